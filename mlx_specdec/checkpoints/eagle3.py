"""EAGLE-3 checkpoints: the layout of SafeAILab, SpecForge, SGLang and AngelSlim (`midlayer.*`, one flat config), and
that of speculators (`layers.0.*`, the layer's sizes in `transformer_layer_config`)."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.llama import ModelArgs

from ..errors import CheckpointError
from ..networks.eagle3 import Eagle3, Eagle3Config
from .draft_vocab import draft_ids
from .folder import Folder, fill

RENAMED = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


def read(folder: Folder) -> Eagle3:
    """The network of an EAGLE-3 checkpoint, with its weights in their own dtype. Raises CheckpointError."""
    tensors = {_ours(name): tensor for name, tensor in folder.tensors().items()}
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    tensors = {name: tensor for name, tensor in tensors.items() if not _superfluous(name)}
    try:
        config = _config(folder, tensors.keys(), d2t)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # entries of other types
        raise _wrong(folder, f"it is not the config of an EAGLE-3 drafter ({error!r})") from error
    ids = draft_ids(folder.path, config.draft_vocab, config.layer.vocab_size, d2t, t2d)
    try:
        network = Eagle3(config, ids)
    except (KeyError, ValueError, TypeError) as error:  # what mlx-lm raises for a scaling that it cannot build
        raise _wrong(folder, f"rope_scaling {config.layer.rope_scaling} cannot be used ({error!r})") from error
    fill(network, tensors, folder)
    return network


def _ours(name: str) -> str:
    name = name.removeprefix("model.")
    for theirs, ours in RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _superfluous(name: str) -> bool:
    """Whether a tensor is a copy of the target's, kept for training, or one that follows from the config."""
    return name.startswith("verifier_") or name.endswith("rotary_emb.inv_freq")


def _config(folder: Folder, names: Any, d2t: mx.array | None) -> Eagle3Config:
    """From the config, and from `names` of tensors where a part is there or not."""
    said = folder.config
    flat = {**said, **(said.get("eagle_config") or {})}
    if flat.get("use_aux_hidden_state") is False:
        raise _wrong(folder, "use_aux_hidden_state is false, and only drafters of several hidden states are supported")
    norm_before_fc = bool(flat.get("norm_before_fc")) or "input_norm.weight" in names
    fc_norm = bool(flat.get("fc_norm")) or "fc_norm.0.weight" in names
    if norm_before_fc and fc_norm:
        raise _wrong(folder, "norm_before_fc and fc_norm are both set and exclude each other")
    layer = said.get("transformer_layer_config") or said
    args, rope = _layer(folder, layer), _rope(layer)
    speculators = said.get("speculators_config") or {}
    tokens = (speculators.get("proposal_methods") or [{}])[0].get("speculative_tokens")
    own_embedding, first = "embed_tokens.weight" in names, "layers.0.self_attn."
    config = Eagle3Config(
        layer=args,
        target_hidden=_size(folder, said, "target_hidden_size", args.hidden_size),
        draft_vocab=_size(folder, said, "draft_vocab_size", args.vocab_size if d2t is None else d2t.size),
        layer_ids=_layer_ids(folder, said),
        windows=_windows(layer, args.num_hidden_layers),
        rotary=float(rope["partial_rotary_factor"]),
        qk_norm=f"{first}q_norm.weight" in names,
        qkv_bias=bool(layer.get("attention_bias") or layer.get("qkv_bias")) or f"{first}q_proj.bias" in names,
        o_bias=f"{first}o_proj.bias" in names,
        fc_bias="fc.bias" in names,
        own_embedding=own_embedding,
        own_head="lm_head.weight" in names,
        tied=own_embedding and bool(said.get("tie_word_embeddings")),
        norm_before_residual=bool(flat.get("norm_before_residual")),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=bool(flat.get("norm_output")),
        draft_tokens=tokens if type(tokens) is int and tokens > 0 else None,
        target_name=(speculators.get("verifier") or {}).get("name_or_path"),
    )
    _check_ends(folder, config)
    return config


