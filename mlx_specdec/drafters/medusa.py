"""Medusa: one head for each token to come, all on the same hidden state of the target.

The authors verify a tree and accept what is typical enough, which changes the text. Here the heads' tokens are one
chain, each drawn from its own head's distribution, and judged like every other draft.
"""

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from ..features import FeatureRequest, Features
from ..networks.medusa import Medusa
from ..sampling import Sampler
from ..target.model import Target, evaluate
from .base import NOTHING, Draft
from .pairing import MadeFor, check_sizes


class MedusaModel:
    """The weights of Medusa heads."""

    name = "medusa"

    def __init__(self, network: Medusa):
        self.network = network

    def pair(self, target: Target) -> Callable[[], "MedusaDrafter"]:
        """What makes its drafters for sequences of `target`. Raises PairingError."""
        config = self.network.config
        check_sizes(self.name, MadeFor(config.hidden, None, config.vocab, config.target_name), target)
        evaluate(self.network)
        return partial(MedusaDrafter, self.network, _rows(self.network, target.vocab), target.vocab)


def _rows(network: Medusa, vocab: int) -> tuple[mx.array, mx.array] | None:
    """The rows of a head that stand for tokens of the target, and these tokens; None if that is each for its own."""
    config = network.config
    ids = np.arange(config.draft_vocab) if network.ids is None else network.ids
    known = np.flatnonzero(ids < vocab)
    if len(known) == vocab and np.array_equal(ids[known], np.arange(vocab)):
        return None
    rows = mx.array(known), mx.array(ids[known])
    mx.eval(rows)
    return rows


class MedusaDrafter:
    """Drafts for one sequence."""

    name = "medusa"
    wants = FeatureRequest(final=True)
    free = False

    def __init__(self, network: Medusa, rows: tuple[mx.array, mx.array] | None, vocab: int):
        """`rows` are as in `_rows`; `vocab` is the number of the target's logits."""
        self._network, self._rows, self._vocab = network, rows, vocab
        self.max_draft = network.config.heads
        self.start(())

    def start(self, prompt: Sequence[int]) -> None:
        self._hidden: mx.array | None = None  # [1, hidden], the target's, of the newest certain token

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        if features is None or features.final is None:
            return
        self._hidden = features.final[-1:]
        mx.async_eval(self._hidden)  # what stays lazy belongs to this thread

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        if limit < 1 or self._hidden is None:
            return NOTHING
        fed, probs = [mx.array([last], dtype=mx.int32)], []
        for head in range(min(limit, self.max_draft)):
            logits = self._over_the_vocabulary(self._network(head, self._hidden))
            token, q = sampler.draft(logits, mx.concatenate(fed))
            fed.append(token)
            if q is not None:
                probs.append(q)
        return Draft(mx.concatenate(fed[1:]), mx.concatenate(probs) if probs else None)

    def settle(self, drafted: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _over_the_vocabulary(self, logits: mx.array) -> mx.array:
        """float32 [1, vocab], -inf for tokens that a head has no row for."""
        if self._rows is None:
            return logits[:, : self._vocab]
        rows, ids = self._rows
        whole = mx.full((1, self._vocab), -mx.inf)
        whole[:, ids] = logits[:, rows]
        return whole
