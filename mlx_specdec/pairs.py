"""The drafter that a user named: heads in the target's checkpoint, a drafter's checkpoint, or a smaller model."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checkpoints
from .checkpoints.catalogue import read_catalogue
from .checkpoints.drafter import kind_of, read_network
from .checkpoints.folder import Folder
from .checkpoints.gguf_drafter import SUFFIX, checkpoint
from .checkpoints.hub import cached, snapshot
from .checkpoints.mtp import read_heads
from .checkpoints.precision import check_dtype, to_dtype
from .drafters.pairing import MadeFor, check_tokenizers, compare, made_for
from .errors import CheckpointError, PairingError, SpecDecError
from .target.model import evaluate, hidden_size

if TYPE_CHECKING:
    import mlx.nn as nn

    from .drafters.base import DrafterModel

_log = logging.getLogger(__name__)

MTP = "mtp"
MODELS = {
    "dflash": "DFlashModel",
    "eagle3": "Eagle3Model",
    "gemma4_assistant": "Gemma4AssistantModel",
    "medusa": "MedusaModel",
    MTP: "MtpModel",
}
CONFIG = ("config.json",)
DRAFTER_FILES = ("*.json", "*.safetensors")
PICKLED_FILES = ("pytorch_model*.bin", "medusa_lm_head.pt")  # of a repository that has no safetensors


def load_drafter(
    source: str,
    *,
    target: str,
    model: "nn.Module",
    tokenizer: Any,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    offline: bool = False,
    models: Path | None = None,
    warn: bool = True,
) -> "DrafterModel | nn.Module":
    """What drafts for `model`, which `load` brought from `target`: "mtp" is the heads inside that checkpoint; anything
    else is a folder, a .gguf file, a name of the catalogue or a Hub id, whose kind is told from its files.

    Returns a drafter's weights, or a whole model for an ordinary checkpoint; either is what SpecDecoder and
    stream_generate take as `drafter`. What its config says of its target and the tokenizer that it carries, if any, are
    compared before its weights are fetched and read; another name than the target's is logged unless `warn` is False,
    and no reason to refuse it. `offline` and `models` are those of `checkpoints.load`. Raises
    CheckpointError and PairingError.
    """
    check_dtype(dtype)
    source = str(source)
    hub = Repository(revision, offline, models)
    if source == MTP:
        heads = load_heads(target, model, dtype=dtype, revision=revision, offline=offline, models=models)
        if heads is None:
            raise PairingError(f"{target} has no MTP heads in its checkpoint; use another drafter")
        return heads
    kind = hub.kind(source)
    if kind is None:
        draft, draft_tokenizer = checkpoints.load(
            source,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            offline=offline,
            models=models,
        )
        check_tokenizers(tokenizer, draft_tokenizer)
        return draft
    config = checkpoint(hub.folder(source, CONFIG)).config
    wanted = made_for(kind, config)
    compare(kind, wanted, MadeFor(hidden_size(model), len(model.layers)))
    if warn and wanted.name and (other := _other_name(wanted.name, target, models)):
        _log.warning(f"the drafter {source} says that it was made for {wanted.name}, and this is {other}")
    files = checkpoint(hub.weights(source))
    if (own := carried_tokenizer(files.path)) is not None:
        check_tokenizers(tokenizer, own, "drafter")
    with reading(source, kind):
        return _wrap(kind, read_network(files, kind), dtype)


def _other_name(wanted: str, target: str, models: Path | None) -> str | None:
    """A target's name, if that and the name of the target that is `wanted` tell clearly that these are two models."""
    known = read_catalogue(models)
    names = [name for name in identity(target, models=models)[0] if known.tells(name)]
    if not names or not known.tells(wanted) or any(known.same(name, wanted) for name in names):
        return None
    return names[0]


