"""DFlash checkpoints: z-lab's layout, and that of vLLM's speculators.

z-lab's is a Qwen3 config with `dflash_config` inside, and has neither embedding nor head: they are the target's. The
other nests the Qwen3 config and may bring both, the head over fewer tokens.
"""

import math
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from ..networks.dflash import DFlash, DFlashConfig, Sight
from .draft_vocab import draft_ids
from .folder import Folder, fill

SLIDING, FULL = "sliding_attention", "full_attention"
# What a training run left of its target, which drafting has no use for.
LEFT_OVER = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t", "rotary_emb.inv_freq")
# Tensors of drafters that grew out of DFlash and may carry its name in their config.
OTHERS = {"markov_head.": "DSpark", "candidate_selector.": "DFlash 2", "layer_fusion_weights": "DFly"}
OLD_NAMES = {"self_attn.attention_sink_bias": "self_attn.sinks"}


def read(folder: Folder) -> DFlash:
    """Its network, with weights. Raises CheckpointError for a config that says too little, or another than its tensors
    do."""
    if (folder.path / "mask_embedding.pt").exists():
        raise CheckpointError(f"{folder.path} has a mask vector of its own (mask_embedding.pt), which is not "
                              "supported; use a DFlash drafter with a mask token")  # fmt: skip
    tensors = {_name(name): x for name, x in folder.tensors().items()}
    for sign, other in OTHERS.items():
        if any(name.startswith(sign) for name in tensors):
            raise CheckpointError(f"{folder.path} is a {other} drafter, which is not supported; use a DFlash, EAGLE-3 "
                                  "or MTP drafter")  # fmt: skip
    try:
        config = _config(folder, tensors)
        network = DFlash(config, _draft_ids(folder, config, tensors))
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # values of kinds that nothing here expects
        raise CheckpointError(f"the config of {folder.path} cannot be used ({type(error).__name__}: {error}); fetch "
                              "the checkpoint again, or use another drafter") from error  # fmt: skip
    fill(network, {name: x for name, x in tensors.items() if not name.endswith(LEFT_OVER)}, folder)
    return network


def _name(name: str) -> str:
    name = name.removeprefix("model.")
    for old, new in OLD_NAMES.items():
        name = name.replace(old, new)
    return name


class _Fields:
    """The config's values, wherever this layout keeps them."""

    def __init__(self, folder: Folder):
        top = folder.config
        self.folder = folder
        self.speculators = "transformer_layer_config" in top
        inner = top.get("dflash_config") or {}
        self.layer = top.get("transformer_layer_config") or top
        self._places = (inner, top, self.layer)

    def get(self, *names: str) -> Any:
        """The first value that is there and not null: by name, then from the innermost place outwards."""
        for name in names:
            for place in self._places:
                if place.get(name) is not None:
                    return place[name]
        return None

    def need(self, *names: str) -> Any:
        value = self.get(*names)
        if value is None:
            raise CheckpointError(f"the config of {self.folder.path} has no {names[0]}, which a DFlash drafter needs; "
                                  "fetch the checkpoint again")  # fmt: skip
        return value

    def whole(self, name: str, least: int = 1) -> int:
        """A whole number that must be there."""
        value = self.need(name)
        if type(value) is not int or value < least:
            raise CheckpointError(f"the config of {self.folder.path} has the {name} {value!r}, which must be a whole "
                                  f"number from {least}; fetch the checkpoint again")  # fmt: skip
        return value


