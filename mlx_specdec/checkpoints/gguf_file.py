"""The GGUF container: a bounded header parser and a reader of single tensors.

Everything the header claims is checked against the length of the file before any of it is used, so a damaged
file is an error and never a crash or a huge allocation. Tensors are repacked here and not by `mx.load`, which
turns BF16 and the K-quantised types into float16 in silence and parses the header again in unchecked C.
"""

import math
import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .gguf_types import INTEGERS, TYPES, Type, read_weight
from .gguf_weight import Requantise, Weight

_MAX_DIMS = 4
_MAX_TAKE = 1 << 28  # bytes of the longest string or array of numbers that a header may hold
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_COUNT, _ID = 10, 4  # lengths and offsets are u64, types and dimensions u32
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies. `shape` is in row-major order: rows first, the quantised axis last."""

    name: str
    shape: tuple[int, ...]
    type: Type
    start: int
    nbytes: int
    path: Path


class GGUFFile:
    """An open-ended view of a .gguf file or of the parts of a split one: `metadata` by key, `tensors` by name.

    Raises CheckpointError, in the constructor, for anything but a whole GGUF file, or a part whose others are missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        headers = [_header(part) for part in _parts(path)]
        self.metadata: dict[str, Any] = headers[0].metadata
        self.tensors: dict[str, Tensor] = {}
        for number, header in enumerate(headers):
            if len(headers) > 1 and header.metadata.get("split.no") != number:
                raise header.fault(f"it calls itself part {header.metadata.get('split.no')!r}, counted from 0")
            if twice := self.tensors.keys() & header.tensors.keys():
                raise header.fault(f"tensor {min(twice)!r} is in an earlier part too")
            self.tensors |= header.tensors
        claimed = self.metadata.get("split.tensors.count", len(self.tensors))
        if len(headers) > 1 and claimed != len(self.tensors):
            raise self.fault(f"its parts hold {len(self.tensors)} tensors and should hold {claimed}")

    def read(self, name: str, dtype: mx.Dtype | None = None, anew: Requantise | None = None) -> Weight:
        """One tensor, read from the file; `dtype` and `anew` as in `read_weight`."""
        tensor = self.tensors[name]
        try:
            return read_weight(tensor.type, self._bytes(tensor), tensor.shape, dtype, anew)
        except ValueError as error:
            raise self.fault(f"tensor {name!r} cannot be used: {error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def integers(self, name: str) -> np.ndarray:
        """A tensor of integers, int64."""
        tensor = self.tensors[name]
        if tensor.type.name not in INTEGERS:
            raise self.fault(f"tensor {name!r} is of type {tensor.type.name}, not of integers")
        return self._bytes(tensor).view(INTEGERS[tensor.type.name]).reshape(tensor.shape).astype(np.int64)

    def fault(self, what: str) -> CheckpointError:
        """The error for a file whose content is wrong."""
        return _fault(self.path, what)

    def _bytes(self, tensor: Tensor) -> np.ndarray:
        return np.memmap(tensor.path, np.uint8, "r", offset=tensor.start, shape=(tensor.nbytes,))


def _parts(path: Path) -> list[Path]:
    """The files that belong together, in order: the others of a split file have names that differ in one number."""
    count = _header(path).metadata.get("split.count", 1)
    if not isinstance(count, int) or count < 2:
        return [path]
    named = _PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts; name it as NAME-00001-of-{count:05}.gguf beside the others"
        )
    parts = [path.with_name(f"{named['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.exists():
            raise CheckpointError(f"{path} is one of {count} parts and {part.name} is missing; fetch it too")
    return parts


def _header(path: Path) -> "_Header":
    try:
        with path.open("rb") as file:
            return _Header(path, file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); give a readable GGUF file") from error


def _fault(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a usable GGUF file: {what}; fetch or convert it again")


class _Header:
    """A cursor over the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.end, self.at = path, file, os.fstat(file.fileno()).st_size, 0
        if (magic := self.take(4)) != b"GGUF":
            raise self.fault(f"it begins with {magic!r} where 'GGUF' is expected")
        version = self.scalar(_ID)
        if version not in (2, 3):
            raise CheckpointError(f"{path} has GGUF version {version}; convert it to version 3, little-endian")
        tensor_count, value_count = self.scalar(_COUNT), self.scalar(_COUNT)
        self.metadata: dict[str, Any] = {}
        for _ in range(value_count):
            key = self.string()
            self.metadata[key] = self.value(key)
        tensors = [self.tensor() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self.fault(f"general.alignment is {alignment!r}, not a positive multiple of 8")
        data_start = -(-self.at // alignment) * alignment
        self.tensors = {each.name: self.placed(each, data_start, alignment) for each in tensors}
        if len(self.tensors) != tensor_count:
            raise self.fault("two tensors have the same name")

    def fault(self, what: str) -> CheckpointError:
        return _fault(self.path, what)

    def take(self, count: int) -> bytes:
        if count > min(self.end - self.at, _MAX_TAKE):
            raise self.fault(f"its header wants {count} bytes at {self.at} and the file has {self.end}")
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
            raise self.fault(f"{key!r} has unknown value type {kind}")
        kind, count = self.scalar(_ID), self.scalar(_COUNT)
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise self.fault(f"{key!r} is an array of unknown value type {kind}")
        width = struct.calcsize("<" + _SCALARS[kind])
        return np.frombuffer(self.take(count * width), np.dtype("<" + _SCALARS[kind])).tolist()

    def tensor(self) -> Tensor:
        """The next tensor info; `start` still counts from the beginning of the data."""
        name, dims = self.string(), self.scalar(_ID)
        if not 1 <= dims <= _MAX_DIMS:
            raise self.fault(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self.scalar(_COUNT) for _ in range(dims))[::-1]
        number, offset = self.scalar(_ID), self.scalar(_COUNT)
        if number not in TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of the unknown type number {number}; use a file of another "
                "quantisation"
            )
        kind = TYPES[number]
        if shape[-1] % kind.values:
            raise self.fault(f"{kind.name} tensor {name!r} has rows of {shape[-1]} values")
        return Tensor(name, shape, kind, offset, math.prod(shape) // kind.values * kind.nbytes, self.path)

    def placed(self, tensor: Tensor, data_start: int, alignment: int) -> Tensor:
        start = data_start + tensor.start
        if tensor.nbytes == 0 or tensor.start % alignment or start + tensor.nbytes > self.end:
            raise self.fault(
                f"tensor {tensor.name!r} of shape {tensor.shape} should take {tensor.nbytes} bytes "
                f"at {start} and the file has {self.end}"
            )
        return replace(tensor, start=start)
