"""A verdict is what its rule says, as one lazy graph; and a round waits for the device once."""

import mlx_specdec  # noqa: F401  # isort: skip  # before mlx.core

import io
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.drafters.base import NOTHING, Draft, Drafter
from mlx_specdec.drafters.draft_model import DraftModel
from mlx_specdec.drafters.ngram_simple import NgramSimple
from mlx_specdec.sampling import Sampler, SamplingParams, log_probabilities
from mlx_specdec.target.model import Target
from mlx_specdec.verify import Verdict, verify
from tests import zoo
from tests.scripted import drafted_rounds

VOCAB = 10
LAST = mx.array([7])
PROMPT = [5, 6, 7]


def sampler(**params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), PROMPT)


def random_logits(rows: int, seed: int = 0) -> mx.array:
    return 2 * mx.random.normal((rows, VOCAB), key=mx.random.key(seed))


def certain(tokens: list[int]) -> mx.array:
    """Logits of a target that says these."""
    return 100.0 * (mx.array(tokens)[:, None] == mx.arange(VOCAB))


def changed(tokens: list[int], place: int) -> list[int]:
    return [(token + 1) % VOCAB if i == place else token for i, token in enumerate(tokens)]


def emitted(verdict: Verdict) -> list[int]:
    return verdict.tokens.tolist()[: verdict.accepted.item() + 1]


RULES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "acceptance": "token"},
    {"temperature": 0.8, "acceptance": "block"},
    {"temperature": 0.8, "acceptance": "coupled"},
]
STOCHASTIC = RULES[1:3]
CHOICES = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("params", RULES)
def test_a_target_that_is_certain(params: dict[str, Any], place: int):
    """The drafts before the first wrong one stand (place 4: all), and what is emitted is what the target says."""
    draft = Draft(mx.array(changed(CHOICES[:4], place)))
    verdict = verify(certain(CHOICES), LAST, draft, sampler(**params, seed=0))
    assert verdict.accepted.item() == place
    assert emitted(verdict) == CHOICES[: place + 1]


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("acceptance", ["token", "coupled"])
def test_matching_the_targets_own_picks(acceptance: str, seed: int, place: int):
    """Under `coupled`, and at temperature 0 whatever the rule."""
    params = {"temperature": 0.9 if acceptance == "coupled" else 0.0, "acceptance": acceptance, "seed": seed}
    logits, ours = random_logits(5, seed), sampler(**params, presence_penalty=1.0)
    fed = [LAST.item()]
    for i in range(5):  # what it picks depends, through the penalty, on what it picked before
        scores = ours.scores(logits[i : i + 1], mx.array(fed), start=i)
        fed.append(ours.pick(ours.judged(scores), start=i).item())
    picks = fed[1:]
    verdict = verify(logits, LAST, Draft(mx.array(changed(picks[:4], place))), ours)
    assert verdict.accepted.item() == place
    assert emitted(verdict) == picks[: place + 1]


@pytest.mark.parametrize("tied", [[1, 2], [0, 9], [4, 5, 6], list(range(VOCAB))])
def test_ties_go_to_the_lowest_id(tied: list[int]):
    logits = mx.zeros((2, VOCAB)).at[:, mx.array(tied)].add(3.0)
    for draft, accepted in ((tied[0], 1), (tied[1], 0)):
        verdict = verify(logits, LAST, Draft(mx.array([draft])), sampler())
        assert verdict.accepted.item() == accepted
        assert emitted(verdict) == [tied[0]] * (accepted + 1)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.7, "presence_penalty": 2.0}])
