"""The round loop: propose, verify, rewind, observe."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .drafters.base import NOTHING, Draft, Drafter
from .features import Features
from .sampling import Sampler
from .target.model import Sequence
from .verify import Verdict, verify


class Round(NamedTuple):
    """What one round emitted: `tokens`, the first `accepted` of them drafted, with their log-probabilities."""

    tokens: list[int]
    logprobs: list[mx.array]
    accepted: int
    drafted: int


class Pass(NamedTuple):
    """A verify pass, not evaluated yet."""

    verdict: Verdict
    logprobs: list[mx.array]  # the verdict's, row by row
    features: Features | None
    state: list  # the cache's arrays

    def read(self, drafted: int) -> Round:
        """The one synchronisation of a round."""
        mx.eval(self)
        accepted, tokens = np.array(self.verdict.accepted).item(), np.array(self.verdict.tokens).tolist()
        return Round(tokens[: accepted + 1], self.logprobs, accepted, drafted)


def plain_rounds(
    sequence: Sequence,
    prompt: list[int],
    sampler: Sampler,
    limit: int,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Round]:
    """Plain decoding. No drafter needs to see a token first, so the next pass is always under way already."""
    for _ in sequence.prefill(prompt, progress):
        pass
    last = prompt[-1]
    this = _verify(sequence, mx.array([last]), NOTHING, sampler)
    mx.async_eval(this)
    for remaining in range(limit - 1, -1, -1):
        sequence.settle(1)
        sampler.advance([last])
        following = _verify(sequence, this.verdict.tokens, NOTHING, sampler) if remaining else this
        mx.async_eval(following)
        emitted = this.read(drafted=0)
        last = emitted.tokens[0]
        yield emitted
        this = following


def drafted_rounds(
    sequence: Sequence,
    prompt: list[int],
    sampler: Sampler,
    limit: int,
    progress: Callable[[int, int], None] | None,
    drafter: Drafter,
    most: int,
) -> Iterator[Round]:
    """Speculative decoding with at most `most` drafts a round, until `limit` tokens are emitted.

    Nothing lazy is left where a round is handed out, so another thread may ask for the next one.
    """
    drafter.start(prompt)
    for chunk, features in sequence.prefill(prompt, progress):
        drafter.observe(chunk, features)
    last, remaining = prompt[-1], limit
    while remaining > 0:
        k = sequence.room(min(most, remaining - 1) + 1) - 1
        draft = drafter.propose(last, k, sampler) if k > 0 else NOTHING
        this = _verify(sequence, mx.array([last]), draft, sampler)
        emitted = this.read(drafted=draft.tokens.shape[0])
        yield emitted
        committed = [last, *emitted.tokens[:-1]]
        sequence.settle(len(committed))
        sampler.advance(committed)
        drafter.observe(committed, this.features and this.features.head(len(committed)))
        if emitted.drafted:
            drafter.settle(emitted.drafted, emitted.accepted)
        last = emitted.tokens[-1]
        remaining -= len(emitted.tokens)


def _verify(sequence: Sequence, last: mx.array, draft: Draft, sampler: Sampler) -> Pass:
    """One pass over [last, *draft]; last is int32 [1]."""
    logits, features = sequence.forward(mx.concatenate([last, draft.tokens]))
    verdict = verify(logits, last, draft, sampler)
    return Pass(verdict, list(verdict.logprobs), features, sequence.state)
