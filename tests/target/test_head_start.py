"""Handing the first layers over early changes nothing but when they are computed."""

import mlx_specdec  # noqa: F401  # isort: skip

import mlx.core as mx
import pytest

from mlx_specdec.target import head_start
from mlx_specdec.target.model import Target
from tests import zoo
from tests.scripted import Scripted, drafted, reference, scripts

PROMPT = [(7 * i * i + 3 * i + 5) % 64 for i in range(9)]


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_ids_and_when_it_acts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build(name, num_hidden_layers=8)
    before, begun = type(model.layers[1]), []
    answer = reference(model, PROMPT, 30)
    target = Target(model)
    evaluate = mx.async_eval
    monkeypatch.setattr(head_start.mx, "async_eval", lambda *x: (begun.append(x[0].shape), evaluate(*x)))
    for k in (1, 4):
        assert drafted(target, Scripted(answer, scripts(64)["mixed"]), PROMPT, 30, k) == answer
    assert {shape[1] for shape in begun if len(shape) == 3} <= {1, 2, 3, 4, 5}, "not while the prompt is read"
    assert len(begun) > 10
    target.close()
    assert type(model.layers[1]) is before


def test_a_shallow_model_needs_none() -> None:
    model = zoo.build("llama")
    classes = [type(layer) for layer in model.layers]
    Target(model)
    assert [type(layer) for layer in model.layers] == classes
