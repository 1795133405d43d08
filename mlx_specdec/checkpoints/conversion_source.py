"""What a conversion reads: the files of a checkpoint, found, checked, and laid out as mlx-lm reads them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..errors import CheckpointError, SpecDecError
from .folder import SIDECARS, Folder, is_within, read_tensors
from .hub import snapshot
from .mtp_layout import trunk_classes
from .writing import save

# Of a repository, only what the result or the conversion needs, and of its formats only the first that it has.
SMALL = (
    *("*.json", "*.jinja", "*.txt", "*.tiktoken", "tiktoken.model", "tokenizer.model", "tokenization_*.py"),
    *("LICENSE*", "NOTICE*", "additional_chat_templates/*"),
)
FORMATS = (
    ("model*.safetensors", "*mtp*.safetensors", "mtp/*.safetensors"),
    ("*.safetensors",),
    ("pytorch_model*.bin", "*.pt"),
    ("*.onnx", "*.onnx*data*"),
    ("onnx/decoder_model_merged.onnx*", "onnx/model.onnx*"),
)
QUANTISATION = ("quantization", "quantization_config")  # which mlx-lm takes for a table wherever they are there
COPIED = (
    *("tokenizer*.json", "tokenizer.model", "*.tiktoken", "tiktoken.model", "vocab.*", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*"),
    *("generation_config.json", "LICENSE*", "NOTICE*"),
)


@contextmanager
def converting(source: str) -> Iterator[None]:
    """Whatever is wrong with a checkpoint as one sentence: a config can be wrong in as many ways as its readers have
    exceptions."""
    try:
        yield
    except (SpecDecError, ImportError, OSError):  # the second is no checkpoint's fault, the third the disk's
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300].rstrip(".") or "no reason given"
        raise CheckpointError(
            f"{source} cannot be converted ({type(error).__name__}: {said}); check that it is whole"
        ) from error


def fetched(repository: str, revision: str | None, offline: bool = False) -> Path:
    """The folder of a Hub repository with what a conversion needs; `offline` never asks. Raises CheckpointError."""
    folder = snapshot(repository, revision, SMALL, offline=offline)
    for files in FORMATS:
        folder = snapshot(repository, revision, (*SMALL, *files), offline=offline)
        found = (path for pattern in files for path in folder.glob(pattern))
        if any(str(path.relative_to(folder)) not in SIDECARS for path in found):
            break
    return folder


def staged(folder: Folder, links: Path, files: Path) -> Folder:
    """A folder with the config and the weights of `folder` as mlx-lm reads them: the shards that are meant, no others,
    under names that it looks for.

    It is `links`, with links to safetensors, or `files`, into which PyTorch's files are written anew, one in memory at
    a time. Raises CheckpointError for a file that cannot be read, and for a folder without weights; OSError.
    """
    shards = _shards(folder)
    stage = links if _safe(shards) else files
    stage.mkdir()
    for number, file in enumerate(shards, 1):
        name = stage / f"model-{number:05d}.safetensors"
        tensors = read_tensors(file)  # unread, if safe, but known to be there
        if stage is links:
            name.symlink_to(file.resolve())
        else:
            save(name, tensors)
    for kept in ("config.json", "hf_quant_config.json"):
        if (folder.path / kept).is_file():
            shutil.copyfile(folder.path / kept, stage / kept)
    return Folder(stage)


def _safe(files: list[Path]) -> bool:
    return all(file.suffix == ".safetensors" for file in files)


def _shards(folder: Folder) -> list[Path]:
    """Without an index a file of heads, or the same weights in another format (consolidated.*), may be among them."""
    files = [file for file in folder.files() if file.name not in SIDECARS]
    return [file for file in files if file.name.startswith("model")] or files


def original(folder: Folder, stage: Folder) -> Folder:
    """The one to read tensors by name from, which a message should name if that can be."""
    return folder if _safe(folder.files()) else stage


def lazy_model(folder: Folder, stage: Folder) -> tuple[nn.Module, dict[str, Any]]:
    """The mlx-lm model of a staged checkpoint, its parameters unread, heads left out, and its config.

    Raises CheckpointError, speaking of `folder`.
    """
    from mlx_lm.utils import load_model

    _check_architecture(folder)
    try:
        model, config = load_model(stage.path, lazy=True, get_model_classes=trunk_classes)
    except Exception as error:  # a checkpoint can be wrong in as many ways as mlx-lm's models have exceptions
        said = " ".join(str(error).split())[:300].rstrip(".").replace(str(stage.path), str(folder.path))
        raise CheckpointError(f"{folder.path} does not fit its config.json ({type(error).__name__}: {said}); "
                              "fetch it again") from error  # fmt: skip
    return model, {key: value for key, value in config.items() if value is not None or key not in QUANTISATION}


def _check_architecture(folder: Folder) -> None:
    from mlx_lm import __version__

    config = folder.config
    kind = config.get("model_type")
    if config.get("model_file") is not None:
        raise CheckpointError(
            f"{folder.path} brings its own model code ({config['model_file']!r}), which is not run; use mlx_lm.convert "
            "if you trust it"
        )
    try:
        if not isinstance(kind, str) or not kind.replace("-", "_").isidentifier():
            raise ValueError
        trunk_classes(config)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder.path} has the model_type {kind!r}, for which mlx-lm {__version__} has no model; update mlx-lm or "
            "convert another model"
        ) from error


def copy_small_files(folder: Path, result: Path) -> None:
    """The tokenizer, the chat template, how to generate, and the licence. No code, unless the tokenizer is made of it:
    then it is copied, not run. Raises CheckpointError for a link to what is no part of the checkpoint."""
    patterns = list(COPIED)
    if (file := folder / "tokenizer_config.json").is_file() and "auto_map" in file.read_text(encoding="utf-8"):
        patterns.append("*.py")
    for pattern in patterns:
        for file in folder.glob(pattern):
            if file.is_file():
                if not is_within(file, folder):
                    raise CheckpointError(f"{file} is a link to {file.resolve()}, which is no part of the checkpoint; "
                                          "put the file itself there")  # fmt: skip
                target = result / file.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
