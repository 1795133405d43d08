"""Drafters in GGUF files, as llama.cpp's converter makes them: EAGLE-3, DFlash, Gemma 4 assistants, and the MTP blocks
(`nextn`) of a target.

Each is given the config and the tensor names of the checkpoint that it was made of, and read by that one's reader.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .drafter import kind_of, read_network
from .folder import Folder
from .gguf import read_parameters, with_quantisation
from .gguf_config import family_of, heads_alone, model_config, mtp_layers, shared
from .gguf_families import COPIES, DRAFTERS, ROPE_FACTORS, Family, of_head
from .gguf_fields import FULL, SLIDING, Fields, partial
from .gguf_file import GGUFFile
from .gguf_gemma import gemma4

if TYPE_CHECKING:
    import mlx.nn as nn

Config = dict[str, Any]
SUFFIX = ".gguf"
_DRAFT_IDS = "d2t"
# By a tensor that no other kind has: drafters that share DFlash's architecture and are refused by these names.
_RELATIVES = {
    "markov_w1.weight": "DSparkDraftModel",
    "selector_hidden.weight": "DFlash2DraftModel",
    "layer_fusion": "DFlyDraftModel",
}


def checkpoint(path: Path) -> Folder:
    """A checkpoint's folder or GGUF file, whichever `path` is, as readers of drafters take it.

    Raises CheckpointError.
    """
    return GGUFFolder(path) if path.is_file() and path.suffix == SUFFIX else Folder(path)


def read_drafter(path: Path) -> "tuple[str, nn.Module]":
    """The kind (see `kind_of`) and the network of a drafter in a GGUF file. Raises CheckpointError."""
    folder = GGUFFolder(path)
    kind = kind_of(folder)
    if kind is None:
        raise CheckpointError(f"{path} holds a model to generate with and no drafter; use it as a draft model")
    return kind, read_network(folder, kind)


class GGUFFolder(Folder):
    """A GGUF file in the place of a folder: `config` and `tensors()` are those of the checkpoint that it was made of.

    A target's are the heads' alone. `path` is that of the file.
    """

    def __init__(self, path: Path):
        """Raises CheckpointError for a file of another architecture, or one that cannot be read."""
        self.path = path
        self.file = GGUFFile(path)
        architecture = str(self.file.metadata.get("general.architecture")).replace("_", "-")
        self._drafter = DRAFTERS.get(architecture)
        if self._drafter is None:
            _, self._family = family_of(self.file)
            self.config = _of_heads(self.file)
        else:
            self._family = self._drafter
            self.config = _CONFIGS[architecture](Fields(self.file, self.file.metadata["general.architecture"]))
        self._sizes = self.config.get("text_config", self.config)

    def tensors(self) -> dict[str, mx.array]:
        """All of the drafter's tensors, evaluated. Raises CheckpointError for one that has no place in it."""
        places = self._heads() if self._drafter is None else self._all(self._drafter)
        tensors, settings = read_parameters(self.file, self._family, self._sizes, places)
        self.config = with_quantisation(self.config, settings)
        if _DRAFT_IDS in self.file.tensors:
            tensors[_DRAFT_IDS] = self._offsets()
        return tensors

    def _all(self, family: Family) -> dict[str, tuple[str, ...]]:
        places = {}
        for name in self.file.tensors:
            if name not in (*ROPE_FACTORS, _DRAFT_IDS) and not name.startswith("masked_emb"):
                places[name] = family.parameters(name, self._sizes["num_hidden_layers"])
                if not places[name]:
                    raise self.file.fault(f"tensor {name!r} has no place in a drafter of kind {family.model_type}")
        return places

    def _heads(self) -> dict[str, tuple[str, ...]]:
        places, layers = {}, self.config["num_hidden_layers"]
        for number in range(mtp_layers(self.file)):
            prefix = f"blk.{layers + number}."
            for name in self.file.tensors:
                if name.startswith(prefix) and (tail := name.removeprefix(prefix)) not in COPIES:
                    places[name] = of_head(self._family, tail, number)
                    if not places[name]:
                        raise self.file.fault(f"tensor {name!r} has no place in an MTP head")
        return places

    def _offsets(self) -> mx.array:
        """The file holds the ids themselves, where published checkpoints hold what is to be added to a row's number."""
        ids = self.file.integers(_DRAFT_IDS).reshape(-1)
        if ids.min() < 0 or ids.max() >= 1 << 31:
            raise self.file.fault(f"{_DRAFT_IDS} names tokens from {ids.min()} to {ids.max()}")
        return mx.array((ids - np.arange(len(ids))).astype(np.int32))


