"""The distribution that is sampled is mlx-lm's; the noise that it is sampled with depends on seed and place alone."""

import mlx_specdec  # noqa: F401  # isort: skip  # before mlx.core

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx_lm.sample_utils
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_specdec.errors import OptionError
from mlx_specdec.sampling import Sampler, SamplingParams, log_probabilities

VOCAB = 50


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> mx.array:
    return 2 * mx.random.normal((rows, vocab), key=mx.random.key(seed))


def random_logprobs(rows: int, vocab: int = VOCAB, seed: int = 0) -> mx.array:
    logits = random_logits(rows, vocab, seed)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def sampler(prompt: Sequence[int] = (0,), *more: Any, **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), list(prompt), *more)


def test_only_sampling_pays_for_log_probabilities() -> None:
    """They take a softmax over the vocabulary for every row; the likeliest token is the likeliest without it."""
    logits = random_logits(3)
    assert sampler().judged(logits) is logits
    assert mx.array_equal(sampler(temperature=1.0).judged(logits), log_probabilities(logits))


# --- filters

FILTERS = [
    {"top_p": top_p, "min_p": min_p, "top_k": top_k, "min_tokens_to_keep": keep, "temperature": temperature}
    for top_p, min_p, top_k, (keep, temperature) in itertools.product(
        (0.0, 0.3, 0.9, 1.0), (0.0, 0.05, 0.5, 1.0), (0, 1, 7, VOCAB - 1), ((1, 1.0), (4, 0.7), (1, 2.5))
    )
]


def mlx_lm_filtered(params: dict[str, Any], logprobs: mx.array, monkeypatch: pytest.MonkeyPatch) -> mx.array:
    """What the last link of mlx-lm's chain, which draws the token, draws from."""
    monkeypatch.setattr(mlx_lm.sample_utils, "categorical_sampling", lambda logits, temp: logits * (1 / temp))
    chain = {name: value for name, value in params.items() if name != "temperature"}
    return make_sampler(params["temperature"], **chain)(logprobs)


@pytest.mark.parametrize("params", FILTERS, ids=lambda params: "-".join(map(str, params.values())))
def test_filters_are_mlx_lms(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    logprobs = random_logprobs(6)
    logprobs[3, 10:] = -math.inf  # as a grammar would have it
    logprobs[4] = logprobs[4, 0]
    ours = sampler(**params).filtered(logprobs)
    assert mx.array_equal(ours, mlx_lm_filtered(params, logprobs, monkeypatch))
    assert mx.array_equal(ours, mx.concatenate([sampler(**params).filtered(row[None]) for row in logprobs]))
    assert mx.isfinite(ours).any(axis=-1).all().item()


@pytest.mark.parametrize("params", [{"top_k": VOCAB}, {"top_k": 1000}, {"min_p": 0.5, "min_tokens_to_keep": 1000}, {}])
def test_filters_that_keep_the_whole_vocabulary(params: dict[str, Any]):
    logprobs = random_logprobs(3)
    assert mx.array_equal(sampler(temperature=1, **params).filtered(logprobs), logprobs)


# --- processors

PENALTIES: list[dict[str, Any]] = [
    {},
    {"logit_bias": {3: 2.5, 7: -100.0}},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6, "repetition_context_size": 2},
    {"presence_penalty": 1.5, "presence_context_size": 3},
    {"frequency_penalty": 0.7, "frequency_context_size": 6},
    {
        "logit_bias": {1: 1.0},
        "repetition_penalty": 1.2,
        "repetition_context_size": 4,
        "presence_penalty": -0.5,
        "presence_context_size": 3,
        "frequency_penalty": 0.4,
        "frequency_context_size": 5,
    },
]


def by_hand(tokens: list[int], logits: list[float], params: dict[str, Any]) -> list[float]:
    """Log-probabilities after penalties, token by token: mlx-lm's meaning of its options."""

    def window(name: str) -> list[int]:
        return tokens[-params.get(f"{name}_context_size", 20) :]

    result = []
    for token, logit in enumerate(logits):
        value = logit + params.get("logit_bias", {}).get(token, 0.0)
        if token in window("repetition"):
            penalty = params.get("repetition_penalty", 1.0)
            value = value * penalty if value < 0 else value / penalty
        if token in window("presence"):
            value -= params.get("presence_penalty", 0.0)
        value -= params.get("frequency_penalty", 0.0) * window("frequency").count(token)
        result.append(value)
    total = math.log(sum(map(math.exp, result)))
    return [value - total for value in result]


