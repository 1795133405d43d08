"""PyTorch's files written by hand, opcode by opcode, so that tests need no PyTorch and can write wrong ones too."""

import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

STORAGES = {"f4": "FloatStorage", "f2": "HalfStorage", "f8": "DoubleStorage", "i8": "LongStorage", "i4": "IntStorage",
            "i2": "ShortStorage", "i1": "CharStorage", "u1": "ByteStorage", "b1": "BoolStorage"}  # fmt: skip


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def whole(value: int) -> bytes:
    """A number of any size."""
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def name(module: str, what: str) -> bytes:
    return f"c{module}\n{what}\n".encode()


def several(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + several(*arguments) + b"R"


def storage(kind: bytes, key: str, elements: int) -> bytes:
    return several(text("storage"), kind, text(key), text("cpu"), whole(elements)) + b"Q"


def tensor(kind: str, key: str, elements: int, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> bytes:
    """The call that rebuilds a tensor which lies so in the storage `key` of `elements`."""
    return call(
        name("torch._utils", "_rebuild_tensor_v2"),
        storage(name("torch", kind), key, elements),
        whole(offset),
        several(*map(whole, shape)),
        several(*map(whole, strides)),
        b"\x89",
        call(name("collections", "OrderedDict")),
    )


def parameter(of: bytes) -> bytes:
    return call(name("torch._utils", "_rebuild_parameter"), of, b"\x88", call(name("collections", "OrderedDict")))


def state_dict(tensors: Mapping[str, bytes]) -> bytes:
    """An OrderedDict with the versions that PyTorch hangs on it."""
    items = b"".join(text(key) + value for key, value in tensors.items())
    versions = b"}" + text("_metadata") + call(name("collections", "OrderedDict")) + b"s"
    return b"\x80\x02" + call(name("collections", "OrderedDict")) + b"(" + items + b"u" + versions + b"b."


def write(
    path: Path,
    program: bytes,
    storages: Mapping[str, bytes],
    *,
    folder: str = "archive",
    byteorder: str | None = "little",
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(f"{folder}/data.pkl", program)
        if byteorder is not None:
            archive.writestr(f"{folder}/byteorder", byteorder)
        for key, data in storages.items():
            archive.writestr(f"{folder}/data/{key}", data)
        archive.writestr(f"{folder}/version", "3\n")
    return path


def save(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """What torch.save makes of a state dict of tensors with these values."""
    tensors, storages = {}, {}
    for number, (key, array) in enumerate(arrays.items()):
        strides = [step // array.itemsize for step in np.ascontiguousarray(array).strides] if array.ndim else []
        kind = STORAGES[array.dtype.str[1:]]
        tensors[key] = tensor(kind, str(number), array.size, array.shape, strides)
        storages[str(number)] = np.ascontiguousarray(array).tobytes()
    return write(path, state_dict(tensors), storages)
