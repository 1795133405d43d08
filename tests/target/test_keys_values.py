"""The keys and values that drafters observe: those of the tokens that stand, whatever the cache went through."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.draft_length import Auto, Fixed
from mlx_specdec.drafters.base import NOTHING, Draft
from mlx_specdec.drafters.chain import Chain
from mlx_specdec.errors import PairingError
from mlx_specdec.features import FeatureRequest, Features, KeysValues
from mlx_specdec.rounds import rounds
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import CacheOptions, Target
from mlx_specdec.target.rewind import Rewinder
from tests import zoo
from tests.scripted import Scripted, drafted, plain, scripts

STEP, TOKENS = 16, 60

# Model, cache options, the layer that is read, and how many rows it holds at least; None: all of them.
KINDS: dict[str, tuple[str, dict[str, int], int, int | None]] = {
    "kv": ("kv", {}, 2, None),
    "kv8": ("kv_quant", {"kv_bits": 8, "quantized_kv_start": 0}, 0, None),
    "kv8_late": ("kv_quant", {"kv_bits": 8, "quantized_kv_start": 40}, 0, None),
    "window8": ("window8", {}, 2, 8),
    "window24": ("window24", {}, 0, 24),
    "full of window8": ("window8", {}, 3, None),
    "full of a hybrid": ("gated_delta", {}, 3, None),
}


def target_of(kind: str) -> tuple[Target, FeatureRequest]:
    name, options, layer, _ = KINDS[kind]
    wants = FeatureRequest(final=True, keys_values=(layer,))
    target = Target(zoo.CACHE_KINDS[name](), CacheOptions(prefill_step_size=STEP, **options))
    target.watch(wants)
    return target, wants


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + 3 * i + 5) % 64 for i in range(length)]


def truth(target: Target, tokens: Sequence[int]) -> KeysValues:
    """Of all tokens, each pass certain; the rows that a window lost are put together from the passes."""
    sequence, keys, values = target.sequence(), [], []
    for start in range(0, len(tokens), STEP):
        chunk = tokens[start : start + STEP]
        _, features = sequence.forward(mx.array(chunk), certain=len(chunk))
        sequence.settle(len(chunk))
        known = sequence.known(features, len(chunk))
        assert known is not None
        keys.append(known.keys_values[0].keys[:, -len(chunk) :])
        values.append(known.keys_values[0].values[:, -len(chunk) :])
    return KeysValues(mx.concatenate(keys, axis=1), mx.concatenate(values, axis=1))


class Watching(Scripted):
    """Keeps what it was given of keys and values, with how many tokens were known then."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.seen: list[tuple[int, int, KeysValues]] = []

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        super().observe(tokens, features)
        assert features is not None
        assert features.final is not None
        assert len(features.final) == len(tokens)
        self.seen.append((len(self.observed), len(tokens), features.keys_values[0]))


@pytest.mark.parametrize("length", [2, 9, 17, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_the_tokens_that_stand(kind: str, length: int) -> None:
    target, wants = target_of(kind)
    prompt, least = prompt_of(length), KINDS[kind][3]
    answer = plain(target.model, prompt, TOKENS, target.options)
    whole = truth(target, [*prompt, *answer])
    for name, script in scripts(64).items():
        for k in (1, 4):
            drafter = Watching(answer, script, wants)
            assert drafted(target, drafter, prompt, TOKENS, k) == answer
            # a quantiser turns the last bit of a key into a whole step now and then
            assert right(drafter, whole, least, 0.1 if "kv_bits" in KINDS[kind][1] else 1e-4), (name, k)


def right(drafter: Watching, whole: KeysValues, least: int | None, close: float = 1e-4) -> bool:
    for known, new, held in drafter.seen:
        rows = held.keys.shape[1]
        if rows != known and (least is None or rows < max(min(known, least), new)):
            return False
        for had, true in zip(held, whole, strict=True):
            if rows > known or not mx.allclose(had, true[:, known - rows : known], rtol=close, atol=close):
                return False
    return True


class Unquestioning(Watching):
    """Takes whatever it is told of the tokens."""

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        assert features is not None
        self.observed.extend(tokens)
        self.seen.append((len(self.observed), len(tokens), features.keys_values[0]))


@pytest.mark.parametrize("kind", ["kv", "window8"])
def test_a_refused_row_that_stays_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, wants = target_of(kind)
    prompt = prompt_of(17)
    answer = plain(target.model, prompt, TOKENS, target.options)
    whole, settle = truth(target, [*prompt, *answer]), Rewinder.settle
    monkeypatch.setattr(Rewinder, "_check", lambda self: None)
    monkeypatch.setattr(
        Rewinder, "settle", lambda self, keep: settle(self, min(keep + 1, sum(p.rows for p in self._passes)))
    )
    drafter = Unquestioning(answer, scripts(64)["wrong"], wants)
    emitted = rounds(target.sequence(), prompt, Sampler(SamplingParams(), prompt), 8, Chain([drafter], Fixed(4)))
    assert [r.accepted for r in emitted]
    assert not right(drafter, whole, KINDS[kind][3])


class Idle(Watching):
    """Costs something and never drafts."""

    free = True

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        return NOTHING


class Ahead(Auto):
    """Always starts the next pass before this one's token was looked at."""

    def look_ahead(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["kv", "window8"])
def test_a_pass_that_is_under_way_does_not_show(kind: str) -> None:
    target, wants = target_of(kind)
    prompt = prompt_of(9)
    answer = plain(target.model, prompt, TOKENS, target.options)
    drafter = Idle(answer, scripts(64)["right"], wants)
    chain = Chain([drafter], Ahead())
    emitted = rounds(target.sequence(), prompt, Sampler(SamplingParams(), prompt), TOKENS, chain)
    assert [t for r in emitted for t in r.tokens] == answer
    assert right(drafter, truth(target, [*prompt, *answer]), 0), "of a pass that no draft can follow its own rows"


@pytest.mark.parametrize("length", [Ahead(), Fixed(0)], ids=["ahead", "none"])
def test_a_cache_is_not_copied_for_a_drafter_that_does_not_draft(length: Any) -> None:
    target, wants = target_of("kv")
    prompt, sequence = prompt_of(9), target.sequence()
    drafter = Idle(plain(target.model, prompt, TOKENS, target.options), scripts(64)["right"], wants)
    drafters = [] if isinstance(length, Fixed) else [drafter]
    places = set()
    for _ in rounds(sequence, prompt, Sampler(SamplingParams(), prompt), TOKENS, Chain(drafters, length)):
        drafter.seen.clear()
        keys = np.array(sequence._caches[wants.keys_values[0]].keys, copy=False)
        places.add(keys.__array_interface__["data"][0])
        del keys
    assert len(places) <= 3, "it moves when it grows, and not with every token"


@pytest.mark.parametrize("layer", [0, -1, 7])
def test_a_layer_without_keys_is_refused(layer: int) -> None:
    target = Target(zoo.CACHE_KINDS["gated_delta"]())
    with pytest.raises(PairingError, match=f"keys and values of layer {layer}, and the target has none"):
        target.watch(FeatureRequest(keys_values=(layer,)))


def test_layers_that_share_keys_have_none_of_their_own() -> None:
    target = Target(zoo.build("gemma4_text"))
    assert target.remembering == len(target.model.layers) - 2
    with pytest.raises(PairingError, match="layer 4"):
        target.watch(FeatureRequest(keys_values=(4,)))
