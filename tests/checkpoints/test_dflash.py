"""DFlash configs and tensors as they are published, and what is said of those that cannot be used."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from mlx_specdec.checkpoints.drafter import kind_of, read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.errors import CheckpointError
from mlx_specdec.networks.dflash import DFlash, Sight

SLIDING, FULL = "sliding_attention", "full_attention"
HIDDEN, VOCAB, HEADS, SIZE, INNER = 32, 70, 4, 16, 64
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": SIZE,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
ZLAB: dict[str, Any] = {
    **QWEN3,
    "architectures": ["DFlashDraftModel"],
    "num_target_layers": 8,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3, 6]},
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [2, 4, 8],
    "block_size": 8,
    "mask_token_id": 5,
    "draft_vocab_size": VOCAB,
    "sliding_window_non_causal": False,
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "some/target"}},
    "transformer_layer_config": QWEN3,
}


def shapes(bias: bool = False) -> dict[str, tuple[int, ...]]:
    """Of a checkpoint with two layers and three taps."""
    found: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 3 * HIDDEN)}
    found |= {f"{name}.weight": (HIDDEN,) for name in ("hidden_norm", "norm")}
    for i in range(2):
        layer, rows = f"layers.{i}.", {"q": HEADS * SIZE, "k": 2 * SIZE, "v": 2 * SIZE, "o": HIDDEN}
        for name, count in rows.items():
            columns = HEADS * SIZE if name == "o" else HIDDEN
            found[f"{layer}self_attn.{name}_proj.weight"] = (count, columns)
            if bias:
                found[f"{layer}self_attn.{name}_proj.bias"] = (count,)
        found |= {f"{layer}self_attn.{name}_norm.weight": (SIZE,) for name in "qk"}
        found |= {f"{layer}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        found |= {f"{layer}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        found[f"{layer}mlp.down_proj.weight"] = (HIDDEN, INNER)
    return found


def drawn(bias: bool = False, **more: tuple[int, ...]) -> dict[str, mx.array]:
    wanted = shapes(bias) | {name.replace("__", "."): shape for name, shape in more.items()}
    return {name: mx.random.normal(shape, key=mx.random.key(i)) for i, (name, shape) in enumerate(wanted.items())}


def write(path: Path, config: dict[str, Any], tensors: dict[str, mx.array]) -> Folder:
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / "model.safetensors"), tensors)
    return Folder(path)


def read(path: Path, config: dict[str, Any], tensors: dict[str, mx.array] | None = None) -> DFlash:
    folder = write(path, config, drawn() if tensors is None else tensors)
    assert kind_of(folder) == "dflash"
    network = read_network(folder, "dflash")
    assert isinstance(network, DFlash)
    return network


def zlab(inner: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    return {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], **(inner or {})}, **top}


def speculators(inner: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    return {**SPECULATORS, "transformer_layer_config": {**QWEN3, **(inner or {})}, **top}


FULLS, CAUSAL = (Sight(), Sight()), Sight(causal=True)
SLIDE = {"layer_types": [SLIDING, FULL], "sliding_window": 6}
YARN = {"type": "yarn", "factor": 64, "original_max_position_embeddings": 4096, "mscale": 1, "mscale_all_dim": 1}
NESTED = {SLIDING: {"rope_type": "default", "rope_theta": 5.0}, FULL: {"rope_type": "default", "rope_theta": 7.0}}

CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "z-lab": (
        ZLAB,
        {"target_layer_ids": (1, 3, 6), "block_size": 8, "mask_token_id": 5, "num_target_layers": 8, "sights": FULLS},
    ),
    "block size inside": (zlab({"block_size": 4}, block_size=16), {"block_size": 4}),
    "all at the top": (
        {**QWEN3, "architectures": ["DFlashDraftModel"], "block_size": 8, "mask_token_id": 5,
         "target_layer_ids": [1, 3, 6]},
        {"target_layer_ids": (1, 3, 6), "mask_token_id": 5, "num_target_layers": None},
    ),
    "noise of the target": (
        zlab(tie_word_embeddings=True, partial_rotary_factor=0.25, auto_map={"AutoModel": "dflash.DFlash"}),
        {"embedding_size": None, "draft_vocab_size": None},
    ),
    "scales": (
        zlab({"input_embedding_scale": 2, "output_multiplier": 0.5, "final_logit_softcapping": 30}),
        {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 30},
    ),
    "softcap at the top": (zlab(final_logit_softcapping=20.0), {"final_logit_softcapping": 20.0}),
    "sliding": (zlab(**SLIDE), {"sights": (Sight(5, 6, True), Sight())}),
    "sliding, not causal": (zlab(**SLIDE, is_causal=False), {"sights": (Sight(5, 6, False), Sight())}),
    "causal everywhere": (zlab({"causal": True}, **SLIDE), {"sights": (Sight(5, 6, True), CAUSAL)}),
    "is_causal before causal": (zlab({"causal": True}, is_causal=False), {"sights": FULLS}),
    "types by number": (
        zlab(use_sliding_window=True, sliding_window=6, max_window_layers=1),
        {"sights": (Sight(), Sight(5, 6, True))},
    ),
    "windows not used": (zlab(use_sliding_window=False, sliding_window=6, max_window_layers=1), {"sights": FULLS}),
    "theta": (zlab(rope_theta=1e6, rope_scaling=None), {"ropes": ((1e6, None),) * 2}),
    "no theta": (ZLAB, {"ropes": ((10000.0, None),) * 2}),
    "nested rope": (
        zlab(**SLIDE, rope_parameters=NESTED),
        {"ropes": ((5.0, NESTED[SLIDING]), (7.0, NESTED[FULL]))},
    ),
    "anchor": (zlab({"sample_from_anchor": True}), {"sample_from_anchor": True}),
    "speculators": (
        SPECULATORS,
        {"target_layer_ids": (1, 3, 7), "target_name": "some/target", "scaled_embedding": False, "vocab_size": VOCAB,
         "sample_from_anchor": False, "num_target_layers": None},
    ),
    "speculators, sliding": (speculators(SLIDE), {"sights": (Sight(6, None, True), Sight())}),
    "speculators, sliding, not causal": (
        speculators(SLIDE, sliding_window_non_causal=True),
        {"sights": (Sight(6, None, False), Sight())},
    ),
    "speculators, nested rope": (
        speculators({**SLIDE, "rope_parameters": NESTED}),
        {"ropes": ((5.0, NESTED[SLIDING]),) * 2},
    ),
    "speculators, anchor": (speculators(sample_from_anchor=True), {"sample_from_anchor": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name: str, tmp_path: Path) -> None:
    config, expected = CONFIGS[name]
    found = read(tmp_path, config).config
    assert {field: getattr(found, field) for field in expected} == expected


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("factor", [None, 1.25])
def test_yarn_grows_queries_and_keys_whatever_mscale_says(key: str, factor: float | None, tmp_path: Path) -> None:
    network = read(tmp_path, zlab(**{key: {**YARN, "attention_factor": factor}}, rope_theta=50000.0))
    expected = factor or 1 + 0.1 * math.log(64)
    assert network.layers[0].self_attn.rope.mscale == pytest.approx(expected)


def test_tensors(tmp_path: Path) -> None:
    """A bias where the config has one, sinks under either name, and a prefix that is dropped."""
    tensors = drawn(bias=True, layers__0__self_attn__attention_sink_bias=(HEADS,))
    network = read(tmp_path, zlab(attention_bias=True), {f"model.{name}": x for name, x in tensors.items()})
    assert network.config.sinks == (0,)
    assert mx.array_equal(network.layers[0].self_attn.sinks, tensors["layers.0.self_attn.attention_sink_bias"])
    assert mx.array_equal(network.layers[1].self_attn.o_proj.bias, tensors["layers.1.self_attn.o_proj.bias"])
    assert mx.array_equal(network.fc.weight, tensors["fc.weight"])


IDS = [0, 2, 3, 10, 69]


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_reduced_head(absolute: bool, marks: bool, tmp_path: Path) -> None:
    """`d2t` counts from the row, or is the token; then the offsets would lead to tokens that are not marked, or beyond
    the vocabulary. Left-overs of the target are not kept."""
    tensors = drawn(lm_head__weight=(5, HIDDEN), embed_tokens__weight=(VOCAB, HIDDEN), verifier_norm__weight=(HIDDEN,),
                    verifier_lm_head__weight=(5, HIDDEN))  # fmt: skip
    tensors["d2t"] = mx.array([token - (0 if absolute else row) for row, token in enumerate(IDS)], dtype=mx.int64)
    if marks:
        tensors["t2d"] = mx.array([token in IDS for token in range(VOCAB)])
    network = read(tmp_path, speculators(draft_vocab_size=5), tensors)
    assert (network.config.draft_vocab_size, network.config.embedding_size) == (5, VOCAB)
    assert network._draft_ids.tolist() == IDS
    logits = network.logits(mx.ones((2, 5)), VOCAB + 3, capped=False)
    assert logits.shape == (2, VOCAB + 3)
    assert [i for i, x in enumerate(logits[1].tolist()) if x == 1] == IDS
    assert mx.isinf(logits).sum().item() == 2 * (VOCAB + 3 - 5)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised(bits: int, tmp_path: Path) -> None:
    network = read(tmp_path, ZLAB)
    nn.quantize(network, group_size=32, bits=bits, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    tensors = dict(tree_flatten(network.parameters()))
    config = {**ZLAB, "quantization": {"group_size": 32, "bits": bits}}
    again = read(tmp_path, config, tensors)
    assert isinstance(again.fc, nn.QuantizedLinear)
    assert again.layers[1].mlp.up_proj.bits == bits
    assert again.dtype == mx.float32


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    inner = {k: v for k, v in config.get("dflash_config", {}).items() if k not in names}
    return {**{k: v for k, v in config.items() if k not in names}, **({"dflash_config": inner} if inner else {})}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, mx.array], str]] = {
    "no layers": (without(ZLAB, "target_layer_ids"), drawn(), "has no aux_hidden_state_layer_ids"),
    "no mask": (without(ZLAB, "mask_token_id"), drawn(), "has no mask_token_id"),
    "no block": (without(ZLAB, "block_size"), drawn(), "has no block_size"),
    "empty block": (zlab(block_size=1), drawn(), "the block_size 1, which drafts nothing"),
    "the embedding as a layer": (
        {**SPECULATORS, "aux_hidden_state_layer_ids": [0, 2, 4]}, drawn(), r"the embedding as one \(\[-1, 1, 3\]"
    ),
    "too few types": (zlab(layer_types=[FULL]), drawn(), r"2 layers and the layer_types \['full_attention'\]"),
    "unknown type": (zlab(layer_types=[FULL, "linear_attention"]), drawn(), "one of sliding_attention and full"),
    "no window": (zlab(layer_types=[FULL, SLIDING]), drawn(), "has no sliding_window"),
    "another activation": (zlab(hidden_act="gelu"), drawn(), "hidden_act 'gelu'"),
    "another rope": (zlab(rope_scaling={"rope_type": "odd"}), drawn(), "ValueError: Unsupported RoPE type odd"),
    "text for a number": (zlab(num_hidden_layers="two"), drawn(), "num_hidden_layers 'two', which must be a whole"),
    "half a number": (zlab(block_size=16.0), drawn(), "block_size 16.0, which must be a whole number from 1"),
    "a window of 0": (
        zlab(layer_types=[SLIDING] * 2, sliding_window=0), drawn(), "sliding_window 0, which must be a whole"
    ),
    "text for a cap": (zlab(final_logit_softcapping="high"), drawn(), "cannot be used \\(ValueError"),
    "another width": (zlab(target_hidden_size=64), drawn(), "hidden_size 32 and its target 64"),
    "mask beyond its embedding": (
        speculators(mask_token_id=VOCAB), drawn(embed_tokens__weight=(VOCAB, HIDDEN)), "mask_token_id 70"
    ),
    "head of another size": (
        speculators(draft_vocab_size=6), drawn(lm_head__weight=(5, HIDDEN)), "draft_vocab_size 6 and its lm_head has 5"
    ),
    "no head": (speculators(draft_vocab_size=6), drawn(), "its lm_head has no rows"),
    "no d2t": (speculators(draft_vocab_size=5), drawn(lm_head__weight=(5, HIDDEN)), "no d2t"),
    "d2t beyond": (
        speculators(draft_vocab_size=5),
        {**drawn(lm_head__weight=(5, HIDDEN)), "d2t": mx.array([0, 0, 0, 0, 70])},
        "d2t names tokens twice or beyond the vocabulary",
    ),
    "a tensor missing": (
        ZLAB, {k: v for k, v in drawn().items() if k != "layers.1.mlp.up_proj.weight"}, "lacks layers.1.mlp.up_proj"
    ),
    "taps that do not fit": (
        zlab({"target_layer_ids": [1, 3]}), drawn(), r"fc.weight has the shape \[32, 96\] and its config asks for"
    ),
    "DSpark by its tensors": (ZLAB, drawn(markov_head__markov_w1__weight=(VOCAB, 4)), "is a DSpark drafter"),
    "DFly by its tensors": (ZLAB, drawn(layer_fusion_weights=(2, 3)), "is a DFly drafter"),
    "another layer": (ZLAB, drawn(layers__0__self_attn__qkv_proj__weight=(128, HIDDEN)), "unknown tensor layers.0.s"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, tmp_path: Path) -> None:
    config, tensors, said = REFUSED[name]
    folder = write(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=said) as error:
        read_network(folder, "dflash")
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_mask_vector_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, ZLAB, drawn())
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="mask vector of its own"):
        read_network(folder, "dflash")
