"""Rows of a head pair what the target made of token i with token i + 1, and hold nothing that is not certain."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Sequence
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_specdec.drafters.heads import CHUNK, HeadDrafter
from mlx_specdec.features import FeatureRequest, Features
from mlx_specdec.sampling import Sampler, SamplingParams

VOCAB, PRIME = 89, 251
WANTS = FeatureRequest(layers=(0,))


def row_of(token: int, hidden: int) -> int:
    """What a row of the toy head keeps."""
    return (3 * token + hidden) % PRIME


def output_of(rows: Sequence[int]) -> int:
    """What the newest row gives: it depends on every row, and on where each stands."""
    return sum((place % 7 + 1) * row for place, row in enumerate(rows)) % PRIME


class Toy:
    """A head in whole numbers; `fuse` triples features, so that they cannot be taken for its own output."""

    def __init__(self) -> None:
        self.forwards: list[int] = []

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def fuse(self, features: Features) -> mx.array:
        return features.layers[0] * 3

    def rows(self, tokens: mx.array, hidden: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        past = cache[0].offset
        new = (3 * tokens[:, None] + hidden) % PRIME
        kept, _ = cache[0].update_and_fetch(new[None, None], new[None, None])
        kept = kept[0, 0, :, 0]
        weighted = mx.cumsum((mx.arange(kept.shape[0]) % 7 + 1) * kept)[past:]
        self.forwards.append(new.shape[0])
        output = (weighted % PRIME)[:, None]
        return output, output

    def logits(self, output: mx.array) -> mx.array:
        return 9.0 * (mx.arange(VOCAB) == output.astype(mx.int32) % VOCAB)


class Reference:
    """The same, from the whole history each time."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.features: list[int] = []

    def observe(self, tokens: Sequence[int], features: Sequence[int]) -> None:
        self.tokens += tokens
        self.features += features

    def draft(self, last: int, k: int) -> list[int]:
        following = [*self.tokens[1:], last]
        rows = [row_of(token, 3 * feature) for token, feature in zip(following, self.features, strict=True)]
        drafts: list[int] = []
        for _ in range(k):
            output = output_of(rows)
            drafts.append(output % VOCAB)
            rows.append(row_of(drafts[-1], output))
        return drafts


class Pair:
    """A drafter and the reference, told the same."""

    def __init__(self, seed: int = 0):
        self.random, self.head, self.reference = Random(seed), Toy(), Reference()
        self.drafter = HeadDrafter("toy", self.head, WANTS, 4)
        self.sampler = Sampler(SamplingParams(), [0])

    def start(self, prompt: Sequence[int], chunk: int = 10**9) -> None:
        self.reference.__init__()  # type: ignore[misc]
        self.drafter.start(prompt)
        body = prompt[:-1]
        for start in range(0, len(body), chunk):
            self.observe(body[start : start + chunk])

    def observe(self, tokens: Sequence[int]) -> None:
        features = [self.random.randrange(PRIME) for _ in tokens]
        hidden = mx.array(features, dtype=mx.float32)[:, None]
        self.drafter.observe(tokens, Features((hidden,), None))
        self.reference.observe(tokens, features)

    def propose(self, last: int, k: int) -> list[int]:
        draft = self.drafter.propose(last, k, self.sampler).tokens.tolist()
        assert draft == self.reference.draft(last, k)
        return draft

    def round(self, last: int, k: int, accepted: int) -> int:
        """Draft k, of which `accepted` stand (with k 0: nothing is drafted); returns the new last token."""
        draft = self.propose(last, k) if k else []
        self.observe([last, *draft[:accepted]])
        self.drafter.settle(len(draft), accepted)
        return self.random.randrange(VOCAB)


def prompt(length: int) -> list[int]:
    return [(7 * i * i + 3 * i + 5) % VOCAB for i in range(length)]


def test_a_row_pairs_the_feature_of_a_token_with_the_next_token() -> None:
    drafter, head = HeadDrafter("toy", Toy(), WANTS, 4), Toy()
    drafter.start([5, 6, 7])
    drafter.observe([5, 6], Features((mx.array([[10.0], [20.0]]),), None))
    first = drafter.propose(7, 1, Sampler(SamplingParams(), [0])).tokens.item()
    output, _ = head.rows(mx.array([6, 7]), mx.array([[30.0], [60.0]]), head.make_cache())
    assert first == output[-1].item() % VOCAB == output_of([row_of(6, 30), row_of(7, 60)]) % VOCAB


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("chunk", [1, 3, 10**9])
def test_drafts_follow_from_certain_tokens_alone(seed: int, chunk: int) -> None:
    pair = Pair(seed)
    pair.start(prompt(12), chunk)
    last = prompt(12)[-1]
    for _ in range(40):
        k = pair.random.choice([0, 0, 1, 2, 4, 8])
        last = pair.round(last, k, pair.random.randint(0, k))


