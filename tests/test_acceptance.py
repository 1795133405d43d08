"""The rules of acceptance, proved on small cases: with rational numbers the output's law is the target's, exactly."""

import mlx_specdec  # noqa: F401  # isort: skip  # before mlx.core

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise, product
from math import prod
from random import Random

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec import acceptance

VOCAB = range(3)
UNIT = 16  # probabilities are whole numbers of sixteenths: float32 holds them exactly
EDGE = Fraction(1, 2000)  # so near to its thresholds is a rule looked at

Row = tuple[Fraction, ...]
Tree = dict[tuple[int, ...], Row]  # a distribution of the next token for every beginning
Rule = Callable[[mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
Law = dict[tuple[int, ...], Fraction]


# --- the rules again, from the papers, in rational numbers


def token_thresholds(p: Sequence[Row], q: Sequence[Row], draft: Sequence[int]) -> list[Fraction]:
    """Token i is accepted where its uniform lies below min(1, p/q) (Leviathan 2023, algorithm 1)."""
    return [min(Fraction(1), p[i][x] / q[i][x]) for i, x in enumerate(draft)]


def block_weights(p: Sequence[Row], q: Sequence[Row], draft: Sequence[int]) -> list[Fraction]:
    weights = [Fraction(1)]
    for i, x in enumerate(draft):
        weights.append(min(Fraction(1), weights[-1] * p[i][x] / q[i][x]))
    return weights


def block_thresholds(p: Sequence[Row], q: Sequence[Row], draft: Sequence[int]) -> list[Fraction]:
    """Prefix i passes where its uniform lies below h_i (Sun et al. 2024, algorithm 2)."""
    weights, k = block_weights(p, q, draft), len(draft)
    thresholds = []
    for i in range(1, k):
        rest = sum(excess(p[i], q[i], weights[i]))
        short = rest + 1 - weights[i]
        thresholds.append(rest / short if short else Fraction(1))
    return [*thresholds, weights[k]]


def excess(p: Row, q: Row, weight: Fraction) -> Row:
    return tuple(max(weight * a - b, Fraction(0)) for a, b in zip(p, q, strict=True))


def residual(rule: str, p: Sequence[Row], q: Sequence[Row], draft: Sequence[int], accepted: int) -> Row | None:
    """The law of the token after `accepted` drafts; None where it never comes to that."""
    if accepted == len(draft):
        return p[accepted]
    weight = block_weights(p, q, draft)[accepted] if rule == "block" else Fraction(1)
    rest = excess(p[accepted], q[accepted], weight)
    return tuple(r / sum(rest) for r in rest) if sum(rest) else None


THRESHOLDS = {"token": token_thresholds, "block": block_thresholds}
OURS: dict[str, Rule] = {"token": acceptance.token, "block": acceptance.block}


# --- trees of distributions


def random_row(random: Random) -> Row:
    """Zeros are as likely as any other number: tokens that only one of the two models knows are the hard case."""
    a, b = sorted(random.randint(0, UNIT) for _ in range(2))
    return Fraction(a, UNIT), Fraction(b - a, UNIT), Fraction(UNIT - b, UNIT)


def one_hot(token: int) -> Row:
    return tuple(Fraction(x == token) for x in VOCAB)


def tree(depth: int, row: Callable[[], Row]) -> Tree:
    return {beginning: row() for n in range(depth) for beginning in product(VOCAB, repeat=n)}


def trees(kind: str, k: int, seed: int) -> tuple[Tree, Tree]:
    """Of the target, k + 1 deep, and of the drafter, k deep."""
    random = Random(f"{kind} {seed}")
    p = tree(k + 1, lambda: random_row(random))
    if kind == "random":
        return p, tree(k, lambda: random_row(random))
    if kind == "one-hot":
        return p, tree(k, lambda: one_hot(random.randrange(3)))
    # half of the drafter's rows are the target's own
    return p, {beginning: random.choice([p[beginning], random_row(random)]) for beginning in tree(k, tuple)}


def rows(where: Tree, tokens: Sequence[int], count: int) -> list[Row]:
    return [where[tuple(tokens[:i])] for i in range(count)]


def probability(where: Tree, tokens: Sequence[int]) -> Fraction:
    return prod((where[tuple(tokens[:i])][x] for i, x in enumerate(tokens)), start=Fraction(1))


# --- the law of the output


def cells(
    thresholds: Sequence[Fraction], within: Sequence[tuple[Fraction, Fraction]]
) -> Iterator[tuple[Row, Fraction]]:
    """The midpoint and the exact share of every cell of the uniforms, each of them uniform `within` an interval.

    An interval is cut at the threshold, and close to either side of it, so that a threshold of another height
    shows.
    """
    axes = []
    for threshold, (low, high) in zip(thresholds, within, strict=True):
        inner = {x for x in (threshold - EDGE, threshold, threshold + EDGE) if low < x < high}
        cuts = sorted({low, high} | inner)
        axes.append([((a + b) / 2, (b - a) / (high - low)) for a, b in pairwise(cuts)])
    for cell in product(*axes):
        yield tuple(middle for middle, _ in cell), prod((share for _, share in cell), start=Fraction(1))


def independent(q: Row, token: int) -> tuple[Fraction, Fraction]:
    return Fraction(0), Fraction(1)


def drew_the_draft(q: Row, token: int) -> tuple[Fraction, Fraction]:
    """Where the uniform lies if it is the one that picked the token."""
    return sum(q[:token], Fraction(0)), sum(q[: token + 1], Fraction(0))


def outcomes(
    name: str, rule: Rule, p: Tree, q: Tree, k: int, noise: Callable[[Row, int], tuple[Fraction, Fraction]]
) -> Iterator[tuple[tuple[int, ...], Fraction, int, Row]]:
    """Every draft with every cell of its uniforms: (draft, probability, accepted, law of the token after these).

    `rule` works in float32. Where its residual is the exact one to 1e-6, the exact one takes its place.
    """
    cases, results = [], []
    for draft in product(VOCAB, repeat=k):
        if not probability(q, draft):
            continue
        p_rows, q_rows = rows(p, draft, k + 1), rows(q, draft, k)
        within = [noise(row, x) for row, x in zip(q_rows, draft, strict=True)]
        for uniforms, share in cells(THRESHOLDS[name](p_rows, q_rows, draft), within):
            arrays = [mx.array(np.array(a, dtype=np.float32)) for a in (p_rows, q_rows)]
            results.append(rule(*arrays, mx.array(draft), mx.array(np.array(uniforms, dtype=np.float32))))
            cases.append((draft, p_rows, q_rows, share * probability(q, draft)))
    mx.eval(results)
    for (draft, p_rows, q_rows, mass), (accepted, weights) in zip(cases, results, strict=True):
        seen = np.array(weights, dtype=np.float64)
        seen /= seen.sum()
        exact = residual(name, p_rows, q_rows, draft, accepted.item())
        near = exact is not None and np.abs(seen - np.array(exact, dtype=np.float64)).max() < 1e-6
        yield draft, mass, accepted.item(), exact if near else tuple(map(Fraction, seen.tolist()))


def law(name: str, rule: Rule, p: Tree, q: Tree, k: int, noise: Callable = independent) -> Law:
    """Of the first k + 1 tokens: the drafts that stand, the token after them, and then the target's own."""
    total = dict.fromkeys(product(VOCAB, repeat=k + 1), Fraction(0))
    for draft, mass, accepted, following in outcomes(name, rule, p, q, k, noise):
        for output in total:
            if output[:accepted] == draft[:accepted]:
                ending = [p[output[:i]][output[i]] for i in range(accepted + 1, k + 1)]
                total[output] += mass * following[output[accepted]] * prod(ending, start=Fraction(1))
    return total


def target_law(p: Tree, k: int) -> Law:
    return {output: probability(p, output) for output in product(VOCAB, repeat=k + 1)}


def distance(a: Law, b: Law) -> Fraction:
    return sum(abs(a[x] - b[x]) for x in a) / 2


SIZES = [("token", 1), ("token", 2), ("token", 3), ("block", 1), ("block", 2), ("block", 3)]


@pytest.mark.parametrize("kind", ["random", "one-hot", "often equal"])
@pytest.mark.parametrize(("name", "k"), SIZES)
def test_law_is_the_targets(name: str, k: int, kind: str):
    for seed in range(12 if k < 3 else 2):
        p, q = trees(kind, k, seed)
        assert law(name, OURS[name], p, q, k) == target_law(p, k)


# --- rules that are nearly right, and that the same comparison must catch


def with_residual(rule: Rule, change: Callable[[mx.array, mx.array, mx.array], mx.array]) -> Rule:
    """The rule's decision, and change(p, q, weights) of the row where it stopped in place of its weights."""

    def changed(p: mx.array, q: mx.array, draft: mx.array, uniforms: mx.array) -> tuple[mx.array, mx.array]:
        accepted, weights = rule(p, q, draft, uniforms)
        ended = mx.concatenate([q, mx.zeros((1, 3))])
        return accepted, change(p[accepted], ended[accepted], weights)

    return changed


def accept_inverted(p: mx.array, q: mx.array, draft: mx.array, uniforms: mx.array) -> tuple[mx.array, mx.array]:
    """Accept with min(1, q/p); the residual that belongs to the true rule."""
    at = mx.arange(draft.shape[0])
    stands = uniforms * p[at, draft] < q[at, draft]
    accepted = mx.cumprod(stands.astype(mx.int32)).sum()
    rest = mx.maximum(p[accepted] - mx.concatenate([q, mx.zeros((1, 3))])[accepted], 0)
    return accepted, mx.where(rest.sum() > 0, rest, p[accepted])


def without_block_residual(p: mx.array, q: mx.array, weights: mx.array) -> mx.array:
    rest = mx.maximum(p - q, 0)
    return mx.where(rest.sum() > 0, rest, p)


BROKEN: dict[str, tuple[str, Rule, Callable]] = {
    "residual is p": ("token", with_residual(acceptance.token, lambda p, q, _: p), independent),
    "residual is |p - q|": ("token", with_residual(acceptance.token, lambda p, q, _: mx.abs(p - q)), independent),
    "accepts with min(1, q/p)": ("token", accept_inverted, independent),
    "accepts everything": ("token", lambda p, q, d, u: acceptance.token(p, q, d, u * 0), independent),
    "accepts with the draft's own noise": ("token", acceptance.token, drew_the_draft),
    "p is a row late": ("token", lambda p, q, d, u: acceptance.token(mx.roll(p, 1, axis=0), q, d, u), independent),
    "p is a row early": ("token", lambda p, q, d, u: acceptance.token(mx.roll(p, -1, axis=0), q, d, u), independent),
    "block, residual is p": ("block", with_residual(acceptance.block, lambda p, q, _: p), independent),
    "block, residual of token": ("block", with_residual(acceptance.block, without_block_residual), independent),
    "block, decision of token": (
        "block",
        lambda p, q, d, u: (acceptance.token(p, q, d, u)[0], acceptance.block(p, q, d, u)[1]),
        independent,
    ),
    "block, the draft's own noise": ("block", acceptance.block, drew_the_draft),
    "block, p is a row late": (
        "block",
        lambda p, q, d, u: acceptance.block(mx.roll(p, 1, axis=0), q, d, u),
        independent,
    ),
    "block, one uniform for all": (
        "block",
        lambda p, q, d, u: acceptance.block(p, q, d, mx.broadcast_to(u[:1], u.shape)),
        independent,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_caught(name: str):
    base, rule, noise = BROKEN[name]
    furthest = 0
    for seed in range(6):
        p, q = trees("random", 2, seed)
        furthest = max(furthest, distance(law(base, rule, p, q, 2, noise), target_law(p, 2)))
    assert furthest > 0.01


# --- how much is accepted


def expected(name: str, p: Tree, q: Tree, k: int) -> Fraction:
    return sum(mass * accepted for _, mass, accepted, _ in outcomes(name, OURS[name], p, q, k, independent))


@pytest.mark.parametrize("k", [1, 2])
def test_block_accepts_no_fewer_than_token(k: int):
    gains = []
    for seed in range(12):
        p, q = trees("random", k, seed)
        gains.append(expected("block", p, q, k) - expected("token", p, q, k))
    assert min(gains) >= 0
    assert (max(gains) > 0) == (k > 1)  # a block of one token is a token


NEARLY_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def distributions(count: int, vocab: int, seed: int) -> mx.array:
    return mx.softmax(3 * mx.random.normal((count, vocab), key=mx.random.key(seed)), axis=-1)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("k", "vocab"), [(1, 2), (3, 50), (8, 50_000)])
def test_equal_distributions_accept_everything(name: str, k: int, vocab: int):
    p = distributions(k + 1, vocab, k)
    draft = mx.random.categorical(mx.log(p[:k]), key=mx.random.key(1)).astype(mx.int32)
    accepted, weights = OURS[name](p, p[:k], draft, mx.full((k,), NEARLY_ONE))
    assert accepted.item() == k
    assert mx.array_equal(weights, p[k])


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("place", range(4))
def test_what_the_target_cannot_say_is_refused(name: str, place: int):
    p, q, draft = distributions(5, 10, 0), distributions(4, 10, 1), mx.array([3, 1, 4, 1])
    p[place, draft[place]] = 0
    accepted, weights = OURS[name](p, q, draft, mx.zeros((4,)))
    assert accepted.item() <= place
    assert not mx.logical_and(weights > 0, p[accepted] == 0).any().item()


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("p_x", "q_x", "stands"), [(0.5, 1e-37, True), (1e-37, 0.5, False), (1e-37, 1e-37, True)])
def test_tiny_probabilities(name: str, p_x: float, q_x: float, stands: bool):
    p = mx.array([[p_x, 1 - p_x], [0.5, 0.5]])
    q = mx.array([[q_x, 1 - q_x]])
    accepted, weights = OURS[name](p, q, mx.array([0]), mx.array([0.5]))
    assert accepted.item() == stands
    assert mx.isfinite(weights).all().item()
    assert weights.sum().item() > 0


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("k", [1, 4])
def test_shapes_and_types(name: str, k: int):
    accepted, weights = OURS[name](distributions(k + 1, 7, 0), distributions(k, 7, 1), mx.arange(k), mx.zeros((k,)))
    assert (accepted.shape, accepted.dtype) == ((), mx.int32)
    assert (weights.shape, weights.dtype) == ((7,), mx.float32)


@pytest.mark.parametrize("k", range(4))
def test_match(k: int):
    for draft in product(range(2), repeat=k):
        for picks in product(range(2), repeat=k + 1):
            want = next((i for i in range(k) if draft[i] != picks[i]), k)
            accepted = acceptance.match(mx.array(picks), mx.array(draft, dtype=mx.int32))
            assert (accepted.item(), accepted.dtype, accepted.shape) == (want, mx.int32, ())
