"""Drafters whose every proposal is known beforehand, and the loops that the exactness tests compare."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from mlx_specdec.draft_length import Fixed
from mlx_specdec.drafters.base import NOTHING, Draft, Drafter
from mlx_specdec.drafters.chain import Chain
from mlx_specdec.features import FeatureRequest, Features
from mlx_specdec.rounds import Round, rounds
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import CacheOptions, Target


class Scripted:
    """Proposes from a known continuation of the prompt, changed token by token as `script` says.

    Checks what every drafter relies on: that what is observed is what came to be, in order, each token once.
    """

    name = "scripted"
    max_draft = 8
    free = True

    def __init__(
        self,
        answer: Sequence[int],
        script: Callable[[int, int], int],
        wants: FeatureRequest = FeatureRequest(),  # noqa: B008
    ):
        """`script(place, token)` gives what is proposed where `token` would be right at `place` of the answer."""
        self.answer, self.script, self.wants = list(answer), script, wants
        self.observed: list[int] = []
        self.features: list[Features] = []
        self.settled: list[tuple[int, int]] = []

    def start(self, prompt: Sequence[int]) -> None:
        self.prompt = list(prompt)

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        self.observed.extend(tokens)
        assert self.observed == (self.prompt + self.answer)[: len(self.observed)]
        if features is not None:
            self.features.append(features)

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        place = len(self.observed) + 1 - len(self.prompt)
        right = self.answer[place : place + limit]
        tokens = [self.script(place + i, token) for i, token in enumerate(right)]
        return Draft(mx.array(tokens, dtype=mx.int32)) if tokens else NOTHING

    def settle(self, drafted: int, accepted: int) -> None:
        self.settled.append((drafted, accepted))

    def close(self) -> None:
        pass


def scripts(vocab: int, seed: int = 0) -> dict[str, Callable[[int, int], int]]:
    """The four ways to be right or wrong; `mixed` is right two times in three."""
    random = Random(seed)
    return {
        "right": lambda _, token: token,
        "wrong": lambda _, token: (token + 1) % vocab,
        "mixed": lambda _, token: token if random.random() < 2 / 3 else random.randrange(vocab),
    }


class Empty(Scripted):
    """Never has anything to say."""

    name = "empty"

    def __init__(self, answer: Sequence[int]):
        super().__init__(answer, lambda _, token: token)

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        return NOTHING


def reference(model: Any, prompt: Sequence[int], tokens: int, **options: Any) -> list[int]:
    """What mlx-lm's own plain decoding gives."""
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=tokens, **options)]


def plain(
    model: Any, prompt: Sequence[int], tokens: int, cache: CacheOptions | None = None, **sampling: Any
) -> list[int]:
    """What our plain decoding gives."""
    sequence = Target(model, cache, rewinds=False).sequence()
    sampler = Sampler(SamplingParams(**sampling), prompt)
    emitting = rounds(sequence, list(prompt), sampler, tokens, Chain([], Fixed(0)))
    return [t for emitted in emitting for t in emitted.tokens]


def drafted_rounds(
    sequence: Any, prompt: Sequence[int], sampler: Sampler, tokens: int, drafter: Drafter, most: int
) -> Iterator[Round]:
    """Rounds with one drafter, which may propose `most` tokens in each."""
    return rounds(sequence, list(prompt), sampler, tokens, Chain([drafter], Fixed(most)))


def drafted(
    target: Target, drafter: Drafter, prompt: Sequence[int], tokens: int, most: int, **sampling: Any
) -> list[int]:
    """What decoding with a drafter gives; the number of tokens in the cache is checked after every round, and that one
    which always can draft did."""
    sequence = target.sequence()
    sampler = Sampler(SamplingParams(**sampling), prompt)
    ids: list[int] = []
    proposed = 0
    for emitted in drafted_rounds(sequence, prompt, sampler, tokens, drafter, most):
        proposed += emitted.drafted
        held = sequence.offset - emitted.drafted - 1  # the rewind comes after the round is handed out
        assert held == len(prompt) - 1 + len(ids)
        ids += emitted.tokens
    assert proposed or drafter.free or tokens <= 2 or most == 0, "nothing was drafted, so nothing would be shown"
    return ids
