"""Hidden states of the target, as a drafter asks for them and gets them."""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx


@dataclass(frozen=True)
class FeatureRequest:
    """Which hidden states of the target a drafter wants to observe. Layers are numbered from 0, by their output."""

    layers: tuple[int, ...] = ()
    final: bool = False

    def __bool__(self) -> bool:
        return bool(self.layers) or self.final


class Features(NamedTuple):
    """Hidden states of n tokens in the target's dtype, in the order of the tokens."""

    layers: tuple[mx.array, ...]  # one [n, hidden] for each layer asked for, in that order
    final: mx.array | None  # [n, hidden], after the final norm; None if not asked for

    def head(self, n: int) -> "Features":
        """Those of the first `n` tokens."""
        return Features(tuple(h[:n] for h in self.layers), None if self.final is None else self.final[:n])