def _config(folder: Folder, tensors: dict[str, mx.array]) -> DFlashConfig:
    fields = _Fields(folder)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kinds = _kinds(fields)
    verifier = ((fields.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    config = DFlashConfig(
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or hidden // heads,
        rms_norm_eps=fields.get("rms_norm_eps") or 1e-6,
        max_position_embeddings=fields.get("max_position_embeddings") or 32768,
        block_size=fields.whole("block_size"),
        mask_token_id=fields.whole("mask_token_id", 0),
        target_layer_ids=_target_layers(fields),
        target_hidden_size=fields.get("target_hidden_size") or hidden,
        vocab_size=fields.whole("vocab_size"),
        sights=tuple(_sight(fields, kind) for kind in kinds),
        ropes=tuple(_rope(fields, kind) for kind in kinds),
        num_target_layers=fields.get("num_target_layers"),
        target_name=verifier,
        attention_bias=bool(fields.get("attention_bias")),
        sinks=tuple(i for i in range(len(kinds)) if f"layers.{i}.self_attn.sinks" in tensors),
        sample_from_anchor=bool(fields.get("sample_from_anchor")),
        # speculators trains on the rows of the embedding as they are, whatever its target multiplies them by
        scaled_embedding=not fields.speculators,
        input_embedding_scale=float(fields.get("input_embedding_scale") or 1),
        output_multiplier=float(fields.get("output_multiplier") or 1),
        final_logit_softcapping=None if (cap := fields.get("final_logit_softcapping")) is None else float(cap),
        embedding_size=_rows(tensors, "embed_tokens.weight"),
        draft_vocab_size=_rows(tensors, "lm_head.weight"),
    )
    _check(fields, config)
    return config


def _check(fields: _Fields, config: DFlashConfig) -> None:
    where = f"the config of {fields.folder.path}"
    if config.block_size < (1 if config.sample_from_anchor else 2):
        raise CheckpointError(f"{where} has the block_size {config.block_size}, which drafts nothing; "
                              "fetch the checkpoint again")  # fmt: skip
    if (activation := fields.get("hidden_act") or "silu") != "silu":
        raise CheckpointError(f"{where} has the hidden_act {activation!r} and DFlash has silu; use another drafter")
    if config.hidden_size != config.target_hidden_size and None in (config.embedding_size, config.draft_vocab_size):
        raise CheckpointError(f"{where} has the hidden_size {config.hidden_size} and its target "
                              f"{config.target_hidden_size}, whose embedding and head it cannot use, and not both of "
                              "its own; fetch the checkpoint again")  # fmt: skip
    if not 0 <= config.mask_token_id < (config.embedding_size or config.mask_token_id + 1):
        raise CheckpointError(f"{where} has the mask_token_id {config.mask_token_id} and its embedding "
                              f"{config.embedding_size} rows; fetch the checkpoint again")  # fmt: skip
    reduced = fields.get("draft_vocab_size") if fields.speculators else None
    if reduced not in (None, config.vocab_size, config.draft_vocab_size):
        raise CheckpointError(f"{where} has the draft_vocab_size {reduced} and its lm_head has "
                              f"{config.draft_vocab_size or 'no'} rows; fetch the checkpoint again")  # fmt: skip


def _target_layers(fields: _Fields) -> tuple[int, ...]:
    """Always as written; no formula gives them. `target_layer_ids` count the layers' outputs from 0, speculators' ids
    begin with the embedding's."""
    ids = fields.get("target_layer_ids")
    layers = ids if ids is not None else [i - 1 for i in fields.need("aux_hidden_state_layer_ids")]
    if not layers or min(layers) < 0:
        raise CheckpointError(f"the config of {fields.folder.path} names no target layers, or the embedding as one "
                              f"({list(layers)} by their outputs); use another drafter")  # fmt: skip
    return tuple(layers)


def _kinds(fields: _Fields) -> list[str]:
    """Each layer's kind of attention; where they are not listed, transformers' rule for a Qwen3 config."""
    count, kinds = fields.whole("num_hidden_layers"), fields.get("layer_types")
    if kinds is None:
        first = fields.get("max_window_layers") if fields.get("use_sliding_window") else None
        first = count if first is None else first
        return [SLIDING if i >= first else FULL for i in range(count)]
    unknown = set(kinds) - {SLIDING, FULL}
    if len(kinds) != count or unknown:
        raise CheckpointError(f"the config of {fields.folder.path} has {count} layers and the layer_types {kinds}; one "
                              f"of {SLIDING} and {FULL} is expected for each")  # fmt: skip
    return list(kinds)


def _sight(fields: _Fields, kind: str) -> Sight:
    """Sliding layers are causal within the block and full ones are not, unless a flag says so for all.

    In z-lab's code a window reaches back from each row, in speculators' masks from the anchor, for the whole block.
    """
    window = fields.whole("sliding_window", 2) if kind == SLIDING else None
    if fields.speculators:
        return Sight(reach=window, causal=kind == SLIDING and not fields.get("sliding_window_non_causal"))
    said = fields.get("is_causal", "causal")
    causal = kind == SLIDING if said is None else bool(said)
    return Sight(None if window is None else window - 1, window, causal)


def _rope(fields: _Fields, kind: str) -> tuple[float, dict[str, Any] | None]:
    """Theta, and the scaling as mlx-lm reads it. Nested by kind of layer, it is looked up there; speculators turns
    all layers as it does the sliding ones."""
    scaling = fields.layer.get("rope_parameters") or fields.layer.get("rope_scaling")
    if scaling and (nested := [scaling[k] for k in (kind, SLIDING, FULL) if isinstance(scaling.get(k), dict)]):
        scaling = scaling.get(SLIDING, nested[0]) if fields.speculators else nested[0]
    theta = fields.layer.get("rope_theta") or (scaling or {}).get("rope_theta") or 10000.0
    return float(theta), _with_attention_factor(scaling) if scaling else None


def _with_attention_factor(scaling: dict[str, Any]) -> dict[str, Any]:
    """YaRN's factor on queries and keys is 1 + 0.1 ln(factor) unless the config says otherwise, whatever `mscale` it
    took over from its target: so Kimi-K2.5's drafter was trained, and with the 1 of its `mscale` less is accepted."""
    if (scaling.get("rope_type") or scaling.get("type")) != "yarn" or scaling["factor"] <= 1:
        return scaling
    grown = 0.1 * math.log(scaling["factor"])
    factor = scaling.get("attention_factor") or 1 + grown
    return {**scaling, "mscale": (factor - 1) / grown, "mscale_all_dim": 0}


def _rows(tensors: dict[str, mx.array], name: str) -> int | None:
    return tensors[name].shape[0] if name in tensors else None


def _draft_ids(folder: Folder, config: DFlashConfig, tensors: dict[str, mx.array]) -> mx.array | None:
    """Which tokens its own head's rows stand for; None: the row's number."""
    if config.draft_vocab_size is None:
        return None
    ids = draft_ids(folder.path, config.draft_vocab_size, config.vocab_size, tensors.get("d2t"), tensors.get("t2d"))
    return None if ids is None else mx.array(ids.astype(np.int32))
