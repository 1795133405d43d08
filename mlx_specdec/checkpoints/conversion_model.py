"""A model to an MLX folder: numbers as asked for, shards, and last of all the config.

The model is never held: MLX's arrays are lazy, so what mlx-lm does to a checkpoint (renaming, stacking, quantising) is
planned for all tensors and carried out for one after another, as they are written.
"""

from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from .conversion_heads import without_place
from .conversion_options import Config, Numbers, cast, forms, make_dense, quantising
from .gguf import with_quantisation
from .precision import DTYPES
from .writing import Progress, write_shards


def write_model(
    result: Path,
    model: nn.Module,
    config: Config,
    entries: Config,
    numbers: Numbers,
    dtype: str | None,
    largest: int,
    progress: Progress | None,
) -> None:
    """Write a lazy model, which is of no use afterwards, into the folder `result`.

    `entries` say in the config how what lies beside it is quantised; `dtype` is that of dense weights, None for their
    own; no file is larger than `largest` bytes. Raises OSError, and OptionError for numbers that it cannot have.
    """
    from mlx_lm.utils import save_config

    model, config = _with_numbers(model, without_place(config), numbers, dtype)
    parameters: Any = tree_flatten(model.parameters())
    tensors = dict(parameters)
    del parameters
    keep_vision = "vision_tower" in getattr(model, "model", {})
    for module in model.modules():
        module.clear()  # or it would hold every tensor
    write_shards(result, tensors, largest, progress)
    if "quantization" in config:
        config["quantization"] |= entries
    save_config(config, result / "config.json", keep_vision_config=keep_vision)


def _with_numbers(model: nn.Module, config: Config, numbers: Numbers, dtype: str | None) -> tuple[nn.Module, Config]:
    """The model and its config in the numbers asked for, lazily."""
    from mlx_lm.utils import quantize_model

    before = forms(model)
    make_dense(model, numbers, dtype)
    kept = forms(model)
    if kept != before:
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
        if kept:
            config = with_quantisation(config, forms(model))
    return model, config


def named_dtype(config: Config) -> str | None:
    """The precision that a config says its weights are in: mlx-lm casts to it, and so does transformers."""
    inner: dict[str, Any] = config.get("text_config") or {}
    for place, name in ((config, "torch_dtype"), (config, "dtype"), (inner, "torch_dtype"), (inner, "dtype")):
        if place.get(name) in DTYPES:
            return str(place[name])
    return None
