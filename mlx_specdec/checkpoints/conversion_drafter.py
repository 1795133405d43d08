"""A drafter's checkpoint in other numbers, in the layout that it was published in."""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx

from .conversion_heads import model_of_heads, with_numbers, without_place, write_heads
from .conversion_options import Config, Numbers, with_dtype
from .drafter import read_network
from .folder import Folder
from .writing import Progress, Tensors, write_shards

# The matrices of its layers; what joins the target's width to the drafter's (fc, the projections) stays as it is.
OF_A_LAYER = re.compile(r"(^|\.)(layers\.\d+|midlayer|\d+)\.(.*\.)?weight$")

PARTS = ("weight", "scales", "biases")  # of a packed module; the last is affine's alone


def convert_drafter(
    folder: Folder, stage: Folder, kind: str, result: Path, numbers: Numbers, largest: int, progress: Progress | None
) -> None:
    """Write a drafter of that kind anew, its config last, in files of at most `largest` bytes.

    `stage` holds what `folder` holds, in files that need not be read as a whole. Raises CheckpointError for a drafter
    that could not draft, OSError.
    """
    network: Any = read_network(folder, kind)
    if kind == "mtp":
        model, layout = model_of_heads(folder)
        with_numbers(network, numbers, numbers.dtype, model)
        write_heads(result / "model.safetensors", network, layout)
    else:
        ends = [f"{name}.weight" for name in ("embed_tokens", "lm_head") if name in network]
        del network
        tensors = stage.tensors()
        write_shards(result, _planned(tensors, folder.config, numbers, ends), largest, progress)
    (result / "config.json").write_text(json.dumps(_config(folder.config, numbers), indent=4), encoding="utf-8")


def _planned(tensors: Tensors, config: Config, numbers: Numbers, ends: list[str]) -> Tensors:
    """The tensors in the numbers asked for, lazily. `ends` are those of its vocabulary that may be packed too."""
    own = config.get("quantization") or config.get("quantization_config") or {}
    modules = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    packed = {module: _form(own, module) for module in modules}
    tensors = _unpacked(tensors, {module: form for module, form in packed.items() if not numbers.keeps(form)})
    tensors = {name: with_dtype(value, numbers.dtype) for name, value in tensors.items()}
    if not numbers.quantize:
        return tensors
    planned: Tensors = {}
    form = _common(own, numbers)
    for name, value in tensors.items():
        planned |= _packed(name, value, form) if _is_linear(name, value, ends) else {name: value}
    return planned


def _form(settings: Config, module: str) -> Config:
    """group_size, bits and mode of a packed module, as `fill` reads them."""
    known = settings.get(module) or settings
    return {"mode": "affine"} | {key: known[key] for key in ("group_size", "bits", "mode") if key in known}


def _common(settings: Config, numbers: Numbers) -> Config:
    """How all are packed that have no form of their own: as they were, if that is what is asked for."""
    known = _form(settings, "")
    return known if {"group_size", "bits"} <= known.keys() and numbers.keeps(known) else numbers.form


def _unpacked(tensors: Tensors, forms: dict[str, Config]) -> Tensors:
    dense: Tensors = {}
    for name, value in tensors.items():
        module, _, part = name.rpartition(".")
        if module not in forms or part not in PARTS:
            dense[name] = value
        elif part == "weight":
            scales, biases = tensors[f"{module}.scales"], tensors.get(f"{module}.biases")
            dense[name] = mx.dequantize(value, scales, biases, **forms[module])
    return dense


def _is_linear(name: str, value: mx.array, ends: list[str]) -> bool:
    inner = OF_A_LAYER.search(name) is not None or name.removeprefix("model.") in ends
    return inner and value.ndim == 2 and mx.issubdtype(value.dtype, mx.floating)


def _packed(name: str, value: mx.array, form: Config) -> Tensors:
    if value.shape[-1] % form["group_size"]:
        return {name: value}
    packed = mx.quantize(value, **form)
    return {name.removesuffix("weight") + part: x for part, x in zip(PARTS, packed, strict=False)}


def _config(config: Config, numbers: Numbers) -> Config:
    config, own = without_place(config), config.get("quantization") or config.get("quantization_config") or {}
    if numbers.dequantize or numbers.quantize:
        config = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    if numbers.quantize:
        kept = {at: form for at, form in own.items() if isinstance(form, dict) and numbers.keeps(_form(form, ""))}
        said = _common(own, numbers) | kept
        config |= {"quantization": said, "quantization_config": said}
    if numbers.dtype:
        config = {key: numbers.dtype if key in ("torch_dtype", "dtype") else value for key, value in config.items()}
    return config
