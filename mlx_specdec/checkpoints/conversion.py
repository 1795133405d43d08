"""A checkpoint to an MLX folder: a target with its MTP heads, or a drafter, in the numbers asked for.

The model is never held: MLX's arrays are lazy, so what mlx-lm does to a checkpoint (renaming, stacking, quantising) is
planned for all tensors and carried out for one after another, as they are written.
"""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from . import find, load
from .conversion_drafter import convert_drafter
from .conversion_heads import heads_of, layout_of, note_on_heads, with_numbers, write_heads
from .conversion_options import Config, Numbers, cast, dense, forms, quantising
from .conversion_source import SIDECARS, copy_small_files, fetched, lazy_model, original, staged
from .drafter import kind_of
from .folder import Folder
from .onnx import home, onnx_file, staged_onnx
from .precision import DTYPES
from .writing import SHARD, Progress, new_folder, write_shards

_log = logging.getLogger(__name__)


def convert(
    hf_path: str,
    mlx_path: str | Path = "mlx_model",
    numbers: Numbers | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Convert a checkpoint to the new folder `mlx_path`, which mlx-lm loads too if it is a model, and return its path.

    `hf_path` is a folder (Hugging Face's safetensors or .bin, MLX's own, an ONNX export), a .gguf or .onnx file, a name
    of the catalogue or a Hub id. `numbers` say what becomes of the weights; by default they keep their precision, or
    get the one that the config names. MTP heads go along; a drafter keeps its layout. At most one shard is in memory.

    Raises OptionError where `mlx_path` exists or the numbers cannot be had, CheckpointError for a checkpoint that
    cannot be read and a folder that cannot be written. Nothing is left behind then.
    """
    numbers, destination = numbers or Numbers(), Path(mlx_path).expanduser()
    with new_folder(destination) as workshop:
        source, result = find(hf_path) or fetched(hf_path, revision), workshop / "result"
        if (file := onnx_file(source)) is not None:
            copy_small_files(home(file), result)
            stage = staged_onnx(file, workshop / "source")
            _convert_model(stage, stage, result, numbers, progress)
        elif source.is_file():
            _convert_file(source, result, numbers, progress)
        else:
            _convert_folder(Folder(source), workshop, numbers, progress)
    return destination


def _convert_folder(folder: Folder, workshop: Path, numbers: Numbers, progress: Progress | None) -> None:
    kind, result = kind_of(folder), workshop / "result"
    copy_small_files(folder.path, result)
    stage = staged(folder, workshop / "source")
    if kind is not None:
        convert_drafter(folder, stage, kind, result, numbers, progress)
    else:
        _convert_model(folder, stage, result, numbers, progress)


def _convert_model(folder: Folder, stage: Folder, result: Path, numbers: Numbers, progress: Progress | None) -> None:
    """`folder` is what the user gave, `stage` the same as mlx-lm reads it."""
    model, config = lazy_model(folder, stage)
    largest = max(file.stat().st_size for file in stage.files())
    dtype = numbers.dtype or _named_dtype(config)
    entries: Config = {}
    heads = heads_of(original(folder, stage), model)
    if heads is not None and (layout := layout_of(model)):
        with_numbers(heads, numbers, dtype, model)
        entries = write_heads(result / SIDECARS[0], heads, layout)
    elif note := note_on_heads(folder):
        _log.warning("%s; converted without", note)
    del heads
    model, config = _with_numbers(model, config, numbers, dtype)
    _write_model(result, model, config, entries, largest, progress)


def _convert_file(file: Path, result: Path, numbers: Numbers, progress: Progress | None) -> None:
    model, tokenizer = load(file, lazy=True)
    args: Any = model.args  # a dataclass in every model of mlx-lm
    config = {**asdict(args), "eos_token_id": sorted(tokenizer.eos_token_ids)}
    if packed := forms(model):
        config["quantization"] = {**next(iter(packed.values())), **packed}
    model, config = _with_numbers(model, config, numbers, numbers.dtype)
    tokenizer.save_pretrained(result)
    _write_model(result, model, config, {}, SHARD, progress)


def _with_numbers(model: nn.Module, config: Config, numbers: Numbers, dtype: str | None) -> tuple[nn.Module, Config]:
    """The model and its config in the numbers asked for, lazily."""
    from mlx_lm.utils import quantize_model

    if numbers.must_be_dense(model):
        model = dense(model, dtype)
        config = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    if dtype is not None:
        cast(model, dtype)
        config = {k: dtype if k in ("torch_dtype", "dtype") else v for k, v in config.items()}
    if numbers.quantize:
        form, predicate = numbers.form, numbers.predicate(model)
        with quantising():
            model, config = quantize_model(
                model, config, form["group_size"], form["bits"], form["mode"], quant_predicate=predicate
            )
    return model, config


def _write_model(
    result: Path, model: nn.Module, config: Config, entries: Config, largest: int, progress: Progress | None
) -> None:
    """Write the shards and last of all the config, without which nothing loads; the model is of no use afterwards."""
    from mlx_lm.utils import save_config

    tensors = dict(tree_flatten(model.parameters()))
    keep_vision = "vision_tower" in getattr(model, "model", {})
    for module in model.modules():
        module.clear()  # or it would hold every tensor
    write_shards(result, tensors, largest, progress)
    if "quantization" in config:
        config["quantization"] |= entries
    save_config(config, result / "config.json", keep_vision_config=keep_vision)


def _named_dtype(config: Config) -> str | None:
    """The precision that a config says its weights are in: mlx-lm casts to it, and so does transformers."""
    inner: dict[str, Any] = config.get("text_config") or {}
    for place, name in ((config, "torch_dtype"), (config, "dtype"), (inner, "torch_dtype"), (inner, "dtype")):
        if place.get(name) in DTYPES:
            return str(place[name])
    return None
