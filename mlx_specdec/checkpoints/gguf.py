"""A GGUF file as an mlx-lm model: names, row order, and quantisation kept as it is where MLX has the same."""

import importlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from ..errors import CheckpointError
from .gguf_config import family_of, heads_alone, model_config, mtp_layers
from .gguf_families import ROPE_FACTORS, Family
from .gguf_file import GGUFFile, Tensor
from .gguf_types import FLOATS, exact_dtype, kept_packed, readable
from .gguf_weight import Requantise, Weight

Settings = dict[str, dict[str, Any]]  # how each quantised module is quantised

_log = logging.getLogger(__name__)
_LARGE = 1 << 30  # bytes

# Small matrices that stay float32 in a file of any type, and so do not say what the model is computed in.
_KEPT_WIDE = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "per_layer_model_proj")


@dataclass(frozen=True)
class Precision:
    """What becomes of a file's numbers, as `load_gguf` says."""

    dtype: str | None = None
    anew: Requantise | None = None
    dense: bool = False


PLAIN = Precision()


def load_gguf(
    file: GGUFFile,
    overrides: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    requantise: Mapping[str, int] | None = None,
    dense: bool = False,
) -> nn.Module:
    """The mlx-lm model of a GGUF file.

    Tensors whose type MLX has stay quantised, each in its own bits; the others become dense, or are quantised anew as
    `requantise` says: {"bits": 4, "group_size": 64}. All floating parameters get one dtype, so that the model computes
    in one precision: `dtype`, by default the narrowest that holds every dense matrix and every scale of a file exactly,
    and float16 for types that none but float32 holds so. Norms, float32 on disk, are rounded to it. Models that are
    known to leave float16's range compute in bfloat16 or float32 instead. `dense` unpacks every weight, in float32, and
    rounds it once.

    Memory: the model, and a few times the largest tensor's bytes in the file. `overrides` replaces fields of the mlx-lm
    configuration. Raises CheckpointError for what cannot be mapped exactly, OptionError for a quantisation that MLX
    lacks.
    """
    return model_and_config(file, overrides, dtype=dtype, requantise=requantise, dense=dense)[0]


def model_and_config(
    file: GGUFFile,
    overrides: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    requantise: Mapping[str, int] | None = None,
    dense: bool = False,
) -> tuple[nn.Module, dict[str, Any]]:
    """The model as `load_gguf` has it, and what config.json says of it, its quantisation included."""
    _, family = family_of(file)
    if heads_alone(file):
        raise CheckpointError(f"{file.path} holds the MTP heads of a model and not the model; give it as the drafter")
    precision = Precision(dtype, None if requantise is None else Requantise(**requantise), dense)
    config = model_config(file) | dict(overrides or {})
    module = importlib.import_module(f"mlx_lm.models.{family.model_type}")
    model = module.Model(module.ModelArgs.from_dict(config))
    places = _places(file, family, config)
    kept = getattr(model, "cast_predicate", lambda _: True)
    parameters, settings = read_parameters(file, family, config, places, precision, kept)
    parameters = model.sanitize(parameters) if hasattr(model, "sanitize") else parameters
    nn.quantize(model, class_predicate=lambda path, each: settings.get(path, False) if _packable(each) else False)
    _fill(file, family, model, parameters, config)
    return model, with_quantisation(config, settings)


def read_parameters(
    file: GGUFFile,
    family: Family,
    config: Mapping[str, Any],
    places: Mapping[str, tuple[str, ...]],
    precision: Precision = PLAIN,
    castable: Callable[[str], bool] = lambda _: True,
) -> tuple[dict[str, mx.array], Settings]:
    """The parameters that tensors hold, by `places`, and how the packed ones are packed.

    Floats are in the one dtype that the model computes in, but for those that are not `castable`, which are float32.
    """
    for kind in {file.tensors[name].type for name in places}:
        try:
            readable(kind)
        except CheckpointError as error:
            raise CheckpointError(f"{file.path}: {error}") from error
    tensors = [file.tensors[name] for name in places]
    computing = getattr(mx, precision.dtype) if precision.dtype else computing_dtype(tensors, family.wide)
    _warn(file, tensors, computing, precision)
    parameters: dict[str, mx.array] = {}
    settings: Settings = {}
    for tensor, names in places.items():
        weight = _read(file, tensor, family, config, computing, precision)
        for name, part in zip(names, weight.halves() if len(names) == 2 else (weight,), strict=True):
            if part.settings:
                settings[name.removesuffix(".weight")] = part.settings
            parameters |= _named(name, part, computing if castable(name) else mx.float32)
    return parameters, settings


