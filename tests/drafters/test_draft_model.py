"""A draft model follows its sequence through every kind of cache, and never changes the text."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlx_specdec.drafters.draft_model import CHUNK, STEP, DraftModel
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import Target
from tests import zoo
from tests.scripted import drafted, reference

VOCAB, TOKENS = 64, 25


def prompt(length: int) -> list[int]:
    return [(7 * i * i + 3 * i + 5) % VOCAB for i in range(length)]


@cache
def target() -> Target:
    return Target(zoo.build("llama"))


@cache
def answer(length: int) -> list[int]:
    return reference(target().model, prompt(length), TOKENS)


class Counting(DraftModel):
    """Remembers how its drafts fared."""

    def __init__(self, model: nn.Module):
        super().__init__(Target(model), VOCAB)
        self.drafted = self.accepted = 0

    def settle(self, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted


@pytest.mark.parametrize("kind", zoo.CACHE_KINDS)
def test_a_draft_model_of_any_kind_for_a_target_of_another(kind: str) -> None:
    drafter = DraftModel(Target(zoo.CACHE_KINDS[kind](seed=3)), VOCAB)
    for length in (1, 30):
        for k in (1, 6):
            assert drafted(target(), drafter, prompt(length), TOKENS, k) == answer(length)


SAMPLED = {"temperature": 1.0, "seed": 2, "acceptance": "token"}
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    SAMPLED,
    {**SAMPLED, "acceptance": "block"},
    {**SAMPLED, "acceptance": "coupled"},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
)


@pytest.mark.parametrize("kind", zoo.CACHE_KINDS)
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_the_target_itself_is_never_refused(kind: str, sampling: dict[str, Any]) -> None:
    """Only if its cache holds exactly the committed tokens, and its logits go through the same processors."""
    model = zoo.CACHE_KINDS[kind]()
    drafter = Counting(model)
    drafted(Target(model), drafter, prompt(12), TOKENS, 4, **sampling)
    assert drafter.drafted >= TOKENS * 3 // 5
    assert drafter.accepted >= 0.97 * drafter.drafted


@pytest.mark.parametrize("kind", ["kv", "window8", "gated_delta"])
@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 20])
def test_a_long_prompt_goes_in_by_chunks(kind: str, length: int) -> None:
    model = zoo.CACHE_KINDS[kind]()
    expected = reference(model, prompt(length), 12)
    drafter = Counting(model)
    assert drafted(Target(model), drafter, prompt(length), 12, 3) == expected
    assert drafter.accepted == drafter.drafted > 0


def test_a_draft_pays_for_itself_alone() -> None:
    """The prompt is read before the first round, and what nobody drafts for is read in small steps."""
    drafter, ids = DraftModel(Target(zoo.build("llama")), VOCAB), prompt(100)
    drafter.start(ids)
    for chunk in (ids[:60], ids[60:-1]):
        drafter.observe(chunk, None)
    assert drafter._sequence.offset == 99
    for number, token in enumerate(prompt(80), 1):
        drafter.observe([token], None)
        assert 0 <= 99 + number - drafter._sequence.offset < STEP


def test_a_prompt_beyond_its_context_is_not_read() -> None:
    model, ids = Target(zoo.build("llama")), prompt(100)
    model.context = 50
    drafter = DraftModel(model, VOCAB)
    drafter.start(ids)
    drafter.observe(ids[:-1], None)
    assert drafter._sequence.offset < 50
    assert len(drafter.propose(ids[-1], 3, sampler(ids)).tokens) == 0


def sampler(given: Sequence[int], **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), given)


@pytest.mark.parametrize("rows", [VOCAB - 20, VOCAB, VOCAB + 30])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5},
                                    {"temperature": 1.0, "acceptance": "coupled"}], ids=str)  # fmt: skip
def test_drafts_are_tokens_of_the_target(rows: int, params: dict[str, Any]) -> None:
    drafter = DraftModel(Target(zoo.build("llama", vocab=rows)), VOCAB)
    for last in (5, VOCAB - 1):
        drafter.start(prompt(10))
        drafter.observe(prompt(10)[:-1], None)
        tokens, probs, confidence = drafter.propose(last, 6, sampler(prompt(10), **params))
        assert confidence is None
        assert tokens.shape == (6,)
        assert tokens.dtype == mx.int32
        assert 0 <= tokens.min().item() <= tokens.max().item() < min(rows, VOCAB)
        if params.get("temperature") and "acceptance" not in params:
            assert probs is not None
            assert probs.shape == (6, VOCAB)
            assert mx.abs(probs.sum(axis=-1) - 1).max().item() < 1e-5
            assert (mx.take_along_axis(probs, tokens[:, None], axis=-1) > 0).all()
            assert not probs[:, rows:].any()
        else:
            assert probs is None


def test_nothing_is_drafted_without_room() -> None:
    drafter = DraftModel(Target(zoo.build("llama", max_position_embeddings=16)), VOCAB)
    drafter.start(prompt(10))
    drafter.observe(prompt(10)[:-1], None)
    for limit in (0, 7, 100):
        assert drafter.propose(3, limit, sampler(prompt(10))).tokens.size == 0
    assert drafter.propose(3, 6, sampler(prompt(10))).tokens.size == 6


def test_a_second_sequence_begins_afresh() -> None:
    drafter = DraftModel(target(), VOCAB)
    outputs = [drafted(target(), drafter, prompt(length), TOKENS, 3) for length in (9, 30, 9)]
    assert outputs == [answer(length) for length in (9, 30, 9)]
