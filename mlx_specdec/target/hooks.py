"""Listen to calls of modules inside a model without forking it.

`nn.Module` has no hooks, and Python looks `__call__` up on the class. So a hooked module is given a one-off subclass
of its own class: its attributes, its place in the parameter tree and `isinstance` stay as they were, which a wrapper
object would have to imitate. Releasing the last hook gives the class back.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.nn as nn

Hook = Callable[..., Any]
Release = Callable[[], None]

_installing = threading.Lock()


class _Hooked:
    """Mixed into the one-off subclasses, to know them again."""

    hooks: tuple[Hook, ...]


def hook(module: nn.Module, listener: Hook) -> Release:
    """Route calls of `module` through `listener(module, forward, *args, **kwargs)`, whose result the call returns.

    Returns the undo. Hooks nest, the newest outermost, and may be released in any order and more than once; several
    owners may hook one module, from several threads.
    """
    entry = partial(listener, module)  # a new object, so that the same listener hooked twice is two hooks
    with _installing:
        if not isinstance(module, _Hooked):
            module.__class__ = _subclass(type(module))
        hooked: Any = type(module)
        hooked.hooks = (*hooked.hooks, entry)

    def release() -> None:
        with _installing:
            installed = len(hooked.hooks)
            hooked.hooks = tuple(h for h in hooked.hooks if h is not entry)
            if installed and not hooked.hooks:
                module.__class__ = hooked.original

    return release


def _subclass(original: type) -> type:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = partial(original.__call__, self)
        for listener in hooked.hooks:
            forward = partial(listener, forward)
        return forward(*args, **kwargs)

    members = {"__call__": call, "hooks": (), "original": original}
    hooked: Any = type(original.__name__, (_Hooked, original), members)
    return hooked
