"""What a conversion does to the numbers: their type, and how they are quantised."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from ..errors import OptionError
from .precision import check_dtype, to_dtype

Config = dict[str, Any]
Predicate = Callable[[str, nn.Module], bool | Config]

DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}  # group size and bits, as mlx-lm's
RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")


@dataclass(frozen=True)
class Numbers:
    """mlx-lm's options of the same names. Raises OptionError for what cannot be done or would do nothing."""

    dtype: str | None = None
    quantize: bool = False
    q_bits: int | None = None
    q_group_size: int | None = None
    q_mode: str = "affine"
    quant_predicate: str | None = None
    dequantize: bool = False

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if self.quantize and self.dequantize:
            raise OptionError("--quantize and --dequantize exclude each other; choose one")
        if self.q_mode not in DEFAULTS:
            raise OptionError(f"--q-mode is {self.q_mode!r}; choose one of {', '.join(DEFAULTS)}")
        if self.quant_predicate not in (None, *RECIPES):
            raise OptionError(f"--quant-predicate is {self.quant_predicate!r}; choose one of {', '.join(RECIPES)}")
        if self.quant_predicate and self.q_mode != "affine":
            raise OptionError(f"--quant-predicate goes with the mode affine, and --q-mode is {self.q_mode}; leave one")
        for name in ("q_bits", "q_group_size", "quant_predicate"):
            if getattr(self, name) is not None and not self.quantize:
                option = name.replace("_", "-")
                raise OptionError(f"--{option} is {getattr(self, name)} and nothing is quantised; give --quantize too")
        if self.q_mode != "affine" and not self.quantize:
            raise OptionError(f"--q-mode is {self.q_mode} and nothing is quantised; give --quantize too")
        if self.quantize:
            for name in ("q_bits", "q_group_size"):
                if (value := getattr(self, name)) is not None and value < 1:
                    raise OptionError(f"--{name.replace('_', '-')} is {value}; choose one that MLX has")
            with quantising():
                mx.quantize(mx.zeros((1, 512)), **self.form)

    @property
    def form(self) -> Config:
        """group_size, bits and mode."""
        group_size, bits = DEFAULTS[self.q_mode]
        if self.q_group_size is not None:
            group_size = self.q_group_size
        return {"group_size": group_size, "bits": bits if self.q_bits is None else self.q_bits, "mode": self.q_mode}

    def keeps(self, form: Config) -> bool:
        """Whether packed weights of that form stay to the bit: they do, unless others were asked for. Affine is what is
        asked for by default, so that it does not speak against another mode of as many bits."""
        if not self.quantize or self.quant_predicate:
            return not (self.quantize or self.dequantize)
        mode, size = self.q_mode in ("affine", form["mode"]), self.q_group_size in (None, form["group_size"])
        return mode and size and form["bits"] == self.form["bits"]

    def predicate(self, model: nn.Module) -> Predicate:
        """Whether and how a module of `model` is quantised: by the recipe, else as the family wants it, else like all.

        Raises OptionError for a recipe that does not fit the model.
        """
        chosen = self._recipe(model) if self.quant_predicate else getattr(model, "quant_predicate", None)
        form = self.form

        def quantised(path: str, module: nn.Module) -> bool | Config:
            said = chosen(path, module) if chosen else True
            group_size = said.get("group_size", form["group_size"]) if isinstance(said, dict) else form["group_size"]
            return said if module.weight.shape[-1] % group_size == 0 else False

        return quantised

    def _recipe(self, model: nn.Module) -> Predicate:
        from mlx_lm.convert import mixed_quant_predicate_builder

        try:
            return mixed_quant_predicate_builder(self.quant_predicate, model, self.form["group_size"])
        except ValueError as error:
            raise OptionError(f"--quant-predicate {self.quant_predicate} cannot be used here: {error}") from error


@contextmanager
def quantising() -> Iterator[None]:
    """What MLX says of a form that it has not, or a width that groups do not divide, as an OptionError."""
    try:
        yield
    except ValueError as error:
        raise OptionError(f"MLX cannot quantise so ({error}); choose other --q-bits or --q-group-size") from error


def cast(model: nn.Module, dtype: str) -> None:
    """Make the floating parameters of that type, in place and lazily, but for those that the model keeps."""
    castable = getattr(model, "cast_predicate", lambda _: True)
    model.update(tree_map_with_path(lambda n, v: with_dtype(v, dtype) if castable(n) else v, model.parameters()))


def with_dtype(value: mx.array, dtype: str | None) -> mx.array:
    """A floating array in that type, any other as it is."""
    return value.astype(getattr(mx, dtype)) if dtype and mx.issubdtype(value.dtype, mx.floating) else value


def make_dense(model: nn.Module, numbers: Numbers, dtype: str | None) -> None:
    """Unpack, in place and lazily, the modules that do not stay as they are, to `dtype` or else the model's own.

    Raises CheckpointError for a kind of module that cannot be unpacked.
    """
    changed = {
        path: module for path, module in model.named_modules() if (form := form_of(module)) and not numbers.keeps(form)
    }
    if changed:
        holder = nn.Module()
        holder.modules_of = list(changed.values())
        to_dtype(holder, dtype or _dtype_of(model))
        model.update_modules(tree_unflatten(list(zip(changed, holder.modules_of, strict=True))))


def _dtype_of(model: nn.Module) -> str:
    """The type of most of its floating parameters, scales included."""
    parameters: Any = tree_flatten(model.parameters())
    kinds = Counter(v.dtype for _, v in parameters if mx.issubdtype(v.dtype, mx.floating))
    return str(kinds.most_common(1)[0][0]).removeprefix("mlx.core.")


def form_of(module: nn.Module) -> Config | None:
    """The group_size, bits and mode of a module that holds packed weights."""
    if "scales" not in module:
        return None
    return {"group_size": module.group_size, "bits": module.bits, "mode": getattr(module, "mode", "affine")}


def forms(model: nn.Module) -> dict[str, Config]:
    """The quantised modules of a model by path."""
    return {path: form for path, module in model.named_modules() if (form := form_of(module))}
