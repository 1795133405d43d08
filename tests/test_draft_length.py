"""The controller, run against scripted acceptance and costs: near the best fixed length, and hardly ever below none."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Callable
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.draft_length import Auto, Fixed, Outcome
from mlx_specdec.drafters.base import NOTHING, Draft, Drafter
from mlx_specdec.measured import Chances, Costs, Measured
from tests.scripted import Empty

MOST, SEEDS = 8, range(8)

# Seconds of a verify pass by its rows, in passes of one row. The second is what was reported of an Apple GPU.
CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 1.0,
    "apple": lambda rows: 1 + (rows - 1) / 6 if rows <= 4 else 1.5 + (rows - 4) * 0.3,
    "linear": float,
}
DRAFTS = [Draft(mx.arange(k)) if k else NOTHING for k in range(MOST + 1)]
WRONG = -1


def drafter(free: bool) -> Any:
    made = Empty([])
    made.free, made.max_draft = free, MOST
    return made


def came(k: int, right: int) -> list[int]:
    """The tokens of a round that verified `k` of the drafts 0, 1, ..., the first `right` of which are what comes."""
    return [*range(min(k, right)), k if k < right else WRONG]


def lengths(
    length: Auto,
    chance: Callable[[int], float],
    cost: Callable[[int], float],
    seed: int,
    free: bool,
    rounds: int = 300,
    factor: Callable[[int], float] = lambda number: 1.0,
) -> list[int]:
    """The drafts of every round that `length` chose, where draft i stands with `chance(round)`."""
    random, chosen, who = Random(seed), [], drafter(free)
    for number in range(rounds):
        k = length.limit(who)
        k = length.cut(who, DRAFTS[k], ()) if k else 0
        right = 0
        while right < MOST and random.random() < chance(number):
            right += 1
        # A draft model takes a tenth of the target's time for each token.
        seconds = cost(k + 1) + (0.0 if free else 0.1 * k)
        length.record(Outcome(who if k else None, k, came(k, right), seconds * factor(number)))
        chosen.append(k)
    return chosen


def rate(chosen: list[int], a: float, cost: Callable[[int], float], free: bool) -> float:
    """Expected tokens per second of these rounds."""
    tokens = sum(sum(a**i for i in range(k + 1)) for k in chosen)
    return tokens / sum(cost(k + 1) + (0.0 if free else 0.1 * k) for k in chosen)


def best(a: float, cost: Callable[[int], float], free: bool) -> float:
    return max(rate([k], a, cost, free) for k in range(MOST + 1))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("free", [True, False], ids=["free", "model"])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("a", [0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_near_the_best_fixed_length(a: float, curve: str, free: bool) -> None:
    cost = CURVES[curve]
    runs = [lengths(Auto(), lambda _: a, cost, seed, free) for seed in SEEDS]
    assert mean([rate(run[50:], a, cost, free) for run in runs]) >= 0.95 * best(a, cost, free)
    assert mean([rate(run, a, cost, free) for run in runs]) >= 0.97 * rate([0], a, cost, free)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(("before", "then"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.8), (0.8, 0.0), (0.9, 0.3), (0.2, 0.9)])
def test_acceptance_that_changes_midway(before: float, then: float, curve: str) -> None:
    cost = CURVES[curve]
    runs = [lengths(Auto(), lambda number: before if number < 150 else then, cost, seed, True) for seed in SEEDS]
    assert mean([rate(run[200:], then, cost, True) for run in runs]) >= 0.95 * best(then, cost, True)
    for run in runs:
        parts = [(run[:150], before), (run[150:], then)]
        tokens = sum(sum(sum(a**i for i in range(k + 1)) for k in part) for part, a in parts)
        assert tokens / sum(cost(k + 1) for k in run) >= 0.97, "of plain decoding, over both halves"


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_account_bounds_what_is_lost(curve: str, seed: int) -> None:
    """Whatever is drafted, tokens and seconds as they really came: never under 0.97 of plain decoding in 300 rounds."""
    random, length, who = Random(seed), Auto(), drafter(True)
    tokens = seconds = 0.0
    for _ in range(300):
        k = length.cut(who, DRAFTS[MOST], ())
        right = 0
        while right < MOST and random.random() < 0.15:
            right += 1
        emitted = came(k, right)
        length.record(Outcome(who if k else None, k, emitted, CURVES[curve](k + 1)))
        tokens, seconds = tokens + len(emitted), seconds + CURVES[curve](k + 1)
    assert tokens / seconds >= 0.97


def test_a_drafter_that_is_slower_than_the_target_is_left_alone() -> None:
    for slow in (1.0, 3.0, 10.0):
        run = lengths(Auto(), lambda _: 0.9, lambda rows, s=slow: CURVES["apple"](rows) + s * (rows - 1), 0, False)
        tokens = sum(sum(0.9**i for i in range(k + 1)) for k in run)
        assert tokens / sum(CURVES["apple"](k + 1) + (slow + 0.1) * k for k in run) >= 0.96, slow
        assert sum(map(bool, run)) <= 12


class Reckless(Auto):
    """Drafts without looking at its accounts, as much as it can."""

    def _best(self, drafter: Drafter, most: int, confidence: object, elsewhere: float = 1.0) -> int:
        return most if self._measured.plain else 0


@pytest.mark.parametrize("curve", ["apple", "linear"])
def test_a_controller_that_always_drafts_is_caught(curve: str) -> None:
    """The negative control: the bounds above are not met by just drafting."""
    cost = CURVES[curve]
    run = lengths(Reckless(), lambda _: 0.2, cost, 0, True)
    assert rate(run[50:], 0.2, cost, True) < 0.95 * best(0.2, cost, True)
    assert rate(run, 0.2, cost, True) < 0.97 * rate([0], 0.2, cost, True)


def test_what_was_not_verified_is_judged_too() -> None:
    run = lengths(Auto(), lambda number: float(number >= 100), CURVES["apple"], 0, True, rounds=120)
    assert sum(map(bool, run[:100])) <= 5, "it need not be verified to be known as bad"
    assert min(run[105:]) >= 4, "nor to be known as good again"


def test_slow_moments_are_forgotten() -> None:
    """The first draft of each length takes three times what it takes later, as if a kernel were built for it."""
    seen, cost = set[int](), CURVES["apple"]

    def slow(rows: int) -> float:
        first, _ = rows > 1 and rows not in seen, seen.add(rows)
        return cost(rows) * (3 if first else 1)

    for free in (True, False):
        seen.clear()
        run = lengths(Auto(), lambda _: 0.8, slow, 0, free)
        assert rate(run[150:], 0.8, cost, free) >= 0.95 * best(0.8, cost, free)


def test_streams_share_what_was_measured_and_nothing_else() -> None:
    measured, who = Measured(), drafter(True)
    one, other = Auto(measured), Auto(measured)
    lengths(one, lambda _: 1.0, CURVES["flat"], 0, True, rounds=60)
    assert other.cut(who, DRAFTS[MOST], ()) == MOST, "what the other stream measured is known"
    assert other.state()["cost_by_rows"] == one.state()["cost_by_rows"]
    assert other.state()["chosen"] == {"empty": MOST}


def test_confidence_is_calibrated() -> None:
    """A drafter that calls everything certain and is right one time in ten is not believed for long."""
    length, who = Auto(), drafter(True)
    boast = Draft(mx.arange(MOST), confidence=(1.0,) * MOST)
    length.record(Outcome(None, 0, [WRONG], 1.0))
    verified = []
    for number in range(60):
        k = length.cut(who, boast, ())
        verified.append(k)
        length.record(Outcome(who if k else None, k, came(k, int(number % 10 == 0)), CURVES["apple"](k + 1)))
    assert max(verified) > 0
    assert sum(verified[30:]) <= 6


def test_a_confidence_that_is_no_share() -> None:
    length, who = Auto(), drafter(True)
    length.record(Outcome(None, 0, [WRONG], 1.0))
    for confidence in (float("nan"), 50.0, -1.0):
        k = length.cut(who, Draft(mx.arange(2), confidence=(confidence,) * 2), ())
        length.record(Outcome(who if k else None, k, came(k, 0), 1.0))
    assert all(0 <= chance <= 1 for chance in length.state()["chances"]["empty"].values())


def test_the_same_measurements_give_the_same_choices() -> None:
    runs = [lengths(Auto(), lambda _: 0.6, CURVES["apple"], 3, True) for _ in range(2)]
    assert runs[0] == runs[1]


def test_costs_are_lines_between_and_beyond_what_was_measured() -> None:
    costs = Costs()
    assert (costs.of(2), costs.most) == (1.0, 0)
    for rows, cost in ((4, 2.2), (4, 9.0), (4, 2.5), (8, 2.0), (8, 2.1)):
        costs.add(rows, cost)
    assert costs.of(4) == 2.5, "the median"
    assert costs.of(2) == pytest.approx(1.5)
    assert costs.of(8) == 2.0, "more rows may cost less"
    assert costs.of(16) == 2.0
    costs.add(16, 3.0)
    assert costs.of(16) == 2.0, "once is not believed"
    costs.add(16, 3.2)
    assert costs.of(12) == 2.5
    assert costs.of(24) == 3.5, "half the last rise"
    costs.add(6, 1.9)
    assert costs.of(6) == 1.9, "but that it costs less is"
    assert costs.most == 16


def disturbed(a: float, free: bool, factor: Callable[[int, Random], float], begin: int, rounds: int = 600) -> float:
    """How near the best the rounds from `begin` on are where round i takes `factor(i)` of its time."""
    shape, rates = CURVES["apple"], []
    for seed in SEEDS:
        random = Random(seed)
        run = lengths(Auto(), lambda _: a, shape, seed, free, rounds, lambda number, of=random: factor(number, of))
        rates.append(rate(run[begin:], a, shape, free))
    return mean(rates) / best(a, shape, free)


both = pytest.mark.parametrize("free", [True, False], ids=["free", "model"])


@both
@pytest.mark.parametrize("then", [0.25, 0.5, 1.5, 2.0, 4.0, 10.0])
def test_all_rounds_becoming_slower_or_faster_changes_nothing(then: float, free: bool) -> None:
    """As when another program begins or ends, or a longer text comes."""
    assert disturbed(0.8, free, lambda number, _: 1 if number < 200 else then, 200) >= 0.95


@both
def test_a_pause_is_forgotten(free: bool) -> None:
    """The machine slept in one round: for a hundred rounds' time."""
    assert disturbed(0.8, free, lambda number, _: 100 if number == 200 else 1, 201) >= 0.95