@pytest.mark.parametrize("idle", [1, 5, CHUNK - 3, CHUNK + 40])
def test_rounds_without_drafting_are_caught_up_with(idle: int) -> None:
    pair = Pair()
    pair.start(prompt(4))
    last = pair.round(3, 4, 2)
    for _ in range(idle):
        last = pair.round(last, 0, 0)
    for accepted in (0, 4, 1):
        last = pair.round(last, 4, accepted)


def test_a_draft_of_which_nothing_is_verified_leaves_no_trace() -> None:
    """As when the draft length is cut to nothing and another drafter has its turn."""
    pair = Pair()
    pair.start(prompt(9))
    pair.propose(1, 4)
    pair.observe([1, 50, 60])
    pair.propose(2, 4)
    pair.observe([2])
    pair.propose(3, 1)


def test_a_prompt_of_one_token_has_nothing_to_draft_from_at_first() -> None:
    pair = Pair()
    pair.start([8])
    assert pair.drafter.propose(8, 4, pair.sampler).tokens.size == 0
    pair.observe([8])
    last = pair.round(11, 4, 3)
    pair.round(last, 4, 0)


def test_a_prompt_of_two_tokens() -> None:
    pair = Pair()
    pair.start([8, 9])
    pair.round(9, 4, 2)


def test_no_room_draws_nothing() -> None:
    pair = Pair()
    pair.start(prompt(6))
    assert pair.drafter.propose(1, 0, pair.sampler).tokens.size == 0
    pair.propose(1, 2)


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 3 * CHUNK])
@pytest.mark.parametrize("chunk", [100, 10**9])
def test_a_long_prompt_goes_in_while_it_is_read(length: int, chunk: int) -> None:
    pair = Pair()
    pair.start(prompt(length), chunk)
    assert sum(pair.head.forwards) >= length - 1 - CHUNK
    pair.round(prompt(length)[-1], 3, 1)
    assert pair.head.forwards[-3] <= CHUNK, "what is left for the first draft"


def test_a_new_sequence_begins_afresh() -> None:
    pair = Pair()
    for length in (9, 1, 30):
        pair.start(prompt(length))
        last = pair.round(prompt(length)[-1], 0, 0)
        pair.round(last, 4, 2)


def test_a_chain_is_one_forward_a_token() -> None:
    pair = Pair()
    pair.start(prompt(9))
    pair.head.forwards.clear()
    pair.round(4, 5, 3)
    assert pair.head.forwards == [8, 1, 1, 1, 1]
    pair.head.forwards.clear()
    pair.round(4, 5, 0)
    assert pair.head.forwards == [4, 1, 1, 1, 1]


SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.01, "top_p": 0.9, "min_p": 0.1, "top_k": 5},
)


class Broken(Toy):
    """Knows a few tokens only, or computes nonsense."""

    def __init__(self, logit: float, known: int):
        super().__init__()
        self.logit, self.known = logit, known

    def logits(self, output: mx.array) -> mx.array:
        return mx.where(mx.arange(VOCAB) < self.known, self.logit, -mx.inf)[None]


@pytest.mark.parametrize("params", SAMPLING, ids=str)
@pytest.mark.parametrize(("logit", "known"), [(1.0, 5), (float("nan"), VOCAB), (float("inf"), 9), (-1e38, VOCAB)])
@pytest.mark.parametrize("allowed", [None, [70, 80]])
def test_q_is_a_distribution_whatever_the_head_gives(
    params: dict[str, Any], logit: float, known: int, allowed: list[int] | None
) -> None:
    """Also when a processor forbids all that the head knows."""

    def only(tokens: mx.array, logits: mx.array) -> mx.array:
        mask = mx.array([i in (allowed or ()) for i in range(VOCAB)])
        return mx.where(mask, logits, -mx.inf)

    drafter = HeadDrafter("toy", Broken(logit, known), WANTS, 4)
    drafter.start([1, 2])
    drafter.observe([1], Features((mx.array([[10.0]]),), None))
    sampler = Sampler(SamplingParams(**params), [1, 2], [only] if allowed else [])
    tokens, probs, _ = drafter.propose(2, 6, sampler)
    assert 0 <= tokens.min().item() <= tokens.max().item() < VOCAB
    if allowed:
        assert set(tokens.tolist()) <= set(allowed)
    if probs is not None:
        assert mx.abs(probs.sum(axis=-1) - 1).max().item() < 1e-5
        assert (mx.take_along_axis(probs, tokens[:, None], axis=-1) > 0).all()
        if not allowed:
            assert not probs[:, known:].any()