@pytest.mark.parametrize("prompt", [[5], [3, 3, 9, 2, 5], [token % 11 for token in range(40)]])
@pytest.mark.parametrize("params", PENALTIES)
def test_every_row_has_its_own_history(params: dict[str, Any], prompt: list[int]):
    generated, fed = [1, 8, 8], [4, 1, 9, 1, 1]  # in the cache, and last with four drafts
    logits = random_logits(len(fed))
    ours = sampler(prompt, **params)
    ours.advance([prompt[-1], *generated])
    logprobs = log_probabilities(ours.scores(logits, mx.array(fed)))
    assert logprobs.dtype == mx.float32
    for i, row in enumerate(logits):
        history = [*prompt, *generated, *fed[: i + 1]]
        theirs = mx.array(row[None])
        for process in make_logits_processors(**params):
            theirs = process(mx.array(history), theirs)
        theirs = theirs - mx.logsumexp(theirs, keepdims=True)
        assert mx.array_equal(logprobs[i], theirs[0])
        assert mx.allclose(logprobs[i], mx.array(by_hand(history, row.tolist(), params)), atol=1e-5)
        alone = log_probabilities(ours.scores(row[None], mx.array(fed[: i + 1]), start=i))
        assert mx.array_equal(logprobs[i : i + 1], alone)
    assert mx.array_equal(logits, random_logits(len(fed)))  # mlx-lm's penalties write in place


def test_a_long_history():
    """More tokens than there was room for at first."""
    ours, tokens = sampler([0], frequency_penalty=0.1, frequency_context_size=5000), []
    for length in (1, 500, 3, 2000):
        piece = [(7 * i) % VOCAB for i in range(length)]
        ours.advance(piece)
        tokens += piece
    logits = random_logits(1)
    want = by_hand([*tokens, 6], logits[0].tolist(), {"frequency_penalty": 0.1, "frequency_context_size": 5000})
    assert mx.allclose(log_probabilities(ours.scores(logits, mx.array([6])))[0], mx.array(want), atol=1e-4)


def test_a_processor_gets_the_tokens_so_far_and_one_row():
    seen: list[tuple[list[int], tuple[int, ...]]] = []

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append((tokens.tolist(), logits.shape))
        return logits.at[:, 2].add(100.0)

    ours = sampler([7, 8, 9], [process])
    ours.advance([9, 4])
    logprobs = log_probabilities(ours.scores(random_logits(3), mx.array([5, 6, 1])))
    assert seen == [([7, 8, 9, 4, 5, 6, 1][: 5 + i], (1, VOCAB)) for i in range(3)]
    assert mx.argmax(logprobs, axis=-1).tolist() == [2, 2, 2]


def test_processors_follow_the_penalties_in_order():
    order: list[str] = []

    def named(name: str) -> Callable:
        return lambda _, logits: order.append(name) or mx.minimum(logits, 50.0)

    logits = mx.zeros((1, VOCAB))
    logprobs = log_probabilities(
        sampler([0], [named("a"), named("b")], logit_bias={4: 100.0, 5: 100.0}).scores(logits, mx.array([0]))
    )
    assert order == ["a", "b"]
    assert mx.allclose(logprobs[0, 4:6], mx.array([0.5, 0.5]).log())


def test_a_choosing_function_gets_one_row_at_a_time():
    seen: list[mx.array] = []

    def choose(logprobs: mx.array) -> mx.array:
        seen.append(logprobs)
        return mx.argmin(logprobs, axis=-1)

    ours, logits = sampler([0], (), choose, temperature=0.8), random_logits(3)
    logprobs = log_probabilities(ours.scores(logits, mx.array([1, 2, 3])))
    picks = ours.pick(logprobs)
    assert ours.matches
    assert not ours.greedy
    assert [row.shape for row in seen] == [(1, VOCAB)] * 3
    assert mx.array_equal(mx.concatenate(seen), logprobs)
    assert (picks.tolist(), picks.dtype) == (mx.argmin(logprobs, axis=-1).tolist(), mx.int32)
    assert ours.draft(logits[:1], mx.array([1]))[1] is None


