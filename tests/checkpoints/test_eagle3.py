"""EAGLE-3 drafters in all published layouts, and what is said of those that cannot be used.

That the numbers are right is tested with the drafter; here every form must give the very network that the golden one
gives.
"""

import mlx_specdec  # noqa: F401  # isort: skip

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_specdec import CheckpointError
from mlx_specdec.checkpoints.drafter import kind_of, read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.networks.eagle3 import Eagle3
from tests.checkpoints.torch_files import save

GOLDEN = Path(__file__).parents[1] / "golden"
FLAT, NESTED = "eagle3_safeailab_llama", "eagle3_speculators_variant"
Tensors = dict[str, mx.array]
Config = dict[str, Any]


@cache
def golden(name: str) -> tuple[Config, Tensors]:
    return Folder(GOLDEN / name).config, Folder(GOLDEN / name).tensors()


def write(folder: Path, config: Config, tensors: Tensors) -> Folder:
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return Folder(folder)


def changed(
    folder: Path, name: str, config: Config | None = None, change: Callable[[Tensors], Tensors] = lambda t: t
) -> Folder:
    """A golden checkpoint with other entries in its config (None: taken out) and other tensors."""
    said, tensors = golden(name)
    said = {k: v for k, v in {**said, **(config or {})}.items() if k not in (config or {}) or v is not None}
    return write(folder, said, change(dict(tensors)))


def read(folder: Folder) -> Eagle3:
    network = read_network(folder, "eagle3")
    assert isinstance(network, Eagle3)
    return network


def layer(**fields: Any) -> Config:
    """speculators' config with other sizes of its layer (None: taken out)."""
    sizes = {**golden(NESTED)[0]["transformer_layer_config"], **fields}
    return {"transformer_layer_config": {k: v for k, v in sizes.items() if v is not None or k not in fields}}


def renamed(theirs: str, ours: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {re.sub(theirs, ours, name): tensor for name, tensor in tensors.items()}


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def added(**more: mx.array) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, **{name.replace("__", "."): tensor for name, tensor in more.items()}}


def same(ours: Eagle3, name: str) -> bool:
    theirs = read(Folder(GOLDEN / name))
    a, b = dict(tree_flatten(ours.parameters())), dict(tree_flatten(theirs.parameters()))
    alike = a.keys() == b.keys() and all(mx.array_equal(a[k], b[k]).item() for k in a)
    return alike and np.array_equal(ours.ids, theirs.ids) and ours.config == theirs.config


def test_both_layouts_are_known_by_their_config(tmp_path: Path) -> None:
    assert kind_of(Folder(GOLDEN / FLAT)) == kind_of(Folder(GOLDEN / NESTED)) == "eagle3"
    for architecture in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator"):
        folder = changed(tmp_path, FLAT, {"architectures": [architecture], "draft_vocab_size": None})
        assert kind_of(folder) == "eagle3"
    assert kind_of(Folder(GOLDEN / "target_llama")) is None


FORMS: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "speculators' names in a flat config": (FLAT, renamed("^midlayer", "layers.0")),
    "SafeAILab's names in a nested one": (NESTED, renamed(r"^layers\.0", "midlayer")),
    "inside a model": (FLAT, renamed("^(?!lm_head|d2t|t2d)", "model.")),
    "older names of the norms": (
        NESTED,
        lambda t: renamed(r"fc_norm\.0", "aux_norm_low")(
            renamed(r"fc_norm\.1", "aux_norm_mid")(renamed(r"fc_norm\.2", "aux_norm_high")(t))
        ),
    ),
    "without the marks": (FLAT, without("t2d")),
    "ids for offsets": (FLAT, lambda t: {**t, "d2t": t["d2t"] + mx.arange(97)}),
    "ids for offsets, without the marks": (FLAT, lambda t: without("t2d")({**t, "d2t": t["d2t"] + mx.arange(97)})),
    "offsets of another type": (FLAT, lambda t: {**t, "d2t": t["d2t"].astype(mx.int32)}),
    "copies of the target's tensors": (
        NESTED,
        added(verifier_lm_head__weight=mx.ones((97, 64)), verifier_norm__weight=mx.ones((64,))),
    ),
    "what follows from the config": (FLAT, added(midlayer__self_attn__rotary_emb__inv_freq=mx.ones((8,)))),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_network(form: str, tmp_path: Path) -> None:
    name, change = FORMS[form]
    assert same(read(changed(tmp_path, name, None, change)), name)


