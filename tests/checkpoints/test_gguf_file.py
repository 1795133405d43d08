"""The container: values to the bit, and damage of every kind as a sentence."""

import random
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from mlx_specdec.checkpoints.gguf_file import GGUFFile, Weight
from mlx_specdec.errors import CheckpointError

from .tiny_gguf import TinyGGUF

READABLE = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q8_0]


def write(path: Path, values: np.ndarray, kind: Type) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("a", values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def to_float32(weight: Weight, bits: int | None) -> np.ndarray:
    if weight.scales is None or weight.biases is None:
        return np.array(weight.weight.astype(mx.float32))
    scales, biases = weight.scales.astype(mx.float32), weight.biases.astype(mx.float32)
    return np.array(mx.dequantize(weight.weight, scales, biases, group_size=32, bits=bits))


@pytest.mark.parametrize("kind", READABLE)
def test_values_equal_those_of_the_gguf_package_to_the_bit(tmp_path, kind):
    values = np.random.default_rng(0).normal(0, 1, (48, 96)).astype(np.float32)
    values[0, :4] = [1e5, -1e5, 1e-30, 0] if kind in (Type.F32, Type.BF16) else 0
    packed = quantize(values, kind)
    file = GGUFFile(write(tmp_path / "m.gguf", packed, kind))
    expected = dequantize(packed, kind)
    np.testing.assert_array_equal(to_float32(file.read("a"), file.tensors["a"].bits), expected)


def test_every_code_of_a_block_in_its_place(tmp_path):
    """Arbitrary bytes as codes, so that each nibble and each int8 occurs at each position."""
    rng = np.random.default_rng(1)
    for kind, size in ((Type.Q4_0, 18), (Type.Q4_1, 20), (Type.Q8_0, 34)):
        blocks = rng.integers(0, 256, (64, 3 * size), dtype=np.uint8)
        for at in range(0, 3 * size, size):
            blocks[:, at : at + 2] = rng.normal(0, 1, 64).astype("<f2").view(np.uint8).reshape(64, 2)
            blocks[:, at + 2 : at + 4] = blocks[:, at : at + 2]
        file = GGUFFile(write(tmp_path / f"{kind.name}.gguf", blocks, kind))
        got = to_float32(file.read("a"), file.tensors["a"].bits)
        np.testing.assert_array_equal(got, dequantize(blocks, kind))


def test_metadata_of_every_kind(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    scalars = {
        "uint8": 200,
        "int8": -3,
        "uint16": 65535,
        "int16": -300,
        "uint32": 1 << 31,
        "int32": -5,
        "uint64": 1 << 40,
        "int64": -(1 << 40),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "日本 \n",
    }
    arrays = {"texts": ["a", "", "é"], "numbers": [1, -2, 3], "floats": [0.5, 1.5], "flags": [True, False]}
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(kind, value)
    for key, value in arrays.items():
        writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile(tmp_path / "m.gguf").metadata == {"general.architecture": "llama"} | scalars | arrays


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    TinyGGUF(types={"ffn": Type.Q4_0}).write(tmp_path / "whole.gguf")
    return (tmp_path / "whole.gguf").read_bytes()


def refusal(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_damaged_file_is_refused(tmp_path, whole):
    data_start = GGUFReader(tmp_path / "whole.gguf").data_offset
    assert "begins with b'GGML'" in refusal(tmp_path, b"GGML" + whole[4:])
    assert "begins with b'GGUF'" not in refusal(tmp_path, b"")
    assert "version 1" in refusal(tmp_path, whole[:4] + struct.pack("<I", 1) + whole[8:])
    assert "version 50331648" in refusal(tmp_path, whole[:4] + struct.pack(">I", 3) + whole[8:])
    assert "header wants" in refusal(tmp_path, whole[: data_start // 2])
    assert "should take" in refusal(tmp_path, whole[: data_start + 100])
    assert "should take" in refusal(tmp_path, whole[:-40])


@pytest.mark.parametrize("count", [1 << 20, 1 << 62, (1 << 64) - 1])
def test_absurd_counts_are_refused(tmp_path, whole, count):
    packed = struct.pack("<Q", count)
    refusal(tmp_path, whole[:8] + packed + whole[16:])  # tensors
    refusal(tmp_path, whole[:16] + packed + whole[24:])  # values
    refusal(tmp_path, whole[:24] + packed + whole[32:])  # the length of the first key


def test_absurd_shapes_and_offsets_are_refused(tmp_path, whole):
    at = whole.index(b"token_embd.weight") + len(b"token_embd.weight")
    dims = [(0, "<I", 5), (0, "<I", 0), (4, "<Q", 0), (4, "<Q", (1 << 64) - 1), (12, "<Q", 1 << 40)]
    for offset, code, value in [*dims, (24, "<Q", 1), (24, "<Q", 1 << 63)]:
        packed = struct.pack(code, value)
        refusal(tmp_path, whole[: at + offset] + packed + whole[at + offset + len(packed) :])


def test_other_quantisation_is_named(tmp_path):
    path = write(tmp_path / "m.gguf", np.zeros((4, 210), np.uint8), Type.Q6_K)
    with pytest.raises(CheckpointError, match="tensor 'a' is of type Q6_K, which is not read; use a file of F32"):
        GGUFFile(path)


def test_scales_that_are_not_finite_are_refused(tmp_path):
    blocks = np.zeros((2, 18), np.uint8)
    blocks[1, :2] = np.array([np.inf], "<f2").view(np.uint8)
    file = GGUFFile(write(tmp_path / "m.gguf", blocks, Type.Q4_0))
    with pytest.raises(CheckpointError, match="scales of tensor 'a' are not finite"):
        file.read("a")


def test_random_damage_is_an_error_or_harmless(tmp_path, whole):
    rng = random.Random(3)
    header = GGUFReader(tmp_path / "whole.gguf").data_offset
    path = tmp_path / "bad.gguf"
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(header)] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        path.write_bytes(content[: rng.choice([len(content), rng.randrange(len(content))])])
        try:
            file = GGUFFile(path)
            for name in file.tensors:
                file.read(name)
        except CheckpointError as error:
            assert "\n" not in str(error)  # noqa: PT017
