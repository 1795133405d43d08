"""MTP heads: from the tensors that a checkpoint carries beside its trunk to a network.

mlx-lm drops these tensors, so they are read from the target's folder: its shards, or a file beside them. What mlx-lm
does to a trunk layer's tensors of the family (stacking experts, splitting MLA's projection, fp8) is done by the
family's own `sanitize`, which gets a head's layer under the name of a trunk layer.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError
from ..networks.mtp import MtpConfig, MtpNetwork
from ..target.model import evaluate
from ..target.taps import trunk
from .folder import SIDECARS, Folder, fill, read_tensors
from .mtp_layout import LAYOUTS, Layout, Tensors, declared, module_of, settings

NORM = re.compile(r"norm\.weight$")


def read_heads(folder: Folder, model: nn.Module) -> MtpNetwork | None:
    """The MTP heads in the folder of `model`; None if it has none and declares none.

    Raises CheckpointError when it declares heads that its files do not hold, or that cannot be used.
    """
    family, count = module_of(type(model.layers[0])), declared(folder.config)
    layout = LAYOUTS.get(family)
    if layout is None:
        if not count:
            return None
        raise CheckpointError(
            f"{folder.path} declares {count} MTP head(s), and those of {family or 'its family'} are not supported "
            f"({', '.join(LAYOUTS)} are); use another drafter"
        )
    for tensors, bare in _sources(folder):
        if heads := layout.heads(tensors, bare):
            return _build(folder, layout, heads, model, raw=_unconverted(tensors))
    if not count:
        return None
    raise CheckpointError(
        f"{folder.path} declares {count} MTP head(s) and its files hold none, as when a conversion drops them; use a "
        f"checkpoint that has them, or put them into its folder as {SIDECARS[0]}"
    )


def read(folder: Folder) -> MtpNetwork:
    """The heads in a folder of their own, whose config is the target's but for the model type, which ends in _mtp.

    Raises CheckpointError.
    """
    network = read_heads(folder, _shell(folder))
    if network is None:
        raise CheckpointError(f"{folder.path} holds no tensor of an MTP head; fetch it again")
    return network


def _sources(folder: Folder) -> Iterator[tuple[Tensors, bool]]:
    """Where heads may be, unread, and whether names there may lack their prefix. The first that has some has them all:
    a file beside the shards was made for this checkpoint, and its norms may be in another form than the shards'."""
    named = (folder.config.get("mlx_lm_extra_tensors") or {}).get("mtp_file")
    if named is not None:
        place = Path(str(named))  # as written: in the hub's cache every file is a link to elsewhere
        if place.is_absolute() or ".." in place.parts:
            raise CheckpointError(f"{folder.path} names the file {named!r}, which is not in its folder; do not use it")
        if not (folder.path / named).is_file():
            raise CheckpointError(f"{folder.path} names the file {named!r} for its MTP heads, which is missing; "
                                  "fetch the checkpoint again")  # fmt: skip
        yield read_tensors(folder.path / named), True
    for name in SIDECARS:
        if (folder.path / name).is_file():
            yield read_tensors(folder.path / name), True
    yield folder.tensors(), str(folder.config.get("model_type", "")).endswith("_mtp")


def _unconverted(tensors: Tensors) -> bool:
    """Whether these are as published: a convolution's channels are then not last."""
    return any("conv1d.weight" in name and value.shape[-1] != 1 for name, value in tensors.items())


def _build(folder: Folder, layout: Layout, heads: list[Tensors], model: nn.Module, raw: bool) -> MtpNetwork:
    args = _args(model)
    if settings(folder.config).get("mtp_use_dedicated_embeddings"):
        raise CheckpointError(
            f"{folder.path} has MTP heads with an embedding of their own (mtp_use_dedicated_embeddings is true), which "
            "are not supported; use another drafter"
        )
    index = _counterpart(model, any(".experts." in n or ".switch_mlp." in n for n in heads[0]), folder)
    config = MtpConfig(
        hidden=args.hidden_size,
        eps=args.rms_norm_eps,
        target_layers=args.num_hidden_layers,
        vocab=args.vocab_size,
        hidden_first=layout.hidden_first,
    )
    network = MtpNetwork(config, [_block(model.layers[index], args, index) for _ in heads])
    converted = [_converted(head, layout, model, index, folder) for head in heads]
    tensors = {f"heads.{i}.{name}": value for i, head in enumerate(converted) for name, value in head.items()}
    if layout.zero_centred and (raw or _zero_centred(tensors, model, index)):
        tensors = {name: value + 1 if NORM.search(name) else value for name, value in tensors.items()}
    _quantise(network, tensors, folder)
    fill(network, tensors, folder)
    evaluate(network)
    return network


def _args(model: nn.Module) -> Any:
    """The configuration that the layers of an mlx-lm model were made from, which may be that of its language model."""
    found = (getattr(module, "args", None) for module in model.modules())
    return next(args for args in found if hasattr(args, "num_hidden_layers"))