@both
def test_spikes_and_noise(free: bool) -> None:
    assert disturbed(0.8, free, lambda _, random: 20 if random.random() < 0.02 else 1, 50, 3000) >= 0.95
    assert disturbed(0.8, free, lambda _, random: random.gauss(1, 0.1), 50) >= 0.95


@both
def test_a_first_step_that_costs_as_much_as_all(free: bool) -> None:
    """As with a drafter that makes its whole block at once: one draft does not pay, eight do."""

    def step(rows: int) -> float:
        return 1.0 if rows == 1 else 2.0

    run = lengths(Auto(), lambda _: 0.8, lambda rows: step(rows) - (0 if free else 0.1 * (rows - 1)), 0, free, 600)
    tokens = [sum(0.8**i for i in range(k + 1)) for k in run[300:]]
    assert sum(tokens) / sum(step(k + 1) for k in run[300:]) >= 0.95 * sum(0.8**i for i in range(MOST + 1)) / 2


def test_a_drafter_that_is_right_only_when_it_is_not_verified() -> None:
    """Judged by what came it seems perfect: the account of what drafting lost ends that."""
    length, who, tokens, seconds = Auto(), drafter(True), 0, 0.0
    for _ in range(300):
        k = length.cut(who, DRAFTS[MOST], ())
        emitted = came(k, 0 if k else MOST)
        length.record(Outcome(who if k else None, k, emitted, CURVES["apple"](k + 1)))
        tokens, seconds = tokens + len(emitted), seconds + CURVES["apple"](k + 1)
    assert tokens / seconds >= 0.97


