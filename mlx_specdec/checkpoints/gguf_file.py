"""The GGUF container: a bounded header parser and a reader of single tensors.

Everything the header claims is checked against the length of the file before any of it is used, so a damaged
file is an error and never a crash or a huge allocation. Tensors are repacked here and not by `mx.load`, which
turns BF16 and the K-quantised types into float16 in silence and parses the header again in unchecked C.
"""

import math
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError

GROUP_SIZE = 32  # values that share one scale, in all three quantised types read here

_MAX_DIMS = 4
_MAX_TAKE = 1 << 28  # bytes of the longest string or array of numbers that a header may hold
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_COUNT, _ID = 10, 4  # lengths and offsets are u64, types and dimensions u32

_F32, _F16, _Q4_0, _Q4_1, _Q8_0, _BF16 = 0, 1, 2, 3, 8, 30
_BITS = {_Q4_0: 4, _Q4_1: 4, _Q8_0: 8}
_ITEMS: dict[int, np.dtype] = {  # one value of a float type, one block of GROUP_SIZE values of a quantised type
    _F32: np.dtype("<f4"),
    _F16: np.dtype("<f2"),
    _BF16: np.dtype("<u2"),
    _Q4_0: np.dtype([("scale", "<f2"), ("codes", "u1", 16)]),
    _Q4_1: np.dtype([("scale", "<f2"), ("bias", "<f2"), ("codes", "u1", 16)]),
    _Q8_0: np.dtype([("scale", "<f2"), ("codes", "u1", 32)]),
}
# fmt: off
_TYPE_NAMES = (
    "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K",
    "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS",
    "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0",
    "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4", "NVFP4",
)
# fmt: on


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies. `shape` is in row-major order: rows first, the quantised axis last."""

    name: str
    shape: tuple[int, ...]
    type: int
    start: int
    nbytes: int

    @property
    def bits(self) -> int | None:
        """Bits per packed value, or None for a float tensor."""
        return _BITS.get(self.type)


@dataclass(frozen=True)
class Weight:
    """A tensor as MLX computes with it.

    Float tensors: `weight` [shape], no scales. Quantised ones: `weight` uint32 [rows, columns * bits / 32],
    `scales` and `biases` float16 [rows, columns / 32]; value = scale * code + bias.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None

    def take_rows(self, order: np.ndarray) -> "Weight":
        """The same tensor with its rows in another order."""
        index = mx.array(order)
        rest = (None if part is None else part[index] for part in (self.scales, self.biases))
        return Weight(self.weight[index], *rest)


