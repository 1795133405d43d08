"""Take recurrent layers back to an earlier row of a pass.

A recurrent state (gated delta, Mamba, short convolution, RWKV) cannot be trimmed, but MLX arrays never change, so the
state before a pass is kept by holding references to it. To stand after the first rows of that pass, the state is put
back and the mixers alone run again over those rows. A mixer is whatever module is handed the recurrent cache, so no
architecture is named here. What its linear layers gave in the pass is remembered and sliced, so the replay reads no
projection weights; its output is never asked for, so lazy evaluation leaves out all that only the output needs.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedModelError
from .hooks import Release, hook


class Call:
    """One call of a mixer during a pass over `rows` rows."""

    def __init__(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any], rows: int):
        self.forward, self.args, self.kwargs = forward, args, kwargs
        self.rows = self.width = rows  # width: the rows of the run under way, fewer in a replay
        self.projected: dict[int, mx.array | None] = {}

    def head(self, keep: int) -> tuple[list, dict[str, Any]]:
        """The arguments, with every array that runs along the rows cut to the first `keep`."""

        def cut(value: Any) -> Any:
            along = isinstance(value, mx.array) and value.ndim >= 2 and value.shape[1] == self.rows
            return value[:, :keep] if along else value

        return [cut(a) for a in self.args], {name: cut(a) for name, a in self.kwargs.items()}

    def project(self, module: nn.Module, forward: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        """A linear layer inside the mixer: computed and remembered in the pass, sliced in a replay."""
        if x.ndim != 3 or x.shape[1] != self.width:
            return forward(x)
        seen = id(module) in self.projected
        if self.width < self.rows:
            output = self.projected.get(id(module))
            return forward(x) if output is None else output[:, : self.width]
        output = forward(x)
        self.projected[id(module)] = None if seen else output  # called twice: which one is not known, so neither
        return output


class Tape:
    """The mixer calls that one recurrent cache went through during one pass."""

    def __init__(self, mixers: "Mixers", rows: int):
        self.mixers, self.rows = mixers, rows
        self.calls: list[Call] = []

    def replay(self, keep: int) -> None:
        """Advance the cache, which must hold the state from before the pass, by the pass's first `keep` rows."""
        for call in self.calls:
            args, kwargs = call.head(keep)
            call.width = keep
            with self.mixers.running(call):
                call.forward(*args, **kwargs)


class Mixers:
    """The recurrent mixers of a model, hooked so that a pass over a cache that carries a `tape` is recorded on it."""

    def __init__(self, model: nn.Module, caches: list, recurrent: list):
        """Find who takes the `recurrent` caches out of `caches` (a fresh prompt cache) in one unevaluated pass."""
        self._local = threading.local()
        self._releases: list[Release] = []
        for mixer in find_mixers(model, caches, recurrent):
            self._releases.append(hook(mixer, self._record))
            linear = (m for m in mixer.modules() if isinstance(m, nn.Linear | nn.QuantizedLinear))
            self._releases.extend(hook(m, self._project) for m in linear)

    def release(self) -> None:
        for release in self._releases:
            release()

    @contextmanager
    def running(self, call: Call) -> Iterator[None]:
        self._local.call = call
        try:
            yield
        finally:
            self._local.call = None

    def _record(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tapes = [getattr(value, "tape", None) for value in (*args, *kwargs.values())]
        tape = next((t for t in tapes if t is not None and t.mixers is self), None)
        if tape is None:
            return forward(*args, **kwargs)
        call = Call(forward, args, kwargs, tape.rows)
        tape.calls.append(call)
        with self.running(call):
            return forward(*args, **kwargs)

    def _project(self, module: nn.Module, forward: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        call = getattr(self._local, "call", None)
        return forward(x) if call is None else call.project(module, forward, x)


def find_mixers(model: nn.Module, caches: list, recurrent: Iterable[Any]) -> list[nn.Module]:
    """The innermost modules that are handed a recurrent cache, each once, in the order of a pass.

    Raises UnsupportedModelError where a cache reaches no module by itself, or one that also holds another cache.
    """
    wanted = {id(cache): cache for cache in recurrent}
    others = {id(cache) for cache in caches} - set(wanted)
    found: dict[int, nn.Module] = {}
    claimed: set[int] = set()
    stack: list[set[int]] = []
    thread = threading.get_ident()

    def trace(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return forward(*args, **kwargs)
        handed = {id(value) for value in (*args, *kwargs.values())}
        inside: set[int] = set()
        stack.append(inside)
        output = forward(*args, **kwargs)
        stack.pop()
        own = (handed & set(wanted)) - inside
        if own:
            if handed & others:
                raise UnsupportedModelError(
                    f"the cache of this model cannot be rewound: {type(module).__name__} holds a recurrent state and "
                    "another cache at once; generate without a drafter"
                )
            found[id(module)] = module
            claimed.update(own)
        if stack:
            stack[-1] |= inside | own
        return output

    releases = [hook(module, trace) for module in model.modules()]
    try:
        model(mx.zeros((1, 2), dtype=mx.int32), cache=caches)
    finally:
        for release in releases:
            release()
    if set(wanted) - claimed:
        raise UnsupportedModelError(
            "the cache of this model cannot be rewound: a recurrent state is used outside any module of its own; "
            "generate without a drafter"
        )
    return list(found.values())
