"""The MTP heads of a model, taken along: mlx-lm drops them, so they go into a file beside its shards."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..networks.mtp import MtpConfig, MtpNetwork
from .conversion_options import Config, Numbers, cast, forms, make_dense, quantising
from .folder import SIDECARS, Folder, read_tensors
from .mtp_layout import LAYOUTS, MIMO, NEXTN, QWEN, Layout, declared, module_of, settings, trunk_classes
from .writing import SIDECAR, Tensors, save

PROJECTION = "eh_proj"  # which joins two inputs of different size: kept as it is, like the norms


def layout_of(model: nn.Module) -> Layout | None:
    """How the heads of its family are named; None for families whose heads are not known."""
    return LAYOUTS.get(module_of(type(model.layers[0])))


def has_heads(folder: Folder, model: nn.Module) -> bool:
    """Whether a checkpoint's files hold heads, of a family whose heads are known, whatever its config says."""
    layout, layers = layout_of(model), settings(folder.config).get("num_hidden_layers", 0)
    if layout is None:
        return False
    return heads_beside(folder) or any(
        layout.of_a_head(name, layers) for file in folder.files() for name in read_tensors(file)
    )


def heads_beside(folder: Folder) -> bool:
    """Whether heads are in a file of their own, beside the model's."""
    named = (folder.config.get("mlx_lm_extra_tensors") or {}).get("mtp_file")
    return named is not None or any((folder.path / name).is_file() for name in SIDECARS)


def note_on_heads(folder: Folder) -> str | None:
    """What is to be said of a model converted without heads, if its config speaks of some."""
    count = declared(folder.config)
    return f"{folder.path} declares {count} MTP head(s) and holds none that can be used" if count else None


def without_place(config: Config) -> Config:
    """A config that does not name the file of the heads, which are now in one that is looked for by itself."""
    said = config.get("mlx_lm_extra_tensors") or {}
    others = {key: value for key, value in said.items() if key != "mtp_file"}
    config = {key: value for key, value in config.items() if key != "mlx_lm_extra_tensors"}
    return config | {"mlx_lm_extra_tensors": others} if others else config


def take_along(
    heads: MtpNetwork | None, model: nn.Module, numbers: Numbers, dtype: str | None, result: Path
) -> dict[str, Config]:
    """Write the heads of `model` beside its shards to be; returns how their modules are quantised, for the config.

    Raises OSError.
    """
    layout = layout_of(model)
    if heads is None or layout is None:
        return {}
    with_numbers(heads, numbers, dtype, model)
    return write_heads(result / SIDECAR, heads, layout)


def with_numbers(network: MtpNetwork, numbers: Numbers, dtype: str | None, model: nn.Module) -> None:
    """Give the heads of `model` the numbers asked for, lazily and in place."""
    make_dense(network, numbers, dtype)
    if dtype is not None:
        cast(network, dtype)
    if not numbers.quantize:
        return
    predicate = numbers.predicate(model)
    like = next(path for path, module in model.named_modules() if module is model.layers[-1])

    def chosen(path: str, module: nn.Module) -> bool | Config:
        if path.endswith(PROJECTION) or not hasattr(module, "to_quantized"):
            return False
        inner = path.partition(".block.")[2]  # asked about as if it were a layer of the trunk
        return predicate(f"{like}.{inner}", module)

    with quantising():
        nn.quantize(network, **numbers.form, class_predicate=chosen)


def model_of_heads(folder: Folder) -> tuple[nn.Module, Layout]:
    """The target of heads in a folder of their own, from their config and without weights, and how they are named.

    Raises CheckpointError.
    """
    config = folder.config | {"model_type": str(folder.config["model_type"]).removesuffix("_mtp")}
    classes: Any = trunk_classes(config)
    kind, args = classes
    return kind(args.from_dict(config)), LAYOUTS[module_of(kind)]


def write_heads(file: Path, network: MtpNetwork, layout: Layout) -> dict[str, Config]:
    """Write the heads' file; returns how its modules are quantised, for the config. Raises OSError."""
    name = partial(_published, layout=layout, config=network.config, alone=len(network.heads) == 1)
    parameters: Any = tree_flatten(network.parameters())
    tensors: Tensors = {name(path): value for path, value in parameters}
    for value in tensors.values():
        mx.eval(value)
    save(file, tensors)
    return {name(path): form for path, form in forms(network).items()}


def _published(path: str, layout: Layout, config: MtpConfig, alone: bool) -> str:
    """The name of a head's tensor or module in its family's checkpoints, but for experts, which are in mlx's form."""
    _, number, rest = path.split(".", 2)
    module, dot, kind = rest.partition(".")
    if module == "block":
        return _place(layout, int(number), config) + kind
    outer = {
        "eh_proj": layout.projection,
        "enorm": layout.embedding_norm,
        "hnorm": layout.hidden_norm,
        "norm": layout.norm,
    }
    shared = alone and layout is QWEN
    return ("mtp." if shared else _place(layout, int(number), config)) + outer[module] + dot + kind


def _place(layout: Layout, number: int, config: MtpConfig) -> str:
    if layout is NEXTN:
        return f"model.layers.{(config.target_layers or 0) + number}."
    return f"model.mtp_layers.{number}." if layout is MIMO else f"mtp.layers.{number}."