def test_probes_are_paid_for_where_another_drafter_wins() -> None:
    """What drafting won does not pay for asking a hopeless drafter again and again before the good one."""
    length, good, probes = Auto(), drafter(True), 0
    hopeless = drafter(False)
    hopeless.name = "hopeless"
    length.record(Outcome(None, 0, [WRONG], 1.0))
    for _ in range(300):
        k = length.limit(hopeless)
        probes += k > 0
        who = hopeless if k else good
        k = k or length.cut(good, DRAFTS[MOST], ())
        length.record(Outcome(who if k else None, k, came(k, 0 if who is hopeless else MOST), CURVES["apple"](k + 1)))
    assert 2 <= probes <= 40


def in_turn(
    first: float,
    second: Callable[[int], float],
    cost: Callable[[int], float],
    seed: int,
    silent: Callable[[int], bool] = lambda number: False,
    since: int = 50,
    rounds: int = 300,
) -> float:
    """Tokens a second, from round `since` on, of a free drafter that always drafts and, where that yields its turn, of
    a model; what comes is 0, 1, ... Where the model is `silent` it drafts nothing."""
    random, length, free, model = Random(seed), Auto(), drafter(True), drafter(False)
    model.name, tokens, seconds = "model", 0, 0.0

    def right(a: float) -> int:
        return next((k for k in range(MOST) if random.random() >= a), MOST)

    for number in range(rounds):
        stands, drafts = right(first), np.arange(MOST)
        drafts[stands:] = WRONG
        k, who = length.cut(free, Draft(mx.array(drafts)), (model,)), free
        if k == 0 and (k := length.limit(model)):
            stands, who = right(second(number)), model
            k = length.cut(model, NOTHING if silent(number) else DRAFTS[k], ())
        spent = cost(k + 1) + 0.1 * k * (who is model)
        length.record(Outcome(who if k else None, k, range(min(k, stands) + 1), spent))
        tokens, seconds = tokens + (number >= since) * (min(k, stands) + 1), seconds + (number >= since) * spent
    return tokens / seconds


