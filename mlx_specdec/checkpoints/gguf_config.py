"""The metadata of a GGUF file as an mlx-lm configuration, refused where the two cannot say the same."""

from typing import Any

from ..errors import CheckpointError
from .gguf_file import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"

# Keys that change the arithmetic in ways that the mlx-lm models have no field for, with the value that
# changes nothing.
_NEUTRAL: dict[str, Any] = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.scale": 0.0,
    "attention.sliding_window": 0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "embedding_scale": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


def model_config(file: GGUFFile) -> dict[str, Any]:
    """The mlx-lm configuration (as in config.json) of a GGUF file.

    Raises CheckpointError for another architecture, a missing or absurd field, or a field that mlx-lm cannot
    honour.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} is of architecture {architecture!r}; give a GGUF file of "
            f"{', '.join(ARCHITECTURES)}, or the model in mlx-lm's format."
        )
    if (parts := file.metadata.get("split.count", 1)) not in (0, 1):
        raise CheckpointError(f"{file.path} is one of {parts} parts; join them with llama-gguf-split --merge first.")
    fields = _Fields(file, architecture)
    for key, neutral in _NEUTRAL.items():
        if (value := fields.optional(key, neutral)) != neutral:
            raise CheckpointError(
                f"{file.path} sets {architecture}.{key} to {value!r}, which mlx-lm's {architecture} model "
                "cannot do; use another conversion of the model."
            )
    hidden, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := fields.count(key, head_dim)) != head_dim:
            raise file.fault(f"{architecture}.{key} is {value} where the head dimension is {head_dim}")
    if architecture == "qwen2" and head_dim * heads != hidden:
        raise file.fault(f"{heads} heads of {head_dim} do not make the hidden size {hidden}")
    kv_heads = fields.count("attention.head_count_kv", heads)
    if heads % kv_heads or head_dim % 2:
        raise file.fault(f"{heads} heads of {head_dim} do not go with {kv_heads} key-value heads")
    if (layers := fields.count("block_count")) > len(file.tensors):
        raise file.fault(f"it claims {layers} layers and has {len(file.tensors)} tensors")
    config = {
        "model_type": architecture,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocabulary_size(file, hidden),
        "max_position_embeddings": fields.count("context_length"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, fields, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    return config if architecture == "qwen2" else config | {"head_dim": head_dim}


def _vocabulary_size(file: GGUFFile, hidden: int) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.fault("tensor 'token_embd.weight' is missing")
    if embedding.shape[1:] != (hidden,):
        raise file.fault(f"'token_embd.weight' has shape {embedding.shape} where the hidden size is {hidden}")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise file.fault(f"it has {len(tokens)} tokens and {embedding.shape[0]} embeddings")
    return embedding.shape[0]


def _rope_scaling(file: GGUFFile, fields: "_Fields", head_dim: int) -> dict[str, Any] | None:
    kind = fields.optional("rope.scaling.type", "linear")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0)) or 1.0
    if (tensor := file.tensors.get(ROPE_FACTORS)) is not None:
        if tensor.shape != (head_dim // 2,) or tensor.bits is not None:
            raise file.fault(f"{ROPE_FACTORS} is not {head_dim // 2} plain numbers but of shape {tensor.shape}")
        if kind == "yarn" or factor != 1.0:
            raise file.fault(f"it has both {ROPE_FACTORS} and {kind} scaling by {factor}")
        # A divisor for each frequency (Llama 3). That is mlx-lm's longrope, as long as its own scaling of the
        # values is kept out by an original context that no model exceeds.
        factors = file.read(ROPE_FACTORS).weight.tolist()
        return {
            "type": "longrope",
            "original_max_position_embeddings": 1 << 40,
            "short_factor": factors,
            "long_factor": factors,
        }
    if kind == "none" or (kind in ("linear", "yarn") and factor == 1.0):
        return None
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": fields.count(
                "rope.scaling.original_context_length", fields.count("context_length")
            ),
            "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise CheckpointError(f"{file.path} scales its positions by {kind!r}; only linear, yarn and rope_freqs are read.")


class _Fields:
    """Typed access to the keys of one architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.prefix = file, architecture + "."

    def optional(self, key: str, default: Any) -> Any:
        return self.file.metadata.get(self.prefix + key, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.file.fault(f"{self.prefix + key} is {value!r}, not a number")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.optional(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self.file.fault(f"{self.prefix + key} is {value!r}, not a positive whole number")
        return value
