"""Prompt lookup without state: what followed the newest earlier occurrence of the last n tokens (llama.cpp's
`ngram-simple`)."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..errors import OptionError
from ..features import FeatureRequest, Features
from ..history import History
from ..sampling import Sampler
from .base import NOTHING, Draft
from .ngrams import occurrences


class NgramSimple:
    """Drafts up to `m` tokens after a match of `n`; llama.cpp's option names and defaults.

    As there, the history must be longer than n + m + 1 tokens, the very first token never begins a match, and a match
    with fewer than n tokens after it gives no draft (older ones are not tried).
    """

    name = "ngram_simple"
    wants = FeatureRequest()
    free = True

    def __init__(self, n: int = 12, m: int = 48):
        for option, value in (("ngram_n", n), ("ngram_m", m)):
            if type(value) is not int or not 1 <= value <= 1024:
                raise OptionError(f"{option} is {value}; choose a whole number from 1 to 1024")
        self.n, self.m = n, m
        self.max_draft = m
        self._history = History()

    def start(self, prompt: Sequence[int]) -> None:
        self._history = History(len(prompt) + 1024)

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        self._history.extend(tokens)

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        tokens = lookup(self._history.tokens, last, self.n, self.m)[:limit]
        return Draft(mx.array(tokens)) if len(tokens) else NOTHING

    def settle(self, drafted: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        pass


def lookup(history: np.ndarray, last: int, n: int, m: int) -> np.ndarray:
    """The draft, int32 [at most m], that follows history int32 [length] and then `last`."""
    length = len(history)
    if length <= n + m + 1:
        return history[:0]
    pattern = np.append(history[length - n + 1 :], np.int32(last))
    # Places where the whole pattern may begin: not the first token, and early enough to be followed by something.
    places = occurrences(history, pattern, 1, length - n)
    if len(places) == 0:
        return history[:0]
    after = int(places[-1]) + n
    draft = history[after : after + m]
    return draft if len(draft) >= n else history[:0]
