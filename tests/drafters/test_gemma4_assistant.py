"""Gemma 4 assistants against Hugging Face's numbers, and exact with any weights.

tests/golden/gemma4_assistant_plain/README.md says what the arrays are. `alt_` arrays are other engines' conventions.
"""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlx_specdec.checkpoints.drafter import kind_of, read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.drafters.gemma4_assistant import Gemma4AssistantDrafter, Gemma4AssistantModel
from mlx_specdec.features import Features, KeysValues
from mlx_specdec.networks.gemma4_assistant import Gemma4Assistant
from mlx_specdec.rounds import Round
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import CacheOptions, Target
from tests.scripted import drafted_rounds

GOLDEN = Path(__file__).parents[1] / "golden" / "gemma4_assistant_plain"
KINDS = ("sliding_attention", "full_attention")  # in the order of the drafter's layers


@cache
def expected() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "expected.npz"))


def network(**conventions: int) -> Gemma4Assistant:
    folder = Folder(GOLDEN / "assistant")
    assert kind_of(folder) == "gemma4_assistant"
    read: Any = read_network(folder, "gemma4_assistant")
    read.config = replace(read.config, **conventions)
    return read


@cache
def target() -> Target:
    model, _ = load_model(GOLDEN / "target")
    model.eval()
    made = Target(model)
    made.watch(maker()().wants)
    return made


def maker(drafter: Gemma4Assistant | None = None) -> Any:
    unwatched, _ = load_model(GOLDEN / "target")
    return Gemma4AssistantModel(drafter or network()).pair(Target(unwatched))


class Noting(Sampler):
    """Greedy, keeping the logits that it was asked to draft from."""

    def __init__(self) -> None:
        super().__init__(SamplingParams(), [0])
        self.logits: list[mx.array] = []

    def draft(self, logits: mx.array, fed: mx.array) -> tuple[mx.array, mx.array | None]:
        self.logits.append(logits)
        return super().draft(logits, fed)


def committed() -> list[int]:
    return [*expected()["prompt_ids"].tolist(), *expected()["greedy_ids"].tolist()]


def observe(drafter: Gemma4AssistantDrafter, start: int, end: int) -> None:
    """Tokens start to end with what the reference's target made of them."""
    gold = expected()
    held = [KeysValues(*(mx.array(gold[f"shared_{x}_{kind}"][:, :end]) for x in ("k", "v"))) for kind in KINDS]
    final = mx.array(gold["all_hidden"][start:end])
    drafter.observe(committed()[start:end], Features((), final, tuple(held)))


def proposed(drafter: Gemma4AssistantDrafter, last: int) -> tuple[list[int], np.ndarray]:
    noting = Noting()
    tokens = drafter.propose(last, 3, noting).tokens.tolist()
    return tokens, np.array(mx.concatenate(noting.logits))


def two_rounds(**conventions: int) -> Iterator[tuple[str, list[int], np.ndarray]]:
    drafter = maker(network(**conventions))()
    observe(drafter, 0, 24)
    yield "r1", *proposed(drafter, committed()[24])
    observe(drafter, 24, 26)
    yield "r2", *proposed(drafter, committed()[26])


