"""Tensors out of PyTorch's own files (`pytorch_model.bin`, `*.pt`) without PyTorch and without running them.

Such a file is a zip archive: a pickle that says how tensors lie in storages, and the bytes of each storage. A file is
believed in nothing: names are looked up inside the archive alone, every size is compared with what is there.
"""

import math
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .pickle_program import ORDERED_DICT, Call, Global, Persistent, follow

MOST_PROGRAM = 4 << 20  # bytes of pickle, of which a thousand tensors take a tenth of a million
MOST_TIMES = 4  # tensors may share storages and so be larger than the file, within reason
LEGACY = (b"\x80\x02\x8a\x0a", b"\x80\x02l")

# How numpy reads each dtype of PyTorch.
READ = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float8_e4m3fn": "u1",
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1",
    "uint64": "<u8", "uint32": "<u4", "uint16": "<u2", "uint8": "u1", "bool": "u1",
}  # fmt: skip
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
UNTYPED = Global("torch.storage", "UntypedStorage")
TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
TENSOR_OF_DTYPE = Global("torch._utils", "_rebuild_tensor_v3")
PARAMETER = Global("torch._utils", "_rebuild_parameter")
SIZE = Global("torch", "Size")
KNOWN = {ORDERED_DICT, UNTYPED, TENSOR, TENSOR_OF_DTYPE, PARAMETER, SIZE}
KNOWN |= {Global("torch", name) for name in (*STORAGES, *READ)}


class Layout(NamedTuple):
    """How a tensor lies in a storage, counted in elements."""

    dtype: str
    storage: str
    elements: int  # of the storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_pickled(path: Path) -> dict[str, mx.array]:
    """The tensors of a state dict, by name; float64 becomes float32, as no GPU of Apple's has it.

    Raises CheckpointError for a damaged file, PyTorch's format from before 1.6, and a file that holds anything but
    tensors, naming it.
    """
    with _blaming(path), path.open("rb") as file:
        if file.read(4).startswith(LEGACY):
            raise ValueError("it has PyTorch's format from before version 1.6")
        if not zipfile.is_zipfile(file):
            raise ValueError("it is no file of PyTorch's")
        with zipfile.ZipFile(file) as opened:
            archive = Archive(opened, os.fstat(file.fileno()).st_size)
            layouts = _layouts(follow(archive.program(), _check))
            archive.check_total(layouts.values())
            return _tensors(archive, layouts)


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Whatever goes wrong while reading `path` is said to be its fault."""
    try:
        yield
    except (
        ValueError, KeyError, OSError, EOFError, RuntimeError, NotImplementedError, OverflowError,
        zipfile.BadZipFile, struct.error,
    ) as error:  # fmt: skip
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{path} cannot be read: {said}; use another copy or form of it") from error


class Archive:
    """The members of such a file: stored as they are, nowhere else, and none larger than it says."""

    def __init__(self, opened: zipfile.ZipFile, size: int):
        """`size` is that of the file."""
        self._opened, self._size = opened, size
        members = opened.infolist()
        self._members = {member.filename: member for member in members}
        if len(self._members) < len(members):
            raise ValueError("it has two members of one name")
        for member in members:
            if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
                raise ValueError(f"its member {member.filename[:80]!r} is compressed, which PyTorch never does")
        if sum(member.file_size for member in members) > size:
            raise ValueError("its members are larger than the file")
        programs = [name for name in self._members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(programs) != 1:
            raise ValueError("it has no data.pkl, which names the tensors, or several")
        self._folder = programs[0].removesuffix("data.pkl")
        if self._read_if_there("byteorder", "little") != "little":
            raise ValueError("it was written by a machine with the bytes of numbers in the other order")

    def program(self) -> bytes:
        member = self._members[self._folder + "data.pkl"]
        if member.file_size > MOST_PROGRAM:
            raise ValueError(f"its data.pkl has {member.file_size} bytes, more than any tensors' names take")
        return self._opened.read(member)

    def storage(self, key: str, dtype: str, elements: int) -> np.ndarray:
        """The numbers of a storage, [elements], as they were written."""
        member = self._members.get(f"{self._folder}data/{key}")
        if member is None:
            raise ValueError(f"it lacks the storage {key[:80]!r}")
        if member.file_size != elements * np.dtype(READ[dtype]).itemsize:
            raise ValueError(f"its storage {key[:80]!r} has {member.file_size} bytes for {elements} {dtype}")
        return np.frombuffer(self._opened.read(member), READ[dtype])

    def check_total(self, layouts: Any) -> None:
        """Raise ValueError when tensors that share storages add up to far more than the file."""
        total = sum(math.prod(lie.shape) * np.dtype(READ[lie.dtype]).itemsize for lie in set(layouts))
        if total > MOST_TIMES * self._size:
            raise ValueError(f"its tensors take {total} bytes, and the file has {self._size}")

    def _read_if_there(self, name: str, otherwise: str) -> str:
        member = self._members.get(self._folder + name)
        return otherwise if member is None else self._opened.read(member)[:16].decode().strip()


def _check(named: Global) -> None:
    if named not in KNOWN:
        raise ValueError(f"it asks for {str(named)[:120]!r} to be run, and only tensors are read")


def _layouts(found: Any) -> dict[str, Layout]:
    """Of the tensors of a state dict, by name."""
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__} and not tensors by name")
    return {name: _layout(name, value) for name, value in found.items()}


def _layout(name: str, value: Any) -> Layout:
    if isinstance(value, Call) and value.function == PARAMETER and value.arguments:
        value = value.arguments[0]
    if not isinstance(value, Call) or value.function not in (TENSOR, TENSOR_OF_DTYPE):
        raise ValueError(f"it holds {name[:80]!r}, which is no tensor")
    typed = value.function == TENSOR
    match value.arguments:
        case (Persistent(("storage", Global() as kind, str() as key, str(), elements)), offset, shape, strides, *rest):
            dtype = _dtype(name, kind, None if typed else rest[2:3])
            if not typed:
                elements = _whole(name, elements) // np.dtype(READ[dtype]).itemsize  # an untyped storage counts bytes
            counts = _whole(name, elements), _whole(name, offset)
            lie = Layout(dtype, key, *counts, _sizes(shape), _sizes(strides))
        case _:
            raise ValueError(f"the tensor {name[:80]!r} is not built as PyTorch builds them")
    _check_bounds(name, lie)
    return lie


def _dtype(name: str, storage: Global, said: list[Any] | None) -> str:
    """Of a tensor's numbers: told by its storage, or `said` of a storage of bytes."""
    if said is None:
        dtype = STORAGES.get(storage.name)
    else:
        match said:
            case [Global("torch", named)] if storage == UNTYPED:
                dtype = named
            case _:
                dtype = None
    if dtype not in READ:
        raise ValueError(f"the numbers of {name[:80]!r} are of a kind that is not read")
    return dtype


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, Call) and value.function == SIZE and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple) or len(value) > 8:
        raise ValueError("a tensor has sizes that are none")
    return tuple(_whole("", n) for n in value)


