"""The round loop: propose, verify, rewind, observe."""

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .draft_length import Outcome
from .drafters.base import NOTHING, Draft
from .drafters.chain import Chain
from .features import Features
from .sampling import Sampler
from .target.model import Sequence
from .verify import Verdict, verify


class Round(NamedTuple):
    """What one round emitted: `tokens`, the first `accepted` of them drafted, with the target's logits float32 [vocab]
    after processors (`scores`).

    `drafter` is who drafted, None if nobody did. Seconds: `drafting` until the draft's graph is built, `verifying` the
    wait for the device, which computes the draft as well, `host` all other work since the round before was handed out.
    """

    tokens: list[int]
    scores: list[mx.array]
    drafter: str | None
    drafted: int
    accepted: int
    drafting: float
    verifying: float
    host: float


class Pass(NamedTuple):
    """A verify pass, not evaluated yet."""

    verdict: Verdict
    scores: list[mx.array]  # the verdict's, row by row
    features: Features | None
    state: list  # the cache's arrays

    def read(self) -> tuple[list[int], int]:
        """The tokens emitted, and how many of them were drafted: the one synchronisation of a round."""
        mx.eval(self)
        accepted, tokens = np.array(self.verdict.accepted).item(), np.array(self.verdict.tokens).tolist()
        return tokens[: accepted + 1], accepted


def rounds(
    sequence: Sequence,
    prompt: list[int],
    sampler: Sampler,
    limit: int,
    chain: Chain,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[Round]:
    """Decode until `limit` tokens are emitted; plain decoding is a chain without drafters.

    After a round without a draft the next pass may be under way already, before the token was looked at (`ahead`),
    which hides the host's work; the drafters are then only asked whether that should go on. Nothing lazy is left where
    a round is handed out, so another thread may ask for the next one.
    """
    wants = bool(chain.wants)
    chain.start(prompt)
    for chunk, known in sequence.prefill(prompt, progress):
        chain.observe(chunk, known)
        del known  # or the last chunk's would stay for as long as tokens are generated
    last, remaining, after = prompt[-1], limit, 0.0
    ahead: Pass | None = None
    while remaining > 0:
        started = clock()
        room = sequence.room(remaining) - 1
        if ahead is None:
            draft = chain.propose(last, room, sampler)
            wanted = len(draft.tokens) > 0
            draft = draft.within(sequence.target.vocab) if wanted else draft
            proposed = clock()
            this = _verify(sequence, mx.array([last]), draft, sampler, begin=True)
        else:
            draft, wanted, this = NOTHING, chain.would_draft(last, room, sampler), ahead
            proposed = clock()
        ahead = None
        if not wanted and remaining > 1 and chain.length.look_ahead():
            mx.async_eval(this)
            sequence.settle(1)
            this = this._replace(features=sequence.known(this.features, 1, ahead=True) if wants else None)
            mx.async_eval(this.features)
            sampler.advance([last])
            ahead = _verify(sequence, this.verdict.tokens, NOTHING, sampler)
            mx.async_eval(ahead)
        built = clock()
        tokens, accepted = this.read()
        read = clock()
        drafted, name = len(draft.tokens), chain.winner.name if chain.winner else None
        yield Round(
            tokens, this.scores, name, drafted, accepted, proposed - started, read - built, built - proposed + after
        )
        resumed = clock()
        committed = [last, *tokens[:-1]]
        if ahead is None:
            sequence.settle(len(committed))
            this = this._replace(features=sequence.known(this.features, len(committed)) if wants else None)
            sampler.advance(committed)
        chain.observe(committed, this.features)
        chain.settle(drafted, accepted)
        last = tokens[-1]
        remaining -= len(tokens)
        after = clock() - resumed
        chain.length.record(Outcome(chain.winner, drafted, tokens, read - started + after))


def _verify(sequence: Sequence, last: mx.array, draft: Draft, sampler: Sampler, begin: bool = False) -> Pass:
    """One pass over [last, *draft]; last is int32 [1]."""
    logits, features = sequence.forward(mx.concatenate([last, draft.tokens]), begin=begin)
    verdict = verify(logits, last, draft, sampler)
    return Pass(verdict, list(verdict.scores), features, sequence.state)
