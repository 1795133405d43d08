"""Matrices in blocks of a few bits (MatMulNBits) in MLX's own form, or dense where that would not be the same."""

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .onnx_file import OnnxFile
from .onnx_parts import Packed
from .writing import Tensors

GROUPS = (32, 64, 128)
BITS = (2, 4, 8)


def unpacked(file: OnnxFile, packed: Packed) -> Tensors:
    """`weight` uint32, `scales` and `biases` [rows, blocks]; or `weight` [rows, columns] in the type of its scales.

    Block b of a row stands for (code - zero point) * scale; MLX has code * scale + bias. Both pack codes into bytes
    alike, the first into the lowest bits. Raises CheckpointError for sizes that do not fit.
    """
    codes = file.array(packed.codes)
    if packed.bits not in BITS or packed.block < 16 or codes.dtype != mx.uint8 or codes.ndim < 2:
        raise CheckpointError(
            f"{file.path}: {packed.codes} has {packed.bits} bits in blocks of {packed.block} ({codes.dtype}), which is "
            "not supported; use an export in 4 or 8 bits, float32 or float16"
        )
    rows = codes.shape[0]
    codes = codes.reshape(rows, -1)
    columns = packed.columns or codes.shape[1] * 8 // packed.bits
    blocks = -(-columns // packed.block)
    if codes.shape[1] * 8 != blocks * packed.block * packed.bits:
        raise _wrong(file, packed.codes, codes.size, rows, columns)
    scales = file.array(packed.scales)
    if scales.size != rows * blocks:
        raise _wrong(file, packed.scales, scales.size, rows, columns)
    scales = scales.reshape(rows, blocks)
    zeros = _zero_points(file, packed, rows, blocks, columns)
    biases = -(zeros.astype(mx.float32) * scales.astype(mx.float32))
    kept = biases.astype(scales.dtype)
    exact = scales.dtype == mx.float32 or mx.array_equal(kept, biases).item()
    if packed.block in GROUPS and columns % packed.block == 0 and exact:
        return {"weight": mx.contiguous(codes).view(mx.uint32), "scales": scales, "biases": kept}
    values = _codes(codes, packed.bits).reshape(rows, blocks, packed.block).astype(mx.float32)
    dense = (values - zeros.astype(mx.float32)[..., None]) * scales.astype(mx.float32)[..., None]
    return {"weight": mx.contiguous(dense.reshape(rows, -1)[:, :columns].astype(scales.dtype))}


def _zero_points(file: OnnxFile, packed: Packed, rows: int, blocks: int, columns: int) -> mx.array:
    """[rows, blocks], codes or numbers of the scales' type; the middle code where there are none."""
    if packed.zero_points is None:
        return mx.full((rows, blocks), 1 << (packed.bits - 1))
    given = file.array(packed.zero_points)
    if given.dtype == mx.uint8:
        width = -(-blocks * packed.bits // 8)
        if given.size != rows * width:
            raise _wrong(file, packed.zero_points, given.size, rows, columns)
        return _codes(given.reshape(rows, width), packed.bits)[:, :blocks]
    if given.size != rows * blocks:
        raise _wrong(file, packed.zero_points, given.size, rows, columns)
    return given.reshape(rows, blocks)


def _codes(packed: mx.array, bits: int) -> mx.array:
    """uint8 [rows, n] of `bits` each out of the bytes of a row, the first out of the lowest bits."""
    shifts = mx.array(np.arange(0, 8, bits, dtype=np.uint8))
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).reshape(packed.shape[0], -1)


def _wrong(file: OnnxFile, name: str, size: int, rows: int, columns: int) -> CheckpointError:
    return CheckpointError(
        f"{file.path}: {name} has {size} values, which do not make a matrix of {rows} x {columns} in its blocks; fetch "
        "the file again"
    )