def _warn(file: GGUFFile, tensors: list[Tensor], computing: mx.Dtype, precision: Precision) -> None:
    """Say so when a file grows by a lot, which nobody who chose a small one expects."""
    unpacked = [tensor for tensor in tensors if not kept_packed(tensor.type) and tensor.type.name not in FLOATS]
    size = sum(math.prod(tensor.shape) for tensor in unpacked) * computing.size
    if precision.anew is None and not precision.dense and size > _LARGE:
        kinds = ", ".join(sorted({tensor.type.name for tensor in unpacked}))
        _log.info(
            "%s has %s weights, which MLX has no form for: they take %.1f GB as they are; convert it with -q to pack "
            "them",
            *(file.path.name, kinds, size / 1e9),
        )


def computing_dtype(tensors: list[Tensor], wide: bool = False) -> mx.Dtype:
    """What a model of these tensors computes in, as `load_gguf` says. `wide`: float16 has not its range."""
    matrices = [t for t in tensors if len(t.shape) > 1 and not any(f"{part}." in t.name for part in _KEPT_WIDE)]
    exact = [dtype for tensor in matrices if (dtype := exact_dtype(tensor.type)) is not None]
    if not exact:
        return mx.bfloat16 if wide else mx.float16
    dtype = reduce(lambda a, b: mx.result_type(mx.array(0, a), mx.array(0, b)), exact)
    return mx.float32 if wide and dtype == mx.float16 else dtype


def with_quantisation(config: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """A configuration that says how its modules are quantised: the commonest way for all, and the others by name."""
    if not settings:
        return dict(config)
    common = Counter(tuple(each.items()) for each in settings.values()).most_common(1)[0][0]
    exceptions = {name: each for name, each in settings.items() if tuple(each.items()) != common}
    return dict(config) | {"quantization": dict(common) | exceptions}


def _places(file: GGUFFile, family: Family, config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The parameters that each tensor of the trunk holds."""
    layers, places = config["num_hidden_layers"], {}
    heads = tuple(f"blk.{layers + i}." for i in range(mtp_layers(file)))
    for name in file.tensors:
        if name in ROPE_FACTORS or (heads and name.startswith(heads)):
            continue
        places[name] = family.parameters(name, layers)
        if not places[name]:
            raise file.fault(f"tensor {name!r} has no place in mlx-lm's {config['model_type']} model")
    return places


def _read(
    file: GGUFFile, name: str, family: Family, config: Mapping[str, Any], computing: mx.Dtype, precision: Precision
) -> Weight:
    """A tensor as mlx-lm has it; floats still in the file's own dtype, for what is added to them."""
    tensor = file.tensors[name]
    floats = tensor.type.name in FLOATS
    if not floats and len(tensor.shape) == 1:
        raise file.fault(
            f"tensor {name!r} of {tensor.shape[0]} values is of type {tensor.type.name}, which is for matrices"
        )
    if floats:
        weight = file.read(name)
    elif precision.dense:
        weight = Weight(file.read(name, mx.float32).dense())
    else:
        weight = file.read(name, computing, precision.anew)
    return family.changed(name, weight, config)


def _named(parameter: str, weight: Weight, dtype: mx.Dtype) -> dict[str, mx.array]:
    """The arrays of a weight under their names, floats in `dtype`; evaluated, so that nothing keeps the file's own."""
    arrays = {}
    for kind, array in weight.arrays.items():
        name = parameter if kind == "weight" else parameter.removesuffix("weight") + kind
        arrays[name] = array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
    mx.eval(list(arrays.values()))
    return arrays


def _packable(module: nn.Module) -> bool:
    return hasattr(module, "to_quantized")


def _fill(
    file: GGUFFile, family: Family, model: nn.Module, parameters: dict[str, mx.array], config: Mapping[str, Any]
) -> None:
    """Give `model` its parameters: every one, of the right shape, none left over."""
    expected = dict(tree_flatten(model.parameters()))
    for name in expected.keys() - parameters.keys():
        if name.endswith(family.optional or ("\0",)):
            parameters[name] = expected[name]

    def tensor_of(parameter: str) -> str:
        layers = config["num_hidden_layers"]
        return next((t for t in family.tensors(layers) if parameter in family.parameters(t, layers)), parameter)

    if missing := sorted(expected.keys() - parameters.keys()):
        raise file.fault(f"tensor {tensor_of(missing[0])!r} is missing")
    for name, array in parameters.items():
        if name not in expected:
            raise file.fault(f"tensor {tensor_of(name)!r} has no place in this model")
        if array.shape != expected[name].shape:
            raise file.fault(f"{tensor_of(name)!r} has shape {array.shape} where {expected[name].shape} is expected")
    model.load_weights(list(parameters.items()))
    model.eval()
