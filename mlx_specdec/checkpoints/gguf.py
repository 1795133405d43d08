"""A GGUF file as an mlx-lm model: names, row order, and quantisation kept as it is."""

import importlib
from collections.abc import Mapping
from functools import reduce
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from .gguf_config import ROPE_FACTORS, model_config
from .gguf_file import GROUP_SIZE, GGUFFile, Weight

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_gguf(file: GGUFFile, overrides: Mapping[str, Any] | None = None) -> nn.Module:
    """The mlx-lm model of a GGUF file, its parameters not yet evaluated.

    Quantised tensors stay quantised, each in its own bits. All floating parameters get one dtype, so that the
    model computes in one precision: the narrowest that holds every matrix and every scale exactly. For a
    quantised file that is float16, and its norms, float32 on disk, are rounded to it.

    `overrides` replaces fields of the mlx-lm configuration. Raises CheckpointError for what cannot be mapped
    exactly.
    """
    config = model_config(file) | dict(overrides or {})
    names = _parameter_names(config["num_hidden_layers"])
    for name in file.tensors:
        if name not in names and name != ROPE_FACTORS:
            raise file.fault(f"tensor {name!r} has no place in mlx-lm's {config['model_type']} model")
    weights = {names[name]: file.read(name) for name in file.tensors if name in names}
    if config["model_type"] == "llama":
        _restore_row_order(weights, config["num_attention_heads"], config["num_key_value_heads"])

    arch = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = arch.Model(arch.ModelArgs.from_dict(config))
    bits = {names[name]: tensor.bits for name, tensor in file.tensors.items() if name in names}

    def quantisation(path: str, module: nn.Module) -> bool | dict[str, int]:
        width = bits.get(path + ".weight") if hasattr(module, "to_quantized") else None
        return {"group_size": GROUP_SIZE, "bits": width} if width else False

    nn.quantize(model, class_predicate=quantisation)
    parameters = _parameters(weights)
    _check_fit(file, model, parameters, {theirs: ours for ours, theirs in names.items()})
    model.load_weights(list(parameters.items()))
    model.eval()
    return model


def _parameter_names(layers: int) -> dict[str, str]:
    """GGUF tensor name -> mlx-lm parameter name, for all that a file of these architectures may hold."""
    modules = dict(_TOP)
    for i in range(layers):
        modules |= {f"blk.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in _LAYER.items()}
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in ("weight", "bias")}


def _restore_row_order(weights: dict[str, Weight], heads: int, kv_heads: int) -> None:
    """Undo the row order of Llama files.

    They interleave the two halves of each query and key head, for a rotation of neighbours; mlx-lm rotates
    halves. The order is one of output rows, so packed rows move whole, with their scales.
    """
    for name, weight in weights.items():
        count = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        if count and weight.weight.shape[0] % (2 * count) == 0:
            rows = np.arange(weight.weight.shape[0])
            weights[name] = weight.take_rows(rows.reshape(count, -1, 2).swapaxes(1, 2).reshape(-1))


def _parameters(weights: dict[str, Weight]) -> dict[str, mx.array]:
    """Parameter name -> array, the floating ones in the one dtype that `load_gguf` promises."""
    matrices = [weight for weight in weights.values() if weight.weight.ndim > 1]
    dtypes = [(matrix.weight if matrix.scales is None else matrix.scales).dtype for matrix in matrices]
    dtype = reduce(lambda a, b: mx.result_type(mx.array(0, a), mx.array(0, b)), dtypes)
    parameters = {}
    for name, weight in weights.items():
        if weight.scales is None or weight.biases is None:
            parameters[name] = weight.weight.astype(dtype)
            continue
        parameters[name] = weight.weight
        parameters[name.removesuffix("weight") + "scales"] = weight.scales.astype(dtype)
        parameters[name.removesuffix("weight") + "biases"] = weight.biases.astype(dtype)
    return parameters


def _check_fit(
    file: GGUFFile, model: nn.Module, parameters: dict[str, mx.array], tensor_names: Mapping[str, str]
) -> None:
    expected = dict(tree_flatten(model.parameters()))
    if missing := sorted(expected.keys() - parameters.keys()):
        raise file.fault(f"tensor {tensor_names.get(missing[0], missing[0])!r} is missing")
    for name, array in parameters.items():
        tensor = tensor_names.get(name, name)
        if name not in expected:
            raise file.fault(f"tensor {tensor!r} has no place in this model")
        if array.shape != expected[name].shape:
            raise file.fault(f"{tensor!r} has shape {array.shape} where {expected[name].shape} is expected")
