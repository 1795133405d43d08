"""Medusa heads in both published layouts give the same network, and what is wrong with a file is said."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.checkpoints.drafter import kind_of, read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.errors import CheckpointError
from mlx_specdec.networks.medusa import Medusa, MedusaConfig
from tests.checkpoints.torch_files import save

HIDDEN, VOCAB, HEADS = 32, 20, 3
HIDDEN_STATE = mx.random.normal((1, HIDDEN), key=mx.random.key(9))


def arrays(layers: int = 1, heads: int = HEADS) -> dict[str, np.ndarray]:
    """In the authors' layout."""
    draw = np.random.default_rng(1)
    made = {}
    for head in range(heads):
        for layer in range(layers):
            made[f"{head}.{layer}.linear.weight"] = draw.normal(0, 0.2, (HIDDEN, HIDDEN))
            made[f"{head}.{layer}.linear.bias"] = draw.normal(0, 0.2, HIDDEN)
        made[f"{head}.{layers}.weight"] = draw.normal(0, 0.2, (VOCAB, HIDDEN))
    return {name: x.astype(np.float32) for name, x in made.items()}


def as_in_vllm(made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    renamed = {}
    for name, x in made.items():
        head, layer, *rest = name.split(".")
        renamed[f"blocks.{head}.layers.{layer}.{rest[1]}" if "linear" in name else f"lm_heads.{head}.weight"] = x
    return renamed


def expected(made: dict[str, np.ndarray], layers: int = 1) -> list[np.ndarray]:
    """The paper's formula, in float64."""
    logits = []
    for head in range(HEADS):
        x = np.array(HIDDEN_STATE, dtype=np.float64)
        for layer in range(layers):
            inner = x @ made[f"{head}.{layer}.linear.weight"].T + made[f"{head}.{layer}.linear.bias"]
            x = x + inner / (1 + np.exp(-inner))
        logits.append(x @ made[f"{head}.{layers}.weight"].T)
    return logits


AUTHORS = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
VLLM = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "num_heads": HEADS, "num_hidden_layers": 1, "medusa_fc_bias": True}  # fmt: skip


def read(path: Path, made: dict[str, Any], config: dict[str, Any], name: str = "model.safetensors") -> Medusa:
    (path / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        mx.save_safetensors(str(path / name), {name: mx.array(x) for name, x in made.items()})
    else:
        save(path / name, made)
    folder = Folder(path)
    assert kind_of(folder) == "medusa"
    network = read_network(folder, "medusa")
    assert isinstance(network, Medusa)
    return network


def right(network: Medusa, logits: list[np.ndarray]) -> bool:
    assert network.config.heads == len(logits)
    return all(np.allclose(network(i, HIDDEN_STATE), one, atol=1e-5) for i, one in enumerate(logits))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "pytorch_model.bin"])
def test_the_authors_layout(name: str, layers: int, tmp_path: Path) -> None:
    """Whose configs speak of fewer heads than there are."""
    network = read(tmp_path, arrays(layers), AUTHORS | {"medusa_num_layers": layers}, name)
    assert right(network, expected(arrays(layers), layers))
    assert network.config.target_name == "lmsys/vicuna-7b-v1.3"


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("layers", [1, 2])
def test_vllms_layout(layers: int, prefix: str, tmp_path: Path) -> None:
    made = {prefix + name: x for name, x in as_in_vllm(arrays(layers)).items()}
    network = read(tmp_path, made, VLLM | {"num_hidden_layers": layers})
    assert right(network, expected(arrays(layers), layers))


def test_without_biases(tmp_path: Path) -> None:
    made = {name: x for name, x in as_in_vllm(arrays()).items() if not name.endswith("bias")}
    network = read(tmp_path, made, VLLM | {"medusa_fc_bias": False})
    assert right(network, expected({n: x * (not n.endswith("bias")) for n, x in arrays().items()}))


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_one_projection_for_all(name: str, tmp_path: Path) -> None:
    made = as_in_vllm(arrays())
    first = made["lm_heads.0.weight"]
    made = {n: x for n, x in made.items() if not n.startswith("lm_heads.") or name == "lm_heads.0.weight"}
    network = read(tmp_path, made | {name: first}, VLLM | {"original_lm_head": True, "logit_scale": 0.5})
    same = {n: first if n.endswith(".1.weight") else x for n, x in arrays().items()}
    assert right(network, [0.5 * one for one in expected(same)])


