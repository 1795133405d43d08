"""GGUF files of drafters, made of published checkpoints as llama.cpp's converter does it."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.quants import quantize
from mlx.utils import tree_flatten

from .gguf_sources import Source
from .tiny_gguf import add_metadata, permute

GOLDEN = Path(__file__).parents[1] / "golden"
LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd"}
TAPS = [2, 4, 5]  # inputs of the eight layers' usual three


def golden(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    return config, {k: np.array(v) for k, v in mx.load(str(GOLDEN / name / "model.safetensors")).items()}  # type: ignore[union-attr]


def keys(config: dict[str, Any]) -> dict[str, Any]:
    """What the converter says of any model."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
        "vocab_size": config["vocab_size"],
    }


def write(
    path: Path,
    arch: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    types: dict[str, Type] | None = None,
) -> Path:
    writer = GGUFWriter(path, arch)
    add_metadata(writer, {k if k.startswith("tokenizer.") else f"{arch}.{k}": v for k, v in metadata.items()})
    for name, values in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            writer.add_tensor(name, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def renamed(tensors: dict[str, np.ndarray], hidden_norm: str = "") -> dict[str, np.ndarray]:
    found = {}
    for name, values in tensors.items():
        module, _, kind = name.replace("midlayer.", "layers.0.").rpartition(".")
        if module.startswith("layers."):
            _, number, part = module.split(".", 2)
            found[f"blk.{number}.{LAYER[part]}.{kind}"] = values
        else:
            found[f"{TOP.get(module, hidden_norm)}.{kind}"] = values
    return found


def eagle(path: Path, types: dict[str, Type] | None = None, more: Any = None, **said: Any) -> Path:
    config, tensors = golden("eagle3_safeailab_llama")
    del tensors["t2d"]
    offsets = tensors.pop("d2t")
    held = renamed(tensors)
    for name, heads in (("blk.0.attn_q.weight", 4), ("blk.0.attn_k.weight", 2)):
        held[name] = permute(held[name], heads)
    held["d2t"] = offsets.astype(np.int64) + np.arange(len(offsets))
    metadata = keys(config) | {"target_layers": TAPS, "target_hidden_size": 64, "norm_before_residual": False} | said
    return write(path, "eagle3", metadata, held | (more or {}), types)


def flash(path: Path, more: Any = None, **said: Any) -> Path:
    config, tensors = golden("dflash_zlab_qwen3")
    metadata = keys(config) | {
        "target_layers": [2, 4, 6],
        "target_hidden_size": 64,
        "block_size": 8,
        "tokenizer.ggml.mask_token_id": 157,
    }
    return write(path, "dflash", metadata | said, renamed(tensors, "enc.output_norm") | (more or {}))


def assistant(path: Path, **said: Any) -> Path:
    config, tensors = golden("gemma4_assistant_plain/assistant")
    text = config["text_config"]
    source = Source("gemma4", "gemma4_text")
    own = {f"{part}_projection.weight": f"nextn.{part}_projection.weight" for part in ("pre", "post")}
    metadata = keys(text | {"head_dim": 32}) | {
        "nextn_predict_layers": 4,
        "embedding_length_out": config["backbone_hidden_size"],
        "attention.head_count_kv": [2, 2, 2, 1],
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "attention.shared_kv_layers": 4,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, True, True, False],
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": 32,
        "rope.dimension_count_swa": 16,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }
    held = {own.get(name) or source.tensor(name): values for name, values in tensors.items()}
    turns = np.array([1.0] * 4 + [1e30] * 12, np.float32)
    return write(path, "gemma4-assistant", metadata | said, held | {"rope_freqs.weight": turns})


def same(ours: Any, theirs: Any) -> None:
    ours, theirs = dict(tree_flatten(ours.parameters())), dict(tree_flatten(theirs.parameters()))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(np.array(ours[name]), np.array(value), name)
