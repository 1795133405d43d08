"""A loaded model in another precision."""

from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, OptionError

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx import nn

DTYPES = ("float32", "float16", "bfloat16")


def check_dtype(dtype: str | None) -> None:
    """Raises OptionError for a name that is not a dtype of this package."""
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")


def to_dtype(model: "nn.Module", dtype: str) -> "nn.Module":
    """The same model, dense and with its floating parameters in `dtype`; lazy, and in place.

    Quantised weights are computed in float32 and rounded once. Parameters that the model itself declares to
    need their own precision keep it (mlx-lm's `cast_predicate`). Raises CheckpointError if a layer cannot be
    made dense.
    """
    import mlx.core as mx
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import dequantize_model

    for name, module in model.named_modules():
        if "scales" not in module:
            continue
        if "global_scale" in module:
            raise CheckpointError(f"{name} has a scale for the whole tensor and cannot be made dense; leave dtype out.")
        if module.get("biases") is not None:  # affine; the other modes keep uint8 scales
            module.scales, module.biases = module.scales.astype(mx.float32), module.biases.astype(mx.float32)
    model = dequantize_model(model)
    for name, module in model.named_modules():
        if "scales" in module:
            raise CheckpointError(f"{name} ({type(module).__name__}) cannot be made dense; leave dtype out.")
    kind, castable = getattr(mx, dtype), getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, value: Any) -> "mx.array":
        return value.astype(kind) if mx.issubdtype(value.dtype, mx.floating) and castable(name) else value

    model.update(tree_map_with_path(cast, model.parameters()))
    return model