@pytest.mark.parametrize("whole_heads", [True, False])
def test_a_reduced_vocabulary(whole_heads: bool, tmp_path: Path) -> None:
    kept = np.array([7, 0, 19, 4, 11])
    made = as_in_vllm(arrays()) | {"token_map": kept}
    if not whole_heads:
        made |= {name: x[kept] for name, x in made.items() if name.startswith("lm_heads.")}
    network = read(tmp_path, made, VLLM | {"truncated_vocab_size": 5})
    assert network.ids is not None
    assert network.ids.tolist() == kept.tolist()
    assert right(network, [one[:, kept] for one in expected(arrays())])


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_heads(bits: int, tmp_path: Path) -> None:
    network = read(tmp_path, arrays(), AUTHORS)
    nn.quantize(network, group_size=32, bits=bits)
    (tmp_path / "model.safetensors").unlink()
    made = dict(tree_flatten(network.parameters()))
    again = read(tmp_path, made, AUTHORS | {"quantization": {"group_size": 32, "bits": bits}})
    assert all(mx.array_equal(again(i, HIDDEN_STATE), network(i, HIDDEN_STATE)) for i in range(HEADS))


def refused(tmp_path: Path, made: dict[str, Any], config: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as error:
        read(tmp_path, made, config)
    assert str(tmp_path) in str(error.value)


def test_fewer_heads_than_declared(tmp_path: Path) -> None:
    refused(tmp_path, arrays(), AUTHORS | {"medusa_num_heads": 5}, "holds 3 Medusa heads and its config names 5")


def test_no_heads(tmp_path: Path) -> None:
    refused(tmp_path, {"other": np.ones(3, dtype=np.float32)}, AUTHORS, "holds 0 Medusa heads and its config names 2")


def test_a_missing_projection(tmp_path: Path) -> None:
    made = {name: x for name, x in arrays().items() if name != "2.1.weight"}
    refused(tmp_path, made, AUTHORS, "blocks of 3 Medusa heads and not as many projections")


def test_a_missing_block(tmp_path: Path) -> None:
    made = {name: x for name, x in arrays().items() if name != "1.0.linear.weight"}
    refused(tmp_path, made, AUTHORS, "lacks blocks.1.layers.0.weight")


def test_an_unknown_tensor(tmp_path: Path) -> None:
    made = arrays() | {"layers.0.self_attn.q_proj.weight": np.ones((3, 3), dtype=np.float32)}
    refused(tmp_path, made, AUTHORS, "has the unknown tensor layers.0.self_attn.q_proj.weight")


def test_another_hidden_size_than_declared(tmp_path: Path) -> None:
    refused(tmp_path, as_in_vllm(arrays()), VLLM | {"hidden_size": 48}, r"and its config asks for \[\d+, 48\]")


def test_a_reduced_vocabulary_without_a_map(tmp_path: Path) -> None:
    said = "drafts 5 of 20 tokens and has no token_map"
    refused(tmp_path, as_in_vllm(arrays()), VLLM | {"truncated_vocab_size": 5}, said)


@pytest.mark.parametrize("ids", [[1, 1, 2], [0, 20, 3], [-1, 2, 3]])
def test_a_map_that_is_none(ids: list[int], tmp_path: Path) -> None:
    made = as_in_vllm(arrays()) | {"token_map": np.array(ids)}
    refused(tmp_path, made, VLLM | {"truncated_vocab_size": 3}, "token_map names tokens twice or beyond")


def test_heads_that_were_never_trained(tmp_path: Path) -> None:
    made = arrays()
    refused(tmp_path, made | {"1.0.linear.weight": 0 * made["1.0.linear.weight"]}, AUTHORS, "never trained")


def test_an_activation_is_in_the_weights_precision() -> None:
    network = Medusa(MedusaConfig(HIDDEN, VOCAB, VOCAB, 1, 1))
    network.set_dtype(mx.bfloat16)
    assert network.blocks[0](HIDDEN_STATE.astype(network.dtype)).dtype == mx.bfloat16
    assert network(0, HIDDEN_STATE).dtype == mx.float32
