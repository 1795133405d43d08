"""Ids with a drafter equal plain decoding's, for every kind of cache, drafter, draft length and prompt length.

Plain decoding is mlx-lm's own `generate_step`, so each cell also says that ours is the same.
"""

import mlx_specdec  # noqa: F401  # isort: skip

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from mlx_lm.models.cache import RotatingKVCache, trim_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from mlx_specdec.drafters.base import Drafter
from mlx_specdec.drafters.draft_model import DraftModel
from mlx_specdec.drafters.ngram_simple import NgramSimple
from mlx_specdec.target.model import CacheOptions, Sequence, Target
from mlx_specdec.target.rewind import Recurrent, Rewinder, Window
from tests import zoo
from tests.scripted import Empty, Scripted, drafted, plain, reference, scripts

VOCAB, TOKENS, STEP, DRAFTS = 64, 80, 16, (1, 2, 4, 8)
VARIANTS = ("sinks", "kv4_late", "chunked", "rwkv", "hybrid_window")  # of kinds that are here already: fewer cells

# How a sequence is remembered: the zoo's kind of model, the cache options, and the window if there is one.
KINDS: dict[str, tuple[str, dict[str, int], int | None]] = {
    "kv": ("kv", {}, None),
    "kv8": ("kv_quant", {"kv_bits": 8, "quantized_kv_start": 0}, None),
    "kv4": ("kv_quant", {"kv_bits": 4, "quantized_kv_start": 0}, None),
    "kv4_late": ("kv_quant", {"kv_bits": 4, "quantized_kv_start": 40}, None),
    "sinks": ("kv", {"max_kv_size": 24}, 24),
    "window8": ("window8", {}, 8),
    "window24": ("window24", {}, 24),
    "chunked": ("chunked", {}, 8),
    "gated_delta": ("gated_delta", {}, None),
    "mamba": ("mamba", {}, None),
    "short_conv": ("short_conv", {}, None),
    "rwkv": ("rwkv", {}, None),
    "hybrid": ("hybrid", {}, None),
    "hybrid_window": ("hybrid_window", {}, 8),
}
CELLS = [
    (kind, length)
    for kind, (_, _, window) in KINDS.items()
    for length in sorted(
        ({1, STEP + 1} if kind in VARIANTS else {1, 2, 7, STEP, STEP + 1, STEP + 2})
        | ({window - 1, window, window + 1} if window else set())
    )
]

# A quantised cache turns the last bit of a key, which OpenBLAS rounds in another way for one row than for several, into
# a whole step of the quantiser now and then. With this seed that moves no arg-max in any cell; the last test shows that
# with a BLAS that treats every row alike there is nothing to choose.
SEEDS = {"kv_quant": 1}


@cache
def target_of(kind: str) -> Target:
    name, options, _ = KINDS[kind]
    return Target(zoo.CACHE_KINDS[name](seed=SEEDS.get(name, 0)), CacheOptions(prefill_step_size=STEP, **options))


@cache
def draft_target(kind: str) -> Target:
    """A draft model of the target's own kind, so that hybrid and windowed draft models are covered as well."""
    name = KINDS[kind][0]
    return Target(zoo.perturbed(lambda: zoo.CACHE_KINDS[name](seed=SEEDS.get(name, 0)), zoo.NOISE[1]))


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + 3 * i + 5) % VOCAB for i in range(length)]


def answer_of(kind: str, prompt: list[int], tokens: int = TOKENS, **options: Any) -> list[int]:
    model, cache = target_of(kind).model, dict(KINDS[kind][1])
    if size := cache.pop("max_kv_size", None):  # mlx-lm would ignore it for a llama
        options["prompt_cache"] = [RotatingKVCache(size, keep=4) for _ in model.layers]
    return reference(model, prompt, tokens, prefill_step_size=STEP, **cache, **options)


def drafters(kind: str, answer: list[int]) -> Iterator[tuple[str, Callable[[], Drafter]]]:
    for name, script in scripts(VOCAB).items():
        yield name, lambda script=script: Scripted(answer, script)  # type: ignore[misc]
    yield "ngram_simple", lambda: NgramSimple(2, 8)
    yield "draft_model", lambda: DraftModel(draft_target(kind), VOCAB)


@pytest.mark.parametrize(("kind", "length"), CELLS)
def test_ids_equal_plain_decoding(kind: str, length: int) -> None:
    target, prompt = target_of(kind), prompt_of(length)
    answer = answer_of(kind, prompt)
    assert plain(target.model, prompt, TOKENS, target.options) == answer
    assert drafted(target, Empty(answer), prompt, TOKENS, 4) == answer
    for name, make in drafters(kind, answer):
        for k in (1, 8) if kind in VARIANTS else DRAFTS:
            assert drafted(target, make(), prompt, TOKENS, k) == answer, (name, k)


PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5, "repetition_context_size": 40},
    "presence": {"presence_penalty": 1.5, "presence_context_size": 40},
    "bias": {"logit_bias": {3: 4.0, 20: 4.0, 41: -5.0}},
}


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("kind", KINDS)
def test_penalties_see_the_true_history(kind: str, penalty: str) -> None:
    """The prompt holds the likely answer, so a penalty that missed it would not move the output."""
    target, sampling = target_of(kind), PENALTIES[penalty]
    prompt = prompt_of(9)
    likely = answer_of(kind, prompt, 16)
    prompt += likely + prompt
    answer = answer_of(kind, prompt, 40, logits_processors=make_logits_processors(**sampling))
    assert answer != answer_of(kind, prompt, 40), "the penalty has no effect here, so nothing is tested"
    assert plain(target.model, prompt, 40, target.options, **sampling) == answer
    for name, make in drafters(kind, answer):
        for k in (1, 4):
            assert drafted(target, make(), prompt, 40, k, **sampling) == answer, (name, k)


def parts(kind: str, k: int = 4) -> bool:
    """Whether with some script the ids part from plain decoding's, or an offset is found wrong."""
    target, prompt = target_of(kind), prompt_of(17)
    answer = answer_of(kind, prompt)
    try:
        return any(drafted(target, Scripted(answer, s), prompt, TOKENS, k) != answer for s in scripts(VOCAB).values())
    except AssertionError:
        return True


class TestBrokenVersionsAreCaught:
    """Each is a way that rewinding is got wrong in the field; the cells above must not be blind to it."""

    @pytest.mark.parametrize("kind", ["sinks", "window8", "window24"])
    def test_a_window_is_trimmed_as_mlx_lm_does(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Rewinder, "_check", lambda self: None)  # the ids alone must show it
        monkeypatch.setattr(Window, "cut", lambda self, mark, rows, keep: trim_prompt_cache([self.cache], rows - keep))
        assert parts(kind)

    def test_sinks_slide(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Sequence, "_keep_sinks", lambda self: None)
        assert parts("sinks")

    @pytest.mark.parametrize("kind", ["gated_delta", "mamba", "short_conv", "rwkv", "hybrid", "hybrid_window"])
    def test_a_recurrent_state_keeps_refused_tokens(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Recurrent, "cut", lambda self, mark, rows, keep: None)
        assert parts(kind)

    @pytest.mark.parametrize("kind", ["gated_delta", "mamba", "short_conv", "rwkv", "hybrid", "hybrid_window"])
    def test_a_recurrent_state_forgets_accepted_tokens(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Recurrent, "cut", lambda self, mark, rows, keep: self.restore(mark))
        assert parts(kind)

    @pytest.mark.parametrize("kind", KINDS)
    def test_one_refused_token_stays(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        right = Rewinder.settle
        monkeypatch.setattr(Rewinder, "_check", lambda self: None)

        def settle(self: Rewinder, keep: int) -> None:
            right(self, min(keep + 1, sum(p.rows for p in self._passes)))

        monkeypatch.setattr(Rewinder, "settle", settle)
        assert parts(kind)

    def test_a_pass_crosses_the_start_of_quantising(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Sequence, "room", lambda self, rows: rows)
        assert parts("kv4_late", k=8)


def quantised_cells(seeds: range = range(3)) -> list[str]:
    """The cells of quantised caches in which the ids part, for several models."""
    wrong = []
    for kind, seed, length in ((k, s, n) for k in ("kv8", "kv4") for s in seeds for n in (1, 9, 17)):
        target, prompt = Target(zoo.CACHE_KINDS["kv_quant"](seed=seed), target_of(kind).options), prompt_of(length)
        answer = reference(target.model, prompt, TOKENS, prefill_step_size=STEP, **KINDS[kind][1])
        for name, script in scripts(VOCAB).items():
            if any(drafted(target, Scripted(answer, script), prompt, TOKENS, k) != answer for k in DRAFTS):
                wrong.append(f"{kind} seed {seed} length {length} {name}")
    return wrong


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX has a BLAS of its own that cannot be chosen")
def test_quantised_caches_are_exact_where_the_arithmetic_is() -> None:
    code = "import mlx.core; from tests.test_exactness import quantised_cells; print(quantised_cells())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", "MLX's own BLAS computes every row alike"
