"""A drafter from its folder: which kind it is, told from its files, and the network that they hold."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .folder import Folder

if TYPE_CHECKING:
    import mlx.nn as nn

REFUSED = {
    "DFlash2DraftModel": "DFlash 2",
    "DSpark": "DSpark",
    "DFly": "DFly",
    "DFlare": "DFlare",
    "peagle": "parallel EAGLE",
}


def kind_of(folder: Folder) -> str | None:
    """eagle3, dflash, gemma4_assistant, medusa or mtp; None for an ordinary model.

    Raises CheckpointError for a kind of drafter that is known and not supported.
    """
    config = folder.config
    said = f"{config.get('speculators_model_type', '')} {' '.join(config.get('architectures') or ())}"
    for sign, name in REFUSED.items():
        if sign in said:
            raise CheckpointError(f"{folder.path} is a {name} drafter, which is not supported; use a DFlash, EAGLE-3 "
                                  "or MTP drafter")  # fmt: skip
    model_type = str(config.get("model_type", ""))
    if "dflash" in said.lower() or "dflash_config" in config:
        return "dflash"
    if "eagle3" in said.lower() or "draft_vocab_size" in config:  # SafeAILab's own say LlamaForCausalLM
        return "eagle3"
    if model_type.startswith("gemma4") and model_type.endswith("assistant"):
        return "gemma4_assistant"
    if "medusa_num_heads" in config or model_type == "medusa":
        return "medusa"
    return "mtp" if model_type.endswith("_mtp") else None


def read_network(folder: Folder, kind: str) -> "nn.Module":
    """The network of a drafter's folder, with its weights. Raises CheckpointError."""
    reader: Any = import_module(f".{kind}", __package__)
    return reader.read(folder)


def made_for(folder: Folder) -> str:
    """In words for a message: the model that a drafter's config names, if it names one."""
    speculators = folder.config.get("speculators_config") or {}
    name = (speculators.get("verifier") or {}).get("name_or_path") or folder.config.get("base_model_name_or_path")
    return f", {name}" if name else ""