# --- picks

COUPLED = {"temperature": 0.9, "top_p": 0.95, "acceptance": "coupled"}


def picks(sizes: Sequence[int], seed: int | None, **params: Any) -> list[int]:
    """The choices at places 3 to 26, made in rounds of these sizes, the first token of each round being certain."""
    ours, logits, place, chosen = sampler([1, 2, 3, 4], seed=seed, **params), random_logits(24), 0, []
    for size in itertools.cycle(sizes):
        rows = logits[place : place + size]
        if not rows.shape[0]:
            return chosen
        chosen += ours.pick(log_probabilities(ours.scores(rows, mx.array([0] * rows.shape[0])))).tolist()
        ours.advance([0] * rows.shape[0])
        place += size
    return chosen


@pytest.mark.parametrize("params", [COUPLED, {"temperature": 1.0, "acceptance": "token"}, {"temperature": 0.0}])
@pytest.mark.parametrize("sizes", [(1, 2, 3), (8,), (24,), (5, 1)])
def test_the_same_seed_picks_the_same_in_rounds_of_any_size(sizes: Sequence[int], params: dict[str, Any]):
    for seed in range(5):
        assert picks(sizes, seed, **params) == picks((1,), seed, **params)


def test_refused_rows_leave_no_trace():
    """The noise of a place is the same whether or not a draft was judged there before."""
    ours, logits = sampler([1, 2], seed=4, **COUPLED), random_logits(6)
    logprobs = log_probabilities(ours.scores(logits, mx.zeros((6,))))
    first = ours.pick(logprobs)
    ours.advance([1, 1])
    assert mx.array_equal(ours.pick(logprobs[2:]), first[2:])


def test_seeds():
    assert len({tuple(picks((4,), seed, **COUPLED)) for seed in range(50)}) == 50
    assert len({tuple(picks((4,), None, **COUPLED)) for _ in range(5)}) == 5


def test_a_negative_seed_is_another_seed():
    assert picks((4,), 7, **COUPLED) != picks((4,), -7, **COUPLED)


def test_neither_reads_nor_moves_the_global_random_state():
    mx.random.seed(1)
    want = mx.random.uniform()
    first = picks((3,), 5, **COUPLED)
    mx.random.seed(1)
    assert picks((3,), 5, **COUPLED) == first
    mx.random.seed(1)
    for params in (COUPLED, {"temperature": 1.0, "top_k": 3, "min_p": 0.1, "acceptance": "token"}):
        ours = sampler(seed=0, **params)
        mx.eval(ours.draft(random_logits(1), mx.array([0])), ours.uniforms(3), ours.draw(mx.ones((5,))))
    assert mx.random.uniform().item() == want.item()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.0, "acceptance": "block", "top_k": 2}])
def test_greedy_ties_go_to_the_lowest_id(params: dict[str, Any]):
    logits = mx.array([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 5.0]])
    assert sampler(**params).pick(logits).tolist() == [1, 0, 3]
    assert sampler(**params).draft(logits[:1], mx.array([0]))[0].tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-4, 1e-2])
def test_a_low_temperature_is_nearly_greedy(temperature: float):
    logprobs = random_logprobs(20)
    ours = sampler(temperature=temperature, seed=0)
    assert mx.array_equal(ours.pick(logprobs), mx.argmax(logprobs, axis=-1))


@pytest.mark.parametrize("weights", [[0, 0, 3, 0], [0.5, 0, 0.25, 0], [1e-30, 0, 1e-30, 0]])
def test_draw_takes_weights_as_they_are(weights: list[float]):
    """Not normalised, and never a token without weight."""
    ours, counts = sampler(temperature=1, seed=0), [0] * 4
    for _ in range(400):
        token = ours.draw(mx.array(weights))
        assert (token.dtype, token.shape) == (mx.int32, ())
        counts[token.item()] += 1
        ours.advance([0])
    for count, weight in zip(counts, weights, strict=True):
        share = weight / sum(weights)
        assert abs(count - 400 * share) <= 4 * math.sqrt(400 * share * (1 - share))


