"""An ONNX export of a decoder (onnxruntime-genai's or optimum's) as weights that mlx-lm reads."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import CheckpointError
from .folder import Folder
from .mtp_layout import trunk_classes
from .onnx_blocks import unpacked
from .onnx_config import genai_config
from .onnx_file import OnnxFile
from .onnx_parts import FUSED, REFUSED, Dense, Module, Names, Packed, find_modules
from .writing import Tensors, save

Config = dict[str, Any]

DECODERS = (
    "decoder_model_merged.onnx",
    "model_merged.onnx",
    "decoder_with_past_model.onnx",
    "decoder_model.onnx",
    "model.onnx",
)
ONE_ADDED = ("gemma", "gemma2", "gemma3", "gemma3_text")  # mlx-lm adds 1 to their norms' weights, as exporters did
STAGED = 1 << 30  # bytes of a file


def onnx_file(source: Path) -> Path | None:
    """The decoder in a folder that holds weights as ONNX only, or `source` itself if it is such a file."""
    if source.is_file():
        return source if source.suffix == ".onnx" else None
    if any(source.glob("*.safetensors")) or any(source.glob("pytorch_model*.bin")):
        return None
    try:
        genai = json.loads((source / "genai_config.json").read_text(encoding="utf-8"))
        named = [Path(genai["model"]["decoder"]["filename"]).name]
    except (OSError, ValueError, KeyError, TypeError):
        named = []
    for folder in (source, source / "onnx"):
        files = {file.name: file for file in sorted(folder.glob("*.onnx"))}
        for name in (*named, *DECODERS):
            if name in files:
                return files[name]
        if len(files) == 1:
            return next(iter(files.values()))
    return None


def home(file: Path) -> Path:
    """Where its config and tokenizer lie: beside it, or one folder up."""
    beside, above = file.parent, file.parent.parent
    names = ("config.json", "genai_config.json")
    return above if not any((beside / n).is_file() for n in names) and (above / names[0]).is_file() else beside


def staged_onnx(path: Path, stage: Path) -> Folder:
    """`stage` as a folder of mlx-lm's with the config and the weights of an ONNX decoder, one file in memory at a time.

    4-bit and 8-bit blocks of 32, 64 or 128 stay as they are, where MLX's own form holds them exactly; others become
    dense. Raises CheckpointError for what is no such decoder.
    """
    stage.mkdir()
    file, folder = OnnxFile(path), home(path)
    config = Folder(folder).config if (folder / "config.json").is_file() else genai_config(folder, file)
    model = _empty_model(path, config)
    parameters: Any = tree_flatten(model.parameters())
    shapes = {name: tuple(value.shape) for name, value in parameters}
    names = Names(sorted({name.rpartition(".")[0] for name in shapes}))
    modules = find_modules(file, names)
    forms: Config = {}
    tensors: Tensors = {}
    count = 0
    for module in dict.fromkeys(name.rpartition(".")[0] for name in shapes):
        parts = _module(file, module, modules, shapes, str(config["model_type"]))
        if "scales" in parts:
            forms[module] = _form(parts, shapes[f"{module}.weight"])
        tensors |= {f"{module}.{part}": value for part, value in parts.items()}
        mx.eval(list(parts.values()))
        if sum(value.nbytes for value in tensors.values()) >= STAGED:
            save(stage / f"model-{(count := count + 1):05d}.safetensors", tensors)
            tensors = {}
    save(stage / f"model-{count + 1:05d}.safetensors", tensors)
    if forms:
        config["quantization"] = {**next(iter(forms.values())), **forms}
    (stage / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return Folder(stage)


def _empty_model(path: Path, config: Config) -> nn.Module:
    """Raises CheckpointError for an architecture that mlx-lm has not."""
    try:
        classes: Any = trunk_classes(config)
        kind, args = classes
        model: nn.Module = kind(args.from_dict(config))
    except Exception as error:  # as many kinds as there are models
        said = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path} is of the model_type {config.get('model_type')!r}, of which mlx-lm makes no model ({said}); "
            "convert another model"
        ) from error
    if hasattr(model, "sanitize"):
        model.sanitize({})  # which takes the head away where it is tied
    return model


def _module(
    file: OnnxFile, path: str, modules: dict[str, Module], shapes: dict[str, tuple[int, ...]], kind: str
) -> Tensors:
    """The parameters of a module, by their names in it. Raises CheckpointError where they are not all there."""
    wanted = {name.rpartition(".")[2]: shape for name, shape in shapes.items() if name.rpartition(".")[0] == path}
    parts = _parts(file, path, modules, shapes)
    if kind in ONE_ADDED and len(wanted["weight"]) == 1 and "weight" in parts:
        parts["weight"] = parts["weight"] - 1
    elif "weight" not in parts and "bias" in parts and "bias" not in wanted:
        parts = {"weight": parts["bias"]}  # 1 is added in the graph
    for part, shape in wanted.items():
        if part not in parts:
            raise _missing(file, f"{path}.{part}")
        held = shape if part == "weight" and "scales" in parts else tuple(parts[part].shape)
        if held != shape:
            raise CheckpointError(
                f"{file.path}: {path}.{part} has the shape {list(held)} and its config asks for {list(shape)}; is the "
                "config that of another model?"
            )
    return {part: value for part, value in parts.items() if part in wanted or part in ("scales", "biases")}


def _missing(file: OnnxFile, name: str) -> CheckpointError:
    kinds = sorted({node.op_type for node in file.nodes} & set(REFUSED))
    if kinds:
        return CheckpointError(
            f"{file.path} holds weights as {kinds[0]}, which is not supported; use an export in float32, float16, "
            "bfloat16 or 4 bits (MatMulNBits)"
        )
    return CheckpointError(f"{file.path} lacks {name}; is it a whole decoder, and of the family that its config names?")


def _parts(file: OnnxFile, path: str, modules: dict[str, Module], shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """A module's parameters from the graph; those of fused projections are parted, those of parted ones fused."""
    if path in modules:
        return _read(file, modules[path])
    stem, _, last = path.rpartition(".")
    if last in FUSED:
        all_parts = [_parts(file, f"{stem}.{part}", modules, shapes) for part in FUSED[last]]
        if any(parts.keys() != all_parts[0].keys() for parts in all_parts):
            return {}
        return {part: mx.concatenate([parts[part] for parts in all_parts]) for part in all_parts[0]}
    for fused, members in FUSED.items():
        if last in members and f"{stem}.{fused}" in modules:
            rows = [0, *accumulate(shapes[f"{stem}.{member}.weight"][0] for member in members)]
            first = members.index(last)
            whole = _read(file, modules[f"{stem}.{fused}"])
            return {part: mx.contiguous(value[rows[first] : rows[first + 1]]) for part, value in whole.items()}
    return {}


def _read(file: OnnxFile, module: Module) -> Tensors:
    parts: Tensors = {}
    if isinstance(module.weight, Packed):
        parts = unpacked(file, module.weight)
    elif module.weight is not None:
        parts["weight"] = _dense(file, module.weight)
    if module.bias is not None:
        parts["bias"] = _dense(file, module.bias)
    return parts


def _dense(file: OnnxFile, source: Dense) -> mx.array:
    array = file.array(source.name)
    return mx.contiguous(array.T) if source.transposed else array


def _form(parts: Tensors, shape: tuple[int, ...]) -> Config:
    columns = shape[-1]
    bits = parts["weight"].shape[-1] * 32 // columns
    return {"group_size": columns // parts["scales"].shape[-1], "bits": bits, "mode": "affine"}
