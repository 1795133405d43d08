"""Drafters in GGUF files, made of published checkpoints as llama.cpp's converter does it: the networks are those that
the checkpoints themselves give, to the bit."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_specdec.checkpoints import dflash, eagle3, gemma4_assistant
from mlx_specdec.checkpoints.drafter import kind_of
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.checkpoints.gguf import load_gguf
from mlx_specdec.checkpoints.gguf_drafter import GGUFFolder, checkpoint, read_drafter
from mlx_specdec.checkpoints.gguf_file import GGUFFile
from mlx_specdec.checkpoints.mtp import read_heads
from mlx_specdec.checkpoints.mtp_layout import trunk_classes
from mlx_specdec.errors import CheckpointError

from .gguf_sources import Source
from .test_gguf_model import llama3_factors
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


def test_eagle3(tmp_path: Path) -> None:
    kind, network = read_drafter(eagle(tmp_path / "m.gguf"))
    expected = eagle3.read(Folder(GOLDEN / "eagle3_safeailab_llama"))
    assert kind == "eagle3"
    same(network, expected)
    np.testing.assert_array_equal(network.ids, expected.ids)
    assert network.config.layer_ids == (1, 3, 4), "by their outputs"
    known = {field.name: getattr(expected.config, field.name) for field in fields(expected.config)}
    assert network.config == replace(expected.config, layer_ids=(1, 3, 4), layer=network.config.layer)
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps"):
        assert getattr(network.config.layer, name) == getattr(known["layer"], name)


def test_what_an_eagle3_file_may_say(tmp_path: Path) -> None:
    """The older key for the layers, norms before and after, Llama 3's frequencies, an embedding of its own."""
    factors = llama3_factors(
        {"original_max_position_embeddings": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
    )
    more = {
        "enc.output_norm.weight": np.full(192, 0.5, np.float32),
        "token_embd.weight": np.ones((128, 64), np.float32),
        "rope_freqs.weight": factors,
    }
    said = {"target_layers": None, "extract_layers": TAPS, "norm_before_residual": True, "norm_before_fc": True}
    _, network = read_drafter(eagle(tmp_path / "m.gguf", more=more, **said))
    config = network.config
    assert (config.layer_ids, config.norm_before_residual, config.norm_before_fc) == ((1, 3, 4), True, True)
    assert config.own_embedding
    assert network.input_norm.weight.tolist() == [0.5] * 192
    np.testing.assert_array_equal(np.array(config.layer.rope_scaling["long_factor"], np.float32), factors)


def test_quantised_drafters_stay_so(tmp_path: Path) -> None:
    types = {"blk.0.ffn_up.weight": Type.Q4_0, "fc.weight": Type.Q8_0, "output.weight": Type.Q5_1}
    _, network = read_drafter(eagle(tmp_path / "m.gguf", types))
    _, tensors = golden("eagle3_safeailab_llama")
    up = network.layers[0].mlp.up_proj
    assert (up.bits, network.fc.bits, network.lm_head.bits) == (4, 8, 5)
    dense = mx.dequantize(up.weight, up.scales, up.biases, 32, 4)
    raw = quantize(tensors["midlayer.mlp.up_proj.weight"], Type.Q4_0)
    np.testing.assert_array_equal(np.array(dense.astype(mx.float32)), dequantize(raw, Type.Q4_0))


def test_dflash(tmp_path: Path) -> None:
    kind, network = read_drafter(flash(tmp_path / "m.gguf"))
    expected = dflash.read(Folder(GOLDEN / "dflash_zlab_qwen3"))
    assert kind == "dflash"
    same(network, expected)
    assert network.config == replace(expected.config, num_target_layers=None)


def test_what_a_dflash_file_may_say(tmp_path: Path) -> None:
    """Sliding layers, a reduced head, sinks, and drafting from the anchor."""
    ids = np.arange(0, 160, 2)
    more = {
        "output.weight": np.ones((80, 64), np.float32),
        "d2t": ids,
        "blk.0.attn_sinks.weight": np.ones(4, np.float32),
        "blk.1.attn_sinks.weight": np.ones(4, np.float32),
    }
    said = {
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [True, False],
        "attention.causal": False,
        "sample_from_anchor": True,
        "logit_scale": 0.5,
        "final_logit_softcapping": 30.0,
    }
    _, network = read_drafter(flash(tmp_path / "m.gguf", more, **said))
    config = network.config
    assert [sight.window for sight in config.sights] == [16, None]
    assert (config.sample_from_anchor, config.output_multiplier, config.final_logit_softcapping) == (True, 0.5, 30.0)
    assert (bool(config.sinks), config.draft_vocab_size, network.highest_id) == (True, 80, 158)


@pytest.mark.parametrize(("tensor", "name"), [("markov_w1.weight", "DSpark"), ("selector_hidden.weight", "DFlash 2")])
def test_relatives_of_dflash_are_named(tmp_path: Path, tensor: str, name: str) -> None:
    path = flash(tmp_path / "m.gguf", {tensor: np.ones((4, 32), np.float32)})
    with pytest.raises(CheckpointError, match=f"is a {name} drafter"):
        read_drafter(path)


@pytest.mark.parametrize("arch", ["gemma4-assistant", "gemma4_assistant"])
def test_gemma4_assistant(tmp_path: Path, arch: str) -> None:
    path = assistant(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"gemma4-assistant", arch.encode()))
    kind, network = read_drafter(path)
    expected = gemma4_assistant.read(Folder(GOLDEN / "gemma4_assistant_plain/assistant"))
    assert kind == "gemma4_assistant"
    same(network, expected)
    assert network.config.backbone == expected.config.backbone
    for name in (
        "layer_types",
        "rope_parameters",
        "head_dim",
        "global_head_dim",
        "num_attention_heads",
        "rms_norm_eps",
    ):
        assert getattr(network.config.text, name) == getattr(expected.config.text, name), name


