"""A checkpoint of any format to an MLX folder: a target with its MTP heads, or a drafter, in the numbers asked for."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from . import find
from .conversion_drafter import convert_drafter
from .conversion_gguf import convert_gguf
from .conversion_heads import has_heads, heads_beside, note_on_heads, take_along
from .conversion_model import named_dtype, write_model
from .conversion_options import Numbers
from .conversion_source import converting, copy_small_files, fetched, lazy_model, original, staged
from .drafter import kind_of
from .folder import Folder
from .mtp import read_heads
from .onnx import home, onnx_file, staged_onnx
from .writing import Progress, new_folder

_log = logging.getLogger(__name__)


def convert(
    hf_path: str,
    mlx_path: str | Path = "mlx_model",
    numbers: Numbers | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Convert a checkpoint to the new folder `mlx_path`, which mlx-lm loads too if it is a model, and return its path.

    `hf_path` is a folder (Hugging Face's safetensors or .bin, MLX's own, an ONNX export), a .gguf or .onnx file, a name
    of the catalogue or a Hub id. `numbers` say what becomes of the weights; by default they keep their precision, or
    get the one that the config names. MTP heads go along; a drafter keeps its layout. At most one shard is in memory.
    `revision` is that of a Hub repository; with `offline` only what is on this machine is taken.

    Raises OptionError where `mlx_path` exists or the numbers cannot be had, CheckpointError for a checkpoint that
    cannot be read and a folder that cannot be written. Nothing is left behind then.
    """
    numbers, destination = numbers or Numbers(), Path(mlx_path).expanduser()
    with new_folder(destination) as workshop, converting(hf_path):
        source, result = _source(hf_path, revision, offline), workshop / "result"
        if (file := onnx_file(source)) is not None:
            copy_small_files(home(file), result)
            stage = staged_onnx(file, workshop / "source")
            _convert_model(stage, stage, result, numbers, progress)
        elif source.is_file():
            convert_gguf(source, result, numbers, progress)
        else:
            _convert_folder(Folder(source), workshop, numbers, progress)
    return destination


def _source(name: str, revision: str | None, offline: bool) -> Path:
    return find(name, offline=offline) or fetched(name, revision, offline)


def _convert_folder(folder: Folder, workshop: Path, numbers: Numbers, progress: Progress | None) -> None:
    kind, result = kind_of(folder), workshop / "result"
    copy_small_files(folder.path, result)
    with TemporaryDirectory(prefix="mlx-specdec-") as links:  # not every disk has links, that of the system does
        stage = staged(folder, Path(links) / "source", workshop / "source")
        if kind is not None:
            convert_drafter(original(folder, stage), stage, kind, result, numbers, _largest(stage), progress)
        else:
            _convert_model(folder, stage, result, numbers, progress)


def _convert_model(folder: Folder, stage: Folder, result: Path, numbers: Numbers, progress: Progress | None) -> None:
    """`folder` is what the user gave, `stage` the same as mlx-lm reads it."""
    model, config = lazy_model(folder, stage)
    dtype, entries = numbers.dtype or named_dtype(config), {}
    source = folder if heads_beside(folder) else original(folder, stage)
    if has_heads(source, model):
        entries = take_along(read_heads(source, model), model, numbers, dtype, result)
    elif note := note_on_heads(folder):
        _log.warning("%s; converted without", note)
    write_model(result, model, config, entries, numbers, dtype, _largest(stage), progress)


def _largest(stage: Folder) -> int:
    """Bytes of its largest file, which those of the result do not exceed."""
    return max(file.stat().st_size for file in stage.files())