class GGUFFile:
    """One GGUF file: `metadata` (key -> int, float, bool, str or list) and `tensors` (name -> Tensor).

    Raises CheckpointError, in the constructor, for anything but a whole GGUF file of tensors that can be
    read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                header = _Header(path, file)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error}); give a readable GGUF file.") from error
        self.metadata = header.metadata
        self.tensors = header.tensors

    def read(self, name: str) -> Weight:
        """One tensor, read from the file."""
        tensor = self.tensors[name]
        dtype = _ITEMS[tensor.type]
        items = np.fromfile(self.path, dtype, count=tensor.nbytes // dtype.itemsize, offset=tensor.start)
        if tensor.bits is None:
            values = mx.array(items.reshape(tensor.shape))
            return Weight(values.view(mx.bfloat16) if tensor.type == _BF16 else values)
        scales = items["scale"]
        packed = items["codes"] ^ 0x80 if tensor.type == _Q8_0 else _pack_nibbles(items["codes"])
        with np.errstate(over="ignore", invalid="ignore"):  # found by the next check
            # Q4_0 and Q8_0 store signed codes without a bias; times a power of two is exact.
            biases = items["bias"] if tensor.type == _Q4_1 else scales * np.float16(-(1 << tensor.bits - 1))
        if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
            raise self.fault(f"the scales of tensor {name!r} are not finite")
        *rows, columns = tensor.shape
        groups = (*rows, columns // GROUP_SIZE)
        words = np.ascontiguousarray(packed).view("<u4").reshape(*rows, -1)
        return Weight(mx.array(words), mx.array(scales.reshape(groups)), mx.array(biases.reshape(groups)))

    def fault(self, what: str) -> CheckpointError:
        """The error for a file whose content is wrong."""
        return _fault(self.path, what)


def _fault(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a usable GGUF file: {what}; fetch or convert it again.")


def _type_name(kind: int) -> str:
    return _TYPE_NAMES[kind] if kind < len(_TYPE_NAMES) else f"number {kind}"


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """From GGUF's order, values 0..15 of a block low and 16..31 high, to MLX's, neighbours in one byte."""
    low, high = codes & 0x0F, codes >> 4
    return np.concatenate([part[:, 0::2] | part[:, 1::2] << 4 for part in (low, high)], axis=1)


class _Header:
    """A cursor over the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.end, self.at = path, file, os.fstat(file.fileno()).st_size, 0
        if (magic := self.take(4)) != b"GGUF":
            raise _fault(path, f"it begins with {magic!r} where 'GGUF' is expected")
        version = self.scalar(_ID)
        if version not in (2, 3):
            raise CheckpointError(f"{path} has GGUF version {version}; convert it to version 3, little-endian.")
        tensor_count, value_count = self.scalar(_COUNT), self.scalar(_COUNT)
        self.metadata: dict[str, Any] = {}
        for _ in range(value_count):
            key = self.string()
            self.metadata[key] = self.value(key)
        tensors = [self.tensor() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise _fault(path, f"general.alignment is {alignment!r}, not a positive multiple of 8")
        data_start = -(-self.at // alignment) * alignment
        self.tensors = {each.name: self.placed(each, data_start, alignment) for each in tensors}
        if len(self.tensors) != tensor_count:
            raise _fault(path, "two tensors have the same name")

    def take(self, count: int) -> bytes:
        if count > min(self.end - self.at, _MAX_TAKE):
            raise _fault(self.path, f"its header wants {count} bytes at {self.at} and the file has {self.end}")
        self.at += count
        return self.file.read(count)

    def scalar(self, kind: int) -> Any:
        code = _SCALARS[kind]
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        # Bytes that are not UTF-8 are kept visible: a vocabulary may hold a piece of a character.
        return self.take(self.scalar(_COUNT)).decode("utf-8", "replace")

    def value(self, key: str) -> Any:
        kind = self.scalar(_ID)
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(kind)
        if kind != _ARRAY:
            raise _fault(self.path, f"{key!r} has unknown value type {kind}")
        kind, count = self.scalar(_ID), self.scalar(_COUNT)
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise _fault(self.path, f"{key!r} is an array of unknown value type {kind}")
        width = struct.calcsize("<" + _SCALARS[kind])
        return np.frombuffer(self.take(count * width), np.dtype("<" + _SCALARS[kind])).tolist()

    def tensor(self) -> Tensor:
        """The next tensor info; `start` still counts from the beginning of the data."""
        name, dims = self.string(), self.scalar(_ID)
        if not 1 <= dims <= _MAX_DIMS:
            raise _fault(self.path, f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self.scalar(_COUNT) for _ in range(dims))[::-1]
        kind, offset = self.scalar(_ID), self.scalar(_COUNT)
        if kind not in _ITEMS:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of type {_type_name(kind)}, which is not read; "
                "use a file of F32, F16, BF16, Q4_0, Q4_1 and Q8_0 tensors."
            )
        group = GROUP_SIZE if kind in _BITS else 1
        if shape[-1] % group:
            raise _fault(self.path, f"quantised tensor {name!r} has rows of {shape[-1]} values")
        return Tensor(name, shape, kind, offset, math.prod(shape) // group * _ITEMS[kind].itemsize)

    def placed(self, tensor: Tensor, data_start: int, alignment: int) -> Tensor:
        start = data_start + tensor.start
        if tensor.nbytes == 0 or tensor.start % alignment or start + tensor.nbytes > self.end:
            raise _fault(
                self.path,
                f"tensor {tensor.name!r} of shape {tensor.shape} should take {tensor.nbytes} bytes "
                f"at {start} and the file has {self.end}",
            )
        return replace(tensor, start=start)
