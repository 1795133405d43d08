"""Features are the hidden states of exactly the tokens that are observed."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_specdec.errors import PairingError
from mlx_specdec.features import FeatureRequest, Features
from mlx_specdec.target.hooks import hook
from mlx_specdec.target.model import CacheOptions, Target
from tests import zoo
from tests.scripted import Scripted, drafted, reference, scripts

WANTS = FeatureRequest(layers=(2, 0), final=True)


def by_hand(model: nn.Module, tokens: list[int]) -> dict[Any, mx.array]:
    """What layers 0 and 2 give, and what the head is given, for tokens entered one at a time."""
    seen: dict[Any, list[mx.array]] = {0: [], 2: [], "head": []}

    def listen(place: Any) -> Callable[..., Any]:
        def listener(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            hidden = args[0] if place == "head" else output[0] if isinstance(output, tuple) else output
            seen[place].append(hidden[0])
            return output

        return listener

    text = model.language_model if hasattr(model, "language_model") else model
    releases = [hook(model.layers[i], listen(i)) for i in (0, 2)] + [hook(text.lm_head, listen("head"))]
    cache = make_prompt_cache(model)
    for token in tokens:
        mx.eval(model(mx.array([[token]]), cache=cache))
    for release in releases:
        release()
    return {place: mx.concatenate(rows) for place, rows in seen.items()}


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "rwkv7", "exaone4"])
@pytest.mark.parametrize("script", scripts(64))
def test_features_of_observed_tokens(name: str, script: str) -> None:
    model = zoo.build(name)
    prompt = [(7 * i * i + 3 * i + 5) % 64 for i in range(21)]
    answer = reference(model, prompt, 30)
    target = Target(model, CacheOptions(prefill_step_size=8))
    target.watch(WANTS)
    drafter = Scripted(answer, scripts(64)[script], WANTS)
    assert drafted(target, drafter, prompt, 30, 4) == answer
    target.close()
    features = [mx.concatenate(parts) for parts in zip(*(f.layers for f in drafter.features), strict=True)]
    final = mx.concatenate([f.final for f in drafter.features])
    right = by_hand(model, drafter.observed)
    for got, place in ((features[0], 2), (features[1], 0), (final, "head")):
        assert got.shape == right[place].shape
        rounding = 1e-5 * mx.abs(right[place]).max().item()
        assert mx.abs(got - right[place]).max().item() < rounding, place


def test_a_layer_that_does_not_exist_is_named() -> None:
    model = zoo.build("llama")
    with pytest.raises(PairingError, match="layer 7 and the target has 3 layers"):
        Target(model).watch(FeatureRequest(layers=(1, 7)))
    assert type(model.layers[1]).__mro__[1] is not type(model.layers[0]), "nothing stays hooked"


def test_head_of_features() -> None:
    features = Features((mx.arange(6).reshape(3, 2),), mx.arange(3).reshape(3, 1))
    assert features.head(2).layers[0].tolist() == [[0, 1], [2, 3]]
    assert features.head(2).final.tolist() == [[0], [1]]
    assert Features((), None).head(2) == Features((), None)