# --- drafting


def test_a_draft_is_drawn_from_the_distribution_that_it_reports():
    params = {"temperature": 0.8, "top_k": 6, "presence_penalty": 1.0, "logit_bias": {2: 1.0}, "acceptance": "token"}
    logits, fed, counts = random_logits(1), mx.array([6, 7]), [0] * VOCAB
    ours = sampler([4, 5], **params)
    want = mx.softmax(ours.filtered(log_probabilities(ours.scores(logits, fed, start=1))), axis=-1)
    for seed in range(800):
        token, q = sampler([4, 5], seed=seed, **params).draft(logits, fed)
        assert (token.shape, token.dtype, q.shape, q.dtype) == ((1,), mx.int32, (1, VOCAB), mx.float32)
        assert mx.array_equal(q, want)
        counts[token.item()] += 1
    for count, share in zip(counts, want[0].tolist(), strict=True):
        assert abs(count - 800 * share) <= 4 * math.sqrt(800 * share * (1 - share))


@pytest.mark.parametrize("params", [COUPLED, {"temperature": 0.0}])
def test_where_drafts_must_match_the_draft_is_the_targets_own_choice(params: dict[str, Any]):
    """With the target's logits, that is; at the very place where the target will choose."""
    ours, logits = sampler([1, 2, 3], seed=3, presence_penalty=1.0, **params), random_logits(5)
    drafted = [1]
    for i in range(5):
        token, q = ours.draft(logits[i : i + 1], mx.array(drafted))
        assert q is None
        drafted.append(token.item())
    assert ours.pick(log_probabilities(ours.scores(logits, mx.array(drafted[:5])))).tolist() == drafted[1:]


