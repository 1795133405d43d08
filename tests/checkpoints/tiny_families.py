"""A tiny checkpoint for each architecture, with what llama.cpp's converter says of it."""

import math

import numpy as np

from .gguf_sources import FFN, HEAD_DIM, VOCAB, Source

FULL, SLIDING = "full_attention", "sliding_attention"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
}
LINEAR_KEYS = {
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
    "ssm.state_size": 32,
    "ssm.inner_size": 128,
    "ssm.conv_kernel": 4,
    "full_attention_interval": 2,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [11, 11, 10, 0],
}
GEMMA4 = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "final_logit_softcapping": 20.0,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 3000.0},
    },
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
GEMMA4_KEYS = {
    "attention.head_count_kv": [2, 1, 2, 1],
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, False, True, False],
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "rope.freq_base_swa": 3000.0,
    "final_logit_softcapping": 20.0,
}
GEMMA4_TURNS = {"rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12, np.float32)}
GEMMA4_SMALL = {  # of the small models: layers that take keys from others, wider for it, and embeddings for each layer
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
GEMMA4_SMALL_KEYS = {
    "attention.head_count_kv": 2,
    "attention.shared_kv_layers": 2,
    "feed_forward_length": [FFN, FFN, 2 * FFN, 2 * FFN],
    "embedding_length_per_layer_input": 8,
}
SU = {"type": "longrope", "long_factor": [1.0 + i / 4 for i in range(6)], "short_factor": [1.0] * 6}
SOURCES = {
    "llama": Source("llama", "llama"),
    "llama-untied": Source("llama", "llama", {"tie_word_embeddings": False}),
    "smollm3": Source("smollm3", "smollm3", {"no_rope_layer_interval": 4}),
    "qwen2": Source("qwen2", "qwen2", {"head_dim": 16}, {"attention.key_length": 16, "attention.value_length": 16}),
    "qwen3": Source("qwen3", "qwen3"),
    "qwen3moe": Source(
        "qwen3moe", "qwen3_moe",
        EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}, EXPERT_KEYS,
    ),
    "qwen35": Source("qwen35", "qwen3_5", LINEAR, LINEAR_KEYS),
    "qwen35-untied": Source("qwen35", "qwen3_5", LINEAR | {"tie_word_embeddings": False}, LINEAR_KEYS),
    "qwen35moe": Source(
        "qwen35moe", "qwen3_5_moe", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32},
        LINEAR_KEYS | EXPERT_KEYS | {"expert_shared_feed_forward_length": 32},
    ),
    "gemma": Source("gemma", "gemma"),
    "gemma2": Source(
        "gemma2", "gemma2",
        {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0, "query_pre_attn_scalar": HEAD_DIM},
        {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0, "attention.sliding_window": 8},
    ),
    "gemma3": Source(
        "gemma3", "gemma3_text",
        {"query_pre_attn_scalar": HEAD_DIM, "sliding_window": 8, "sliding_window_pattern": 2,
         "rope_local_base_freq": 3000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False, True, False],
         "rope.freq_base_swa": 3000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gemma4": Source("gemma4", "gemma4_text", GEMMA4, GEMMA4_KEYS, GEMMA4_TURNS),
    "gemma4-small": Source(
        "gemma4", "gemma4_text", GEMMA4 | GEMMA4_SMALL, GEMMA4_KEYS | GEMMA4_SMALL_KEYS, GEMMA4_TURNS
    ),
    "gemma4-experts": Source(
        "gemma4", "gemma4_text",
        GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        GEMMA4_KEYS | EXPERT_KEYS, GEMMA4_TURNS,
    ),
    "phi3": Source("phi3", "phi3", {"head_dim": 16, "tie_word_embeddings": False},
                   {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}),
    "phi3-long": Source(
        "phi3", "phi3",
        {"head_dim": 16, "partial_rotary_factor": 0.75, "rope_scaling": SU, "original_max_position_embeddings": 32},
        {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 12,
         "rope.scaling.original_context_length": 32, "attention.sliding_window": 8,
         "rope.scaling.attn_factor": (1 + math.log(4) / math.log(32)) ** 0.5},
        {f"rope_factors_{kind}.weight": np.array(SU[f"{kind}_factor"], np.float32) for kind in ("long", "short")},
    ),
}  # fmt: skip
