"""Lossless speculative decoding for any mlx-lm model: the same text in fewer forward passes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .openblas import preload as _preload

_preload()

if TYPE_CHECKING:
    from .api import generate as generate
    from .api import load as load
    from .api import stream_generate as stream_generate
    from .decoder import GenerationResponse as GenerationResponse
    from .decoder import SpecDecoder as SpecDecoder
    from .errors import CheckpointError as CheckpointError
    from .errors import OptionError as OptionError
    from .errors import PairingError as PairingError
    from .errors import SpecDecError as SpecDecError
    from .errors import UnsupportedModelError as UnsupportedModelError
    from .sampling import SamplingParams as SamplingParams
    from .target.model import CacheOptions as CacheOptions

# Imported when first used, so that importing the package costs nothing: mlx-lm alone takes more than a second.
_HOMES = {
    "api": ("generate", "load", "stream_generate"),
    "decoder": ("GenerationResponse", "SpecDecoder"),
    "errors": ("CheckpointError", "OptionError", "PairingError", "SpecDecError", "UnsupportedModelError"),
    "sampling": ("SamplingParams",),
    "target.model": ("CacheOptions",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
