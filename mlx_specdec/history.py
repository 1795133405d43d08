"""The tokens of a sequence so far."""

from collections.abc import Sequence

import numpy as np


class History:
    """Token ids, int32, that grow at the end."""

    def __init__(self, room: int = 0):
        self._held = np.zeros(room, dtype=np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """All of them, int32 [length], without a copy."""
        return self._held[: self._length]

    def extend(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._held):
            self._held = np.concatenate([self._held, np.zeros(end, dtype=np.int32)])
        self._held[self._length : end] = tokens
        self._length = end

    def ending(self, n: int, last: int) -> np.ndarray:
        """The newest n tokens, int32 [n], where `last` follows what is held; n - 1 tokens must be."""
        return np.append(self._held[self._length - (n - 1) : self._length], np.int32(last))
