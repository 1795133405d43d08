"""The drafter that a user named: heads in the target's checkpoint, a drafter's checkpoint, or a smaller model."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checkpoints
from .checkpoints.drafter import kind_of, read_network
from .checkpoints.folder import Folder
from .checkpoints.hub import snapshot
from .checkpoints.mtp import read_heads
from .checkpoints.precision import check_dtype, to_dtype
from .drafters.pairing import check_tokenizers
from .errors import PairingError

if TYPE_CHECKING:
    import mlx.nn as nn

    from .drafters.base import DrafterModel

MTP = "mtp"
MODELS = {
    "dflash": "DFlashModel",
    "eagle3": "Eagle3Model",
    "gemma4_assistant": "Gemma4AssistantModel",
    "medusa": "MedusaModel",
    MTP: "MtpModel",
}
DRAFTER_FILES = ("*.json", "*.safetensors", "*.bin", "*.pt")


def load_drafter(
    source: str,
    *,
    target: str,
    model: "nn.Module",
    tokenizer: Any,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> "DrafterModel | nn.Module":
    """What drafts for `model`, which `load` brought from `target`: "mtp" is the heads inside that checkpoint; anything
    else is a folder, a name of the catalogue or a Hub id, whose kind is told from its files.

    Returns a drafter's weights, or a whole model for an ordinary checkpoint, after comparing the tokenizers; either is
    what SpecDecoder and stream_generate take as `drafter`. Raises CheckpointError and PairingError.
    """
    check_dtype(dtype)
    if source == MTP:
        network = read_heads(Folder(_folder(target, revision, checkpoints.MODEL_FILES)), model)
        if network is None:
            raise PairingError(f"{target} has no MTP heads in its checkpoint; use another drafter")
        return _wrap(MTP, network, dtype)
    kind = kind_of(Folder(folder)) if (folder := _folder(source, revision, ("config.json",))).is_dir() else None
    if kind is not None:
        return _wrap(kind, read_network(Folder(_folder(source, revision, DRAFTER_FILES)), kind), dtype)
    draft, draft_tokenizer = checkpoints.load(
        source, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code
    )
    check_tokenizers(tokenizer, draft_tokenizer)
    return draft


def _folder(source: str, revision: str | None, files: Sequence[str]) -> Path:
    """Where `source` lies: a local path, or what the Hub has of `files`, fetched unless it was."""
    return checkpoints.find(source) or snapshot(source, revision, files)


def _wrap(kind: str, network: "nn.Module", dtype: str | None) -> "DrafterModel":
    """The network as something that drafts, in the precision asked for."""
    module = import_module(f".drafters.{kind}", __package__)
    return getattr(module, MODELS[kind])(network if dtype is None else to_dtype(network, dtype))
