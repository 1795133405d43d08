"""How llama.cpp names and lays out the tensors of each family, against the parameters of mlx-lm's models."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from .gguf_weight import Weight

Config = Mapping[str, Any]
Change = Callable[[Weight, Config], Weight]
Modules = Mapping[str, str | tuple[str, str]]  # two: the tensor's rows are one module's and then the other's

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # part of the config
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Family:
    """One architecture of llama.cpp. `model_type` is mlx-lm's module.

    `layer` and `top` map a tensor's name without its kind (weight, bias) to modules, `whole` full names to parameters.
    `changes` undo, by a tensor's name, what llama.cpp's converter does to it.
    """

    model_type: str
    layer: Modules
    top: Modules
    whole: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    prefix: str = "model."
    optional: tuple[str, ...] = ()  # parameters that keep their first value where the file has none
    wide: bool = False  # its activations leave the range of float16

    def parameters(self, tensor: str, layers: int) -> tuple[str, ...]:
        """The parameters that a tensor holds; none if it belongs to no layer below `layers`, nor beside them."""
        block = _BLOCK.fullmatch(tensor)
        if block is None:
            return _places(self.top, tensor, "")
        number, tail = int(block[1]), block[2]
        if number >= layers:
            return ()
        return self.of_layer(tail, f"{self.prefix}layers.{number}.")

    def tensors(self, layers: int) -> Iterator[str]:
        """All tensors that a file may have."""
        kinds = ("weight", "bias")
        yield from (f"{name}.{kind}" for name in self.top for kind in kinds)
        for number in range(layers):
            yield from (f"blk.{number}.{name}.{kind}" for name in self.layer for kind in kinds)
            yield from (f"blk.{number}.{name}" for name in self.whole)

    def of_layer(self, tail: str, prefix: str) -> tuple[str, ...]:
        """The parameters of a tensor of a layer, whose own begin with `prefix`."""
        if tail in self.whole:
            return (prefix + self.whole[tail],)
        return _places(self.layer, tail, prefix)

    def changed(self, tensor: str, weight: Weight, config: Config) -> Weight:
        """The weight as mlx-lm's model has it."""
        block = _BLOCK.fullmatch(tensor)
        change = self.changes.get((block[2] if block else tensor).split(".")[0])
        return weight if change is None else change(weight, config)


def _places(modules: Modules, name: str, prefix: str) -> tuple[str, ...]:
    """The parameters of a tensor, whose modules are under `prefix`."""
    module, _, kind = name.rpartition(".")
    found = modules.get(module) if kind in ("weight", "bias") else None
    return tuple(f"{prefix}{each}.{kind}" for each in ((found,) if isinstance(found, str) else found or ()))


def of_head(family: Family, tail: str, number: int) -> tuple[str, ...]:
    """The names, in Qwen's checkpoints, of what a tensor of MTP block `number` holds."""
    return _places(HEADS, tail, "") or family.of_layer(tail, f"mtp.layers.{number}.")


def _rotated_by_halves(heads: str) -> Change:
    """Rows in mlx-lm's order: the file interleaves the two halves of each head, for a rotation of neighbours."""

    def change(weight: Weight, config: Config) -> Weight:
        rows, count = weight.weight.shape[0], config[heads]
        if rows % (2 * count):
            return weight  # of a wrong shape, which is found where shapes are compared
        return weight.take_rows(np.arange(rows).reshape(count, -1, 2).swapaxes(1, 2).reshape(-1))

    return change


def _less_one(weight: Weight, config: Config) -> Weight:
    """Gemma's norms multiply by 1 + w; the file holds the sum."""
    return Weight(weight.weight - 1)


def _by_key_head(config: Config, size: int, first: int, total: int) -> np.ndarray:
    """Where, of `total` rows or columns, the file has what belongs to a linear-attention layer's value heads, `size`
    each, after `first` others.

    The file lists them as the key heads are repeated: the first value head of every key head, then the second ones.
    """
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if first + values * size != total:
        return np.arange(total)  # of a wrong shape, which is found where shapes are compared
    heads = np.arange(values).reshape(values // keys, keys).T.reshape(-1)
    moved = (heads[:, None] * size + np.arange(size)).reshape(-1)
    return np.concatenate([np.arange(first), first + moved])


def _value_rows(size: str | None = "linear_value_head_dim", after_keys: bool = False) -> Change:
    def change(weight: Weight, config: Config) -> Weight:
        keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] if after_keys else 0
        return weight.take_rows(_by_key_head(config, config[size] if size else 1, keys, weight.shape[0]))

    return change


def _row(weight: Weight, config: Config) -> Weight:
    """[columns] -> [1, columns]."""
    return Weight(weight.weight.reshape(1, -1))


def _convolution(weight: Weight, config: Config) -> Weight:
    """[channels, kernel] -> [channels, kernel, 1]."""
    return Weight(_value_rows(after_keys=True)(weight, config).weight[..., None])


def _decay(weight: Weight, config: Config) -> Weight:
    """The file holds -exp(A_log)."""
    return Weight(mx.log(-_value_rows(None)(weight, config).weight))


