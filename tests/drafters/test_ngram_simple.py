"""ngram_simple drafts what llama.cpp's ngram-simple drafts; see tests/golden/README.md for where the cases are from."""

import mlx_specdec  # noqa: F401  # isort: skip  # before mlx.core

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import mlx.core as mx
import pytest

from mlx_specdec.drafters import DrafterOptions, by_name
from mlx_specdec.drafters.ngram_simple import NgramSimple
from mlx_specdec.errors import OptionError
from mlx_specdec.sampling import Sampler, SamplingParams

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ngram_simple.json").read_text())
ANY = Sampler(SamplingParams(), [0])  # what this drafter proposes does not depend on how tokens are chosen


def propose(drafter: NgramSimple, last: int, limit: int) -> list[int]:
    draft = drafter.propose(last, limit, ANY)
    assert draft.probs is None
    assert draft.tokens.dtype == mx.int32
    return draft.tokens.tolist()


def after(n: int, m: int, history: Sequence[int], last: int, limit: int | None = None) -> list[int]:
    drafter = NgramSimple(n, m)
    drafter.start([*history, last])
    drafter.observe(history, None)
    return propose(drafter, last, m if limit is None else limit)


def scan(n: int, m: int, history: list[int], last: int) -> list[int]:
    """The definition, word for word."""
    length = len(history)
    if length <= n + m + 1:
        return []
    pattern = [*history[length - (n - 1) :], last] if n > 1 else [last]
    for j in range(length - n - 1, 0, -1):
        if history[j : j + n] == pattern:
            count = min(m, length - (j + n))
            return history[j + n : j + n + count] if count >= n else []
    return []


@pytest.mark.parametrize("case", GOLDEN["vectors"])
def test_vectors(case: dict):
    assert after(case["n"], case["m"], case["history"], case["id_last"]) == case["draft"]


@pytest.mark.parametrize("trace", GOLDEN["traces"])
def test_traces(trace: dict):
    drafter, history = NgramSimple(trace["n"], trace["m"]), trace["final_history"]
    drafter.start([*trace["begin"], trace["steps"][0]["id_last"]])
    known = 0
    for step in trace["steps"]:
        drafter.observe(history[known : step["history_len"]], None)
        known = step["history_len"]
        draft = propose(drafter, step["id_last"], trace["m"])
        assert draft == step["draft"]
        if draft:
            drafter.settle(len(draft), step["accepted"])


def test_random_histories():
    random, drafts = Random(0), 0
    for _ in range(1500):
        n, m, tokens = random.randint(1, 4), random.randint(1, 6), random.choice([1, 2, 3, 5])
        history = [random.randrange(tokens) for _ in range(random.randint(0, 40))]
        last = random.randrange(tokens)
        want = scan(n, m, history, last)
        assert after(n, m, history, last) == want
        drafts += bool(want)
    assert drafts > 300


@pytest.mark.parametrize("n", [1, 2, 12])
def test_a_long_history_comes_piece_by_piece(n: int):
    """From nothing to 5000 tokens, in pieces of many sizes; half repeat something, so that long patterns match."""
    random, drafter, history, drafts = Random(1), NgramSimple(n, 16), [], 0
    drafter.start([0])
    while len(history) < 5000:
        piece = [random.randrange(4) for _ in range(random.choice([0, 1, 2, 700]))]
        if len(history) > 100 and random.random() < 0.5:
            piece = history[-60:-20]
        drafter.observe(piece, None)
        history += piece
        last = history[-60] if len(history) > 60 else 0
        want = scan(n, 16, history, last)
        assert propose(drafter, last, 16) == want
        drafts += bool(want)
    assert drafts > 10


def test_proposing_changes_nothing():
    history = [9, 1, 2, 3, 4, 5, 6, 1]
    drafter = NgramSimple(2, 3)
    drafter.start([*history, 2])
    drafter.observe(history, None)
    assert [propose(drafter, last, 3) for last in (2, 7, 2)] == [[3, 4, 5], [], [3, 4, 5]]


def test_start_forgets():
    drafter = NgramSimple(2, 3)
    for _ in range(2):
        drafter.start([9, 1, 2, 3, 4, 1, 2])
        drafter.observe([9, 1, 2, 3, 4, 1], None)
        assert propose(drafter, 2, 3) == []  # six tokens are too few
        drafter.observe([2, 8, 1], None)
        assert propose(drafter, 2, 3) == [8, 1]


@pytest.mark.parametrize("limit", range(5))
def test_limit(limit: int):
    """It cuts the draft, and has no say in whether there is one."""
    assert after(2, 3, [9, 1, 2, 3, 4, 5, 6, 1], 2, limit) == [3, 4, 5][:limit]


@pytest.mark.parametrize("value", [-1, 0, 1025, 2.5])
@pytest.mark.parametrize("option", ["ngram_n", "ngram_m"])
def test_options_out_of_range(option: str, value: float):
    with pytest.raises(OptionError, match=rf"{option} is {value}\b"):
        by_name("ngram_simple", DrafterOptions(**{option: value}))


@pytest.mark.parametrize("option", ["ngram_n", "ngram_m"])
def test_options_at_the_ends(option: str):
    for value in (1, 1024):
        drafter = by_name("ngram_simple", DrafterOptions(**{option: value}))[0]()
        drafter.start([1])
        assert propose(drafter, 1, 4) == []
