"""A catalogue of tiny random models, one per mlx-lm architecture worth being exact on.

Whether "the ids equal plain decoding's" depends on how a model keeps its state, not on what it has learnt, so
random float32 weights do, as long as the next token depends on the whole context. Two things make it so here.
Norms, gates, decays and routers are drawn around the values of trained models: a decay near 1 remembers, a
decay near 0 would hide every mistake in a rewind. And the layers are loud against the embedding, or a model
with a tied head would only ever repeat its last token.
"""

import mlx_specdec  # noqa: F401  # isort: skip  # it loads OpenBLAS, and must do so before mlx.core is imported

import copy
import functools
import importlib
import itertools
import math
import random
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import MODEL_REMAPPING
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Config = dict[str, Any]

# What most architectures ask for, in their own words; mlx-lm ignores the keys that a model does not know.
_COMMON: Config = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "sliding_window": 8,
    "conv_kernel": 4,
    "time_step_rank": "auto",
    "time_step_limit": (0.0, math.inf),
}

_TIED: Config = {"tie_word_embeddings": True}

# Routed experts, under the several names that they go by.
_MOE: Config = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
}

# Multi-head latent attention.
_MLA: Config = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

# Keys of 32, and Mamba states of 32 below, because Metal's kernels give each of 32 lanes its share of them.
_GATED_DELTA: Config = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}

_SLIDING_THEN_FULL: Config = {
    "num_hidden_layers": 4,
    "sliding_window_pattern": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}

# The last two layers have no keys and values of their own.
_SHARED_KV: Config = {
    "num_hidden_layers": 5,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
}

_SHORT_CONV: Config = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_bias": False,
    "conv_L_cache": 3,
}