CONVENTIONS = {
    "": {},
    "alt_posNm1_": {"behind": 1},
    "alt_rowsW_": {"beyond": 0},
    "alt_rowsWm1_": {"beyond": -1},
    "alt_posNm1_rowsW_": {"behind": 1, "beyond": 0},
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_rounds_are_the_references(name: str) -> None:
    gold = expected()
    for which, tokens, logits in two_rounds(**CONVENTIONS[name]):
        assert tokens == gold[f"{name}{which}_draft_ids"].tolist()
        np.testing.assert_allclose(logits, gold[f"{name}{which}_draft_logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in CONVENTIONS if name])
def test_a_convention_makes_a_difference(name: str) -> None:
    gold = expected()
    for which, _, logits in two_rounds(**CONVENTIONS[name]):
        assert np.abs(logits - gold[f"{which}_draft_logits"]).max() > 1e-2


def test_hidden_states_are_the_references() -> None:
    gold, net = expected(), network()
    held = {
        kind: KeysValues(*(mx.array(gold[f"shared_{x}_{kind}"][:, 15 * (kind == KINDS[0]) : 24]) for x in ("k", "v")))
        for kind in KINDS
    }
    hidden = mx.array(gold["all_hidden"][23:24])
    for step, token in enumerate([committed()[24], *gold["r1_draft_ids"][:2].tolist()]):
        output, hidden = net(target().ends.embed(mx.array([token])), hidden, held, 24)
        np.testing.assert_allclose(output[0], gold["r1_draft_hidden"][step], rtol=0, atol=1e-4)
        np.testing.assert_allclose(hidden[0], gold["r1_h_next"][step], rtol=0, atol=1e-4)


def test_rounds_on_our_own_target() -> None:
    """With the keys and values of mlx-lm's target, whose windows have wrapped and whose refused rows were rewound."""
    gold, sequence, drafter = expected(), target().sequence(), maker()()
    for chunk, known in sequence.prefill(committed()[:25]):
        drafter.observe(chunk, known)
    tokens, logits = proposed(drafter, committed()[24])
    assert tokens == gold["r1_draft_ids"].tolist()
    np.testing.assert_allclose(logits, gold["r1_draft_logits"], rtol=0, atol=1e-3)
    _, features = sequence.forward(mx.array([committed()[24], *tokens]))
    sequence.settle(1 + int(gold["r1_accepted"]))
    drafter.observe(committed()[24:26], sequence.known(features, 2))
    tokens, logits = proposed(drafter, committed()[26])
    assert tokens == gold["r2_draft_ids"].tolist()
    np.testing.assert_allclose(logits, gold["r2_draft_logits"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("step", [2048, 7, 1])
@pytest.mark.parametrize("k", [1, 3])
def test_whole_runs_are_the_references(k: int, step: int) -> None:
    """All drafts and counts of 40 tokens; near the end fewer are drafted, as no more than 40 are wanted."""
    gold, drafter = expected(), maker()()
    drafts, starts = [], []
    propose = drafter.propose

    def noting(last: int, limit: int, sampler: Sampler) -> Any:
        draft = propose(last, limit, sampler)
        drafts.append(draft.tokens.tolist())
        starts.append(drafter._position + 1)
        return draft

    drafter.propose = noting
    prompt = committed()[:25]
    chooser = Sampler(SamplingParams(), prompt)
    made = Target(target().model, CacheOptions(prefill_step_size=step))
    made.watch(drafter.wants)
    emitted: list[Round] = list(drafted_rounds(made.sequence(), prompt, chooser, 39, drafter, k))
    made.close()
    assert [t for r in emitted for t in r.tokens] == committed()[25:]
    assert [r.accepted for r in emitted] == gold[f"trace_k{k}_accepted"].tolist()
    assert starts == gold[f"trace_k{k}_start"].tolist()[: len(starts)]
    assert len(starts) >= len(emitted) - 1
    for ours, theirs in zip(drafts, gold[f"trace_k{k}_drafts"].tolist(), strict=False):
        assert ours == theirs[: len(ours)]
    assert sum(map(len, drafts)) >= k * (len(emitted) - 2)


# --- the ordered head


ORDERED = GOLDEN.parent / "gemma4_assistant_ordered"


@cache
def ordered() -> tuple[dict[str, np.ndarray], list[int], Target, Any]:
    """The reference's numbers and text, and our target, which like E2B has layers that share keys, and maker."""
    gold = dict(np.load(ORDERED / "expected.npz"))
    model, _ = load_model(ORDERED / "target")
    model.eval()
    net: Any = read_network(Folder(ORDERED / "assistant"), "gemma4_assistant")
    made = Target(model)
    make = Gemma4AssistantModel(net).pair(made)
    assert make().wants.keys_values == (1, 2)
    made.watch(make().wants)
    return gold, [*gold["prompt_ids"].tolist(), *gold["greedy_ids"].tolist()], made, make


@pytest.mark.parametrize(("which", "known"), [("r1", 24), ("r2", 26)])
def test_ordered_rounds_are_the_references(which: str, known: int) -> None:
    """Which gives tokens that are not looked at the smallest logit less 1; ours is -inf, so that q is 0."""
    gold, text, _, make = ordered()
    held = [KeysValues(*(mx.array(gold[f"{x}_{kind}"][:, :known]) for x in ("key", "value"))) for kind in KINDS]
    drafter = make()
    drafter.observe(text[:known], Features((), mx.array(gold["all_hidden"][:known]), tuple(held)))
    tokens, logits = proposed(drafter, text[known])
    assert tokens == gold[f"{which}_draft_ids"].tolist()
    for ours, theirs in zip(logits, gold[f"{which}_draft_logits"], strict=True):
        looked_at = np.isfinite(ours)
        assert looked_at.sum() == 24
        np.testing.assert_allclose(ours[looked_at], theirs[looked_at], rtol=0, atol=1e-4)
        assert np.isneginf(ours[~looked_at]).all()
        np.testing.assert_allclose(theirs[~looked_at], theirs[looked_at].min() - 1, rtol=1e-6)


def test_ordered_whole_runs_are_the_references() -> None:
    gold, text, made, make = ordered()
    drafter, drafts = make(), []
    propose = drafter.propose

    def noting(last: int, limit: int, sampler: Sampler) -> Any:
        draft = propose(last, limit, sampler)
        drafts.append(draft.tokens.tolist())
        return draft

    drafter.propose = noting
    chooser = Sampler(SamplingParams(), text[:25])
    emitted = list(drafted_rounds(made.sequence(), text[:25], chooser, 39, drafter, 3))
    assert [t for r in emitted for t in r.tokens] == text[25:]
    assert [r.accepted for r in emitted] == gold["trace_accepted"].tolist()
    assert len(drafts) >= len(emitted) - 1
    for ours, theirs in zip(drafts, gold["trace_drafts"].tolist(), strict=False):
        assert ours == theirs[: len(ours)]
