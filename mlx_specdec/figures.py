"""What a bench says of the runs that it made: sums over prompts, medians over repeats."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean, median


@dataclass(frozen=True)
class Run:
    """One request. Seconds: `first` until its first token, `rest` from there to its last.

    `at_once` tokens came with the first; `reached` and `stood` count drafts by place, as DrafterStats does.
    """

    ids: tuple[int, ...]
    first: float
    rest: float
    at_once: int
    passes: int
    reached: tuple[int, ...]
    stood: tuple[int, ...]


@dataclass(frozen=True)
class Spread:
    """Over the repeats."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Figures:
    """Of some prompts, a question's every turn, with one way. None where nothing was generated after the first pass.

    tokens_per_second and speedup are of generation alone, without the pass that gave the first token and what came with
    it: tokens and seconds are summed over the prompts, so that long outputs count for more, and speedup is plain
    decoding's seconds per token over the way's. request_speedup is the ratio of whole times, prefill included, as
    Spec-Bench has it. first_token is seconds, the mean over the prompts. tau is tokens a pass, by_position the share of
    drafts that stood at each place, of those that got there (empty for mlx-lm, which does not tell).
    """

    prompts: int
    tokens: int
    tokens_per_second: Spread | None
    first_token: Spread
    tau: float
    by_position: tuple[float, ...]
    speedup: Spread | None
    request_speedup: Spread


def summary(way: list[list[Run]], plain: list[list[Run]], places: Sequence[int]) -> Figures:
    """Of the requests at `places`. The runs are those of each repeat."""
    mine, base = ([[repeat[place] for place in places] for repeat in runs] for runs in (way, plain))
    every = [run for repeat in mine for run in repeat]
    reached, stood = added([run.reached for run in every]), added([run.stood for run in every])
    rates, base_rates = [_rate(repeat) for repeat in mine], [_rate(repeat) for repeat in base]
    return Figures(
        prompts=len(places),
        tokens=sum(len(run.ids) for run in mine[0]),
        tokens_per_second=_spread(rates),
        first_token=_over([fmean(run.first for run in repeat) for repeat in mine]),
        tau=sum(len(run.ids) for run in every) / sum(run.passes for run in every),
        by_position=tuple(s / r for s, r in zip(stood, reached, strict=True) if r),
        speedup=_spread([a / b if a and b else None for a, b in zip(rates, base_rates, strict=True)]),
        request_speedup=_over([_whole(b) / _whole(a) for a, b in zip(mine, base, strict=True)]),
    )


def _rate(runs: Sequence[Run]) -> float | None:
    """Tokens per second after the first pass."""
    tokens, seconds = sum(max(len(run.ids) - run.at_once, 0) for run in runs), sum(run.rest for run in runs)
    return tokens / seconds if tokens else None


def _whole(runs: Sequence[Run]) -> float:
    """Seconds from the call to the last token."""
    return sum(run.first + run.rest for run in runs)


def _over(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return _over(known) if len(known) == len(values) else None


def added(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Place by place."""
    return tuple(sum(column) for column in zip_longest(*counts, fillvalue=0))