def _of_heads(file: GGUFFile) -> Config:
    """The config of a target with its heads; of heads without their target, with the model type that says so."""
    config = model_config(file) | {"mtp_num_hidden_layers": mtp_layers(file)}
    return config | {"model_type": f"{config['model_type']}_mtp"} if heads_alone(file) else config


def _layers(fields: Fields, kind: str) -> Config:
    """What EAGLE-3 and DFlash share: the sizes of their layers, and the target that they were made for."""
    fields.refuse(kind, _HONOURED)
    layers = fields.count("block_count")
    if layers > len(fields.file.tensors):
        raise fields.file.fault(f"it claims {layers} layers and has {len(fields.file.tensors)} tensors")
    config = shared(fields, kind, layers, own_embedding=False)
    head_dim = config["head_dim"]
    return config | {
        "intermediate_size": fields.count("feed_forward_length"),
        "rope_scaling": fields.rope_scaling(head_dim),
        "partial_rotary_factor": partial(fields.count("rope.dimension_count", head_dim), head_dim),
        "target_hidden_size": fields.count("target_hidden_size", config["hidden_size"]),
        "tie_word_embeddings": False,
    }


def _inputs(fields: Fields) -> list[int]:
    """The layers of the target that are read, each numbered by its input, where the output of the layer before is."""
    ids = fields.optional("target_layers", fields.optional("extract_layers"))
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise fields.wrong("target_layers", ids, "not a list of layers")
    return ids


def _eagle3(fields: Fields) -> Config:
    return _layers(fields, "llama") | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": _inputs(fields),
        "norm_before_residual": bool(fields.optional("norm_before_residual", False)),
        "norm_before_fc": bool(fields.optional("norm_before_fc", False)),
    }


def _dflash(fields: Fields) -> Config:
    config = _layers(fields, "qwen3")
    if config["partial_rotary_factor"] != 1:
        raise fields.impossible("rope.dimension_count", "dflash")
    layers, relatives = config["num_hidden_layers"], _RELATIVES.keys() & fields.file.tensors.keys()
    window = fields.any_count("attention.sliding_window")
    sliding = fields.flags("attention.sliding_window_pattern", layers) or [True] * layers
    mask = fields.file.metadata.get("tokenizer.ggml.mask_token_id", fields.optional("mask_token_id"))
    return config | {
        "architectures": [_RELATIVES[min(relatives)] if relatives else "DFlashDraftModel"],
        "block_size": fields.count("block_size", 16),
        "dflash_config": {"target_layer_ids": [i - 1 for i in _inputs(fields)], "mask_token_id": mask},
        "layer_types": [SLIDING if window and each else FULL for each in sliding],
        "sliding_window": window or None,
        "sample_from_anchor": bool(fields.optional("sample_from_anchor", False)),
        # llama.cpp looks at a block whole in every layer, and says so even of drafters whose sliding layers do not.
        "is_causal": True if fields.optional("attention.causal") else None,
        "output_multiplier": fields.number("logit_scale", 1.0) or 1.0,
        "final_logit_softcapping": fields.optional("final_logit_softcapping") or None,
    }


def _assistant(fields: Fields) -> Config:
    """The clusters of tokens that some have are left out by the converter; a head without them sees every token."""
    layers = fields.count("block_count")
    if layers > len(fields.file.tensors):
        raise fields.file.fault(f"it claims {layers} layers and has {len(fields.file.tensors)} tensors")
    config = shared(fields, "gemma4_text", layers)
    return {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": fields.count("embedding_length_out"),
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "text_config": config | gemma4(fields, config),
    }


_HONOURED = ("attention.causal", "attention.sliding_window", "logit_scale", "final_logit_softcapping")
_CONFIGS: dict[str, Callable[[Fields], Config]] = {
    "eagle3": _eagle3,
    "dflash": _dflash,
    "gemma4-assistant": _assistant,
}
