"""Which drafters fit a target, told from configs and tokenizers, without any weights and without a network.

A config can be wrong in as many ways as its readers have exceptions. Whatever is wrong with the target is one sentence;
whatever is wrong with another repository is said in its line, and the others are listed.
"""

from pathlib import Path
from typing import Any, NamedTuple

from .checkpoints import find, not_a_model, refuse_drafter
from .checkpoints.catalogue import Catalogue, Drafter
from .checkpoints.drafter import kind_of
from .checkpoints.folder import Folder
from .checkpoints.gguf_drafter import checkpoint
from .checkpoints.hub import cached, repositories
from .choice import on_this_machine, reason
from .drafters.pairing import MadeFor, check_tokenizers, compare, made_for, of_target
from .errors import CheckpointError, SpecDecError
from .pairs import MTP, carried_tokenizer, identity, reading

MODEL = "draft_model"


class Described(NamedTuple):
    """A target: where it lies (None if it is not on this machine), its config, the families that it belongs to, by what
    it was recognised, and its sizes."""

    source: str
    path: Path | None
    config: dict[str, Any]
    families: list[str]
    by: str
    sizes: MadeFor


class Fit(NamedTuple):
    """A drafter for a target: whether it is on this machine, and what is wrong with it, None where nothing is."""

    name: str
    method: str | None
    here: bool
    wrong: str | None
    entry: Drafter | None = None


class Stored(NamedTuple):
    """A repository in the Hub's cache: a drafter's kind, None for an ordinary model; families that it is, or is for;
    and what is wrong with it if it cannot be used."""

    name: str
    folder: Path
    bytes: int
    kind: str | None
    families: list[str]
    wrong: str | None = None


def describe(source: str, known: Catalogue, models: Path | None = None) -> Described:
    """A target by its folder, file, name or Hub id. Raises CheckpointError for what is none."""
    entry = known.drafters.get(source)
    if entry is not None and entry.method != MODEL:
        raise not_a_model(source, entry.method, f", {' or '.join(entry.targets)}")
    with reading(source):
        return _described(source, known, models)


def _described(source: str, known: Catalogue, models: Path | None) -> Described:
    path = find(source, offline=True, models=models) or cached(source)
    config: dict[str, Any] = {}
    if path is not None:
        files = checkpoint(path)
        refuse_drafter(files, source)
        config = files.config
    families, by = known.families(identity(source, models=models)[0], config)
    return Described(source, path, config, families, by, of_target(config))


def fits(target: Described, known: Catalogue) -> list[Fit]:
    """Heads inside the checkpoint, the drafters published for the target, and all others in the Hub's cache. Raises
    CheckpointError for a target that cannot be read."""
    with reading(target.source):
        found = _heads(target)
        tokenizer = None if target.path is None else carried_tokenizer(target.path)
    for entry in known.drafters_for(target.families):
        path = Path(entry.name).expanduser()
        folder = path if path.exists() else cached(entry.name)
        here = folder is not None and on_this_machine(entry)
        found.append(Fit(entry.name, entry.method, here, _wrong(target, tokenizer, entry.method, folder), entry))
    names = [fit.name for fit in found]
    for other in stored(known):
        if other.name not in names and (other.kind or other.wrong):
            wrong = other.wrong or _wrong(target, tokenizer, str(other.kind), other.folder)
            found.append(Fit(other.name, other.kind, True, wrong, known.drafters.get(other.name)))
    return found


def stored(known: Catalogue) -> list[Stored]:
    """What is in the Hub's cache."""
    found = []
    for name, folder, size in repositories():
        entry = known.drafters.get(name)
        try:
            with reading(name):
                files = Folder(folder)
                kind = kind_of(files) or (entry.method if entry else None)
                families = entry.targets if entry else [] if kind else known.families([name], files.config)[0]
        except SpecDecError as error:
            found.append(Stored(name, folder, size, None, [], reason(error)))
        else:
            found.append(Stored(name, folder, size, kind, families))
    return found


def _wrong(target: Described, tokenizer: Any, method: str, folder: Path | None) -> str | None:
    """What speaks against a drafter, by its config and tokenizer as far as they are on this machine."""
    if folder is None:
        return None
    try:
        with reading(str(folder)):
            if method != MODEL:
                files = checkpoint(folder)
                kind = kind_of(files) or method
                compare(kind, made_for(kind, files.config), target.sizes)
            if tokenizer is not None and (own := carried_tokenizer(folder)) is not None:
                check_tokenizers(tokenizer, own, "draft model" if method == MODEL else "drafter")
    except SpecDecError as error:
        return reason(error)
    return None


def _heads(target: Described) -> list[Fit]:
    """The MTP heads that a target's checkpoint holds, or says it holds, by the names of its tensors."""
    from .checkpoints.mtp import SIDECARS
    from .checkpoints.mtp_layout import LAYOUTS, declared, module_of, settings, trunk_classes

    if target.path is None:
        return []
    if target.path.is_file():  # which declares what it holds
        return [Fit(MTP, MTP, True, None)] if declared(target.config) else []
    try:
        layout = LAYOUTS.get(module_of(trunk_classes(target.config)[0]))
        layers = settings(target.config).get("num_hidden_layers") or 0
        beside = _names_a_file(target) or any((target.path / name).is_file() for name in SIDECARS)
        inside = layout is not None and any(layout.of_a_head(name, layers) for name in _names(Folder(target.path)))
    except (SpecDecError, ValueError, OSError) as error:
        return [Fit(MTP, MTP, True, reason(error))]
    count = declared(target.config)
    if layout is not None and (beside or inside):
        return [Fit(MTP, MTP, True, None)]
    if not count:
        return []
    what = "its files hold none, as when a conversion drops them" if layout else "those of its family are not supported"
    return [Fit(MTP, MTP, True, f"its config declares {count} MTP head(s), and {what}")]


def _names_a_file(target: Described) -> bool:
    """Whether a target's config names a file for its heads. Raises CheckpointError for one that is not there."""
    named = (target.config.get("mlx_lm_extra_tensors") or {}).get("mtp_file")
    if named is None or target.path is None:
        return False
    if not (target.path / named).resolve().is_relative_to(target.path.resolve()):
        raise CheckpointError(f"its config names the file {named!r}, which is not in its folder")
    if not (target.path / named).is_file():
        raise CheckpointError(f"its config names the file {named!r} for its MTP heads, which is missing")
    return True


def _names(folder: Folder) -> list[str]:
    """The names of all tensors, from the heads of the files; of pickled ones, which have none, no names."""
    from safetensors import safe_open

    names: list[str] = []
    for file in (file for file in folder.files() if file.suffix == ".safetensors"):
        try:
            with safe_open(file, framework="numpy") as opened:
                names += opened.keys()
        except Exception as error:  # safetensors has an exception of its own
            raise CheckpointError(f"{file} cannot be read: {error}; fetch it again") from error
    return names
