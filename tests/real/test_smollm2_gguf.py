"""The catalogued model itself: fetched, read, tokenised and run. Golden ids were printed by llama.cpp."""

import json
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from mlx import nn
from mlx_lm.generate import generate_step

import mlx_specdec  # noqa: F401  (before mlx.core, for the BLAS)
from mlx_specdec import checkpoints
from mlx_specdec.checkpoints import hub
from mlx_specdec.checkpoints.catalogue import read_catalogue

from ..checkpoints.tiny_gguf import permute

pytestmark = pytest.mark.real

NAME = "smollm2-135m"
GOLDEN = json.loads((Path(__file__).parents[1] / "checkpoints" / "golden_smollm2_tokens.json").read_text())


@pytest.fixture(scope="module")
def path() -> Path:
    return hub.fetch(read_catalogue().models[NAME])


@pytest.fixture(scope="module")
def loaded(path):
    return checkpoints.load(NAME, dtype="float32")


@pytest.mark.parametrize(("text", "ids"), GOLDEN["ids"])
def test_token_ids(loaded, text, ids):
    _, tokenizer = loaded
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(("prompt", "ids"), GOLDEN["greedy"])
def test_greedy_ids(loaded, prompt, ids):
    model, tokenizer = loaded
    tokens = generate_step(mx.array(tokenizer.encode(prompt)), model, max_tokens=len(ids))
    assert [token for token, _ in tokens] == ids


def test_text_and_its_end(loaded):
    model, tokenizer = loaded
    assert mlx_lm.generate(model, tokenizer, "The capital of France is", max_tokens=2) == "Paris."
    assert tokenizer.eos_token_ids == {2}
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=40) == "The capital of France is Paris."


def test_dense_weights_equal_those_of_the_gguf_package_to_the_bit(loaded, path):
    layer = loaded[0].layers[17]
    ours = {
        "blk.17.attn_q.weight": permute(np.array(layer.self_attn.q_proj.weight), 9),
        "blk.17.attn_k.weight": permute(np.array(layer.self_attn.k_proj.weight), 3),
        "blk.17.ffn_down.weight": np.array(layer.mlp.down_proj.weight),
        "blk.17.ffn_norm.weight": np.array(layer.post_attention_layernorm.weight),
        "token_embd.weight": np.array(loaded[0].model.embed_tokens.weight),
    }
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for name, values in ours.items():
        np.testing.assert_array_equal(values, dequantize(tensors[name].data, tensors[name].tensor_type))


def test_quantised_as_it_is(loaded):
    model, _ = checkpoints.load(NAME)
    assert (model.model.embed_tokens.bits, model.layers[0].mlp.up_proj.bits) == (8, 4)
    assert isinstance(model.layers[0].mlp.up_proj, nn.QuantizedLinear)
    assert model.layers[0].mlp.up_proj.scales.dtype == mx.float16
    model.set_dtype(mx.float32)  # the CPU is some forty times slower in float16
    ids = mx.array([[1, 4093, 198, 19556, 30]])
    np.testing.assert_allclose(np.array(model(ids)), np.array(loaded[0](ids)), atol=2e-2, rtol=1e-2)


def test_loading_takes_seconds(path):
    began = time.perf_counter()
    checkpoints.load(path, dtype="float32")
    assert time.perf_counter() - began < 20
