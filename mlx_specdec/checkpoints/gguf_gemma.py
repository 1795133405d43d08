"""The configurations of the Gemma family, whose layers are of two kinds: sliding windows, and full attention."""

from typing import Any

from .gguf_fields import FULL, SLIDING, Fields, partial, scaled, unscaled

Config = dict[str, Any]


def gemma2(fields: Fields, config: Config) -> Config:
    return unscaled(fields, config) | {
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, 46),
    }


def _query_scalar(config: Config, layers_of_27b: int) -> int:
    """The file does not say by what scores are divided. The models of 27 billion parameters are the exception."""
    exception = config["num_hidden_layers"] == layers_of_27b
    return config["hidden_size"] // config["num_attention_heads"] if exception else config["head_dim"]


def gemma3(fields: Fields, config: Config) -> Config:
    pattern = fields.optional("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, int):
        pattern = _interval(fields, config)
    return scaled(fields, config) | {
        "rope_theta": fields.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _query_scalar(config, 62),
        "sliding_window": fields.count("attention.sliding_window"),
        "sliding_window_pattern": pattern,
    }


def _interval(fields: Fields, config: Config) -> int:
    """After how many layers one of full attention comes, from a list that marks the sliding ones."""
    key, layers = "attention.sliding_window_pattern", config["num_hidden_layers"]
    sliding = fields.flags(key, layers) or []
    interval = sliding.index(False) + 1 if False in sliding else layers + 1
    if sliding != [(i + 1) % interval != 0 for i in range(layers)]:
        raise fields.impossible(key, config["model_type"])
    return interval


def gemma4(fields: Fields, config: Config) -> Config:
    file, layers, full_dim = fields.file, config["num_hidden_layers"], config["head_dim"]
    sliding = fields.flags("attention.sliding_window_pattern", layers)
    if sliding is None:
        raise fields.wrong("attention.sliding_window_pattern", None, f"not a list of {layers}")
    head_dim = fields.count("attention.key_length_swa", full_dim)
    for key, size in (("attention.value_length_swa", head_dim), ("rope.dimension_count_swa", head_dim),
                      ("rope.dimension_count", full_dim)):  # fmt: skip
        if (value := fields.count(key, size)) != size:
            raise fields.wrong(key, value, f"where the head dimension is {size}")
    widths = fields.counts("feed_forward_length", layers)
    shared = fields.any_count("attention.shared_kv_layers")
    wide = [widths[0] * (2 if i >= layers - shared > 0 else 1) for i in range(layers)]
    if len(set(widths)) > 1 and widths != wide:
        raise fields.impossible("feed_forward_length", config["model_type"])
    heads = fields.counts("attention.head_count_kv", layers)
    of_kind = {kind: {n for n, each in zip(heads, sliding, strict=True) if each is kind} for kind in (True, False)}
    if max(map(len, of_kind.values())) > 1:
        raise fields.impossible("attention.head_count_kv", config["model_type"])
    rotated = fields.factors("rope_freqs.weight", full_dim // 2) or [1.0] * (full_dim // 2)
    per_layer = file.tensors.get("per_layer_token_embd.weight")
    values = [f"blk.{i}.attn_v.weight" in file.tensors for i in range(layers - shared) if not sliding[i]]
    experts = fields.any_count("expert_count") > 0
    return {
        "intermediate_size": widths[0],
        "use_double_wide_mlp": len(set(widths)) > 1,
        "head_dim": head_dim,
        "global_head_dim": full_dim,
        "num_key_value_heads": min(of_kind[True] or of_kind[False]),
        "num_global_key_value_heads": min(of_kind[False] or of_kind[True]),
        "attention_k_eq_v": bool(values) and not any(values),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": fields.any_count("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": per_layer.shape[0] if per_layer else config["vocab_size"],
        "layer_types": [SLIDING if each else FULL for each in sliding],
        "sliding_window": fields.count("attention.sliding_window"),
        "final_logit_softcapping": fields.optional("final_logit_softcapping") or None,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": fields.number("rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": _rotated(fields, rotated),
            },
            SLIDING: {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)},
        },
        "enable_moe_block": experts,
        "num_experts": fields.count("expert_count") if experts else None,
        "top_k_experts": fields.count("expert_used_count") if experts else None,
        "moe_intermediate_size": fields.count("expert_feed_forward_length") if experts else None,
    }


def _rotated(fields: Fields, divisors: list[float]) -> float:
    """The part of a head that turns: its frequencies are divided by 1, the others by 1e30."""
    turning = sum(each == 1.0 for each in divisors)
    if any(each < 1e20 for each in divisors[turning:]) or any(each != 1.0 for each in divisors[:turning]):
        raise fields.file.fault("rope_freqs.weight does not rotate the first part of a head and leave the rest")
    return partial(2 * turning, 2 * len(divisors))
