"""Drafting with a head on the target's hidden states, token by token: what EAGLE-3 and MTP heads share.

Row i of a head is made of what the target made of token i, and of token i + 1; it predicts token i + 2. Rows of certain
tokens, with the target's own features, stay in the head's cache. Beyond them the head is fed its own output, and those
rows are dropped when the round is over.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import trim_prompt_cache

from ..features import FeatureRequest, Features
from ..sampling import Sampler
from .base import NOTHING, Draft

CHUNK = 32  # so many rows may wait, while nothing or something else drafts: they are the cost of the next draft


class Head(Protocol):
    """A network that predicts the token after the next; it knows layers, not rounds."""

    def make_cache(self) -> list[Any]:
        """The caches of its layers, which mlx-lm's trim_prompt_cache can shorten."""

    def fuse(self, features: Features) -> mx.array:
        """Features of n tokens -> [n, width], what rows take of them."""

    def rows(self, tokens: mx.array, hidden: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """Rows of tokens int [n] and hidden [n, width] go through the layers and into the cache.

        Returns [n, hidden], which `logits` takes, and [n, width], which a row after it takes in the place of features.
        """

    def logits(self, output: mx.array) -> mx.array:
        """Logits float32 [n, vocab] over the target's vocabulary, of what `rows` returned first; -inf for a token
        that the head does not know."""


class HeadDrafter:
    """Drafts a chain with `head`, whose cache it keeps in step with the target's."""

    free = False

    def __init__(self, name: str, head: Head, wants: FeatureRequest, max_draft: int):
        self.name, self.wants, self.max_draft = name, wants, max_draft
        self._head = head
        self.start(())

    def start(self, prompt: Sequence[int]) -> None:
        self._cache = self._head.make_cache()
        self._carry: mx.array | None = None  # [1, width] of the newest certain token; the row lacks its second token
        self._tokens: list[int] = []  # certain rows that are not in the cache
        self._hidden: list[mx.array] = []
        self._guesses = 0  # rows in the cache that are the head's own

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        if features is None:
            return
        trim_prompt_cache(self._cache, self._guesses)
        self._guesses = 0
        hidden = self._head.fuse(features)
        if self._carry is not None:
            self._tokens.append(tokens[0])
            self._hidden.append(self._carry)
        self._tokens.extend(tokens[1:])
        self._hidden.append(hidden[:-1])
        self._carry = hidden[-1:]
        mx.async_eval(self._hidden[-1], self._carry)  # what stays lazy belongs to this thread
        if len(self._tokens) >= CHUNK:
            self._feed(self._tokens, self._hidden)
            mx.async_eval([c.state for c in self._cache])

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        if limit < 1 or self._carry is None:
            return NOTHING
        output, hidden = self._feed([*self._tokens, last], [*self._hidden, self._carry])
        self._carry = None  # the row of `last` is in the cache
        fed, probs = [mx.array([last], dtype=mx.int32)], []
        for _ in range(limit):
            token, q = sampler.draft(self._head.logits(output[-1:]), mx.concatenate(fed))
            fed.append(token)
            if q is not None:
                probs.append(q)
            if len(fed) <= limit:
                output, hidden = self._head.rows(token, hidden[-1:], self._cache)
                self._guesses += 1
                mx.async_eval(token)  # the device starts while the next row is being built
        mx.async_eval(fed[-1], [c.state for c in self._cache])
        return Draft(mx.concatenate(fed[1:]), mx.concatenate(probs) if probs else None)

    def settle(self, drafted: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _feed(self, tokens: Sequence[int], hidden: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        fed = self._head.rows(mx.array(list(tokens), dtype=mx.int32), mx.concatenate(list(hidden)), self._cache)
        self._tokens, self._hidden = [], []
        return fed
