"""Drafters in GGUF files: the networks are those that the published checkpoints themselves give, to the bit."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from mlx_specdec.checkpoints import dflash, eagle3, gemma4_assistant
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.checkpoints.gguf import load_gguf
from mlx_specdec.checkpoints.gguf_drafter import checkpoint, read_drafter
from mlx_specdec.checkpoints.gguf_file import GGUFFile
from mlx_specdec.errors import CheckpointError

from .gguf_drafters import GOLDEN, TAPS, assistant, eagle, flash, golden, same
from .gguf_sources import Source
from .test_gguf_model import llama3_factors


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