# --- independence of the streams of noise


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The key of every random number that is asked for."""
    seen: list[tuple[int, ...]] = []

    def recorded(original: Callable) -> Callable:
        def drawn(*args: Any, key: mx.array, **more: Any) -> mx.array:
            seen.append(tuple(key.tolist()))
            return original(*args, key=key, **more)

        return drawn

    for name in ("gumbel", "uniform", "categorical", "normal", "bernoulli"):
        monkeypatch.setattr(mx.random, name, recorded(getattr(mx.random, name)))
    return seen


@pytest.mark.parametrize("seed", [0, 1, 12345, None])
def test_drawing_drafting_and_accepting_never_share_noise(seed: int | None, keys: list[tuple[int, ...]]):
    """At any two places, and for drafting and accepting not even between two rounds."""
    ours = sampler([0], temperature=1.0, seed=seed, acceptance="token")
    logits = mx.zeros((9, 4))
    draws, drafts, accepts = [], [], []
    for place in range(600):
        for within in range(8):
            ours.draft(logits[:1], mx.zeros((within + 1,), dtype=mx.int32))
        drafts += keys[:]
        keys.clear()
        ours.uniforms(8)
        accepts += keys[:]
        keys.clear()
        ours.draw(mx.ones((4,)))
        if place % 20 == 0:
            ours.pick(logits)
        draws += keys[:]
        keys.clear()
        ours.advance([0])
    assert (len(drafts), len(accepts)) == (4800, 600)
    assert (len(set(drafts)), len(set(accepts))) == (4800, 600)
    assert len(set(draws)) == 600  # a place has its own, however it is come to
    assert not set(draws) & set(drafts)
    assert not set(draws) & set(accepts)
    assert not set(drafts) & set(accepts)


def test_uniforms():
    ours, values = sampler(temperature=1.0, seed=0), []
    for n in range(1, 200):
        drawn = ours.uniforms(n)
        assert (drawn.shape, drawn.dtype) == ((n,), mx.float32)
        values += drawn.tolist()
        ours.advance([0])
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 4 * math.sqrt(1 / 12 / len(values))


# --- options

NAN, INF = math.nan, math.inf
BAD = {
    "temperature": [-0.1, NAN, INF, "hot", None],
    "top_p": [-0.1, 1.1, NAN, "0.9", None],
    "top_k": [-1, 1.5, "3", None],
    "min_p": [-0.1, 1.1, NAN, "0.1", None],
    "min_tokens_to_keep": [0, -1, 1.5, "2", None],
    "repetition_penalty": [-1.0, NAN, INF, "1.1"],
    "repetition_context_size": [0, -1, 2.5, None],
    "presence_penalty": [NAN, INF, -INF, "1"],
    "presence_context_size": [0, -1, 2.5, None],
    "frequency_penalty": [NAN, INF, -INF, "1"],
    "frequency_context_size": [0, -1, 2.5, None],
    "logit_bias": [{3: NAN}, {3: INF}, {3: "1"}, {"three": 1.0}],
    "seed": [1.5, "lucky"],
    "acceptance": ["typical", "", "Token", 1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_are_refused_with_a_sentence(name: str, value: Any):
    with pytest.raises(OptionError, match=rf"\b{name}\b") as refusal:
        SamplingParams(**{name: value})
    shown = next(iter(value.items())) if isinstance(value, dict) else (value,)
    assert all(re.search(re.escape(str(part)), str(refusal.value)) for part in shown)


GOOD = {
    "temperature": [0, 0.0, 1e-3, 1, 100.0],
    "top_p": [0, 0.0, 0.5, 1, 1.0],
    "top_k": [0, 1, 10**6],
    "min_p": [0, 0.0, 0.5, 1.0],
    "min_tokens_to_keep": [1, 10**6],
    "repetition_penalty": [None, 0.0, 0.5, 1, 2.0],
    "presence_penalty": [None, 0, -2.0, 2.0],
    "frequency_penalty": [None, 0, -2.0, 2.0],
    "logit_bias": [{}, {3: 1.0}, {3: -100}, {3: -INF}],
    "seed": [None, 0, 2**63, -1],
    "acceptance": [None, "token", "block", "coupled"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_good_values_work(name: str, value: Any):
    ours = sampler([1, 2], **{"temperature": 1.0, name: value})
    logprobs = log_probabilities(ours.scores(random_logits(2), mx.array([2, 3])))
    tokens = ours.pick(logprobs)
    assert not mx.isnan(logprobs).any().item()
    assert ((tokens >= 0) & (tokens < VOCAB)).all().item()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_rule_is_coupled_with_a_seed_and_token_without(temperature: float):
    """Unless one is named, which stands."""
    assert SamplingParams(temperature=temperature).rule == "token"
    assert SamplingParams(temperature=temperature, seed=0).rule == "coupled"
    for rule in ("token", "block", "coupled"):
        for seed in (None, 0, 7):
            assert SamplingParams(temperature=temperature, seed=seed, acceptance=rule).rule == rule


def test_the_resolved_rule_is_what_is_done():
    """By default a seed makes drafts stand by matching; without one a draft model has to say its distribution."""
    assert sampler(temperature=1.0, seed=3).matches
    assert not sampler(temperature=1.0).matches
    assert not sampler(temperature=1.0, seed=3, acceptance="token").matches
    logits, fed = random_logits(1), mx.array([1])
    assert sampler(temperature=1.0, seed=3).draft(logits, fed)[1] is None
    assert sampler(temperature=1.0).draft(logits, fed)[1] is not None
    named = sampler(temperature=1.0, seed=3, acceptance="coupled").draft(logits, fed)[0]
    assert mx.array_equal(sampler(temperature=1.0, seed=3).draft(logits, fed)[0], named)


@pytest.mark.parametrize("logits", [[0.0, -math.inf, 1.0, -math.inf], [math.nan] * 4, [math.inf, 0, math.nan, 1e38]])
@pytest.mark.parametrize("forbidden", [{}, {0: -math.inf, 2: -math.inf}])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 3, "min_p": 0.1}])
def test_what_a_draft_is_drawn_from_is_always_a_distribution(logits: list, forbidden: dict, filters: dict) -> None:
    sampler = Sampler(SamplingParams(temperature=0.5, logit_bias=forbidden, **filters), [0])
    token, q = sampler.draft(mx.array([logits], dtype=mx.float32), mx.array([1]))
    assert q is not None
    assert abs(q.sum().item() - 1) < 1e-5
    assert q[0, token.item()].item() > 0
    if forbidden:
        assert q[0, 0].item() == q[0, 2].item() == 0
    elif logits[2] == 1.0:
        assert q[0, 1].item() == q[0, 3].item() == 0