def _layer(folder: Folder, layer: dict[str, Any]) -> ModelArgs:
    """The sizes of the layers, with the defaults of Hugging Face's Llama where one may be missing."""
    if layer.get("hidden_act", "silu") != "silu":
        raise _wrong(folder, f"hidden_act is {layer['hidden_act']!r} and only silu is supported")
    hidden, heads = _size(folder, layer, "hidden_size"), _size(folder, layer, "num_attention_heads")
    kv_heads = _size(folder, layer, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise _wrong(folder, f"num_attention_heads is {heads}, which num_key_value_heads {kv_heads} does not divide")
    rope = _rope(layer)
    positions = _size(folder, layer, "max_position_embeddings", 2048)
    return ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=_size(folder, layer, "num_hidden_layers", 1),
        intermediate_size=_size(folder, layer, "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_size(folder, layer, "head_dim", hidden // heads),
        rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        vocab_size=_size(folder, layer, "vocab_size"),
        max_position_embeddings=positions,
        mlp_bias=bool(layer.get("mlp_bias")),
        rope_theta=rope["rope_theta"],
        rope_scaling=_scaling(rope, positions),
    )


def _rope(layer: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the rotation, from `rope_theta` and `rope_scaling` or from the newer `rope_parameters`."""
    newer = layer.get("rope_parameters") or {}
    newer = newer.get("sliding_attention", newer)  # of a target with several; speculators takes this one
    rope = {**newer, **(layer.get("rope_scaling") or {})}
    rope["rope_theta"] = float(layer.get("rope_theta") or rope.get("rope_theta") or 10000)
    rope["type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope.setdefault("partial_rotary_factor", layer.get("partial_rotary_factor") or 1.0)
    return rope


def _scaling(rope: dict[str, Any], positions: int) -> dict[str, Any] | None:
    """mlx-lm's `rope_scaling`; text has the same position on every axis of a multimodal rotation."""
    if rope["type"] in ("default", "mrope"):
        return None
    return {"original_max_position_embeddings": positions, **rope}


def _windows(layer: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    types = layer.get("layer_types") or []
    window = layer.get("sliding_window") if layer.get("use_sliding_window", True) else None
    return tuple(window if i < len(types) and types[i] == "sliding_attention" else None for i in range(layers))


def _layer_ids(folder: Folder, said: dict[str, Any]) -> tuple[int, ...] | None:
    """The layers of the target whose outputs are read; None if the checkpoint leaves that to the usual three.

    speculators and vLLM number them by their inputs, in `eagle_aux_hidden_state_layer_ids`, where the input of layer
    n of n is the output of the last; SGLang by their outputs, in the key of that name inside `eagle_config`.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    by_output = (said.get("eagle_config") or {}).get(key)
    ids = by_output or said.get(key)
    if not ids:
        return None
    outputs = tuple(ids) if by_output else tuple(i - 1 for i in ids)
    if min(outputs) < 0:
        raise _wrong(folder, f"{key} is {ids}, and what enters the target's first layer cannot be read")
    return outputs


def _check_ends(folder: Folder, config: Eagle3Config) -> None:
    """The target's embedding and head are of the target's width."""
    hidden, target = config.layer.hidden_size, config.target_hidden
    if hidden != target and not (config.own_embedding and (config.own_head or config.tied)):
        missing = "lm_head" if config.own_embedding else "embed_tokens"
        raise _wrong(folder, f"there is no {missing}, and the target's is {target} wide and the drafter {hidden}")


def _size(folder: Folder, config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise _wrong(folder, f"{key} is {value!r} and must be a whole number from 1")
    return value


def _wrong(folder: Folder, what: str) -> CheckpointError:
    return CheckpointError(f"{folder.path / 'config.json'}: {what}; use another drafter")