def identity(source: str, revision: str | None = None, models: Path | None = None) -> tuple[list[str], dict[str, Any]]:
    """What a target on this machine may be recognised by: its names, and its config; that is empty where there is none
    to be read without its weights."""
    try:
        path = checkpoints.find(source, offline=True, models=models) or cached(source, revision)
    except SpecDecError:
        path = None
    if path is None:
        return [source], {}
    place = path.resolve()
    names = [source, place.name]
    if path.is_file():
        return [*names, place.parent.name], {}
    if found := re.search(r"/models--([^/]+)--([^/]+)/snapshots/[^/]+$", place.as_posix()):
        names.append(f"{found[1]}/{found[2]}")
    return names, Folder(path).config


def load_heads(
    target: str,
    model: "nn.Module",
    *,
    dtype: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    models: Path | None = None,
) -> "DrafterModel | None":
    """The MTP heads inside the checkpoint that `load` brought `model` from; None if it has none and declares none.

    Raises CheckpointError when it declares heads that its files do not hold, or that cannot be used.
    """
    path = Repository(revision, offline, models).folder(target, checkpoints.MODEL_FILES)
    with reading(target, MTP):
        network = read_heads(checkpoint(path), model)
        return None if network is None else _wrap(MTP, network, dtype)


@contextmanager
def reading(source: str, kind: str | None = None) -> Iterator[None]:
    """Whatever is wrong with a checkpoint as one sentence: a config can be wrong in as many ways as its readers have
    exceptions."""
    try:
        yield
    except (SpecDecError, ImportError):  # the second is no checkpoint's fault
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300].rstrip(".") or "no reason given"
        what = f"loaded as {kind}" if kind else "read"
        raise CheckpointError(
            f"{source} cannot be {what} ({type(error).__name__}: {said}); check that it is whole"
        ) from error


class Repository:
    """Where files are taken from: local paths, names of the catalogue, the Hub."""

    def __init__(self, revision: str | None = None, offline: bool = False, models: Path | None = None):
        self._revision, self._offline, self._models = revision, offline, models

    def folder(self, source: str, files: tuple[str, ...]) -> Path:
        """Where `source` lies: a local path, or what the Hub has of `files`, fetched unless it was."""
        local = checkpoints.find(source, offline=self._offline, models=self._models)
        return local or snapshot(source, self._revision, files, offline=self._offline)

    def kind(self, source: str) -> str | None:
        """Which kind of drafter it is, by its config or else by the catalogue; None for an ordinary model."""
        path = self.folder(source, CONFIG)
        if path.is_file() and path.suffix != SUFFIX:
            return None  # which loading it says
        known = read_catalogue(self._models).drafters.get(source)
        listed = known.method if known is not None and known.method != "draft_model" else None
        return kind_of(checkpoint(path)) or listed

    def weights(self, source: str) -> Path:
        """Its folder with weights and all: pickled ones only where there are no others."""
        folder = self.folder(source, DRAFTER_FILES)
        if folder.is_dir() and not any(folder.glob("*.safetensors")):
            folder = self.folder(source, PICKLED_FILES)
        return folder


def carried_tokenizer(path: Path) -> Any | None:
    """The tokenizer in a checkpoint's folder or GGUF file; None if it has none. Raises CheckpointError for one that
    cannot be read."""
    from transformers import PreTrainedTokenizerFast

    if path.is_file():
        return _gguf_tokenizer(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CheckpointError(
            f"{file} cannot be read ({' '.join(str(error).split())[:200]}); fetch it again"
        ) from error


def _gguf_tokenizer(path: Path) -> Any | None:
    from .checkpoints.gguf_file import GGUFFile
    from .checkpoints.gguf_tokenizer import load_tokenizer

    file = GGUFFile(path)
    return load_tokenizer(file) if "tokenizer.ggml.tokens" in file.metadata else None


def _wrap(kind: str, network: "nn.Module", dtype: str | None) -> "DrafterModel":
    """The network as something that drafts, in the precision asked for."""
    if dtype is not None:
        network = to_dtype(network, dtype)
    evaluate(network)
    module = import_module(f".drafters.{kind}", __package__)
    return getattr(module, MODELS[kind])(network)
