"""The metadata of a GGUF file as an mlx-lm configuration, refused where the two cannot say the same."""

import math
from collections.abc import Callable
from typing import Any

from ..errors import CheckpointError
from .gguf_families import DRAFTERS, FAMILIES, Family
from .gguf_fields import Fields, partial, scaled, unscaled
from .gguf_file import GGUFFile
from .gguf_gemma import gemma2, gemma3, gemma4

Config = dict[str, Any]
_MOST_LAYERS = 1 << 12  # of a trunk that is in another file
_WIDEST_HEAD = 1 << 16


def family_of(file: GGUFFile) -> tuple[str, Family]:
    """The architecture of a file by llama.cpp's name. Raises CheckpointError for one that is not known."""
    architecture = file.metadata.get("general.architecture")
    if architecture in DRAFTERS:
        raise CheckpointError(f"{file.path} holds a drafter ({architecture}) and no model; give it as the drafter")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise CheckpointError(
            f"{file.path} is of architecture {architecture!r}; give a GGUF file of {', '.join(FAMILIES)}, or the model "
            "in mlx-lm's format"
        )
    return architecture, FAMILIES[architecture]


def model_config(file: GGUFFile) -> Config:
    """The mlx-lm configuration (as in config.json) of a GGUF file.

    Raises CheckpointError for another architecture, a missing or absurd field, or a field that mlx-lm cannot
    honour.
    """
    architecture, family = family_of(file)
    fields = Fields(file, architecture)
    known, own = _OWN[architecture]
    fields.refuse(family.model_type, known)
    config = shared(fields, family.model_type, trunk_layers(fields))
    return config | own(fields, config)


def mtp_layers(file: GGUFFile) -> int:
    """How many of a file's blocks are MTP heads, after its trunk's."""
    count = file.metadata.get(f"{file.metadata.get('general.architecture')}.nextn_predict_layers", 0)
    if type(count) is not int or not 0 <= count < 1 << 16:
        raise file.fault(f"nextn_predict_layers is {count!r}, not a number of layers")
    return count


def trunk_layers(fields: Fields) -> int:
    """How many layers the trunk has. Raises CheckpointError for more than the file can hold."""
    layers = fields.count("block_count") - mtp_layers(fields.file)
    if not 0 < layers <= (len(fields.file.tensors) if not heads_alone(fields.file) else _MOST_LAYERS):
        raise fields.file.fault(f"it claims {layers} layers and has {len(fields.file.tensors)} tensors")
    return layers


def heads_alone(file: GGUFFile) -> bool:
    """Whether it has MTP blocks and no trunk."""
    return mtp_layers(file) > 0 and "blk.0.attn_norm.weight" not in file.tensors


