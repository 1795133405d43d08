"""Files to weights: a model and its tokenizer from a GGUF file, a folder, a catalogue name or a Hub id."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, SpecDecError
from .catalogue import read_catalogue
from .hub import Unreachable, fetch, held, hub_offline, snapshot
from .precision import check_dtype, to_dtype

if TYPE_CHECKING:
    from mlx import nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from .folder import Folder

_log = logging.getLogger(__name__)

# Of a Hub repository, what a model needs: as mlx-lm, with the heads beside the shards, and no code.
MODEL_FILES = (
    "*.json",
    "model*.safetensors",
    "*mtp*.safetensors",
    "mtp/*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)


def load(source: str | PathLike[str], **options: Any) -> "tuple[nn.Module, TokenizerWrapper]":
    """An mlx-lm model and its tokenizer, as `load_with_config` loads them, whose options these are."""
    return load_with_config(source, **options)[:2]


def load_with_config(
    source: str | PathLike[str],
    *,
    dtype: str | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    adapter_path: str | PathLike[str] | None = None,
    lazy: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    offline: bool = False,
    models: Path | None = None,
    requantise: Mapping[str, int] | None = None,
) -> "tuple[nn.Module, TokenizerWrapper, dict[str, Any]]":
    """Load an mlx-lm model, its tokenizer and its config.

    `source` is, in this order: a local .gguf file or a local folder in mlx-lm's format; a name in
    models.toml; the id of a Hub repository. A local path never touches the network.

    `dtype` (float32, float16, bfloat16) makes quantised weights dense and casts the floating ones; None keeps
    them as they are. `lazy` leaves the parameters unevaluated. `adapter_path` is a folder of LoRA adapters.
    `tokenizer_config` and `model_config` replace fields of the checkpoint's own; `revision` and
    `trust_remote_code` concern folders and Hub repositories only. `offline` takes only what is on this machine;
    `models` is a catalogue that adds to the package's. `requantise` ({"bits": 4, "group_size": 64}) packs what a
    GGUF file holds in types that MLX lacks, which is else made dense.

    Raises OptionError for an unknown dtype and CheckpointError for a model that cannot be found, fetched or
    read.
    """
    from ..target.model import evaluate

    check_dtype(dtype)
    path = find(source, offline=offline, models=models)
    try:
        if path is not None and path.is_file():
            model, tokenizer, config = _load_file(path, tokenizer_config, model_config, dtype, requantise)
            if adapter_path is not None:
                from mlx_lm.utils import load_adapters

                model = load_adapters(model, str(adapter_path))
        else:
            wanted = (*MODEL_FILES, "*.py") if trust_remote_code else MODEL_FILES
            folder = path or _fetch_model(str(source), revision, wanted, offline, models)
            model, tokenizer, config = _load_folder(
                folder, tokenizer_config, model_config, adapter_path, trust_remote_code
            )
        if dtype is not None:
            model = to_dtype(model, dtype)
        if not lazy:
            evaluate(model)
    except SpecDecError:
        raise
    except Exception as error:  # a checkpoint can be wrong in as many ways as the libraries below have exceptions
        said = " ".join(str(error).split())[:300].rstrip(".") or "no reason given"
        hint = "that it is whole and in a format that mlx-lm reads" if path else "the name and the network"
        raise CheckpointError(f"{source} cannot be loaded ({type(error).__name__}: {said}); check {hint}.") from error
    model.eval()
    return model, tokenizer, config


def find(source: str | PathLike[str], *, offline: bool = False, models: Path | None = None) -> Path | None:
    """The local file or folder that `source` names, fetched if it is in the catalogue, unless `offline` or
    HF_HUB_OFFLINE says not to ask; None for a Hub id."""
    text = str(source)
    path = Path(text).expanduser()
    if text and path.exists():
        return path
    entries = read_catalogue(models).models
    if text in entries:
        if (offline or hub_offline()) and held(entries[text]) is None:
            why = "--offline" if offline else "HF_HUB_OFFLINE"
            raise Unreachable(f"{text} is not on this machine, and {why} is set; leave that out once to fetch it")
        return fetch(entries[text], progress=_log.info)
    looks_like_a_path = text.endswith(".gguf") or text.startswith(("/", "./", "../", "~")) or not text
    if looks_like_a_path or not isinstance(source, str):
        raise CheckpointError(
            f"{text!r} does not exist; give a .gguf file, a model folder, one of {', '.join(entries)}, or a Hub id."
        )
    return None


def _fetch_model(
    repository: str, revision: str | None, files: Sequence[str], offline: bool, models: Path | None
) -> Path:
    """The folder of a Hub repository. A drafter is told from the catalogue or its config, before it is fetched."""
    from .folder import Folder

    known = read_catalogue(models).drafters.get(repository)
    if known is not None and known.method != "draft_model":
        raise not_a_model(repository, known.method, f", {' or '.join(known.targets)}")
    config = snapshot(repository, revision, ("config.json",), offline=offline)
    if (config / "config.json").exists():
        refuse_drafter(Folder(config), repository)
        files = (*files, *_heads_file(Folder(config).config))
    return snapshot(repository, revision, files, offline=offline)


def _heads_file(config: Mapping[str, Any]) -> list[str]:
    """The file of tensors that a config names for its MTP heads, which may be called anything but a pattern."""
    named = (config.get("mlx_lm_extra_tensors") or {}).get("mtp_file")
    if isinstance(named, str) and re.fullmatch(r"[\w./-]+\.safetensors", named) and ".." not in named:
        return [named]
    return []


def refuse_drafter(files: "Folder", name: str) -> None:
    """Raise CheckpointError, saying what it is for, when a folder is a drafter's."""
    from .drafter import kind_of, made_for

    if kind := kind_of(files):
        raise not_a_model(name, kind, made_for(files))