def _counterpart(model: nn.Module, experts: bool, folder: Folder) -> int:
    """The last layer of the trunk that is of the head's kind: of full attention, and with experts if the head has."""
    for index in reversed(range(len(model.layers))):
        layer = model.layers[index]
        if not getattr(layer, "is_linear", False) and hasattr(layer.mlp, "switch_mlp") == experts:
            return index
    raise CheckpointError(
        f"{folder.path} has an MTP head {'with' if experts else 'without'} experts and its target has no layer of that "
        "kind; use another drafter"
    )


def _block(layer: nn.Module, args: Any, index: int) -> nn.Module:
    """Another layer of the class of `layer`, which is number `index`."""
    kind = next(base for base in type(layer).__mro__ if base.__module__.startswith("mlx_lm.models."))
    numbered = len(inspect.signature(kind).parameters) > 1
    return kind(args, index) if numbered else kind(args)


def _converted(head: Tensors, layout: Layout, model: nn.Module, index: int, folder: Folder) -> Tensors:
    """A head's tensors under our names, its layer's as mlx-lm has a trunk layer's.

    Norms go round `sanitize`: Qwen's would add 1 to four of the seven, whatever they are.
    """
    path = next(name for name, module in model.named_modules() if module is model.layers[index]) + "."
    norms = {name: value for name, value in head.items() if NORM.search(name)}
    others = {path + name: value for name, value in head.items() if name not in norms}
    try:
        others = _stacked({name.removeprefix(path): value for name, value in model.sanitize(others).items()})
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{folder.path} has an MTP head that does not fit a layer of its target: {error}; "
                              "fetch it again") from error  # fmt: skip
    names = {
        layout.projection: "eh_proj",
        layout.embedding_norm: "enorm",
        layout.hidden_norm: "hnorm",
        layout.norm: "norm",
    }
    tensors = {}
    for name, value in (norms | others).items():
        module, _, kind = name.rpartition(".")
        tensors[f"{names[module]}.{kind}" if module in names else f"block.{name}"] = value
    return tensors


def _stacked(tensors: Tensors) -> Tensors:
    """Experts that `sanitize` left numbered, or with gate and up in one, as mlx-lm has them."""
    stacked: Tensors = {}
    numbered: dict[str, dict[int, mx.array]] = {}
    for name, value in tensors.items():
        if found := re.fullmatch(r"(.*)\.experts\.(\d+)\.(.*)", name):
            numbered.setdefault(f"{found[1]}.switch_mlp.{found[3]}", {})[int(found[2])] = value
        elif found := re.fullmatch(r"(.*)\.experts\.gate_up_proj(?:\.(\w+))?", name):
            gate, up = mx.split(value, 2, axis=-2)
            stacked[f"{found[1]}.switch_mlp.gate_proj.{found[2] or 'weight'}"] = gate
            stacked[f"{found[1]}.switch_mlp.up_proj.{found[2] or 'weight'}"] = up
        elif found := re.fullmatch(r"(.*)\.experts\.down_proj(?:\.(\w+))?", name):
            stacked[f"{found[1]}.switch_mlp.down_proj.{found[2] or 'weight'}"] = value
        else:
            stacked[name] = value
    return stacked | {name: mx.stack([of[e] for e in sorted(of)]) for name, of in numbered.items()}


def _zero_centred(tensors: Tensors, model: nn.Module, index: int) -> bool:
    """Whether the norms lack 1, decided once for all of them: by the middle one of how far the mean of each is from
    that of the trunk's own, which has it; from 1 where the trunk has no such norm."""
    own = {f"block.{name}": value for name, value in _flat(model.layers[index]).items()}
    own |= {name: value for name, value in _flat(trunk(model)).items() if name == "norm.weight"}
    distances = []
    for name, value in tensors.items():
        if NORM.search(name):
            same = own.get(re.sub(r"^heads\.\d+\.", "", name))
            distances.append(value.mean() - (1 if same is None else same.mean()))
    return bool(distances) and bool((mx.sort(mx.stack(distances))[len(distances) // 2] < -0.5).item())


def _flat(module: nn.Module) -> Tensors:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(module.parameters()))


def _quantise(network: nn.Module, tensors: Tensors, folder: Folder) -> None:
    """As the shapes of the tensors say, which cannot be at odds with them as a config can."""
    from mlx_lm.utils import infer_quant_config

    def chosen(name: str, module: nn.Module) -> bool | dict[str, Any]:
        packed = f"{name}.scales" in tensors and hasattr(module, "to_quantized")
        return infer_quant_config(name, module, tensors) if packed else False

    try:
        nn.quantize(network, class_predicate=chosen)
    except ValueError as error:
        raise CheckpointError(f"{folder.path} has MTP heads quantised in another way than mlx-lm's: {error}; use dense "
                              "ones") from error  # fmt: skip


def _shell(folder: Folder) -> nn.Module:
    """The target of heads in a folder of their own, from their config, without weights."""
    from mlx_lm.utils import _get_classes

    config = folder.config | {"model_type": str(folder.config.get("model_type")).removesuffix("_mtp")}
    try:
        kind, args = _get_classes(config)
        return kind(args.from_dict(config))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder.path / 'config.json'} does not describe the target of MTP heads: {error}; "
                              "fetch it again") from error  # fmt: skip
