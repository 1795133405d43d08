"""The device begins with a pass while the rest of it is still being built.

The host takes milliseconds to build a pass of a deep model, which plain decoding hides behind the pass before. A pass
that may verify a draft cannot be built before that is known; so its first layers are handed over as soon as they are
there.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .hooks import hook

FEWEST = 8  # layers; a shallower model is built in no time


class HeadStart:
    """A hook on one of the first layers; acts in passes made inside `given`, per thread."""

    def __init__(self, model: nn.Module):
        self._local = threading.local()
        layers = model.layers
        self.release = hook(layers[len(layers) // 8], self._hand_over) if len(layers) >= FEWEST else lambda: None

    @contextmanager
    def given(self) -> Iterator[None]:
        """Around one pass."""
        self._local.on = True
        try:
            yield
        finally:
            self._local.on = False

    def _hand_over(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if getattr(self._local, "on", False):
            mx.async_eval(output)
        return output
