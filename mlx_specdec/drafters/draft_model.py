"""A small model of the same vocabulary drafts token by token (Leviathan 2023)."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..features import FeatureRequest, Features
from ..sampling import Sampler
from ..target.model import Target
from .base import NOTHING, Draft

# Certain tokens that are not in the draft model's cache yet: so many go in with the next draft's first pass; more take
# a pass of their own, which needs no logits; and that pass is made at once when there are enough for it, of the prompt
# or, while nothing is drafted, of what is generated: so that a draft costs about the same whenever it is made.
TOGETHER, CHUNK, STEP = 8, 512, 32


class DraftModel:
    """Draws each token from the draft model's own distribution, after the sequence's own processors.

    Its cache follows what was observed: drafts that stood are in it already, the others are rewound, whatever kinds of
    cache the model has. Near the end of the draft model's own context it stops drafting.
    """

    name = "draft_model"
    wants = FeatureRequest()
    max_draft = 3
    free = False

    def __init__(self, target: Target, vocab: int):
        """`target` is the draft model, shared by sequences; `vocab` the number of logits of the model it drafts for,
        from which the draft model's own may differ by padding."""
        self._model, self._vocab = target, vocab
        self.start(())

    def start(self, prompt: Sequence[int]) -> None:
        self._sequence = self._model.sequence()
        self._unread = len(prompt) - 1  # tokens of the prompt that are still to be observed
        self._waiting: list[int] = []  # certain, not in the cache
        self._ahead: list[mx.array] = []  # in the cache or about to be: `last` and the drafts after it

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        if self._ahead:
            tokens = tokens[self._rewind(tokens) :]
        self._waiting.extend(tokens)
        reading = self._unread > 0
        self._unread -= len(tokens)
        enough = CHUNK if self._unread > 0 else STEP
        while len(self._waiting) >= enough and self._fits(min(len(self._waiting), CHUNK)):
            self._feed(self._waiting[:CHUNK])
            del self._waiting[:CHUNK]
        if reading and self._unread <= 0:
            mx.eval(self._sequence.state)  # reading the prompt is no part of a round

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        if limit < 1 or not self._fits(len(self._waiting) + limit):
            return NOTHING
        if len(self._waiting) > TOGETHER:
            self._feed(self._waiting)
            self._waiting = []
        rows = mx.array([*self._waiting, last])
        self._caught_up, certain = len(self._waiting), rows.shape[0]
        self._waiting = []
        self._ahead = [mx.array([last])]
        probs = []
        for _ in range(limit):
            logits, _ = self._sequence.forward(self._known(rows), certain)
            rows, q = sampler.draft(self._fit(logits[-1:]), mx.concatenate(self._ahead))
            certain = 0
            self._ahead.append(rows)
            if q is not None:
                probs.append(q)
            mx.async_eval(rows)  # the device starts while the next pass is being built
        mx.async_eval(self._sequence.state)
        tokens = mx.concatenate(self._ahead[1:])
        return Draft(tokens, mx.concatenate(probs) if probs else None)

    def settle(self, drafted: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _rewind(self, tokens: Sequence[int]) -> int:
        """Keep in the cache what was rightly drafted; returns how many of `tokens` are there now."""
        fed = [np.array(token).item() for token in self._ahead[:-1]]  # the last draft was drawn and not fed
        kept = next(
            (i for i, (a, b) in enumerate(zip(fed, tokens, strict=False)) if a != b),
            min(len(fed), len(tokens)),
        )
        self._sequence.settle(self._caught_up + kept)
        self._ahead = []
        return kept

    def _feed(self, tokens: Sequence[int]) -> None:
        self._sequence.forward(self._known(mx.array(list(tokens))), certain=len(tokens))
        self._sequence.settle(len(tokens))
        mx.async_eval(self._sequence.state)

    def _fits(self, more: int) -> bool:
        return self._model.context is None or self._sequence.offset + more < self._model.context

    def _known(self, tokens: mx.array) -> mx.array:
        """Ids that the draft model has no embedding for, which only a larger target can emit, read as 0."""
        return tokens if self._model.vocab >= self._vocab else mx.where(tokens < self._model.vocab, tokens, 0)

    def _fit(self, logits: mx.array) -> mx.array:
        """Logits over the target's vocabulary: rows that only one of the two has are never drafted."""
        missing = self._vocab - logits.shape[-1]
        return (
            mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf) if missing > 0 else logits[:, : self._vocab]
        )