def not_a_model(name: str, kind: str, target: str) -> CheckpointError:
    """The sentence for a drafter that is given as a model."""
    return CheckpointError(
        f"{name} is a drafter ({kind}) and not a model; give it with --drafter, and as the model the one it was "
        f"made for{target}"
    )


def _load_folder(
    folder: Path,
    tokenizer_config: Mapping[str, Any] | None,
    model_config: Mapping[str, Any] | None,
    adapter_path: str | PathLike[str] | None,
    trust_remote_code: bool,
) -> "tuple[nn.Module, TokenizerWrapper, dict[str, Any]]":
    """As mlx-lm's `load`, but that heads which a checkpoint carries beside its trunk never make it fail."""
    from mlx_lm.utils import load_adapters, load_model, load_tokenizer

    from .folder import Folder
    from .mtp_layout import trunk_classes

    files = Folder(folder)
    refuse_drafter(files, str(folder))
    files.files()  # a missing shard is named
    model, config = load_model(
        folder,
        lazy=True,
        model_config=dict(model_config or {}),
        get_model_classes=trunk_classes,
        trust_remote_code=trust_remote_code,
    )
    if adapter_path is not None:
        model = load_adapters(model, str(adapter_path))
    tokenizer = load_tokenizer(
        folder,
        {"trust_remote_code": trust_remote_code, **(tokenizer_config or {})},
        eos_token_ids=config.get("eos_token_id"),
    )
    _add_ends(tokenizer, folder)
    return model, tokenizer, config


def _add_ends(tokenizer: "TokenizerWrapper", folder: Path) -> None:
    """End the text at every token that some file calls an end: mlx-lm lets generation_config.json replace what
    config.json says, and a model that then runs past its turn opens the next one."""
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            named = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            for token in named if isinstance(named, list) else [named]:
                if token is not None:
                    tokenizer.add_eos_token(str(token))


def _load_file(
    path: Path,
    tokenizer_config: Mapping[str, Any] | None,
    model_config: Mapping[str, Any] | None,
    dtype: str | None,
    requantise: Mapping[str, int] | None,
) -> "tuple[nn.Module, TokenizerWrapper, dict[str, Any]]":
    from .gguf import model_and_config
    from .gguf_file import GGUFFile
    from .gguf_tokenizer import load_tokenizer

    if path.suffix != ".gguf":
        raise CheckpointError(f"{path} is a file but not a .gguf one; give a .gguf file or a model folder.")
    file = GGUFFile(path)
    dense = dtype is not None
    model, config = model_and_config(file, model_config, dtype=dtype, requantise=requantise, dense=dense)
    return model, load_tokenizer(file, tokenizer_config), config
