"""Read hidden states off a model as it runs: the outputs of chosen layers, and what goes into the head."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import PairingError
from ..features import FeatureRequest, Features
from .hooks import Release, hook


class Taps:
    """Hooks on the layers that a drafter asked for; reads only passes made inside `reading`, per thread."""

    def __init__(self, model: nn.Module, wants: FeatureRequest):
        layers = model.layers
        beyond = [i for i in wants.layers if not 0 <= i < len(layers)]
        if beyond:
            raise PairingError(
                f"the drafter wants the output of layer {beyond[0]} and the target has {len(layers)} layers; "
                "use a drafter made for this target"
            )
        self.wants = wants
        self._local = threading.local()
        self._releases: list[Release] = [hook(layers[i], self._listener(i)) for i in set(wants.layers)]
        if wants.final:
            self._releases.append(hook(trunk(model), self._listener("final")))

    def release(self) -> None:
        for release in self._releases:
            release()

    @contextmanager
    def reading(self) -> Iterator[Callable[[], Features | None]]:
        """Around one pass of batch size 1; the value gives its features afterwards, None if the hooks were released
        in the middle of it (a closed decoder: the round is the stream's last)."""
        seen: dict[int | str, mx.array] = {}
        self._local.seen = seen

        def read() -> Features | None:
            if len(seen) < len(self._releases):
                return None
            return Features(tuple(seen[i] for i in self.wants.layers), seen.get("final"))

        try:
            yield read
        finally:
            self._local.seen = None

    def _listener(self, place: int | str) -> Callable[..., Any]:
        def listen(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            seen = getattr(self._local, "seen", None)
            if seen is not None:
                hidden = output[0] if isinstance(output, tuple) else output
                seen[place] = hidden[0]
            return output

        return listen


def trunk(model: nn.Module) -> nn.Module:
    """The module that owns the layers; what it returns is the hidden state after the final norm."""
    first = model.layers[0]
    for module in model.modules():
        layers = module.get("layers")
        if isinstance(layers, list) and any(layer is first for layer in layers):
            return module
    raise PairingError(f"{type(model).__name__} has no module that owns its layers; use a drafter without features")
