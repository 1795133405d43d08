"""What the tests of the n-gram drafters share: llama.cpp's own outputs, and ways to play them to a drafter."""

import mlx_specdec  # noqa: F401  # isort: skip  # before mlx.core

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

import mlx.core as mx

from mlx_specdec.drafters.base import Drafter
from mlx_specdec.sampling import Sampler, SamplingParams

ANY = Sampler(SamplingParams(), [0])  # what these drafters propose does not depend on how tokens are chosen
PLENTY = 1024


def golden(name: str) -> dict:
    """See tests/golden/README.md."""
    return json.loads((Path(__file__).parents[1] / "golden" / f"{name}.json").read_text())


def propose(drafter: Drafter, last: int, limit: int = PLENTY) -> list[int]:
    draft = drafter.propose(last, limit, ANY)
    assert draft.probs is None
    assert draft.tokens.dtype == mx.int32
    tokens = draft.tokens.tolist()
    assert len(tokens) <= limit
    return tokens


def started(drafter: Drafter, history: Sequence[int], last: int) -> Drafter:
    """The drafter about to draft for the first time after the prompt [*history, last]."""
    drafter.start([*history, last])
    drafter.observe(history, None)
    return drafter


def replay(drafter: Drafter, trace: dict) -> list[list[int]]:
    """What it drafts where llama.cpp drafted."""
    history, drafts = trace["final_history"], []
    drafter.start([*trace["begin"], trace["steps"][0]["id_last"]])
    known = 0
    for step in trace["steps"]:
        drafter.observe(history[known : step["history_len"]], None)
        known = step["history_len"]
        drafts.append(propose(drafter, step["id_last"]))
        if step["draft"]:
            drafter.settle(len(step["draft"]), step["accepted"])
    return drafts


def text(length: int) -> list[int]:
    """Tokens as uneven in frequency as words are."""
    random = Random(0)
    return [int(30000 ** random.random()) for _ in range(length)]


def growth(make: Callable[[], Drafter], longest: int = 100_000) -> float:
    """How many times longer a draft takes after 100,000 tokens than after 1,000 of them.

    Two drafters work in turn, so that whatever else the machine does meets both. Both are given the first 750 tokens
    again, three at a time, to have something to draft. The median of 250 drafts, and the best of three tries.
    """
    tokens = text(longest)
    drafters = [started(make(), tokens[:length], 0) for length in (1000, longest)]
    return min(_growth(drafters, tokens) for _ in range(3))


def _growth(drafters: list[Drafter], tokens: list[int]) -> float:
    times: list[list[float]] = [[], []]
    drafts = 0
    for at in range(0, 750, 3):
        for drafter, spent in zip(drafters, times, strict=True):
            drafter.observe(tokens[at : at + 3], None)
            began = perf_counter()
            draft = drafter.propose(tokens[at + 3], PLENTY, ANY)
            spent.append(perf_counter() - began)
            drafts += len(draft.tokens) > 0
    assert drafts > 400
    return median(times[1]) / median(times[0])
