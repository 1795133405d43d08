"""Files of every architecture, made of checkpoints in Hugging Face's layout: the logits are those that mlx-lm gives."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten

from mlx_specdec.checkpoints import gguf as gguf_module
from mlx_specdec.checkpoints import gguf_types
from mlx_specdec.checkpoints.gguf import load_gguf, model_and_config
from mlx_specdec.checkpoints.gguf_file import GGUFFile
from mlx_specdec.errors import CheckpointError, OptionError

from .tiny_families import SOURCES, VOCAB
from .tiny_gguf import TinyGGUF, write_tensors

# Each matrix in a type that MLX has, exactly; the widths here are multiples of 32 alone.
TYPES = {
    "token_embd": Type.Q8_0,
    "attn_q": Type.Q4_1,
    "attn_output": Type.Q5_0,
    "ssm_out": Type.Q8_0,
    "ssm_": Type.F32,
    "gate_inp": Type.F32,
    "ffn_down": Type.Q8_0,
    "ffn_": Type.Q4_0,
    "attn_": Type.Q5_1,
    "per_layer_model_proj": Type.BF16,
    "inp_gate": Type.F16,
}


def logits(model: Any) -> np.ndarray:
    ids = mx.array([[(7 * i + 3) % VOCAB for i in range(24)]])
    cache = model.make_cache() if hasattr(model, "make_cache") else None
    return np.array(model(ids, cache=cache)[0].astype(mx.float32))


@pytest.mark.parametrize("name", SOURCES)
def test_logits_are_those_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    source = SOURCES[name]
    tensors = source.tensors()
    source.write(tmp_path / "m.gguf", tensors)
    model = load_gguf(GGUFFile(tmp_path / "m.gguf"))
    expected = logits(source.reference(tensors))
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(logits(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SOURCES)
def test_quantised_files_keep_their_numbers(tmp_path: Path, name: str) -> None:
    """Against the same checkpoint with its matrices rounded as the file's types round them; and mlx-lm loads what is
    written, by its own strict rules."""
    source = SOURCES[name]
    tensors = source.tensors()
    source.write(tmp_path / "m.gguf", tensors, TYPES)
    model, config = model_and_config(GGUFFile(tmp_path / "m.gguf"), dtype="float32")
    packed = [name for name, _ in tree_flatten(model.parameters()) if name.endswith(".scales")]
    assert packed
    expected = logits(source.reference(source.rounded(tensors, TYPES)))
    np.testing.assert_allclose(logits(model), expected, atol=2e-3, rtol=1e-3)

    mlx_lm.utils.save_model(tmp_path / "saved", model)
    mlx_lm.utils.save_config(config, tmp_path / "saved" / "config.json")
    again, _ = mlx_lm.utils.load_model(tmp_path / "saved")
    np.testing.assert_array_equal(logits(again), logits(model))


def test_k_quants_stay_packed_and_the_rest_is_dense_or_quantised_anew(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256}
    source = SOURCES["qwen3"].with_(wide, {"embedding_length": 256, "feed_forward_length": 256})
    types = {"token_embd": Type.Q6_K, "attn_q": Type.Q4_K, "ffn_down": Type.Q6_K, "ffn_up": Type.Q5_K,
             "ffn_gate": Type.Q8_0, "attn_": Type.Q4_0}  # fmt: skip
    source.write(tmp_path / "m.gguf", source.tensors(), types, random=True)
    file = GGUFFile(tmp_path / "m.gguf")
    model, config = model_and_config(file, dtype="float32")
    layer = model.layers[1]
    assert config["quantization"]["model.layers.0.mlp.up_proj"] == {"group_size": 32, "bits": 5, "mode": "affine"}
    assert (layer.self_attn.q_proj.bits, layer.mlp.up_proj.bits) == (4, 5)
    raw = file._bytes(file.tensors["blk.1.ffn_down.weight"]).reshape(256, -1)
    np.testing.assert_array_equal(np.array(layer.mlp.down_proj.weight), dequantize(raw, Type.Q6_K))

    assert model_and_config(file)[0].layers[1].mlp.down_proj.weight.dtype == mx.float16
    anew = load_gguf(file, dtype="float32", requantise={"bits": 8, "group_size": 64})
    assert (anew.layers[1].mlp.down_proj.bits, anew.model.embed_tokens.bits) == (8, 8)
    assert anew.layers[1].self_attn.q_proj.bits == 4, "what MLX has is kept"
    np.testing.assert_allclose(logits(anew), logits(model), atol=0.1 * np.abs(logits(model)).max())
    with pytest.raises(OptionError, match="7 bits"):
        load_gguf(file, requantise={"bits": 7, "group_size": 64})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dense_weights_are_rounded_once(tmp_path: Path, dtype: str) -> None:
    """Even where a scale alone is no number of the dtype."""
    source = SOURCES["qwen3"].with_({"hidden_size": 256}, {"embedding_length": 256})
    kinds = {"attn_q": Type.Q4_K, "attn_k": Type.Q6_K, "attn_v": Type.Q8_0, "ffn_gate": Type.MXFP4}
    source.write(tmp_path / "m.gguf", source.tensors(), kinds, random=True)
    model = load_gguf(GGUFFile(tmp_path / "m.gguf"), dtype=dtype, dense=True)
    raw = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    layer = model.layers[2]
    attention = layer.self_attn
    modules = (attention.q_proj, attention.k_proj, attention.v_proj, layer.mlp.gate_proj)
    for name, module in zip(kinds, modules, strict=True):
        held = raw[f"blk.2.{name}.weight"]
        expected = mx.array(dequantize(held.data, held.tensor_type)).astype(getattr(mx, dtype))
        assert mx.array_equal(module.weight, expected), name
        assert set(module.keys()) == {"weight"}


@pytest.mark.parametrize(
    "how", [{}, {"dense": True, "dtype": "float32"}, {"requantise": {"bits": 4, "group_size": 64}}]
)
def test_loading_holds_a_tensor_beside_the_model(tmp_path: Path, monkeypatch: Any, how: Any) -> None:
    """Never two copies of the model: each tensor becomes what it will be before the next is read."""
    monkeypatch.setattr(gguf_types, "AT_ONCE", 1 << 16)
    source = SOURCES["qwen3"].with_(
        {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 8},
        {"embedding_length": 512, "feed_forward_length": 512, "block_count": 8},
    )
    source.write(tmp_path / "m.gguf", source.tensors(), {"ffn_": Type.Q6_K, "attn_q": Type.Q4_K}, random=True)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = load_gguf(GGUFFile(tmp_path / "m.gguf"), **how)
    peak = mx.get_peak_memory() - before
    arrays = [value for _, value in tree_flatten(model.parameters())]
    assert peak < sum(x.nbytes for x in arrays) + 6 * max(x.nbytes for x in arrays)


def test_a_file_that_grows_by_a_lot_is_named_once(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(gguf_module, "_LARGE", 1000)
    source = SOURCES["qwen3"].with_({"hidden_size": 256}, {"embedding_length": 256})
    source.write(tmp_path / "m.gguf", source.tensors(), {"attn_k": Type.Q6_K, "attn_q": Type.IQ4_XS}, random=True)
    file = GGUFFile(tmp_path / "m.gguf")
    with caplog.at_level("INFO"):
        load_gguf(file, requantise={"bits": 4, "group_size": 32})
        load_gguf(file, dense=True)
        assert not caplog.records
        load_gguf(file)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "m.gguf has IQ4_XS, Q6_K weights, which MLX has no form for"
    ]


@pytest.mark.parametrize(
    ("name", "types", "dtype"),
    [
        ("llama", {"attn": Type.Q4_0}, mx.float32),  # the other matrices are float32
        ("llama", dict.fromkeys(("attn", "ffn", "token_embd"), Type.Q4_0), mx.float16),
        ("gemma2", dict.fromkeys(("attn", "ffn", "token_embd"), Type.Q4_0), mx.float32),
        ("gemma2", dict.fromkeys(("attn", "ffn", "token_embd"), Type.BF16), mx.bfloat16),
        ("gemma2", dict.fromkeys(("attn", "ffn", "token_embd"), Type.MXFP4), mx.bfloat16),
        ("gemma3", dict.fromkeys(("attn", "ffn", "token_embd"), Type.Q4_0), mx.float16),
        ("qwen3moe", {"gate_inp": Type.F32} | dict.fromkeys(("attn", "ffn", "token_embd"), Type.Q8_0), mx.float16),
    ],
)
def test_the_model_computes_in_one_precision(tmp_path: Path, name: str, types: Any, dtype: mx.Dtype) -> None:
    source = SOURCES[name]
    source.write(tmp_path / "m.gguf", source.tensors(), types)
    model = load_gguf(GGUFFile(tmp_path / "m.gguf"))
    floats = {x.dtype for _, x in tree_flatten(model.parameters()) if mx.issubdtype(x.dtype, mx.floating)}
    assert floats == {dtype}


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("qwen3moe", {"qwen3moe.expert_gating_func": 2}, "expert_gating_func to 2, which mlx-lm's qwen3_moe"),
        (
            "qwen3moe",
            {"qwen3moe.rope.scaling.type": "yarn", "qwen3moe.rope.scaling.factor": 4.0},
            "scales its positions",
        ),
        ("qwen3moe", {"qwen3moe.expert_used_count": 0}, "expert_used_count is 0"),
        ("qwen35", {"qwen35.ssm.time_step_rank": 3}, "3 value heads go neither with 2"),
        ("qwen35", {"qwen35.ssm.time_step_rank": 1 << 30, "qwen35.ssm.inner_size": 1 << 30}, "has shape"),
        (
            "qwen35",
            {"qwen35.attention.key_length": 1 << 30, "qwen35.attention.value_length": 1 << 30},
            "do not go with",
        ),
        ("qwen35", {"qwen35.attention.recurrent_layers": [True] * 4}, "recurrent_layers to"),
        ("qwen35", {"qwen35.ssm.conv_kernel": 3}, "'blk.0.ssm_conv1d.weight' has shape"),
        ("gemma2", {"gemma2.rope.scaling.type": "linear", "gemma2.rope.scaling.factor": 2.0}, "scales its positions"),
        (
            "gemma3",
            {"gemma3.attention.sliding_window_pattern": [True, True, False, False]},
            "sliding_window_pattern to",
        ),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping to 30.0"),
        ("gemma4", {"gemma4.attention.sliding_window_pattern": [True]}, "not 4 values"),
        ("gemma4", {"gemma4.attention.sliding_window_pattern": None}, "not a list of 4"),
        ("gemma4", {"gemma4.attention.head_count_kv": [2, 1, 1, 1]}, "head_count_kv to"),
        ("gemma4", {"gemma4.feed_forward_length": [96, 96, 32, 96]}, "feed_forward_length to"),
        ("gemma4", {"gemma4.rope.dimension_count_swa": 8}, "dimension_count_swa is 8"),
        ("gemma4", {"gemma4.attention.shared_kv_layers": "two"}, "'two', not a positive whole number"),
        ("phi3-long", {"phi3.rope.scaling.attn_factor": 1.5}, "attn_factor to 1.5"),
        ("phi3-long", {"phi3.rope.scaling.original_context_length": 1}, "not a length of texts"),
        ("phi3-long", {"phi3.rope.dimension_count": 16}, "rope_factors_long.weight is not 8 plain numbers"),
        ("phi3", {"phi3.attention.head_count": 2}, "2 heads of 16 do not make the hidden size 64"),
        ("smollm3", {"smollm3.nextn_predict_layers": 9}, "claims -5 layers"),
        ("smollm3", {"smollm3.nextn_predict_layers": "all"}, "nextn_predict_layers is 'all'"),
    ],
)
def test_what_mlx_lm_cannot_do_is_refused_in_one_sentence(tmp_path: Path, name: str, keys: Any, words: str) -> None:
    SOURCES[name].write(tmp_path / "m.gguf", SOURCES[name].tensors(), **keys)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_gguf(GGUFFile(tmp_path / "m.gguf"))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "m.gguf") in str(caught.value)


def test_a_quantised_vector_is_refused(tmp_path: Path) -> None:
    spec = TinyGGUF(without=("output_norm.weight",))
    norm = spec.write(tmp_path / "m.gguf")["output_norm.weight"]
    write_tensors(tmp_path / "norm.gguf", {"output_norm.weight": (quantize(norm[None], Type.Q8_0)[0], Type.Q8_0)})
    file = GGUFFile(tmp_path / "m.gguf")
    file.tensors |= GGUFFile(tmp_path / "norm.gguf").tensors
    with pytest.raises(CheckpointError, match=r"'output_norm\.weight' of 64 values is of type Q8_0, .* for matrices"):
        load_gguf(file)


def test_saved_config_is_json(tmp_path: Path) -> None:
    source = SOURCES["gemma4"]
    source.write(tmp_path / "m.gguf", source.tensors(), TYPES)
    _, config = model_and_config(GGUFFile(tmp_path / "m.gguf"))
    assert json.loads(json.dumps(config)) == config
