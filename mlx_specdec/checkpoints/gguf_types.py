"""The number formats of GGUF, and the same numbers as MLX computes with them.

A type packs `values` numbers into a block of `nbytes` bytes. Seven quantised types are MLX's own affine form (a scale
and a bias for 32 codes) in other bytes, and MXFP4 is MLX's mode of that name: they are repacked. The others are turned
into numbers by the gguf package, and kept dense or quantised anew.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .gguf_weight import GROUP, Requantise, Weight, joined

AT_ONCE = 1 << 22  # values unpacked at a time, so that a large tensor never has a whole float32 copy


@dataclass(frozen=True)
class Type:
    """A number format by its name in ggml."""

    name: str
    values: int
    nbytes: int


# fmt: off
TYPES = {number: Type(*fields) for number, fields in {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}.items()}
# fmt: on
FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
INTEGERS = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}

Codes = tuple[np.ndarray, np.ndarray, np.ndarray]  # codes uint8 [n, 32], scales [n, 1], biases [n, 1]


def read_weight(
    kind: Type, raw: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype | None = None, anew: Requantise | None = None
) -> Weight:
    """The tensor that `raw`, uint8 [bytes], holds.

    `dtype` is that of floats and of scales and biases; None leaves each as exact as it is: float32 where the type has
    no float of its own. `anew` quantises what has no form in MLX. Raises CheckpointError for a type that cannot be
    read, ValueError for numbers that are not finite.
    """
    if kind.name in FLOATS:
        values = mx.array(raw.view(FLOATS[kind.name]).reshape(shape))
        values = values.view(mx.bfloat16) if kind.name == "BF16" else values
        return Weight(values if dtype is None else values.astype(dtype))
    columns = shape[-1]
    if kind.name == "MXFP4":
        return joined([_mxfp4(part, columns) for part in _parts(kind, raw, columns)], shape)
    if kind.name in AFFINE:
        bits, unpack = AFFINE[kind.name]
        return joined(
            [_affine(unpack(part), bits, columns, dtype) for part in _parts(kind, raw, columns)],
            shape,
        )
    dequantise = dequantiser(kind)
    return joined(
        [_dense(dequantise(part), columns, dtype or mx.float32, anew) for part in _parts(kind, raw, columns)], shape
    )


def exact_dtype(kind: Type) -> mx.Dtype | None:
    """The narrowest dtype that holds a type's floats, or its scales, exactly; None if none or float32 alone does."""
    if kind.name in ("F32", "F16", "BF16"):
        return {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}[kind.name]
    return mx.float16 if kind.name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0") else None