def test_a_pickled_file(tmp_path: Path) -> None:
    config, tensors = golden(FLAT)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save(tmp_path / "pytorch_model.bin", {name: np.array(tensor) for name, tensor in tensors.items()})
    assert same(read(Folder(tmp_path)), FLAT)


def test_a_flat_config_says_what_a_nested_one_does(tmp_path: Path) -> None:
    said = golden(NESTED)[0]
    top = {k: said[k] for k in ("draft_vocab_size", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids")}
    folder = write(tmp_path, {**said["transformer_layer_config"], **top}, golden(NESTED)[1])
    ours, theirs = read(folder).config, read(Folder(GOLDEN / NESTED)).config
    assert ours.draft_tokens is ours.target_name is None
    assert (theirs.draft_tokens, theirs.target_name) == (4, "target_llama")
    assert {**vars(ours), "draft_tokens": 4, "target_name": "target_llama"} == vars(theirs)


KEY = "eagle_aux_hidden_state_layer_ids"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
SAID: tuple[tuple[str, Config, dict[str, Any]], ...] = (
    (FLAT, {}, {"layer_ids": None, "taps": 3, "norm_before_residual": False, "own_embedding": False, "own_head": True}),
    (FLAT, {"norm_before_residual": True}, {"norm_before_residual": True}),
    (NESTED, {"norm_before_residual": None}, {"norm_before_residual": False}),
    (NESTED, {KEY: [1, 3, 8]}, {"layer_ids": (0, 2, 7)}),
    (NESTED, {KEY: None}, {"layer_ids": None}),
    (FLAT, {KEY: [2, 4, 5]}, {"layer_ids": (1, 3, 4)}),
    (FLAT, {"eagle_config": {KEY: [1, 11, 21]}}, {"layer_ids": (1, 11, 21)}),
    (FLAT, {"eagle_config": {KEY: [0, 1, 2], "use_aux_hidden_state": True}}, {"layer_ids": (0, 1, 2)}),
    (FLAT, {"eagle_config": {KEY: []}}, {"layer_ids": None}),
    (FLAT, {"eagle_config": None, "target_hidden_size": 64}, {"target_hidden": 64}),
)
SIZES: tuple[tuple[str, Config, dict[str, Any]], ...] = (
    (FLAT, {}, {"rope_theta": 10000.0, "rope_scaling": None, "head_dim": 16}),
    (FLAT, {"rope_theta": 5e5}, {"rope_theta": 5e5}),
    (FLAT, {"rms_norm_eps": None}, {"rms_norm_eps": 1e-6}),
    (FLAT, {"head_dim": 16}, {"head_dim": 16}),
    (NESTED, layer(rope_theta=None, rope_scaling=None, rope_parameters={"rope_theta": 7e5, "rope_type": "default"}),
     {"rope_theta": 7e5, "rope_scaling": None}),
    (NESTED, layer(rope_scaling={"rope_type": "default", "mrope_section": [2, 3, 3]}), {"rope_scaling": None}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "config", "fields"), SAID, ids=str)
def test_what_the_config_says(name: str, config: Config, fields: dict[str, Any], tmp_path: Path) -> None:
    network = read(changed(tmp_path, name, config))
    assert {field: getattr(network.config, field) for field in fields} == fields


@pytest.mark.parametrize(("name", "config", "fields"), SIZES, ids=str)
def test_what_the_layer_is_like(name: str, config: Config, fields: dict[str, Any], tmp_path: Path) -> None:
    network = read(changed(tmp_path, name, config))
    assert {field: getattr(network.config.layer, field) for field in fields} == fields


@pytest.mark.parametrize("scaling", [
    {"type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0},
    LLAMA3,
], ids=str)  # fmt: skip
def test_a_scaled_rotation_is_built_alike_from_old_and_new_keys(scaling: Config, tmp_path: Path) -> None:
    """Also when the length that it was made for is to be taken from max_position_embeddings (here 512)."""
    old = layer(rope_theta=5e5, rope_scaling=scaling)
    new = layer(rope_theta=None, rope_scaling=None, rope_parameters={**scaling, "rope_theta": 5e5})
    kinds = {kind: {**scaling, "rope_theta": 5e5} for kind in ("full_attention", "sliding_attention")}
    nested = layer(rope_theta=None, rope_scaling=None, rope_parameters=kinds)
    full = layer(rope_theta=5e5, rope_scaling={"original_max_position_embeddings": 512, **scaling})
    x = mx.random.normal((1, 1, 40, 16), key=mx.random.key(0))
    outputs = []
    for config in (old, new, nested, full):
        network = read(changed(tmp_path, NESTED, config))
        outputs.append(network.layers[0].self_attn.rope(x, offset=100))
    plain = nn.RoPE(16, base=5e5)(x, offset=100)
    assert all(mx.array_equal(outputs[0], y).item() for y in outputs)
    assert not mx.allclose(outputs[0], plain).item()


def test_ends_are_own_or_shared_or_tied(tmp_path: Path) -> None:
    whole = {"draft_vocab_size": None, "tie_word_embeddings": False}
    headless = without("lm_head.weight", "d2t", "t2d")
    ends = [
        read(changed(tmp_path, NESTED, config, change)).config
        for config, change in (
            ({}, lambda t: t),
            (whole, headless),
            ({**whole, "tie_word_embeddings": True}, headless),
            (whole, lambda t: headless(without("embed_tokens.weight")(t))),
            (whole, lambda t: {**headless(t), "lm_head.weight": mx.ones((128, 64))}),
        )
    ]
    assert [(c.own_embedding, c.own_head, c.tied) for c in ends] == [
        (True, True, False),
        (True, False, False),
        (True, False, True),
        (False, False, False),
        (True, True, False),
    ]
    assert [c.draft_vocab for c in ends] == [97, 128, 128, 128, 128]


def test_parts_are_told_from_their_tensors(tmp_path: Path) -> None:
    """Biases and norms that a config may leave unsaid."""
    biases = {f"midlayer__self_attn__{p}_proj__bias": mx.ones((n,)) for p, n in (("q", 64), ("k", 32), ("v", 32))}
    norms = {f"midlayer__self_attn__{p}_norm__weight": mx.ones((16,)) for p in "qk"}
    network = read(changed(tmp_path, FLAT, None, added(**biases, **norms, input_norm__weight=mx.ones((192,)))))
    assert network.config.qkv_bias
    assert not network.config.o_bias
    assert network.config.qk_norm
    assert network.config.norm_before_fc


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_checkpoint(bits: int, tmp_path: Path) -> None:
    network = read(Folder(GOLDEN / NESTED))
    nn.quantize(network, group_size=32, bits=bits, class_predicate=lambda name, m: hasattr(m, "to_quantized"))
    tensors = {**dict(tree_flatten(network.parameters())), **{k: golden(NESTED)[1][k] for k in ("d2t", "t2d")}}
    folder = write(tmp_path, {**golden(NESTED)[0], "quantization": {"group_size": 32, "bits": bits}}, tensors)
    again = read(folder)
    assert isinstance(again.layers[0].self_attn.q_proj, nn.QuantizedLinear)
    a, b = dict(tree_flatten(network.parameters())), dict(tree_flatten(again.parameters()))
    assert all(mx.array_equal(a[k], b[k]).item() for k in a)


REFUSED: dict[str, tuple[str, Config, Callable[[Tensors], Tensors], str]] = {
    "one hidden state": (FLAT, {"eagle_config": {"use_aux_hidden_state": False}}, lambda t: t,
                         "use_aux_hidden_state is false"),
    "the embedding as a feature": (NESTED, {KEY: [0, 3, 6]}, lambda t: t, r"\[0, 3, 6\], and what enters"),
    "both norms": (NESTED, {"norm_before_fc": True}, lambda t: t, "norm_before_fc and fc_norm are both set"),
    "another activation": (FLAT, {"hidden_act": "gelu"}, lambda t: t, "hidden_act is 'gelu' and only silu"),
    "another rotation": (FLAT, {"rope_scaling": {"type": "spiral"}}, lambda t: t, "spiral.* cannot be used"),
    "half a rotation": (FLAT, {"rope_scaling": {"type": "linear"}}, lambda t: t, "cannot be used.*factor"),
    "no width": (FLAT, {"hidden_size": None}, lambda t: t, "hidden_size is None and must be a whole number"),
    "a width in words": (FLAT, {"hidden_size": "64"}, lambda t: t, "hidden_size is '64'"),
    "no layer": (FLAT, {"num_hidden_layers": 0}, lambda t: t, "num_hidden_layers is 0"),
    "heads that do not share evenly": (FLAT, {"num_key_value_heads": 3}, lambda t: t,
                                       "num_attention_heads is 4, which num_key_value_heads 3 does not divide"),
    "ids in words": (NESTED, {KEY: "1, 3, 6"}, lambda t: t, "not the config of an EAGLE-3 drafter"),
    "a list for an object": (NESTED, {"speculators_config": [1]}, lambda t: t, "not the config of an EAGLE-3 drafter"),
    "a base in words": (FLAT, {"rope_theta": "big"}, lambda t: t, "not the config of an EAGLE-3 drafter"),
    "another width": (FLAT, {"intermediate_size": 98}, lambda t: t, r"\[96, 64\] and its config asks for \[98, 64\]"),
    "a wider target without an embedding": (FLAT, {"target_hidden_size": 96}, lambda t: t,
                                            "no embed_tokens, and the target's is 96 wide and the drafter 64"),
    "more layers than tensors": (FLAT, {"num_hidden_layers": 2}, lambda t: t, "lacks layers.1"),
    "a tensor that nobody knows": (FLAT, {}, added(mask_hidden=mx.ones((1, 192))), "unknown tensor mask_hidden"),
    "a tensor short": (FLAT, {}, without("norm.weight"), "lacks norm.weight"),
    "no map of the vocabulary": (FLAT, {}, without("d2t", "t2d"), "97 of 128 tokens and has no d2t"),
    "a map of another length": (FLAT, {"draft_vocab_size": 96}, lambda t: t,
                                r"d2t has the shape \[97\] and the head 96"),
    "a map that the marks deny": (FLAT, {}, lambda t: {**t, "t2d": ~t["t2d"]}, "d2t and t2d do not name the same"),
    "a map beyond the vocabulary": (FLAT, {}, lambda t: without("t2d")({**t, "d2t": t["d2t"] + 90}),
                                    "names tokens twice or beyond"),
    "weights that were never trained": (FLAT, {}, lambda t: {**t, "fc.weight": mx.zeros((64, 192))}, "all zero"),
    "weights that are no numbers": (FLAT, {}, lambda t: {**t, "fc.weight": mx.full((64, 192), mx.nan)}, "NaN"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_is_wrong(case: str, tmp_path: Path) -> None:
    name, config, change, said = REFUSED[case]
    with pytest.raises(CheckpointError, match=said) as error:
        read(changed(tmp_path, name, config, change))
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)
