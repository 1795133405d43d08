"""A drafter from its folder: which kind it is, told from its files, and the network that they hold."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .folder import Folder

if TYPE_CHECKING:
    import mlx.nn as nn

REFUSED = {  # lower case
    "dflash2draftmodel": "DFlash 2",
    "dspark": "DSpark",
    "dfly": "DFly",
    "dflare": "DFlare",
    "peagle": "parallel EAGLE",
}


def kind_of(folder: Folder) -> str | None:
    """eagle3, dflash, gemma4_assistant, medusa or mtp; None for an ordinary model.

    Told from the config, or from the tensors' names where that says nothing. Raises CheckpointError for a kind of
    drafter that is known and not supported.
    """
    config = folder.config
    named = config.get("architectures")
    said = " ".join(str(name) for name in (config.get("speculators_model_type"), *_listed(named))).lower()
    for sign, name in REFUSED.items():
        if sign in said:
            raise _unsupported(folder, name)
    model_type = str(config.get("model_type", ""))
    if "dflash" in said or "dflash_config" in config:
        return "dflash"
    if "eagle3" in said or "draft_vocab_size" in config:  # SafeAILab's own say LlamaForCausalLM
        return "eagle3"
    if model_type.startswith("gemma4") and model_type.endswith("assistant"):
        return "gemma4_assistant"
    if "medusa_num_heads" in config or model_type == "medusa":
        return "medusa"
    return "mtp" if model_type.endswith("_mtp") else _by_tensors(folder)


def _by_tensors(folder: Folder) -> str | None:
    names = folder.names()
    if any(name.startswith("midlayer.") for name in names):
        return "eagle3"
    of_others = any(name.startswith(("model.", "language_model.")) or "norm_hidden" in name for name in names)
    if {"fc.weight", "layers.0.mlp.gate_proj.weight"} <= names and not of_others:  # a trunk, or MTP heads
        raise _unsupported(folder, "EAGLE-1 or EAGLE-2")
    return None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _unsupported(folder: Folder, name: str) -> CheckpointError:
    return CheckpointError(
        f"{folder.path} is a {name} drafter, which is not supported; use a DFlash, EAGLE-3 or MTP drafter"
    )


def read_network(folder: Folder, kind: str) -> "nn.Module":
    """The network of a drafter's folder, with its weights. Raises CheckpointError."""
    reader: Any = import_module(f".{kind}", __package__)
    return reader.read(folder)


def made_for(folder: Folder) -> str:
    """In words for a message: the model that a drafter's config names, if it names one."""
    speculators = folder.config.get("speculators_config") or {}
    name = (speculators.get("verifier") or {}).get("name_or_path") or folder.config.get("base_model_name_or_path")
    return f", {name}" if name else ""
