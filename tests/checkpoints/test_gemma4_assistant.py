"""Gemma 4 assistants in the forms that their files take, and what is said about wrong ones."""

import mlx_specdec  # noqa: F401  # isort: skip

import copy
import json
from collections.abc import Callable
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
from mlx_specdec.features import KeysValues
from mlx_specdec.networks.gemma4_assistant import Gemma4Assistant
from tests.checkpoints.torch_files import save

GOLDEN = Path(__file__).parents[1] / "golden" / "gemma4_assistant_ordered" / "assistant"
Config, Tensors = dict[str, Any], dict[str, mx.array]


def given() -> tuple[Config, Tensors]:
    return json.loads((GOLDEN / "config.json").read_text()), dict(mx.load(str(GOLDEN / "model.safetensors")))


def read(path: Path, config: Config, tensors: Tensors, pickled: bool = False) -> Gemma4Assistant:
    (path / "config.json").write_text(json.dumps(config))
    if pickled:
        save(path / "pytorch_model.bin", {name: np.array(x) for name, x in tensors.items()})
    else:
        mx.save_safetensors(str(path / "model.safetensors"), tensors)
    folder = Folder(path)
    assert kind_of(folder) == "gemma4_assistant"
    network = read_network(folder, "gemma4_assistant")
    assert isinstance(network, Gemma4Assistant)
    return network


def logits(network: Gemma4Assistant) -> mx.array:
    """Of one row, with keys of noise."""

    def noise(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(sum(shape)))

    held = {
        kind: KeysValues(noise(1, 9, dim), noise(1, 9, dim))
        for kind, dim in (("sliding_attention", 16), ("full_attention", 32))
    }
    output, _ = network(noise(1, 64), noise(1, 64) * 2, held, 9)
    return network.logits(output)


def expected() -> mx.array:
    return logits(read_golden())


def read_golden() -> Gemma4Assistant:
    network = read_network(Folder(GOLDEN), "gemma4_assistant")
    assert isinstance(network, Gemma4Assistant)
    return network


def older_widths(config: Config, tensors: Tensors) -> None:
    """As published: one width for all full layers."""
    del config["text_config"]["per_layer_config"]
    config["text_config"]["global_head_dim"] = 32


def without_layer_types(config: Config, tensors: Tensors) -> None:
    """Whose default has a full layer at the end."""
    del config["text_config"]["layer_types"]


def with_a_copy_of_the_head(config: Config, tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


def with_another_prefix(config: Config, tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def as_the_unified_model(config: Config, tensors: Tensors) -> None:
    config |= {"model_type": "gemma4_unified_assistant", "architectures": ["Gemma4UnifiedAssistantForCausalLM"]}


def with_a_wide_order(config: Config, tensors: Tensors) -> None:
    name = "masked_embedding.token_ordering"
    tensors[name] = tensors[name].astype(mx.int64)


FORMS = [older_widths, without_layer_types, with_a_copy_of_the_head, with_another_prefix, as_the_unified_model,
         with_a_wide_order]  # fmt: skip


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: Callable[[Config, Tensors], None], pickled: bool, tmp_path: Path) -> None:
    config, tensors = given()
    form(config, tensors)
    assert mx.array_equal(logits(read(tmp_path, config, tensors, pickled)), expected())


def test_an_order_that_is_not_used(tmp_path: Path) -> None:
    config, tensors = given()
    plain = logits(read(tmp_path, config | {"use_ordered_embeddings": False}, tensors))
    looked_at = mx.isfinite(expected())
    assert mx.isfinite(plain).all()
    assert mx.allclose(mx.where(looked_at, plain, 0), mx.where(looked_at, expected(), 0), atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised(bits: int, tmp_path: Path) -> None:
    config, network = given()[0], read_golden()
    nn.quantize(network, group_size=32, bits=bits)
    tensors = dict(tree_flatten(network.parameters()))
    again = read(tmp_path, config | {"quantization": {"group_size": 32, "bits": bits}}, tensors)
    assert isinstance(again.embed_tokens, nn.QuantizedEmbedding)
    assert mx.array_equal(logits(again), logits(network))


WRONG: dict[str, tuple[Callable[[Config, Tensors], Any], str]] = {
    "no text_config": (lambda c, _: c.pop("text_config"), "has no text_config or no backbone_hidden_size"),
    "no backbone": (lambda c, _: c.pop("backbone_hidden_size"), "has no text_config or no backbone_hidden_size"),
    "another backbone": (
        lambda c, _: c.update(backbone_hidden_size=48),
        r"pre_projection.weight has the shape \[32, 128\] and its config asks for \[32, 96\]",
    ),
    "inputs per layer": (
        lambda c, _: c["text_config"].update(hidden_size_per_layer_input=8),
        "says hidden_size_per_layer_input 8, and an assistant has 0",
    ),
    "experts": (lambda c, _: c["text_config"].update(enable_moe_block=True), "says enable_moe_block True"),
    "layer types": (
        lambda c, _: c["text_config"].update(layer_types=["full_attention"]),
        "names 1 layer_types for 4 layers",
    ),
    "clusters": (lambda c, _: c.update(num_centroids=13), "shares 96 tokens among 13 clusters and looks at 3 of these"),
    "chosen": (
        lambda c, _: c.update(centroid_intermediate_top_k=13),
        "shares 96 tokens among 12 clusters and looks at 13",
    ),
    "no chosen": (lambda c, _: c.update(centroid_intermediate_top_k=0), "and looks at 0 of these"),
    "keys of its own": (
        lambda _, t: t.update({"model.layers.0.self_attn.k_proj.weight": mx.ones((16, 32))}),
        "has the unknown tensor layers.0.self_attn.k_proj.weight",
    ),
    "no scalar": (lambda _, t: t.pop("model.layers.2.layer_scalar"), "lacks layers.2.layer_scalar"),
    "no order": (lambda _, t: t.pop("masked_embedding.token_ordering"), "lacks masked_embedding.token_ordering"),
    "an order with a token twice": (
        lambda _, t: t.update({"masked_embedding.token_ordering": mx.zeros(96, dtype=mx.int32)}),
        "token_ordering is not an ordering of the 96 tokens",
    ),
    "an order that is too short": (
        lambda _, t: t.update({"masked_embedding.token_ordering": mx.arange(95)}),
        "token_ordering is not an ordering of the 96 tokens",
    ),
    "an untied head": (
        lambda c, t: (c.update(tie_word_embeddings=False), with_a_copy_of_the_head(c, t)),
        "has the unknown tensor lm_head.weight",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(what: str, tmp_path: Path) -> None:
    config, tensors = copy.deepcopy(given()[0]), given()[1]
    change, said = WRONG[what]
    change(config, tensors)
    with pytest.raises(CheckpointError, match=said) as error:
        read(tmp_path, config, tensors)
    assert str(tmp_path) in str(error.value)
