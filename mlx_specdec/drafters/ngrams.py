"""Where n-grams occur in a text, and their hashes."""

import numpy as np


def occurrences(tokens: np.ndarray, pattern: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The places from `start` to before `stop`, ascending, where the whole pattern begins."""
    places = np.arange(start, stop)
    for offset in range(len(pattern) - 1, -1, -1):
        places = places[tokens[places + offset] == pattern[offset]]
    return places


def hashes(tokens: np.ndarray, n: int, multiplier: np.unsignedinteger) -> np.ndarray:
    """For every n tokens in a row h = h * multiplier + token over them, from 0, in the multiplier's width; [count]."""
    if len(tokens) < n:
        return np.zeros(0, dtype=multiplier.dtype)
    powers = np.full(n, multiplier)
    powers[0] = 1
    powers = np.multiply.accumulate(powers, dtype=multiplier.dtype)[::-1]
    return np.correlate(tokens.astype(multiplier.dtype), powers)