def shared(fields: Fields, model_type: str, layers: int, own_embedding: bool = True) -> Config:
    """What all configurations have."""
    file, hidden = fields.file, fields.count("embedding_length")
    heads = fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", max(hidden // heads, 1))
    if (size := fields.count("attention.value_length", head_dim)) != head_dim:
        raise fields.wrong("attention.value_length", size, f"where the head dimension is {head_dim}")
    kv_heads = min(fields.counts("attention.head_count_kv", layers, heads))
    if heads % kv_heads or head_dim % 2 or head_dim > _WIDEST_HEAD:
        raise file.fault(f"{heads} heads of {head_dim} do not go with {kv_heads} key-value heads")
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": fields.vocabulary(hidden, own_embedding),
        "max_position_embeddings": fields.count("context_length"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _llama(fields: Fields, config: Config) -> Config:
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    return scaled(fields, config) | {key: name in fields.file.tensors for key, name in biases.items()}


def _qwen2(fields: Fields, config: Config) -> Config:
    hidden, heads, head_dim = (config[key] for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if head_dim * heads != hidden:
        raise fields.file.fault(f"{heads} heads of {head_dim} do not make the hidden size {hidden}")
    return scaled(fields, config)


def _experts(fields: Fields) -> Config:
    return {
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _qwen3moe(fields: Fields, config: Config) -> Config:
    return unscaled(fields, config) | _experts(fields)


def _qwen35(fields: Fields, config: Config) -> Config:
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    interval, values = fields.count("full_attention_interval", 4), fields.count("ssm.time_step_rank")
    linear = fields.flags("attention.recurrent_layers", layers)
    if linear not in (None, [(i + 1) % interval != 0 for i in range(layers)]):
        raise fields.impossible("attention.recurrent_layers", config["model_type"])
    scaling = fields.rope_scaling(head_dim)
    keys, inner = fields.count("ssm.group_count"), fields.count("ssm.inner_size")
    if values % keys or inner % values:
        raise fields.file.fault(f"{values} value heads go neither with {keys} key heads nor into {inner} values")
    return {
        "intermediate_size": fields.count("feed_forward_length", 1),
        "full_attention_interval": interval,
        "linear_num_value_heads": values,
        "linear_num_key_heads": keys,
        "linear_key_head_dim": fields.count("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": fields.count("ssm.conv_kernel"),
        "rope_parameters": {
            "type": "default",
            **(scaling or {}),
            "rope_theta": config["rope_theta"],
            "partial_rotary_factor": partial(fields.count("rope.dimension_count", head_dim), head_dim),
        },
    }


def _qwen35moe(fields: Fields, config: Config) -> Config:
    shared = fields.count("expert_shared_feed_forward_length")
    return _qwen35(fields, config) | _experts(fields) | {"shared_expert_intermediate_size": shared}


def _phi3(fields: Fields, config: Config) -> Config:
    """Its sliding window is left out, as by mlx-lm, llama.cpp and the later ones of its own configurations."""
    head_dim = config["head_dim"]
    rotated = fields.count("rope.dimension_count", head_dim)
    long, short = (fields.factors(f"rope_factors_{kind}.weight", rotated // 2) for kind in ("long", "short"))
    context = config["max_position_embeddings"]
    original = fields.count("rope.scaling.original_context_length", context)
    if config["num_attention_heads"] * head_dim != config["hidden_size"]:
        raise fields.file.fault(
            f"{config['num_attention_heads']} heads of {head_dim} do not make the hidden size {config['hidden_size']}"
        )
    scaling = None
    if long is not None and short is not None:
        scaling = {"type": "longrope", "long_factor": long, "short_factor": short}
        if original < 2:
            raise fields.wrong("rope.scaling.original_context_length", original, "not a length of texts")
        longer = context / original
        grown = math.sqrt(1 + math.log(longer) / math.log(original)) if longer > 1 else 1.0
        if not math.isclose(fields.number("rope.scaling.attn_factor", 1.0), grown, rel_tol=1e-4):
            raise fields.impossible("rope.scaling.attn_factor", "phi3")
    return {
        "intermediate_size": fields.count("feed_forward_length"),
        "original_max_position_embeddings": original,
        "partial_rotary_factor": partial(rotated, head_dim),
        "rope_scaling": scaling,
    }


# By architecture: the keys of NEUTRAL that its own part of the configuration honours, and that part.
_EXPERT_KEYS = ("expert_count",)
_OWN: dict[str, tuple[tuple[str, ...], Callable[[Fields, Config], Config]]] = {
    "llama": ((), _llama),
    "smollm3": ((), _llama),
    "qwen2": ((), _qwen2),
    "qwen3": ((), scaled),
    "qwen3moe": (_EXPERT_KEYS, _qwen3moe),
    "qwen35": ((), _qwen35),
    "qwen35moe": ((*_EXPERT_KEYS, "expert_shared_count"), _qwen35moe),
    "gemma": ((), unscaled),
    "gemma2": (("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"), gemma2),
    "gemma3": (("attention.sliding_window",), gemma3),
    "gemma4": (
        (
            *_EXPERT_KEYS,
            "attention.sliding_window",
            "attention.shared_kv_layers",
            "final_logit_softcapping",
            "embedding_length_per_layer_input",
        ),
        gemma4,
    ),
    "phi3": (("attention.sliding_window", "rope.scaling.attn_factor"), _phi3),
}