# MTP blocks


def of_heads(config: dict[str, Any]) -> dict[str, Any]:
    linear = {
        "ssm.time_step_rank": "linear_num_value_heads",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "full_attention_interval": "full_attention_interval",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
    found = {key: config[name] for key, name in linear.items() if name in config}
    rope = config.get("rope_parameters") or config
    return found | {
        "block_count": config["num_hidden_layers"] + 1,
        "nextn_predict_layers": 1,
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "rope.dimension_count": int(config["head_dim"] * 0.25),
        "rope.freq_base": float(rope["rope_theta"]),
    }


def with_heads(path: Path, name: str, arch: str, alone: bool = False) -> Path:
    """The target with its MTP block; `alone`: that block, the embedding and the head."""
    config, tensors = golden(name)
    text = config["text_config"]
    source = Source(arch, config["model_type"], text, keys(text) | of_heads(text))
    layers, heads, trunk = text["num_hidden_layers"], {}, {}
    beside = {"mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm",
              "mtp.norm": "shared_head_norm"}  # fmt: skip
    for each, values in tensors.items():
        if "visual" in each:
            continue
        if not each.startswith("mtp."):
            trunk[each] = values
            continue
        held = values + 1 if "norm" in each else values
        if (module := each.removesuffix(".weight")) in beside:
            heads[f"blk.{layers}.nextn.{beside[module]}.weight"] = held
        elif each.endswith(".experts.gate_up_proj"):
            gate, up = np.split(held, 2, axis=1)
            heads |= {f"blk.{layers}.ffn_gate_exps.weight": gate, f"blk.{layers}.ffn_up_exps.weight": up}
        else:
            theirs = each.replace("mtp.layers.0", "model.layers.0").replace("down_proj", "down_proj.weight").replace(
                ".weight.weight", ".weight")  # fmt: skip
            heads[source.tensor(theirs).replace("blk.0.", f"blk.{layers}.")] = held
    heads[f"blk.{layers}.nextn.embed_tokens.weight"] = np.ones((text["vocab_size"], text["hidden_size"]), np.float32)
    if alone:
        trunk = {each: values for each, values in trunk.items() if ".layers." not in each}
    replace(source, extra=heads).write(path, trunk)
    return path


@pytest.mark.parametrize(("name", "arch"), [("mtp_qwen3_5", "qwen35"), ("mtp_qwen3_5_moe", "qwen35moe")])
def test_mtp_blocks_of_a_target(tmp_path: Path, name: str, arch: str) -> None:
    path = with_heads(tmp_path / "m.gguf", name, arch)
    model, _ = load_model(GOLDEN / name, get_model_classes=trunk_classes)
    ours = load_gguf(GGUFFile(path))
    ids = mx.array([[3, 14, 15, 9, 2, 6]])
    np.testing.assert_allclose(np.array(ours(ids)), np.array(model(ids)), atol=1e-4, rtol=1e-4)

    folder = checkpoint(path)
    assert kind_of(folder) is None, "a target with heads is no drafter"
    network, expected = read_heads(folder, ours), read_heads(Folder(GOLDEN / name), model)
    ours_flat, theirs_flat = (dict(tree_flatten(x.parameters())) for x in (network, expected))  # type: ignore[union-attr]
    assert ours_flat.keys() == theirs_flat.keys()
    for each, value in theirs_flat.items():
        np.testing.assert_allclose(np.array(ours_flat[each]), np.array(value), atol=1e-6, err_msg=each)


def test_mtp_blocks_alone(tmp_path: Path) -> None:
    path = with_heads(tmp_path / "m.gguf", "mtp_qwen3_5", "qwen35", alone=True)
    kind, network = read_drafter(path)
    expected = read_heads(GGUFFolder(with_heads(tmp_path / "whole.gguf", "mtp_qwen3_5", "qwen35")),
                          load_gguf(GGUFFile(tmp_path / "whole.gguf")))  # fmt: skip
    assert kind == "mtp"
    same(network, expected)
    with pytest.raises(CheckpointError, match="holds the MTP heads of a model and not the model"):
        load_gguf(GGUFFile(path))


# what is refused


def test_a_drafter_is_no_target_and_a_target_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds a drafter \(eagle3\) and no model; give it as the drafter"):
        load_gguf(GGUFFile(eagle(tmp_path / "m.gguf")))
    source = Source("qwen3", "qwen3")
    source.write(tmp_path / "target.gguf", source.tensors())
    with pytest.raises(CheckpointError, match="holds a model to generate with and no drafter"):
        read_drafter(tmp_path / "target.gguf")
    assert type(checkpoint(GOLDEN / "target_llama")) is Folder


@pytest.mark.parametrize(
    ("make", "said", "words"),
    [
        (eagle, {"target_layers": None}, "eagle3.target_layers is None, not a list of layers"),
        (eagle, {"target_layers": 3}, "eagle3.target_layers is 3"),
        (eagle, {"block_count": 1 << 30}, "claims 1073741824 layers"),
        (eagle, {"vocab_size": None}, "eagle3.vocab_size is None"),
        (eagle, {"attention.scale": 2.0}, "attention.scale to 2.0"),
        (eagle, {"more": {"blk.0.attn_mystery.weight": np.ones(4, np.float32)}}, "has no place in a drafter"),
        (eagle, {"more": {"d2t": np.full(97, -5)}}, "d2t names tokens from -5"),
        (eagle, {"more": {"d2t": np.ones((97, 1), np.float32)}}, "'d2t' is of type F32, not of integers"),
        (eagle, {"feed_forward_length": 32}, "shape"),
        (flash, {"rope.dimension_count": 8}, "rope.dimension_count to 8"),
        (flash, {"block_size": "eight"}, "block_size is 'eight'"),
        (flash, {"tokenizer.ggml.mask_token_id": None}, "no mask_token_id"),
        (flash, {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]}, "not 2 values"),
        (assistant, {"embedding_length_out": None}, "embedding_length_out is None"),
        (assistant, {"block_count": 1 << 30}, "claims 1073741824 layers"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, make: Any, said: Any, words: str) -> None:
    path = make(tmp_path / "m.gguf", **said)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_drafter(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