@pytest.mark.parametrize("params", STOCHASTIC)
def test_drafts_from_the_targets_own_distribution_all_stand(params: dict[str, Any], filters: dict[str, Any]):
    logits = random_logits(5)
    for seed in range(10):
        ours = sampler(**params, **filters, seed=seed)
        fed, probs = LAST, []
        for i in range(4):
            token, q = ours.draft(logits[i : i + 1], fed)
            fed, probs = mx.concatenate([fed, token]), [*probs, q]
        verdict = verify(logits, LAST, Draft(fed[1:], mx.concatenate(probs)), ours)
        assert verdict.accepted.item() == 4
        assert verdict.tokens[:4].tolist() == fed[1:].tolist()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("params", STOCHASTIC)
def test_a_token_that_is_filtered_out_never_stands(params: dict[str, Any], known: bool):
    """Drafted with certainty, or with a distribution that has nothing else in common with the target's either."""
    logits = random_logits(3)
    unlikely = mx.argmin(logits, axis=-1)[:2].astype(mx.int32)
    q = (unlikely[:, None] == mx.arange(VOCAB)).astype(mx.float32)
    likely = mx.argsort(-logits[0])[:3].tolist()
    seen = set()
    for seed in range(40):
        verdict = verify(logits, LAST, Draft(unlikely, q if known else None), sampler(**params, top_k=3, seed=seed))
        assert verdict.accepted.item() == 0
        seen |= set(emitted(verdict))
    assert seen == set(likely)


@pytest.mark.parametrize("params", STOCHASTIC)
def test_a_certain_draft_is_one_with_a_one_hot_distribution(params: dict[str, Any]):
    logits, tokens = random_logits(4), mx.array([2, 8, 2])
    q = (tokens[:, None] == mx.arange(VOCAB)).astype(mx.float32)
    accepted = set()
    for seed in range(40):
        known, unknown = (verify(logits, LAST, Draft(tokens, p), sampler(**params, seed=seed)) for p in (q, None))
        assert emitted(known) == emitted(unknown)
        accepted.add(known.accepted.item())
    assert len(accepted) > 1


@pytest.mark.parametrize("params", STOCHASTIC)
def test_a_refused_certain_draft_is_not_said_after_all(params: dict[str, Any]):
    logits, tokens, refused = random_logits(3), mx.array([2, 8]), 0
    for seed in range(60):
        verdict = verify(logits, LAST, Draft(tokens), sampler(**params, seed=seed))
        accepted = verdict.accepted.item()
        if accepted < 2:
            refused += 1
            assert emitted(verdict)[-1] != tokens[accepted].item()
    assert refused > 5


@pytest.mark.parametrize("params", RULES)
def test_without_a_draft_the_target_picks(params: dict[str, Any]):
    for seed in range(10):
        logits, ours = random_logits(1, seed), sampler(**params, seed=seed)
        verdict = verify(logits, LAST, NOTHING, ours)
        assert verdict.accepted.item() == 0
        assert verdict.tokens.tolist() == ours.pick(ours.judged(ours.scores(logits, LAST))).tolist()


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("params", RULES)
def test_shapes_and_types(params: dict[str, Any], k: int):
    logits = random_logits(k + 1)
    verdict = verify(logits, LAST, Draft(mx.arange(k, dtype=mx.int32)), sampler(**params, seed=0))
    assert (verdict.accepted.shape, verdict.accepted.dtype) == ((), mx.int32)
    assert (verdict.tokens.shape, verdict.tokens.dtype) == ((k + 1,), mx.int32)
    assert (verdict.scores.shape, verdict.scores.dtype) == ((k + 1, VOCAB), mx.float32)


@pytest.mark.parametrize("params", RULES)
def test_log_probabilities_are_the_targets_after_penalties_and_before_filters(params: dict[str, Any]):
    ours = sampler(**params, seed=0, top_k=2, frequency_penalty=0.5)
    logits, draft = random_logits(3), mx.array([7, 4])
    want = log_probabilities(ours.scores(logits, mx.array([7, 7, 4])))
    assert mx.array_equal(log_probabilities(verify(logits, LAST, Draft(draft), ours).scores), want)
    counts = np.zeros((3, VOCAB))
    for i, history in enumerate(([5, 6, 7], [5, 6, 7, 7], [5, 6, 7, 7, 4])):
        np.add.at(counts[i], history, 1)
    raw = logits - 0.5 * mx.array(counts.astype(np.float32))
    assert mx.allclose(want, raw - mx.logsumexp(raw, axis=-1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2}])
