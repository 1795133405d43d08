"""What the target made of tokens, as a drafter asks for it and gets it: hidden states, keys and values."""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx


@dataclass(frozen=True)
class FeatureRequest:
    """What of the target a drafter wants to observe. Layers are numbered from 0, hidden states are their output."""

    layers: tuple[int, ...] = ()
    final: bool = False
    keys_values: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.layers or self.keys_values) or self.final


class KeysValues(NamedTuple):
    """What the attention of one layer has in its cache: keys and values [heads, n, dim], normed and rotated.

    Rows are in the order of the tokens and end with the newest that was observed. A sliding layer has at least the rows
    of the tokens observed with them and those that it looks back on itself. After a round that no draft can follow
    there are those of the tokens observed with them alone.
    """

    keys: mx.array
    values: mx.array

    def astype(self, dtype: mx.Dtype) -> "KeysValues":
        return KeysValues(self.keys.astype(dtype), self.values.astype(dtype))


class Features(NamedTuple):
    """Hidden states of n tokens in the target's dtype, in the order of the tokens; keys and values up to the last."""

    layers: tuple[mx.array, ...]  # one [n, hidden] for each layer asked for, in that order
    final: mx.array | None  # [n, hidden], after the final norm; None if not asked for
    keys_values: tuple[KeysValues, ...] = ()  # one for each layer asked for, in that order

    def head(self, n: int) -> "Features":
        """The hidden states of the first `n` tokens."""
        return Features(tuple(h[:n] for h in self.layers), None if self.final is None else self.final[:n])