def _whole(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"the tensor {name[:80]!r} has a size that is none")
    return value


def _check_bounds(name: str, lie: Layout) -> None:
    if len(lie.shape) != len(lie.strides):
        raise ValueError(f"the tensor {name[:80]!r} has {len(lie.shape)} sizes and {len(lie.strides)} strides")
    if max(lie.shape, default=0) >= 1 << 31:
        raise ValueError(f"the tensor {name[:80]!r} has {max(lie.shape)} rows")
    last = lie.offset + sum((n - 1) * step for n, step in zip(lie.shape, lie.strides, strict=True))
    if math.prod(lie.shape) > 0 and (last >= lie.elements or math.prod(lie.shape) > lie.elements):
        raise ValueError(f"the tensor {name[:80]!r} goes beyond its storage")


def _tensors(archive: Archive, layouts: dict[str, Layout]) -> dict[str, mx.array]:
    """Storage by storage, so that no more than one is held besides the tensors; equal layouts share an array."""
    by_storage: dict[tuple[str, str, int], list[Layout]] = {}
    for lie in set(layouts.values()):
        by_storage.setdefault((lie.storage, lie.dtype, lie.elements), []).append(lie)
    made: dict[Layout, mx.array] = {}
    for (key, dtype, elements), group in by_storage.items():
        numbers = archive.storage(key, dtype, elements)
        for lie in group:
            steps = tuple(step * numbers.itemsize for step in lie.strides)
            view = np.lib.stride_tricks.as_strided(numbers[lie.offset :], lie.shape, steps, writeable=False)
            made[lie] = _array(view, dtype)
    return {name: made[lie] for name, lie in layouts.items()}


def _array(numbers: np.ndarray, dtype: str) -> mx.array:
    if dtype == "bool":
        return mx.array(numbers != 0)
    if dtype == "float64":
        return mx.array(numbers.astype(np.float32))
    flat = mx.array(numbers.reshape(-1))
    if dtype == "bfloat16":
        flat = flat.view(mx.bfloat16)
    if dtype == "float8_e4m3fn":
        flat = mx.from_fp8(flat)
    return flat.reshape(numbers.shape)
