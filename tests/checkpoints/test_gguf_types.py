"""Numbers of every type against the gguf package, to the bit."""

from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from mlx_specdec.checkpoints import gguf_types
from mlx_specdec.checkpoints.gguf_file import GGUFFile
from mlx_specdec.checkpoints.gguf_types import AFFINE, TYPES, read_weight
from mlx_specdec.checkpoints.gguf_weight import Requantise, Weight
from mlx_specdec.errors import CheckpointError, OptionError

from .tiny_gguf import random_blocks, write_tensors

QUANTISABLE = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.TQ1_0,
               Type.TQ2_0, Type.MXFP4]  # fmt: skip
QUANTISED = [
    Type[kind.name] for kind in TYPES.values() if kind.values > 1 and kind.name not in ("Q8_1", "Q8_K", "Q1_0")
]


def read(path: Path, raw: np.ndarray, kind: Type, **how) -> Weight:
    write_tensors(path / "m.gguf", {"a": (raw, kind)})
    return GGUFFile(path / "m.gguf").read("a", **how)


def exactly(weight: Weight) -> np.ndarray:
    """Its numbers as float32."""
    if weight.mode == "affine" and weight.scales is not None:
        weight = Weight(weight.weight, weight.scales.astype(mx.float32), weight.biases.astype(mx.float32), weight.bits)
    return np.array(weight.dense().astype(mx.float32))


def test_the_table_of_types_is_that_of_the_gguf_package():
    theirs = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in Type if int(kind) in TYPES}
    assert {number: (kind.name, kind.values, kind.nbytes) for number, kind in TYPES.items()} == theirs


@pytest.mark.parametrize("kind", QUANTISABLE, ids=lambda kind: kind.name)
def test_what_gguf_packs(tmp_path, kind):
    values = np.random.default_rng(0).normal(0, 1, (48, 512)).astype(np.float32)
    values[0, :4] = [1e5, -1e5, 1e-30, 0] if kind in (Type.F32, Type.BF16) else 0
    packed = quantize(values, kind)
    np.testing.assert_array_equal(exactly(read(tmp_path, packed, kind)), dequantize(packed, kind))


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_every_byte_of_a_block_in_its_place(tmp_path, kind, monkeypatch):
    """Random bytes, so that each code occurs at each position; in several parts, and in three dimensions."""
    monkeypatch.setattr(gguf_types, "AT_ONCE", 1024)
    blocks = random_blocks(kind, rows=15, columns=512)
    weight = read(tmp_path, blocks.reshape(3, 5, -1), kind)
    np.testing.assert_array_equal(exactly(weight), dequantize(blocks, kind).reshape(3, 5, 512))
    assert (weight.bits is not None) == (kind.name in AFFINE or kind == Type.MXFP4)


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS], ids=lambda kind: kind.name)
def test_in_float16_numbers_are_off_by_a_rounding_of_the_largest_part(tmp_path, kind):
    blocks = random_blocks(kind, rows=8, columns=512)
    expected = dequantize(blocks, kind)
    got = np.array(read(tmp_path, blocks, kind, dtype=mx.float16).dense().astype(mx.float32))
    assert np.abs(got - expected).max() <= 4 * 2**-11 * np.abs(expected).max()
    assert np.abs(got - expected).max() > 0


def test_only_what_has_no_form_in_mlx_is_quantised_anew(tmp_path):
    anew = Requantise(bits=8, group_size=64)
    blocks = random_blocks(Type.Q6_K, rows=8, columns=512)
    weight = read(tmp_path, blocks, Type.Q6_K, dtype=mx.float32, anew=anew)
    assert weight.settings == {"group_size": 64, "bits": 8, "mode": "affine"}
    expected = dequantize(blocks, Type.Q6_K)
    words, scales, biases = mx.quantize(mx.array(expected), group_size=64, bits=8)
    for ours, theirs in zip(weight.arrays.values(), (words, scales, biases), strict=True):
        assert mx.array_equal(ours, theirs)
    assert read(tmp_path, random_blocks(Type.Q4_0, 4, 512), Type.Q4_0, anew=anew).bits == 4
    assert read(tmp_path, np.ones((4, 512), np.float32), Type.F32, anew=anew).bits is None
    assert read(tmp_path, random_blocks(Type.IQ4_NL, 4, 32), Type.IQ4_NL, anew=anew).bits is None, "not whole groups"


@pytest.mark.parametrize(("bits", "group_size"), [(7, 64), (4, 16), (1, 32)])
def test_a_quantisation_that_mlx_lacks_is_refused(bits, group_size):
    with pytest.raises(OptionError, match=f"{bits} bits by groups of {group_size}"):
        Requantise(bits, group_size)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_K, Type.Q6_K, Type.MXFP4], ids=lambda kind: kind.name)
def test_numbers_that_are_not_finite_are_refused(tmp_path, kind):
    blocks = random_blocks(kind, rows=2, columns=256)
    scale = -2 if kind == Type.Q6_K else 0
    blocks[1, scale : scale + 2 or None] = 0xFF if kind == Type.MXFP4 else np.array([np.inf], "<f2").view(np.uint8)
    with pytest.raises(CheckpointError, match="tensor 'a' cannot be used: it holds numbers that are not finite"):
        read(tmp_path, blocks, kind)


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "Q1_0", "F64"])
def test_types_that_gguf_cannot_dequantise_are_named(kind):
    known = next(each for each in TYPES.values() if each.name == kind)
    with pytest.raises(CheckpointError, match=f"of type {kind} cannot be read by this gguf package"):
        read_weight(known, np.zeros(known.nbytes, np.uint8), (1, known.values))


def test_without_the_gguf_package_the_extra_is_named(tmp_path, monkeypatch):
    blocks, plain = random_blocks(Type.Q6_K, 2, 256), random_blocks(Type.Q4_K, 2, 256)
    write_tensors(tmp_path / "m.gguf", {"a": (blocks, Type.Q6_K), "b": (plain, Type.Q4_K)})
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.read("b").bits == 4
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensors of type Q6_K .* install mlx-specdec\[gguf\]"):
        file.read("a")
    with pytest.raises(CheckpointError, match="not of integers"):
        file.integers("a")