@pytest.mark.parametrize("params", RULES)
def test_nothing_is_evaluated(params: dict[str, Any], filters: dict[str, Any], known: bool, k: int):
    """MLX refuses to evaluate what depends on a function's arguments while it traces the function."""
    ours = sampler(**params, **filters, seed=3)

    def judge(logits: mx.array, last: mx.array, tokens: mx.array, probs: mx.array) -> Verdict:
        return verify(logits, last, Draft(tokens, probs if known else None), ours)

    arguments = random_logits(k + 1), LAST, mx.arange(k, dtype=mx.int32), mx.softmax(random_logits(k, 1), axis=-1)
    assert len(mx.compile(lambda *a: tuple(judge(*a)))(*arguments)) == 3
    for i in range(3):
        with pytest.raises(ValueError, match="eval"):
            mx.compile(lambda *a, i=i: mx.eval(judge(*a)[i]))(*arguments)


# --- how often a round waits


def lazy(array: mx.array) -> bool:
    """Whether something would have to be computed before it can be read: its graph has an operation in it."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return "label" in graph.getvalue()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every wait for the device: evaluations, and readings of arrays that are not evaluated yet."""
    seen: list[str] = []

    def evaluation(original: Callable) -> Callable:
        def wait(*args: Any) -> None:
            seen.append("eval")
            original(*args)

        return wait

    def reading(name: str, original: Callable) -> Callable:
        def read(array: Any, *args: Any, **more: Any) -> Any:
            if isinstance(array, mx.array) and lazy(array):
                seen.append(f"{name} of something lazy")
            return original(array, *args, **more)

        return read

    monkeypatch.setattr(mx, "eval", evaluation(mx.eval))
    monkeypatch.setattr(mx, "synchronize", evaluation(mx.synchronize))
    for owner, names in (
        (mx.array, ("item", "tolist", "__bool__", "__int__", "__float__")),
        (np, ("array", "asarray")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, reading(name, getattr(owner, name)))
    return seen


def test_waits_are_seen(waits: list[str]):
    array = mx.array([1.0]) + 1
    assert lazy(array)
    np.array(array)
    assert not lazy(array)
    np.array(array)
    bool(array > 0)
    (array + 1).item()
    mx.eval(array + 1)
    names = ["array of something lazy", "__bool__ of something lazy", "item of something lazy", "eval"]
    assert waits == names


SMALL = {"vocab": 4, "num_hidden_layers": 1}  # so that guesses are right now and then
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "draft_model": lambda: DraftModel(Target(zoo.draft_of("llama", noise=0.1, **SMALL)), 4),
    "ngram_simple": lambda: NgramSimple(1, 4),
}


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("penalty", [None, 1.1])
@pytest.mark.parametrize("params", RULES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_one_wait_a_round(name: str, params: dict[str, Any], penalty: float | None, most: int, waits: list[str]):
    target, drafter, prompt = Target(zoo.build("llama", **SMALL)), DRAFTERS[name](), [1, 2, 3, 0] * 5
    ours = Sampler(SamplingParams(**params, repetition_penalty=penalty, seed=0), prompt)
    waits.clear()
    accepted = drafted = 0
    rounds = drafted_rounds(target.sequence(), prompt, ours, 24, drafter, most)
    for i, this in enumerate(rounds):
        # The first came after the prompt's, which a draft model reads as well.
        assert waits == ["eval"] * (1 if i else 3 if name == "draft_model" else 2)
        waits.clear()
        accepted, drafted = accepted + this.accepted, drafted + this.drafted
    assert 0 < accepted < drafted  # some rounds rewind, and some need not