def dequantiser(kind: Type) -> Callable[[np.ndarray], np.ndarray]:
    """The gguf package's own function: uint8 [rows, bytes] -> float32 [rows, values]. Raises CheckpointError."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise CheckpointError(
            f"tensors of type {kind.name} are read by the gguf package, which is missing; install mlx-specdec[gguf]"
        ) from error
    try:
        number = GGMLQuantizationType[kind.name]
        dequantize(np.zeros((1, kind.nbytes), np.uint8), number)
    except (KeyError, NotImplementedError) as error:
        raise CheckpointError(
            f"tensors of type {kind.name} cannot be read by this gguf package; use a file of another quantisation"
        ) from error

    def dequantise(raw: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # found by `_finite`
            return dequantize(raw, number)

    return dequantise


def kept_packed(kind: Type) -> bool:
    """Whether MLX computes with a type as it is packed."""
    return kind.name in AFFINE or kind.name == "MXFP4"


def readable(kind: Type) -> None:
    """Raises CheckpointError if a weight of this type cannot be read."""
    if kind.name not in FLOATS and not kept_packed(kind):
        dequantiser(kind)


def _parts(kind: Type, raw: np.ndarray, columns: int) -> Iterator[np.ndarray]:
    """Some rows at a time, uint8 [rows, bytes]."""
    rows = raw.reshape(-1, columns // kind.values * kind.nbytes)
    step = max(AT_ONCE // columns, 1)
    for start in range(0, len(rows), step):
        yield np.asarray(rows[start : start + step])


def _dense(values: np.ndarray, columns: int, dtype: mx.Dtype, anew: Requantise | None) -> Weight:
    dense = mx.array(values).astype(dtype)
    _finite(dense)
    return Weight(dense) if anew is None or columns % anew.group_size else anew.apply(dense)


def _affine(codes: Codes, bits: int, columns: int, dtype: mx.Dtype | None) -> Weight:
    values, *factors = codes
    words = _packed(values, bits).reshape(-1, columns * bits // 32)
    scales, biases = (mx.array(part.reshape(len(words), -1)) for part in factors)
    if dtype is not None:
        scales, biases = scales.astype(dtype), biases.astype(dtype)
    _finite(scales, biases)
    return Weight(mx.array(words), scales, biases, bits=bits, group_size=GROUP)


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 codes [n, 32] -> uint32 [n, bits], each code in the next `bits` bits from the lowest on."""
    if bits == 4:
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
    elif bits == 8:
        packed = codes
    else:
        single = np.unpackbits(codes[:, :, None], axis=-1, bitorder="little")[:, :, :bits]
        packed = np.packbits(single.reshape(len(codes), -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4")


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[n, m] -> [n, 2m]: a block's first half is in the low nibbles, its second in the high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _fields(raw: np.ndarray, **fields: Any) -> tuple[np.ndarray, ...]:
    """The fields of the blocks in uint8 [rows, bytes], each [n, size]; their dtypes in order, with the size."""
    kind = np.dtype([(name, dtype, (size,)) for name, (dtype, size) in fields.items()])
    blocks = np.ascontiguousarray(raw).view(kind).reshape(-1)
    return tuple(blocks[name] for name in fields)


def _centred(codes: np.ndarray, scales: np.ndarray, bits: int) -> Codes:
    """Codes whose middle stands for 0; a scale times a power of two is exact."""
    with np.errstate(over="ignore", invalid="ignore"):  # found by `_finite`
        return codes, scales, scales * np.float16(-(1 << bits - 1))


def _q4_0(raw: np.ndarray) -> Codes:
    scale, codes = _fields(raw, scale=("<f2", 1), codes=("u1", 16))
    return _centred(_nibbles(codes), scale, 4)


def _q4_1(raw: np.ndarray) -> Codes:
    scale, bias, codes = _fields(raw, scale=("<f2", 1), bias=("<f2", 1), codes=("u1", 16))
    return _nibbles(codes), scale, bias


def _q5_0(raw: np.ndarray) -> Codes:
    scale, high, codes = _fields(raw, scale=("<f2", 1), high=("u1", 4), codes=("u1", 16))
    return _centred(_nibbles(codes) | _fifth(high), scale, 5)


def _q5_1(raw: np.ndarray) -> Codes:
    scale, bias, high, codes = _fields(raw, scale=("<f2", 1), bias=("<f2", 1), high=("u1", 4), codes=("u1", 16))
    return _nibbles(codes) | _fifth(high), scale, bias


def _fifth(high: np.ndarray) -> np.ndarray:
    """[n, 4] -> [n, 32]: bit i is the fifth bit of code i."""
    return np.unpackbits(high, axis=-1, bitorder="little") << 4


def _q8_0(raw: np.ndarray) -> Codes:
    scale, codes = _fields(raw, scale=("<f2", 1), codes=("u1", 32))
    return _centred(codes ^ 0x80, scale, 8)  # from two's complement to codes from 0


def _q4_k(raw: np.ndarray) -> Codes:
    d, dmin, packed, codes = _fields(raw, d=("<f2", 1), dmin=("<f2", 1), packed=("u1", 12), codes=("u1", 128))
    return _nibbles(codes.reshape(-1, 32)).reshape(-1, GROUP), *_six_bits(d, dmin, packed)


def _q5_k(raw: np.ndarray) -> Codes:
    d, dmin, packed, high, codes = _fields(
        raw, d=("<f2", 1), dmin=("<f2", 1), packed=("u1", 12), high=("u1", 32), codes=("u1", 128)
    )
    # Bit g of high[i] is the fifth bit of code i in group g.
    fifth = np.unpackbits(high[:, :, None], axis=-1, bitorder="little").swapaxes(1, 2).reshape(-1, GROUP)
    return _nibbles(codes.reshape(-1, 32)).reshape(-1, GROUP) | fifth << 4, *_six_bits(d, dmin, packed)


def _six_bits(d: np.ndarray, dmin: np.ndarray, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and biases, float32 [8n, 1], of the eight groups in each block.

    Each has six bits, which multiply the block's own scale: a product that float32 holds exactly, and so does it that
    one's product with a code.
    """
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=-1)
    by_group = [d.astype(np.float32) * scales, -(dmin.astype(np.float32) * minima)]
    return by_group[0].reshape(-1, 1), by_group[1].reshape(-1, 1)


def _mxfp4(raw: np.ndarray, columns: int) -> Weight:
    exponents, codes = _fields(raw, exponents=("u1", 1), codes=("u1", 16))
    if exponents.max() > 250:  # times the largest code, beyond float32
        raise ValueError("it holds numbers that are not finite")
    words = _packed(_nibbles(codes), 4).reshape(-1, columns // 8)
    return Weight(mx.array(words), mx.array(exponents.reshape(len(words), -1)), bits=4, group_size=GROUP, mode="mxfp4")


def _finite(*arrays: mx.array) -> None:
    if not all(mx.isfinite(array).all().item() for array in arrays):
        raise ValueError("it holds numbers that are not finite")


AFFINE: dict[str, tuple[int, Callable[[np.ndarray], Codes]]] = {
    "Q4_0": (4, _q4_0),
    "Q4_1": (4, _q4_1),
    "Q5_0": (5, _q5_0),
    "Q5_1": (5, _q5_1),
    "Q8_0": (8, _q8_0),
    "Q4_K": (4, _q4_k),
    "Q5_K": (5, _q5_k),
}
