"""`convert` of GGUF files: models of every family, their MTP blocks, and drafters."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from mlx.utils import tree_flatten

from mlx_specdec import CheckpointError
from mlx_specdec.checkpoints import load
from mlx_specdec.checkpoints.conversion import convert
from mlx_specdec.checkpoints.conversion_options import Numbers
from mlx_specdec.checkpoints.drafter import kind_of, read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.checkpoints.gguf import load_gguf
from mlx_specdec.checkpoints.gguf_drafter import GGUFFolder, read_drafter
from mlx_specdec.checkpoints.gguf_file import GGUFFile
from mlx_specdec.checkpoints.mtp import read_heads
from tests.checkpoints.gguf_drafters import assistant, eagle, flash, same
from tests.checkpoints.test_gguf_families import TYPES, logits
from tests.checkpoints.test_gguf_mtp import with_heads
from tests.checkpoints.tiny_families import SOURCES, VOCAB
from tests.checkpoints.tiny_gguf import TOKENS, TinyGGUF
from tests.checkpoints.tiny_gguf import TYPES as TOKEN_TYPES

TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [*TOKENS[: VOCAB - 1], "he"],
    "tokenizer.ggml.token_type": TOKEN_TYPES + [1] * (VOCAB - len(TOKEN_TYPES)),
    "tokenizer.ggml.merges": ["h e"],
    "tokenizer.ggml.eos_token_id": 2,
}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "types"), [("llama", {}), *((name, TYPES) for name in SOURCES)], ids=["llama-dense", *SOURCES]
)
def test_models_of_every_family(tmp_path: Path, name: str, types: dict[str, Type]) -> None:
    """mlx-lm loads the folder, tokenizer and all, and its logits are those of the file to the bit."""
    source = SOURCES[name]
    source.write(tmp_path / "m.gguf", source.tensors(), types, **TOKENIZER)
    convert(str(tmp_path / "m.gguf"), tmp_path / "result")
    model, tokenizer = mlx_lm.load(str(tmp_path / "result"))
    assert np.array_equal(logits(model), logits(load_gguf(GGUFFile(tmp_path / "m.gguf"))))
    assert tokenizer.encode("he") == [VOCAB - 1]
    assert 2 in load(tmp_path / "result")[1].eos_token_ids


def test_what_has_the_bits_asked_for_is_kept(tmp_path: Path) -> None:
    """Q4_1 stays Q4_1 in groups of 32; Q8_0 and Q6_K, which MLX has not, become 4 bits in groups of 64."""
    types = {"attn": Type.Q4_1, "token_embd": Type.Q8_0, "ffn_down": Type.F32, "ffn_up": Type.F32}
    TinyGGUF(types=types).write(tmp_path / "m.gguf")
    convert(str(tmp_path / "m.gguf"), tmp_path / "result", Numbers(quantize=True))
    model: Any = mlx_lm.load(str(tmp_path / "result"))[0]
    file = load_gguf(GGUFFile(tmp_path / "m.gguf"))
    kept, own = model.layers[0].self_attn.q_proj, file.layers[0].self_attn.q_proj
    assert (kept.bits, kept.group_size) == (own.bits, own.group_size) == (4, 32)
    assert all(mx.array_equal(kept[part], own[part]) for part in ("weight", "scales", "biases"))
    assert (model.model.embed_tokens.bits, model.model.embed_tokens.group_size) == (4, 64)
    assert (model.layers[0].mlp.up_proj.bits, model.layers[0].mlp.up_proj.group_size) == (4, 64)
    convert(str(tmp_path / "m.gguf"), tmp_path / "uniform", Numbers(quantize=True, q_bits=4, q_group_size=64))
    assert config_of(tmp_path / "uniform")["quantization"] == {"bits": 4, "group_size": 64, "mode": "affine"}


@pytest.mark.parametrize(("name", "arch"), [("mtp_qwen3_5", "qwen35"), ("mtp_qwen3_5_moe", "qwen35moe")])
def test_mtp_blocks_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, arch: str) -> None:
    file = with_heads(tmp_path / "m.gguf", name, arch)
    monkeypatch.setattr("mlx_specdec.checkpoints.gguf_tokenizer.load_tokenizer", lambda *_: NoTokenizer())
    for folder, numbers in (("dense", Numbers()), ("packed", Numbers(quantize=True, q_bits=8, q_group_size=32))):
        convert(str(file), tmp_path / folder, numbers)
    model, _ = mlx_lm.utils.load_model(tmp_path / "dense")
    heads, known = (read_heads(checkpoint, model) for checkpoint in (Folder(tmp_path / "dense"), GGUFFolder(file)))
    ours, theirs = (dict(tree_flatten(x.parameters())) for x in (heads, known))  # type: ignore[union-attr]
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[each], value) for each, value in theirs.items())
    packed: Any = read_heads(Folder(tmp_path / "packed"), mlx_lm.utils.load_model(tmp_path / "packed")[0])
    assert packed.heads[0].block.self_attn.q_proj.bits == 8
    assert "mtp.layers.0.self_attn.q_proj" in config_of(tmp_path / "packed")["quantization"]


class NoTokenizer:
    """The tiny vocabularies of these files have no tokenizer."""

    eos_token_ids = frozenset({2})

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


DRAFTERS = {"eagle3": eagle, "dflash": flash, "gemma4_assistant": assistant}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafters(tmp_path: Path, kind: str) -> None:
    file = DRAFTERS[kind](tmp_path / "m.gguf")
    convert(str(file), tmp_path / "dense")
    assert kind_of(Folder(tmp_path / "dense")) == kind
    same(read_network(Folder(tmp_path / "dense"), kind), read_drafter(file)[1])
    convert(str(file), tmp_path / "packed", Numbers(quantize=True, q_bits=8, q_group_size=32))
    packed: Any = read_network(Folder(tmp_path / "packed"), kind)
    assert packed.layers[0].mlp.up_proj.bits == 8


def test_heads_alone(tmp_path: Path) -> None:
    file = with_heads(tmp_path / "m.gguf", "mtp_qwen3_5", "qwen35", alone=True)
    convert(str(file), tmp_path / "result")
    same(read_network(Folder(tmp_path / "result"), "mtp"), read_drafter(file)[1])


def test_a_packed_drafter_stays_packed(tmp_path: Path) -> None:
    file = eagle(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": Type.Q4_0, "output.weight": Type.Q5_1})
    convert(str(file), tmp_path / "result")
    same(read_network(Folder(tmp_path / "result"), "eagle3"), read_drafter(file)[1])


@pytest.mark.parametrize("dense", [True, False])
def test_float32_is_what_the_file_says(tmp_path: Path, dense: bool) -> None:
    """Blocks, scales and norms that float16 cannot hold are not rounded to it on the way."""
    wide = {"hidden_size": 256, "intermediate_size": 256}
    source = SOURCES["qwen3"].with_(wide, {"embedding_length": 256, "feed_forward_length": 256})
    tensors = {name: x + np.float32(1e-5) if "norm" in name else x for name, x in source.tensors().items()}
    types = {"ffn_up": Type.Q4_K, "ffn_down": Type.Q6_K, "ffn_gate": Type.Q8_0, "attn_": Type.Q8_0,
             "token_embd": Type.Q8_0, "output.weight": Type.Q8_0}  # fmt: skip
    source.write(tmp_path / "m.gguf", tensors, types, random=True, **TOKENIZER)
    assert load_gguf(GGUFFile(tmp_path / "m.gguf")).model.norm.weight.dtype == mx.float16
    convert(str(tmp_path / "m.gguf"), tmp_path / "result", Numbers(dtype="float32", dequantize=dense))
    result: Any = mlx_lm.load(str(tmp_path / "result"))[0]
    if dense:
        file: Any = load(tmp_path / "m.gguf", dtype="float32")[0]
    else:
        file = load_gguf(GGUFFile(tmp_path / "m.gguf"), dtype="float32")
    same(result, file)
    up, layer = file.layers[0].mlp.up_proj, file.layers[0]
    exact = up.weight if dense else up.scales
    for value in (exact, layer.mlp.down_proj.weight, layer.input_layernorm.weight):
        assert value.dtype == mx.float32
        assert not mx.array_equal(value.astype(mx.float16), value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "junk.bin").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"junk.bin is a file and neither a .gguf nor a .onnx one"):
        convert(str(tmp_path / "junk.bin"), tmp_path / "result")
