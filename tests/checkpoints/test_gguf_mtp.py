"""MTP blocks in a target's GGUF file, or in one of their own: the heads are those of the published checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_specdec.checkpoints.drafter import kind_of
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.checkpoints.gguf import load_gguf
from mlx_specdec.checkpoints.gguf_drafter import GGUFFolder, checkpoint, read_drafter
from mlx_specdec.checkpoints.gguf_file import GGUFFile
from mlx_specdec.checkpoints.mtp import read_heads
from mlx_specdec.checkpoints.mtp_layout import trunk_classes
from mlx_specdec.errors import CheckpointError

from .gguf_drafters import GOLDEN, golden, keys, same
from .gguf_sources import Source


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