@pytest.mark.parametrize("curve", ["flat", "apple"])
@pytest.mark.parametrize(("first", "second"), [(0.0, 0.9), (0.2, 0.9), (0.5, 0.9), (0.6, 0.6), (0.9, 0.6), (0.9, 0.0)])
def test_a_free_drafter_yields_to_a_model_that_promises_more(first: float, second: float, curve: str) -> None:
    cost = CURVES[curve]
    alone = max(best(first, cost, True), best(second, cost, False))
    assert mean([in_turn(first, lambda _: second, cost, seed) for seed in SEEDS]) >= 0.9 * alone


def test_nobody_yields_to_a_model_that_is_silent() -> None:
    cost = CURVES["apple"]
    runs = [in_turn(0.7, lambda _: 0.9, cost, seed, lambda _: True) for seed in SEEDS]
    assert mean(runs) >= 0.95 * best(0.7, cost, True)


def test_a_model_that_was_silent_or_bad_for_a_while_is_tried_again() -> None:
    cost, after = CURVES["apple"], {"since": 1500, "rounds": 2000}
    silent = [in_turn(0.6, lambda _: 0.95, cost, seed, lambda number: number < 20, **after) for seed in SEEDS]
    bad = [in_turn(0.6, lambda number: 0.95 * (number > 150), cost, seed, **after) for seed in SEEDS]
    for runs in (silent, bad):
        assert mean(runs) >= 0.9 * best(0.95, cost, False)


def test_a_model_that_pays_less_than_the_free_drafter_costs_what_probes_may() -> None:
    cost, long = CURVES["flat"], {"since": 500, "rounds": 3000}
    alone = best(0.9, cost, True)
    assert mean([in_turn(0.9, lambda _: 0.5, cost, seed, **long) for seed in SEEDS]) >= 0.96 * alone
    assert mean([in_turn(0.9, lambda _: 0.0, cost, seed, **long) for seed in SEEDS]) >= 0.96 * alone


@pytest.mark.parametrize("seed", SEEDS)
def test_measurements_do_not_drift(seed: int) -> None:
    """Where every round drafts, nothing but drafts is measured, noisily, for thousands of rounds."""
    random, length = Random(seed), Auto()
    lengths(length, lambda _: 0.95, lambda rows: CURVES["apple"](rows) * random.gauss(1, 0.1), seed, True, rounds=4000)
    assert length.state()["plain_seconds"] == pytest.approx(1.0, rel=0.25)


def test_what_is_unknown_is_approached_step_by_step() -> None:
    most = 1
    for k in lengths(Auto(), lambda _: 1.0, CURVES["flat"], 0, True):
        assert k + 1 <= 2 * most
        most = max(most, k + 1)
    assert most == MOST + 1


def test_a_plain_round_is_the_median_of_the_last_three() -> None:
    known = Measured()
    for seconds, plain in ((1.0, 1.0), (9.0, 1.0), (1.1, 1.1), (3.0, 3.0), (3.1, 3.0), (1.0, 3.0), (1.0, 1.0)):
        known.add_plain(seconds)
        assert known.plain == plain


def test_a_cost_is_the_median_of_the_last_nine() -> None:
    costs = Costs()
    for _ in range(20):
        costs.add(4, 1.5)
    for _ in range(4):
        costs.add(4, 3.0)
    assert costs.of(4) == 1.5
    costs.add(4, 3.0)
    assert costs.of(4) == 3.0


def test_chances_are_counted_by_confidence() -> None:
    """A drafter that stands the more seldom the surer it is."""
    chances = Chances()
    for _ in range(100):
        chances.add(1, 0, (0.9,))
        chances.add(1, 1, (0.4,))
    assert chances.at(1, (0.95,)) < 0.45
    assert chances.at(1, (0.45,)) > 0.55
    assert chances.state() == {"0.4": 1.0, "0.9": 0.0}


def test_looking_ahead_asks_only_what_follows_a_round_without_a_draft() -> None:
    length, who = Auto(), drafter(True)
    for _ in range(80):
        length.record(Outcome(None, 0, [WRONG], 1.0))
        length.record(Outcome(who, 4, came(4, 0), 1.5))
        length.record(Outcome(who, 4, came(4, 4), 1.5))
    assert length.look_ahead()


def test_looking_ahead_ends_where_drafts_begin_to_stand() -> None:
    length, who = Auto(), drafter(True)
    for _ in range(80):
        length.record(Outcome(None, 0, [WRONG], 1.0))
    assert length.look_ahead()
    length.record(Outcome(who, 4, came(4, 4), 1.5))
    assert not length.look_ahead()


def test_fixed() -> None:
    assert Fixed(3).limit(drafter(True)) == 3
    assert Fixed(3).cut(drafter(True), DRAFTS[2], ()) == 2
    assert Fixed(0).look_ahead()
    assert not Fixed(1).look_ahead()
