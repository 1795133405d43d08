"""A tensor as MLX computes with it, dense or quantised, and the rearrangements that a file's layout asks for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import OptionError

GROUP = 32  # values that share a scale, in all quantised types that are repacked


@dataclass(frozen=True)
class Requantise:
    """MLX's own quantisation, for weights whose type in the file it lacks."""

    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        """Raises OptionError for what MLX has no kernels for."""
        if self.bits not in (2, 3, 4, 5, 6, 8) or self.group_size not in (32, 64, 128):
            raise OptionError(
                f"weights cannot be quantised in {self.bits} bits by groups of {self.group_size}; choose 2, 3, 4, 5, 6 "
                "or 8 bits and groups of 32, 64 or 128"
            )

    def apply(self, dense: mx.array) -> "Weight":
        return Weight(
            *mx.quantize(dense, group_size=self.group_size, bits=self.bits), bits=self.bits, group_size=self.group_size
        )


@dataclass(frozen=True)
class Weight:
    """`weight` [..., columns] of floats; or packed, uint32 [..., columns * bits / 32], with `scales` and, in the affine
    mode, `biases` [..., columns / group_size]: value = scale * code + bias."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int | None = None
    group_size: int = GROUP
    mode: str = "affine"

    @property
    def settings(self) -> dict[str, Any] | None:
        """What `nn.quantize` calls it; None if dense."""
        return None if self.bits is None else {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its numbers."""
        packed = self.weight.shape
        return packed if self.bits is None else (*packed[:-1], packed[-1] * 32 // self.bits)

    @property
    def arrays(self) -> dict[str, mx.array]:
        named = {"weight": self.weight, "scales": self.scales, "biases": self.biases}
        return {name: array for name, array in named.items() if array is not None}

    def dense(self) -> mx.array:
        """Its numbers, in the dtype of its scales."""
        if self.scales is None:
            return self.weight
        return mx.dequantize(self.weight, self.scales, self.biases, self.group_size, self.bits, self.mode)

    def take_rows(self, order: np.ndarray) -> "Weight":
        """The same tensor with its rows in another order, or some of them; whole as they are packed."""
        return self._each(lambda array: mx.take(array, mx.array(order), axis=max(array.ndim - 2, 0)))

    def take_columns(self, order: np.ndarray) -> "Weight":
        """The same tensor with its columns in another order. Packed ones move by whole groups, else become dense."""
        if self.bits is None:
            return Weight(mx.take(self.weight, mx.array(order), axis=-1))
        groups = order[:: self.group_size] // self.group_size
        if not np.array_equal(order, (groups[:, None] * self.group_size + np.arange(self.group_size)).reshape(-1)):
            return Weight(self.dense()).take_columns(order)

        def moved(array: mx.array) -> mx.array:
            by_group = array.reshape(*array.shape[:-1], len(groups), -1)
            return mx.take(by_group, mx.array(groups), axis=-2).reshape(array.shape)

        return self._each(moved)

    def halves(self) -> tuple["Weight", "Weight"]:
        """The first and the second half of its rows."""
        rows = self.weight.shape[-2]
        return self.take_rows(np.arange(rows // 2)), self.take_rows(np.arange(rows // 2, rows))

    def _each(self, change: Any) -> "Weight":
        scales, biases = (None if part is None else change(part) for part in (self.scales, self.biases))
        return replace(self, weight=change(self.weight), scales=scales, biases=biases)


def joined(parts: Sequence[Weight], shape: tuple[int, ...]) -> Weight:
    """Consecutive rows of a tensor as the tensor of `shape`."""
    arrays: dict[str, Any] = {}
    for name in parts[0].arrays:
        whole = mx.concatenate([part.arrays[name] for part in parts]) if len(parts) > 1 else parts[0].arrays[name]
        arrays[name] = whole.reshape(*shape[:-1], -1)
        mx.eval(arrays[name])
    return replace(parts[0], **arrays)
