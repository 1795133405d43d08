"""A drafter's checkpoint on disk: its config, and its tensors by name."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import CheckpointError
from .pickled import read_pickled

FEW = 8  # names listed in a message
PICKLED = (".bin", ".pt", ".pth")

# Files of heads beside a model's own, which do not say in what format these are.
SIDECARS = ("mtp.safetensors", "mtp/weights.safetensors", "model-mtp.safetensors")

# An index of shards, and the files that there are without one. Other .bin and .pt files are states of a training.
FORMS = (
    ("model.safetensors.index.json", ("*.safetensors",)),
    ("pytorch_model.bin.index.json", ("pytorch_model*.bin", "medusa_lm_head.pt")),
)


class Folder:
    """The files of one checkpoint. Tensors are read when they are used, shard by shard."""

    def __init__(self, path: Path):
        """Raises CheckpointError when there is no readable config.json."""
        self.path = path
        try:
            self.config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(
                f"{path} has no config.json that can be read; give the folder of a checkpoint"
            ) from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path / 'config.json'} is not JSON: {error}; fetch it again") from error
        if not isinstance(self.config, dict):
            raise CheckpointError(f"{path / 'config.json'} is not a JSON object; fetch it again")

    def tensors(self) -> dict[str, mx.array]:
        """All tensors of all shards, unevaluated. Raises CheckpointError for a file that is missing or damaged."""
        tensors: dict[str, mx.array] = {}
        for file in self.files():
            tensors |= read_tensors(file)
        return tensors

    def names(self) -> set[str]:
        """The names of its tensors as far as the headers of safetensors files say them; no weight is read."""
        from safetensors import SafetensorError, safe_open

        names: set[str] = set()
        for file in sorted(self.path.glob("*.safetensors")):
            try:
                with safe_open(file, framework="numpy") as opened:
                    names.update(opened.keys())
            except (SafetensorError, OSError):
                continue  # who reads the weights says what is wrong
        return names

    def files(self) -> list[Path]:
        """The files that hold the tensors, safetensors before PyTorch's own if there are both.

        Raises CheckpointError when there are none or the index is wrong.
        """
        heads: list[Path] = []
        for index, patterns in FORMS:
            if (self.path / index).exists():
                return self._indexed(self.path / index)
            files = sorted(file for pattern in patterns for file in self.path.glob(pattern))
            if own := [file for file in files if file.name not in SIDECARS]:
                return own
            heads += files
        if heads:
            return heads
        raise CheckpointError(f"{self.path} holds no .safetensors file and no pytorch_model.bin; fetch the checkpoint "
                              "again")  # fmt: skip

    def _indexed(self, index: Path) -> list[Path]:
        """The shards that an index names, each once."""
        try:
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            names = sorted({str(Path(name)) for name in places})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index} is not an index of shards ({error!r}); fetch it again") from error
        for name in names:
            if Path(name).name != name or name == "..":
                raise CheckpointError(f"{index} names the file {name!r}, which is not in its folder; do not use it")
            if not (self.path / name).is_file():
                raise CheckpointError(f"{index} names {name}, which is missing; fetch the checkpoint again")
        return [self.path / name for name in names]


def is_within(file: Path, folder: Path) -> bool:
    """Whether a file, links followed, lies in the folder of a checkpoint or, in the Hub's cache, among the contents
    that the links of its snapshots are made to."""
    whole, target = folder.resolve(), file.resolve()
    snapshot = next((at for at in (whole, *whole.parents) if at.parent.name == "snapshots"), None)
    blobs = snapshot.parent.parent / "blobs" if snapshot else None
    return target.is_relative_to(whole) or (blobs is not None and target.is_relative_to(blobs))


def read_tensors(file: Path) -> dict[str, mx.array]:
    """The tensors of one file, unevaluated: safetensors, or PyTorch's format, of which nothing is run."""
    if file.suffix in PICKLED:
        return read_pickled(file)
    try:
        loaded = mx.load(str(file))
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; fetch it again") from error
    assert isinstance(loaded, dict)
    return loaded


def fill(network: nn.Module, tensors: dict[str, mx.array], folder: Folder) -> None:
    """Give `network` its weights: every one, of the right shape, none left over, none NaN, no matrix all zero.

    Modules that the file holds quantised become quantised modules. Raises CheckpointError naming the tensor.
    """
    _quantise(network, tensors, folder)
    wanted = dict(tree_flatten(network.parameters()))
    _same_names(wanted.keys(), tensors.keys(), folder)
    for name, value in tensors.items():
        if value.shape != wanted[name].shape:
            raise CheckpointError(
                f"{folder.path}: {name} has the shape {list(value.shape)} and its config asks for "
                f"{list(wanted[name].shape)}; fetch the checkpoint again"
            )
    network.load_weights(list(tensors.items()))
    _sound(tensors, folder)
    network.eval()


def _quantise(network: nn.Module, tensors: dict[str, mx.array], folder: Folder) -> None:
    settings = folder.config.get("quantization") or folder.config.get("quantization_config") or {}

    def chosen(name: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{name}.scales" not in tensors or not hasattr(module, "to_quantized"):
            return False
        return settings.get(name) or {k: settings[k] for k in ("group_size", "bits", "mode") if k in settings}

    nn.quantize(network, class_predicate=chosen)


def _same_names(wanted: Iterable[str], given: Iterable[str], folder: Folder) -> None:
    for names, what in ((set(wanted) - set(given), "lacks"), (set(given) - set(wanted), "has the unknown tensor")):
        if names:
            some = ", ".join(sorted(names)[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")
            raise CheckpointError(f"{folder.path} {what} {some}; is it whole, and of the layout that its config names?")


def _sound(tensors: dict[str, mx.array], folder: Folder) -> None:
    """Raise CheckpointError for weights that cannot draft: NaN, infinite, or a matrix of zeros."""
    floating = {name: x for name, x in tensors.items() if mx.issubdtype(x.dtype, mx.floating)}
    for name, x in floating.items():
        largest = mx.abs(x.astype(mx.float32)).max()
        if not mx.isfinite(largest).item():
            raise CheckpointError(f"{folder.path}: {name} holds NaN or infinite values; fetch the checkpoint again")
        if largest.item() == 0 and x.ndim > 1 and not name.endswith(".biases"):
            raise CheckpointError(f"{folder.path}: {name} is all zero: the head was never trained; leave it out")
