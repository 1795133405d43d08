"""Tiny GGUF files of every architecture and tensor type against mlx-lm models with the same dense weights."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from mlx_specdec import checkpoints
from mlx_specdec.errors import CheckpointError, OptionError

from .tiny_gguf import FFN, HIDDEN, LAYERS, TinyGGUF, dense_model, logits

ONES = np.ones(FFN, np.float32)
MIXED = {
    "token_embd": Type.Q8_0,
    "attn_q": Type.Q4_1,
    "attn_k": Type.Q4_0,
    "attn_v": Type.F16,
    "attn_output": Type.BF16,
    "ffn_down": Type.Q8_0,
    "ffn_up": Type.Q4_0,
}


def loaded(spec: TinyGGUF, path: Path, dtype: str | None = None) -> Any:
    return checkpoints.load(path, dtype=dtype)[0]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("types", [{}, MIXED], ids=["float32", "mixed"])
def test_logits_equal_those_of_the_same_dense_weights(tmp_path, arch, tied, types):
    spec = TinyGGUF(arch, tied=tied, types=types)
    held = spec.write(tmp_path / "m.gguf")
    got = logits(loaded(spec, tmp_path / "m.gguf", "float32"))
    np.testing.assert_allclose(got, logits(dense_model(spec, held)), atol=1e-5, rtol=1e-5)


def test_llama_with_biases_everywhere(tmp_path):
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    spec = TinyGGUF(biases=names)
    held = spec.write(tmp_path / "m.gguf")
    got = logits(loaded(spec, tmp_path / "m.gguf"))
    np.testing.assert_allclose(got, logits(dense_model(spec, held)), atol=1e-5, rtol=1e-5)


def test_quantised_weights_stay_quantised_each_in_its_bits_and_the_rest_is_float16(tmp_path):
    types = {"token_embd": Type.Q8_0, "attn": Type.Q4_1, "ffn": Type.Q4_0, "output.weight": Type.Q8_0}
    spec = TinyGGUF(tied=False, types=types)
    held = spec.write(tmp_path / "m.gguf")
    model = loaded(spec, tmp_path / "m.gguf")
    layer = model.layers[0]
    bits = [m.bits for m in (model.model.embed_tokens, layer.self_attn.q_proj, layer.mlp.up_proj, model.lm_head)]
    assert bits == [8, 4, 4, 8]
    assert {str(layer.mlp.up_proj.scales.dtype), str(layer.input_layernorm.weight.dtype)} == {"mlx.core.float16"}
    model.set_dtype(mx.float32)  # the same codes, computed exactly
    np.testing.assert_allclose(logits(model), logits(dense_model(spec, held)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "dtype"), [(Type.F32, "float32"), (Type.F16, "float16"), (Type.BF16, "bfloat16")])
def test_a_float_file_computes_in_its_own_dtype(tmp_path, kind, dtype):
    spec = TinyGGUF(types=dict.fromkeys(("token_embd", "attn", "ffn"), kind))
    spec.write(tmp_path / "m.gguf")
    model = loaded(spec, tmp_path / "m.gguf")
    assert {str(model.model.norm.weight.dtype), str(model.layers[1].mlp.up_proj.weight.dtype)} == {f"mlx.core.{dtype}"}


def test_the_request_to_pack_reaches_the_file(tmp_path):
    spec = TinyGGUF(types={"ffn": Type.Q4_0})
    spec.write(tmp_path / "m.gguf")
    with pytest.raises(OptionError, match="9 bits by groups of 64"):
        checkpoints.load(tmp_path / "m.gguf", requantise={"bits": 9})
    model, _ = checkpoints.load(tmp_path / "m.gguf", requantise={"bits": 8, "group_size": 32})
    assert model.layers[0].mlp.up_proj.bits == 4, "what MLX has is kept"


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
    ids=["linear", "yarn"],
)
def test_position_scaling(tmp_path, extra, scaling):
    spec = TinyGGUF(extra=extra)
    held = spec.write(tmp_path / "m.gguf")
    got = logits(loaded(spec, tmp_path / "m.gguf"))
    np.testing.assert_allclose(got, logits(dense_model(spec, held, rope_scaling=scaling)), atol=1e-5, rtol=1e-5)


def test_llama3_frequency_factors(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    spec = TinyGGUF(tensors={"rope_freqs.weight": llama3_factors(scaling)})
    held = spec.write(tmp_path / "m.gguf")
    got = logits(loaded(spec, tmp_path / "m.gguf"))
    np.testing.assert_allclose(got, logits(dense_model(spec, held, rope_scaling=scaling)), atol=1e-5, rtol=1e-5)
    assert np.abs(got - logits(dense_model(spec, held))).max() > 1e-2


def llama3_factors(scaling: dict[str, Any], dims: int = 16, base: float = 10000.0) -> np.ndarray:
    """`rope_freqs.weight` as llama.cpp's converter computes it."""
    context, low, high = (
        scaling[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for frequency in 1.0 / base ** (np.arange(0, dims, 2) / dims):
        length = 2 * np.pi / frequency
        if length < context / high:
            factors.append(1.0)
        elif length > context / low:
            factors.append(scaling["factor"])
        else:
            smooth = (context / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (TinyGGUF(extra={"general.architecture": "mamba"}), "architecture 'mamba'"),
        (TinyGGUF(extra={"llama.block_count": None}), "llama.block_count is None"),
        (TinyGGUF(extra={"llama.block_count": 2_000_000_000}), "claims 2000000000 layers"),
        (TinyGGUF(extra={"llama.block_count": LAYERS + 1}), "'blk.2.*is missing"),
        (TinyGGUF(extra={"llama.feed_forward_length": 2_000_000_000}), "has shape"),
        (
            TinyGGUF(extra={"llama.embedding_length": HIDDEN * 2}),
            r"has shape \(\d+, 64\) where the hidden size is 128|head dimension",
        ),
        (TinyGGUF(extra={"llama.attention.head_count": "four"}), "'four', not a positive whole number"),
        (TinyGGUF(extra={"llama.attention.head_count": [4, 4]}), "not a positive whole number"),
        (TinyGGUF(extra={"llama.attention.head_count_kv": 3}), "4 heads of 16 do not go with 3"),
        (TinyGGUF(extra={"llama.rope.dimension_count": 8}), "dimension_count is 8"),
        (TinyGGUF(extra={"llama.expert_count": 8}), "expert_count to 8"),
        (TinyGGUF(extra={"qwen2.attention.sliding_window": 64}, arch="qwen2"), "sliding_window to 64"),
        (TinyGGUF(extra={"llama.rope.scaling.type": "longrope"}), "'longrope'"),
        (TinyGGUF(extra={"tokenizer.ggml.tokens": [str(i) for i in range(999)]}), "999 tokens and"),
        (TinyGGUF(tensors={"rope_freqs.weight": ONES}), "rope_freqs.weight is not 8 plain numbers"),
        (TinyGGUF(extra={"split.count": 3}), "one of 3 parts; name it as"),
        (TinyGGUF(without=("blk.1.ffn_up.weight",)), "'blk.1.ffn_up.weight' is missing"),
        (TinyGGUF(without=("token_embd.weight",)), "'token_embd.weight' is missing"),
        (TinyGGUF(without=("blk.1.attn_v.bias",), arch="qwen2"), "'blk.1.attn_v.bias' is missing"),
        (TinyGGUF(tensors={"blk.0.ffn_gate_inp.weight": ONES}), "'blk.0.ffn_gate_inp.weight' has no place"),
        (TinyGGUF(tensors={"blk.0.ffn_up.bias": ONES}), "'blk.0.ffn_up.bias' has no place"),
    ],
)
def test_what_cannot_be_mapped_is_refused_in_one_sentence(tmp_path, spec, words):
    spec.write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=words) as caught:
        loaded(spec, tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "m.gguf") in str(caught.value)