_CONFIGS: dict[str, Config] = {
    # dense
    "llama": {},
    "mistral": {},
    "qwen2": _TIED,
    "qwen3": {},
    "phi": {"num_hidden_layers": 4, "num_attention_heads": 2, "partial_rotary_factor": 0.5},
    "phi3": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "smollm3": {"num_hidden_layers": 4, **_TIED},
    # experts
    "qwen3_moe": _MOE,
    "glm4_moe": {**_MOE, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "deepseek_v3": {**_MOE, **_MLA, "num_key_value_heads": 4},
    # sliding windows
    "gpt_oss": {**_MOE, "num_hidden_layers": 4},
    "gemma3_text": {**_SLIDING_THEN_FULL, "query_pre_attn_scalar": 16},
    "gemma3n": {
        **_SHARED_KV,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0],
        "altup_num_inputs": 4,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        **_SHARED_KV,
        "global_head_dim": 32,
        "num_key_value_heads": 1,
        **_TIED,
    },
    "ministral3": {
        **_SLIDING_THEN_FULL,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    },
    "cohere2": {**_SLIDING_THEN_FULL, "hidden_size": 64, "logit_scale": 0.25},
    "exaone4": {**_SLIDING_THEN_FULL, "sliding_window_pattern": "LLLG"},
    "olmo3": _SLIDING_THEN_FULL,
    "llama4": {
        **_MOE,
        "num_hidden_layers": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 64,
        "use_qk_norm": True,
    },
    # recurrent, and hybrids of recurrence and attention
    "qwen3_next": {**_MOE, **_GATED_DELTA},
    "qwen3_5": _GATED_DELTA,
    "qwen3_5_moe": {**_MOE, **_GATED_DELTA},
    "olmo_hybrid": {**_GATED_DELTA, "linear_allow_neg_eigval": True},
    "kimi_linear": {
        **_MOE,
        **_MLA,
        "num_hidden_layers": 4,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 4096,
    },
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 4, "state_size": 32, "n_groups": 2},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
    },
    "granitemoehybrid": {
        **_MOE,
        **_TIED,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.5,
        "logits_scaling": 0.5,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "position_embedding_type": "nope",
    },
    "nemotron_h": {
        **_MOE,
        "hybrid_override_pattern": list("M-M*EM"),
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
        "time_step_limit": None,
    },
    "jamba": {
        **_MOE,
        **_TIED,
        "num_hidden_layers": 4,
        "attn_layer_offset": 2,
        "attn_layer_period": 4,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
    "plamo2": {
        **_TIED,
        "num_hidden_layers": 4,
        "hidden_size_per_head": 16,
        "mamba_num_heads": 4,
        "mamba_d_state": 32,
    },
    "lfm2": {
        **_SHORT_CONV,
        "block_dim": 32,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    "lfm2_moe": {**_MOE, **_SHORT_CONV, "num_dense_layers": 2, "use_expert_bias": True},
    "baichuan_m1": {"num_hidden_layers": 4, "sliding_window_layers": [1, 3], "conv_window": 2},
    "rwkv7": {
        "head_dim": 32,
        "hidden_size": 64,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "recurrent_gemma": {
        "num_key_value_heads": 1,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 8,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
}

# Their constructors make a head that `sanitize` takes away again, as the published weights have none.
_TIED_BY_SANITIZE = ("gemma3_text", "recurrent_gemma")

ARCHITECTURES: tuple[str, ...] = tuple(_CONFIGS)

# Some random models end in repeating one token. With these shifts of the seed none does for seeds 0 to 2.
_LIVELIER = {
    "qwen2": 10,
    "phi": 40,
    "gemma3_text": 20,
    "qwen3_5": 10,
    "falcon_h1": 10,
    "jamba": 10,
    "nemotron_h": 10,
    "recurrent_gemma": 20,
}


def build(name: str, *, seed: int = 0, vocab: int = 64, **overrides: Any) -> nn.Module:
    """A tiny `name`, float32. The same arguments give the same weights, whatever the global random state."""
    architecture = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(name, name)}")
    sizes = {"vocab_size": vocab, "vocab_size_per_layer_input": vocab}
    config = copy.deepcopy({"model_type": name, **_COMMON, **_CONFIGS[name], **sizes, **overrides})
    if "text_config" in architecture.ModelArgs.__annotations__:
        config = {"model_type": name, "text_config": config}
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    if name in _TIED_BY_SANITIZE:
        model.sanitize({})
    return _rewrite(model, seed + _LIVELIER.get(name, 0), _draw)


# Noise at which a draft model picks the target's token in about 9, 6 and 3 of 10 places.
NOISE = (0.006, 0.035, 0.1)


def perturbed(builder: Callable[[], nn.Module], noise: float, seed: int = 1) -> nn.Module:
    """A draft model for what `builder` makes: its weights moved by `noise` times their tensor's spread."""
    return _rewrite(builder(), seed, lambda _, old, normal, __: old + noise * mx.std(old) * normal)


def draft_of(name: str, *, noise: float, seed: int = 0, vocab: int = 64, **overrides: Any) -> nn.Module:
    """A draft model that agrees with `build(name, seed=seed, ...)` often, but not always."""
    return perturbed(lambda: build(name, seed=seed, vocab=vocab, **overrides), noise, seed + 1)


def _kind(name: str, **fixed: Any) -> Callable[..., nn.Module]:
    return lambda **more: build(name, **{**fixed, **more})


# One small model per way of keeping state, for tests that cross it with everything else.
CACHE_KINDS: dict[str, Callable[..., nn.Module]] = {
    "kv": _kind("llama"),
    "kv_quant": _kind("llama", head_dim=64, hidden_size=64),  # for QuantizedKVCache: groups of 32 or 64
    "window8": _kind("gemma3_text", sliding_window=8),
    "window24": _kind("gemma3_text", sliding_window=24),
    "chunked": _kind("llama4"),
    "gated_delta": _kind("qwen3_5"),
    "mamba": _kind("mamba2"),
    "short_conv": _kind("lfm2"),
    "rwkv": _kind("rwkv7"),
    "hybrid": _kind("falcon_h1"),
    "hybrid_window": _kind("recurrent_gemma"),
}


_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
_SPECIAL = ("<eos>", "<user>", "<assistant>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(
    vocab: int = 300,
    *,
    extra: tuple[str, ...] = (),
    rename: dict[str, str] | None = None,
    shuffle: int | None = None,
) -> TokenizerWrapper:
    """A byte-level BPE tokenizer of `vocab` tokens: the bytes, pairs of letters, then the special tokens.

    For tokenizers that do not match this one: `extra` adds tokens after the others, `rename` renames special
    tokens, and `shuffle` (a seed) gives the same tokens other ids.
    """
    names = {token: (rename or {}).get(token, token) for token in _SPECIAL}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # where \u0120 is the space
    pairs = list(itertools.product("\u0120" + _LETTERS, _LETTERS))
    fixed = len(alphabet) + len(names)
    if not fixed <= vocab <= fixed + len(pairs):
        raise ValueError(f"vocab must be from {fixed} to {fixed + len(pairs)}, not {vocab}")
    merges = pairs[: vocab - fixed]
    tokens = [*alphabet, *map("".join, merges), *names.values(), *extra]
    ids = list(range(len(tokens)))
    if shuffle is not None:
        random.Random(shuffle).shuffle(ids)
    core = Tokenizer(models.BPE(vocab=dict(zip(tokens, ids, strict=True)), merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([*names.values(), *extra])
    template = functools.reduce(lambda text, name: text.replace(*name), names.items(), _CHAT_TEMPLATE)
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=names["<eos>"], chat_template=template)
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)


def _rewrite(model: nn.Module, seed: int, draw: Callable[..., mx.array]) -> nn.Module:
    """Replace every parameter by draw(path, old value, normal noise, uniform noise), all keys distinct."""
    parameters = sorted(dict(tree_flatten(model.parameters())).items())
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    new = []
    for (path, old), key in zip(parameters, keys, strict=True):
        noise = mx.random.normal(old.shape, key=key), mx.random.uniform(shape=old.shape, key=key)
        new.append((path, draw(path, old, *noise)))
    model.update(tree_unflatten(new))
    mx.eval(model.parameters())
    return model


# The first pattern found in a parameter's path says how it is drawn, from normal noise n or uniform noise u.
# Decays centre between 0.6 and 0.98 a token, linear layers have twice the variance-keeping scale, queries
# and keys are large enough for attention to choose, and the last norm makes up for the small embedding.
_DRAWS: tuple[tuple[str, Callable[[mx.array, mx.array], mx.array]], ...] = (
    (r"A_log$", lambda n, u: mx.log(0.25 + 0.75 * u)),
    (r"(dt_bias|dt_proj\.bias|w_lora\.lora\.2\.bias)$", lambda n, u: -2.5 + 2.0 * u),
    (r"recurrent_param$", lambda n, u: -5.0 + 2.0 * u),
    (r"\.x_[rwkvag]$", lambda n, u: u),
    (r"bias$|sinks$", lambda n, u: 0.1 * n),
    (r"(model|backbone)\.(norm|final_\w*norm|norm_f|embedding_norm)\.weight$", lambda n, u: 3.0 + 0.3 * n),
    (r"[qk]_((layer)?norm\.)?weight$", lambda n, u: 1.5 + 0.15 * n),
    (r"norm|\.D$|\.k_[ka]$|scal(e|ar)$", lambda n, u: 1.0 + 0.1 * n),
    (r"embed(dings|_tokens)", lambda n, u: 0.1 * n),
    (r"conv[^.]*\.weight$|conv_[kv]$|r_k$", lambda n, u: 0.6 * n),
    (r"lm_head\.weight$", lambda n, u: 0.7 / math.sqrt(n.shape[-1]) * n),
    (r"weight$", lambda n, u: 2.0 / math.sqrt(n.shape[-1]) * n),
)


def _draw(path: str, _: mx.array, normal: mx.array, uniform: mx.array) -> mx.array:
    for pattern, draw in _DRAWS:
        if re.search(pattern, path):
            return draw(normal, uniform)
    raise KeyError(path)
