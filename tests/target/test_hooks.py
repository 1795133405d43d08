"""Hooks see the calls of a module and leave it as it was."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlx_specdec.target.hooks import Hook, hook


def scaled(factor: float, seen: list[float]) -> Hook:
    def listener(module: nn.Module, forward: Callable[..., Any], x: mx.array) -> mx.array:
        seen.append(factor)
        return forward(x) * factor

    return listener


def test_a_hook_wraps_calls_until_released() -> None:
    layer, x = nn.Linear(4, 4), mx.ones((1, 4))
    before, names = layer(x), dict(tree_flatten(layer.parameters())).keys()
    seen: list[float] = []
    release = hook(layer, scaled(2.0, seen))
    assert mx.array_equal(layer(x), before * 2)
    assert isinstance(layer, nn.Linear)
    assert dict(tree_flatten(layer.parameters())).keys() == names
    release()
    release()
    assert type(layer) is nn.Linear
    assert mx.array_equal(layer(x), before)
    assert seen == [2.0]


def test_hooks_nest_and_are_released_in_any_order() -> None:
    layer, x = nn.Linear(4, 4), mx.ones((1, 4))
    before = layer(x)
    seen: list[float] = []
    inner, outer = hook(layer, scaled(2.0, seen)), hook(layer, scaled(3.0, seen))
    assert mx.array_equal(layer(x), before * 2 * 3)
    assert seen == [3.0, 2.0], "the newest is outermost"
    inner()
    assert mx.array_equal(layer(x), before * 3)
    outer()
    assert type(layer) is nn.Linear
    again = hook(layer, scaled(5.0, seen))
    inner()  # released long ago: it must not touch the new hook
    assert mx.array_equal(layer(x), before * 5)
    again()
    assert type(layer) is nn.Linear


def test_one_listener_hooked_twice_is_two_hooks() -> None:
    layer, x = nn.Linear(4, 4), mx.ones((1, 4))
    before, listener = layer(x), scaled(2.0, [])
    first, second = hook(layer, listener), hook(layer, listener)
    assert mx.array_equal(layer(x), before * 4)
    first()
    assert mx.array_equal(layer(x), before * 2)
    second()
    assert type(layer) is nn.Linear