def _value_columns(weight: Weight, config: Config) -> Weight:
    return weight.take_columns(_by_key_head(config, config["linear_value_head_dim"], 0, weight.shape[-1]))


def _norms(change: Change, *tables: Modules) -> dict[str, Change]:
    return {name: change for table in tables for name in table if name.endswith("norm")}


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _ATTENTION | _FEED_FORWARD | {"ffn_norm": "post_attention_layernorm"}
_QWEN3 = _LLAMA | _QK_NORM


def _experts(switch: str, router: str) -> dict[str, str | tuple[str, str]]:
    return {
        "ffn_gate_inp": router,
        "ffn_gate_exps": f"{switch}.gate_proj",
        "ffn_up_exps": f"{switch}.up_proj",
        "ffn_down_exps": f"{switch}.down_proj",
        "ffn_gate_up_exps": (f"{switch}.gate_proj", f"{switch}.up_proj"),
    }


_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_LINEAR_ATTENTION = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN35 = _ATTENTION | _QK_NORM | _LINEAR_ATTENTION | {"post_attention_norm": "post_attention_layernorm"}
_SANDWICH = {  # a norm before and after each half of a layer
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA2 = _ATTENTION | _FEED_FORWARD | _SANDWICH
_GEMMA3 = _GEMMA2 | _QK_NORM
_GEMMA4 = (
    _GEMMA3
    | _experts("experts.switch_glu", "router.proj")
    | {
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    }
)
_GEMMA4_TOP = _TOP | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_HALVES = {"attn_q": _rotated_by_halves("num_attention_heads"), "attn_k": _rotated_by_halves("num_key_value_heads")}


def _qwen35(model_type: str, feed_forward: Modules) -> Family:
    return Family(
        model_type,
        {**_QWEN35, **feed_forward},
        {tensor: f"language_model.{module}" for tensor, module in _TOP.items()},
        whole={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
        changes={
            "attn_qkv": _value_rows(after_keys=True),
            "attn_gate": _value_rows(),
            "ssm_alpha": _value_rows(None),
            "ssm_beta": _value_rows(None),
            "ssm_dt": _value_rows(None),
            "ssm_a": _decay,
            "ssm_conv1d": _convolution,
            "ssm_out": _value_columns,
            "ffn_gate_inp_shexp": _row,
        },
        prefix="language_model.model.",
    )


FAMILIES = {
    "llama": Family("llama", _LLAMA, _TOP, changes=_HALVES),
    "smollm3": Family("smollm3", _LLAMA, _TOP, changes=_HALVES),
    "qwen2": Family("qwen2", _LLAMA, _TOP),
    "qwen3": Family("qwen3", _QWEN3, _TOP),
    "qwen3moe": Family("qwen3_moe", {**_QWEN3, **_experts("mlp.switch_mlp", "mlp.gate")}, _TOP),
    "qwen35": _qwen35("qwen3_5", _FEED_FORWARD),
    "qwen35moe": _qwen35("qwen3_5_moe", {**_experts("mlp.switch_mlp", "mlp.gate"), **_SHARED_EXPERT}),
    "gemma": Family("gemma", _LLAMA, _TOP, changes=_norms(_less_one, _LLAMA, _TOP), wide=True),
    "gemma2": Family("gemma2", _GEMMA2, _TOP, changes=_norms(_less_one, _GEMMA2, _TOP), wide=True),
    "gemma3": Family("gemma3_text", _GEMMA3, _TOP, changes=_norms(_less_one, _GEMMA3, _TOP)),
    "gemma4": Family(
        "gemma4_text",
        _GEMMA4,
        _GEMMA4_TOP,
        whole={
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "layer_output_scale.weight": "layer_scalar",
        },
        optional=("layer_scalar",),
        wide=True,
    ),
    "phi3": Family(
        "phi3",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        _TOP,
    ),
}

# Drafters, under the names of the checkpoints that they are made of.
_EAGLE3_TOP = {
    "fc": "fc",
    "enc.output_norm": "input_norm",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
}
_ASSISTANT_TOP = _TOP | {"nextn.pre_projection": "pre_projection", "nextn.post_projection": "post_projection"}
DRAFTERS = {
    "eagle3": Family("eagle3", _LLAMA | {"attn_norm_2": "hidden_norm"}, _EAGLE3_TOP, changes=_HALVES, prefix=""),
    "dflash": Family(
        "dflash",
        _QWEN3,
        _EAGLE3_TOP | {"enc.output_norm": "hidden_norm", "hidden_norm": "hidden_norm"},
        whole={"attn_sinks.weight": "self_attn.sinks"},
        prefix="",
    ),
    "gemma4-assistant": replace(FAMILIES["gemma4"], model_type="gemma4_assistant", top=_ASSISTANT_TOP),
}
# What an MTP block has beside a layer's tensors, under the names of Qwen's checkpoints. An embedding and a head are
# copies of the target's.
HEADS = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
COPIES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
