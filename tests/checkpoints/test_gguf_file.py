"""The container and its parts, and damage of every kind as a sentence."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter

from mlx_specdec import checkpoints
from mlx_specdec.checkpoints.gguf_file import GGUFFile
from mlx_specdec.errors import CheckpointError, SpecDecError

from .tiny_families import SOURCES
from .tiny_gguf import TinyGGUF, logits


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
    assert "two tensors have the same name" in refusal(tmp_path, whole.replace(b"blk.0.ffn_up", b"blk.1.ffn_up"))


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


def test_an_unknown_type_is_named(tmp_path, whole):
    at = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    words = "tensor 'token_embd.weight' is of the unknown type number 4096; use a file of another quantisation"
    assert words in refusal(tmp_path, whole[:at] + struct.pack("<I", 4096) + whole[at + 4 :])
    assert "type number 31" in refusal(tmp_path, whole[:at] + struct.pack("<I", 31) + whole[at + 4 :]), "Q4_0_4_4"


def test_integers(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, values in (("d2t", np.array([5, -1, 1 << 40])), ("small", np.array([[1, -2]], np.int8))):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.integers("d2t").tolist() == [5, -1, 1 << 40]
    assert file.integers("small").tolist() == [[1, -2]]


# parts


def split(path: Path, count: int, **keys: list[int]) -> list[Path]:
    """A tiny model in parts, as llama-gguf-split makes them: all metadata in the first. `keys` replace what the parts
    say of themselves."""
    TinyGGUF().write(path / "whole.gguf")
    reader = GGUFReader(path / "whole.gguf")
    parts = [path / f"m-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    for i, part in enumerate(parts):
        tensors = reader.tensors[i::count]
        writer = GGUFWriter(part, "llama")
        for key, field in reader.fields.items() if i == 0 else ():
            if not key.startswith(("GGUF.", "general.architecture")):
                kinds = [int(kind) for kind in field.types]
                writer.add_key_value(key, field.contents(), *[gguf.GGUFValueType(kind) for kind in kinds[:2]])
        said = {"split.no": list(range(count)), "split.count": [count] * count,
                "split.tensors.count": [len(reader.tensors)] * count} | keys  # fmt: skip
        for key, values in said.items():
            writer.add_uint32(key, values[i])
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def test_a_split_file_is_named_by_any_of_its_parts(tmp_path):
    parts = split(tmp_path, 3)
    expected = logits(checkpoints.load(tmp_path / "whole.gguf")[0])
    for part in parts:
        model, tokenizer = checkpoints.load(part)
        np.testing.assert_array_equal(logits(model), expected)
        assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_parts_that_do_not_make_a_whole(tmp_path):
    parts = split(tmp_path, 2)
    parts[0].rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf is one of 2 parts and m-00001-of-00002\.gguf is "
                       "missing; fetch it too"):  # fmt: skip
        GGUFFile(parts[1])
    (tmp_path / "kept").rename(tmp_path / "renamed.gguf")
    with pytest.raises(
        CheckpointError, match=r"one of 2 parts; name it as NAME-00001-of-00002\.gguf beside the others"
    ):
        GGUFFile(tmp_path / "renamed.gguf")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"split.no": [0, 0]}, "calls itself part 0"),
        ({"split.count": [2, 7], "split.no": [0, 5]}, "calls itself part 5"),
        ({"split.tensors.count": [99, 99]}, "should hold 99"),
    ],
)
def test_parts_that_belong_to_others(tmp_path, keys, words):
    with pytest.raises(CheckpointError, match=words):
        GGUFFile(split(tmp_path, 2, **keys)[0])


def test_a_part_that_repeats_a_tensor(tmp_path):
    parts = split(tmp_path, 2)
    whole = TinyGGUF(extra={"split.no": 1, "split.count": 2})
    whole.write(parts[1])
    with pytest.raises(CheckpointError, match="is in an earlier part too"):
        GGUFFile(parts[0])


# damage


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


@pytest.mark.parametrize("name", ["gemma4", "qwen35moe", "phi3-long"])
def test_random_damage_to_a_model_is_a_sentence_or_harmless(tmp_path, name):
    """Through the configuration and into the tensors; no damage may ask for memory that a file of this size cannot
    fill."""
    source = SOURCES[name]
    source.write(tmp_path / "whole.gguf", source.tensors(), {"ffn": Type.Q4_0, "attn": Type.Q8_0})
    whole = (tmp_path / "whole.gguf").read_bytes()
    rng = random.Random(5)
    header = GGUFReader(tmp_path / "whole.gguf").data_offset
    path = tmp_path / "bad.gguf"
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(header)] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        path.write_bytes(content)
        try:
            checkpoints.load(path, lazy=True)
        except SpecDecError as error:
            assert "\n" not in str(error)  # noqa: PT017
