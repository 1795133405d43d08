"""Typed access to the metadata of a GGUF file, and what it says that mlx-lm's models cannot do."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .gguf_file import GGUFFile

SLIDING, FULL = "sliding_attention", "full_attention"
_FREQUENCIES = "rope_freqs.weight"

# Keys that change the arithmetic in ways that few of the mlx-lm models have a field for, with values that change
# nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (True,),
    "expert_gating_func": (0, 1),  # softmax
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "embedding_length_per_layer_input": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


class Fields:
    """The keys of one architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def optional(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "not a number")
        # float32 in the file: 1e-06 again, and not what is nearest to it
        return float(value) if isinstance(value, int) else float(str(np.float32(value)))

    def count(self, key: str, default: int | None = None) -> int:
        value = self.optional(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self.wrong(key, value, "not a positive whole number")
        return value

    def any_count(self, key: str) -> int:
        """A whole number, 0 if it is not there."""
        return self.count(key) if self.optional(key, 0) != 0 else 0

    def counts(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """A number for each layer, from such a list or from one number for all."""
        value = self.optional(key)
        if not isinstance(value, list):
            return [self.count(key, default)] * layers
        if len(value) != layers or not all(type(each) is int and 0 < each < 1 << 31 for each in value):
            raise self.wrong(key, value[:8], f"not {layers} positive whole numbers")
        return value

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """A yes or no for each layer; None if there is no such list."""
        value = self.optional(key)
        if not isinstance(value, list):
            return None
        if len(value) < layers:
            raise self.wrong(key, value[:8], f"not {layers} values")
        return [bool(each) for each in value[:layers]]

    def wrong(self, key: str, value: Any, what: str) -> CheckpointError:
        return self.file.fault(f"{self.architecture}.{key} is {value!r}, {what}")

    def impossible(self, key: str, model_type: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file.path} sets {self.architecture}.{key} to {self.optional(key)!r}, which mlx-lm's {model_type} "
            "model cannot do; use another conversion of the model"
        )

    def refuse(self, model_type: str, known: Collection[str]) -> None:
        """Raises CheckpointError for a key that would change the arithmetic and is not among the `known` ones."""
        for key, neutral in NEUTRAL.items():
            if key not in known and self.optional(key, neutral[0]) not in neutral:
                raise self.impossible(key, model_type)

    def vocabulary(self, hidden: int, own: bool = True) -> int:
        """The rows of the embedding, which may be more than there are tokens. Drafters may have none of their `own`:
        the target's vocabulary, then."""
        embedding = self.file.tensors.get("token_embd.weight")
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        if embedding is None:
            if own:
                raise self.file.fault("tensor 'token_embd.weight' is missing")
            return self.count("vocab_size", len(tokens) if isinstance(tokens, list) else None)
        if embedding.shape[1:] != (hidden,):
            raise self.file.fault(f"'token_embd.weight' has shape {embedding.shape} where the hidden size is {hidden}")
        if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
            raise self.file.fault(f"it has {len(tokens)} tokens and {embedding.shape[0]} embeddings")
        return embedding.shape[0]

    def factors(self, name: str, count: int) -> list[float] | None:
        """A tensor of `count` plain numbers, or None if it is not there."""
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        if tensor.shape != (count,) or tensor.type.name != "F32":
            raise self.file.fault(
                f"{name} is not {count} plain numbers but of shape {tensor.shape} and type {tensor.type.name}"
            )
        values: list[float] = self.file.read(name).weight.tolist()  # type: ignore[assignment]
        return values

    def rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        """mlx-lm's `rope_scaling`."""
        kind = self.optional("rope.scaling.type", "linear")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0)) or 1.0
        if (factors := self.factors(_FREQUENCIES, head_dim // 2)) is not None:
            if kind == "yarn" or factor != 1.0:
                raise self.file.fault(f"it has both {_FREQUENCIES} and {kind} scaling by {factor}")
            # A divisor for each frequency (Llama 3). That is mlx-lm's longrope, as long as its own scaling of the
            # values is kept out by an original context that no model exceeds.
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
                "original_max_position_embeddings": self.count(
                    "rope.scaling.original_context_length", self.count("context_length")
                ),
                "beta_fast": self.number("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": self.number("rope.scaling.yarn_beta_slow", 1.0),
            }
        raise CheckpointError(
            f"{self.file.path} scales its positions by {kind!r}; only linear, yarn and {_FREQUENCIES} are read"
        )


def dense(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a model has whose layers are all alike and rotate whole heads. Raises CheckpointError for another."""
    head_dim = config["head_dim"]
    if (size := fields.count("rope.dimension_count", head_dim)) != head_dim:
        raise fields.wrong("rope.dimension_count", size, f"where the head dimension is {head_dim}")
    for key in ("attention.head_count_kv", "feed_forward_length"):
        if len(set(fields.counts(key, config["num_hidden_layers"], 1))) > 1:
            raise fields.impossible(key, config["model_type"])
    return {"intermediate_size": fields.counts("feed_forward_length", config["num_hidden_layers"])[0]}


def scaled(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    return dense(fields, config) | {"rope_scaling": fields.rope_scaling(config["head_dim"])}


def unscaled(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """For the models of mlx-lm that have no scaling of positions."""
    if fields.rope_scaling(config["head_dim"]) is not None:
        raise CheckpointError(
            f"{fields.file.path} scales its positions, which mlx-lm's {config['model_type']} model cannot do; use "
            "another conversion of the model"
        )
    return dense(fields, config)


def partial(rotated: int, head_dim: int) -> float:
    """A factor that `int(head_dim * factor)` turns into `rotated`."""
    factor = rotated / head_dim
    return factor if int(head_dim * factor) == rotated else (rotated + 0.5) / head_dim
