"""Prompt lookup through one table of fixed size that all sequences share (llama.cpp's `ngram-mod`)."""

from collections.abc import Sequence
from threading import Lock

import mlx.core as mx
import numpy as np

from ..errors import OptionError
from ..features import FeatureRequest, Features
from ..history import History
from ..sampling import Sampler
from .base import NOTHING, Draft
from .ngrams import hashes

MULTIPLIER = np.uint64(6364136223846793005)
LAG = 32  # how far what is learnt may stay behind, so that tokens are learnt several at a time
LOW = 0.25  # a draft of which a smaller part stood is low
LOW_MOST = 5  # so many low drafts in a row empty the table
FULL = 0.25  # a table filled beyond this is emptied when a sequence begins


class Table:
    """What last followed each n tokens, for all sequences of whoever made it: 16 MiB, safe under threads.

    The n tokens themselves are not stored, so two n-grams with one slot overwrite each other, and a wrong draft that
    comes of it is the target's to reject. What other sequences leave here changes the speed, never the text.
    """

    def __init__(self, size: int = 4 * 1024 * 1024):
        self.size = size
        self.used = 0
        self._next = self._nothing()
        self._lock = Lock()

    def empty(self) -> None:
        with self._lock:
            self._next, self.used = self._nothing(), 0

    def make_room(self) -> None:
        if self.used > FULL * self.size:
            self.empty()

    def learn(self, tokens: np.ndarray, n: int) -> None:
        """Every n tokens that another one follows; the last writer of a slot wins."""
        slots = hashes(tokens[:-1], n, MULTIPLIER) % np.uint64(self.size)
        slots, newest = np.unique(slots[::-1], return_index=True)
        with self._lock:
            self.used += int(np.count_nonzero(self._next[slots] == 0))
            self._next[slots] = tokens[n:][::-1][newest] + 1

    def follow(self, window: np.ndarray, most: int) -> list[int]:
        """Up to `most` tokens that follow `window`, each found by the newest len(window) before it."""
        multiplier, tokens, size = int(MULTIPLIER), window.tolist(), self.size
        weight_of_oldest = pow(multiplier, len(window) - 1, 1 << 64)
        h = hashes(window, len(window), MULTIPLIER).item()
        with self._lock:
            for oldest in range(most):
                token = self._next.item(h % size) - 1
                if token < 0:
                    break
                h = ((h - tokens[oldest] * weight_of_oldest) * multiplier + token) % (1 << 64)
                tokens.append(token)
        return tokens[len(window) :]

    def _nothing(self) -> np.ndarray:
        """A slot holds a token + 1: zeros take up memory only where they are written over."""
        return np.zeros(self.size, dtype=np.int32)


class NgramMod:
    """Drafts from `n_min` to `n_max` tokens, each the one that last followed the `n_match` before it, in any sequence.

    Option names and defaults are llama.cpp's. What it does otherwise, and `compat=True` repeats:

    - It looks whether the table is too full after it has learnt a prompt, and empties it of that very prompt too; here
      it looks before.
    - It measures a draft's success against what it found, even if less was drafted because of `limit`: with a small
      limit every draft is low, however good. Here it is measured against what was drafted.
    - A new sequence inherits the low drafts of the one before; here it starts at none.
    """

    name = "ngram_mod"
    wants = FeatureRequest()
    free = True

    def __init__(
        self, n_match: int = 24, n_min: int = 48, n_max: int = 64, table: Table | None = None, compat: bool = False
    ):
        """`table` is what sequences share; without one this drafter learns for itself alone."""
        for option, value, least in (
            ("ngram_n_match", n_match, 1),
            ("ngram_n_min", n_min, 0),
            ("ngram_n_max", n_max, 0),
        ):
            if value not in range(least, 1025):
                raise OptionError(f"{option} is {value}; choose a whole number from {least} to 1024")
        if n_min > n_max:
            raise OptionError(
                f"ngram_n_min is {n_min} and ngram_n_max is {n_max}, so nothing could be drafted; lower ngram_n_min"
            )
        self.n_match, self.n_min, self.n_max, self.compat = n_match, n_min, n_max, compat
        self.max_draft = n_max
        self.table = Table() if table is None else table
        self._low = 0
        self.start([])

    def start(self, prompt: Sequence[int]) -> None:
        self._history = History(len(prompt) + 1024)
        # llama.cpp begins when the whole prompt is in the cache and its first new token is `last`. Our first `propose`
        # comes one token earlier, so the prompt that llama.cpp begins with is ours without its last token.
        self._prompt: int | None = max(len(prompt) - 1, 0)  # its length; None once it has begun
        self._learnt = 0  # the places before this one begin an n-gram that is in the table
        self._found = 0  # length of the last draft before it was cut
        if not self.compat:
            self._low = 0

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        self._history.extend(tokens)

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        if self._prompt is not None:
            self._begin(self._prompt)
            self._prompt = None
        if len(self._history) < self.n_match:
            return NOTHING
        if self._learnt + LAG < len(self._history):
            self._learn(len(self._history))
        tokens = self.table.follow(self._history.ending(self.n_match, last), self.n_max)
        self._found = len(tokens)
        if len(tokens) < self.n_min:
            return NOTHING
        tokens = tokens[:limit]
        return Draft(mx.array(tokens, dtype=mx.int32)) if tokens else NOTHING

    def settle(self, drafted: int, accepted: int) -> None:
        if accepted >= LOW * (self._found if self.compat else drafted):
            self._low = 0
            return
        self._low += 1
        if self._low == LOW_MOST:
            self.table.empty()
            self._low = self._learnt = 0

    def close(self) -> None:
        pass

    def _begin(self, length: int) -> None:
        if not self.compat:
            self.table.make_room()
        self._learn(length)
        if self.compat:
            self.table.make_room()

    def _learn(self, length: int) -> None:
        """What is not learnt yet of the first `length` tokens."""
        if length >= self.n_match:
            self.table.learn(self._history.tokens[self._learnt : length], self.n_match)
            self._learnt = length - self.n_match
