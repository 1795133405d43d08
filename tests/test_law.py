"""Through the whole decoder: what comes out has the target's own law, and with `coupled` it is the very same text.

The laws are compared by thousands of seeded runs, so a test that passes passes always. Rule, sampling and drafter
are not crossed in full, which would take ten minutes: `token` and `block` each meet every filter, the penalties and
every drafter. The controls are what such a test is for: with about a quarter of the runs the same comparison must
reject them.
"""

import mlx_specdec  # noqa: F401  # isort: skip  # before mlx.core

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import acceptance, draft_length
from mlx_specdec.drafters.base import Draft, Drafter
from mlx_specdec.drafters.chain import Chain
from mlx_specdec.drafters.draft_model import DraftModel
from mlx_specdec.drafters.ngram_cache import NgramCache
from mlx_specdec.drafters.ngram_map import NgramMap
from mlx_specdec.drafters.ngram_mod import NgramMod, Table
from mlx_specdec.drafters.ngram_simple import NgramSimple
from mlx_specdec.drafters.suffix import Suffix
from mlx_specdec.features import FeatureRequest, Features
from mlx_specdec.rounds import rounds
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import Target
from tests import zoo
from tests.law import Law, critical, exact, misfit
from tests.scripted import Scripted, drafted, drafted_rounds, plain, scripts

VOCAB, LENGTH = 12, 3
PROMPT = [1, 4, 2, 1, 5, 2, 1, 4]
TINY = {
    "vocab": VOCAB,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
RUNS, FEW = 1000, 400

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.2},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_k": {"temperature": 1.3, "top_k": 4},
    "min_p": {"temperature": 0.9, "min_p": 0.1},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.2,
        "repetition_context_size": 6,
        "presence_penalty": 1.0,
        "presence_context_size": 2,
        "frequency_penalty": 0.8,
        "frequency_context_size": 4,
        "logit_bias": {4: 3.0, 1: -1.0},  # it would say 4 again and again
    },
    "everything": {
        "temperature": 0.9,
        "top_p": 0.95,
        "min_p": 0.02,
        "top_k": 8,
        "frequency_penalty": 1.0,
        "logit_bias": {5: 1.0},
    },
}


@cache
def target() -> Target:
    return Target(zoo.build("llama", **TINY))


@cache
def draft_target() -> Target:
    return Target(zoo.draft_of("llama", noise=0.3, **TINY))


@cache
def true_law(sampling: str) -> Law:
    return exact(target().model, PROMPT, LENGTH, VOCAB, SAMPLING[sampling])


class Blind:
    """Looks at `last` alone."""

    name, max_draft, free, wants = "blind", 3, True, FeatureRequest()

    def start(self, prompt: Sequence[int]) -> None: ...

    def observe(self, tokens: Sequence[int], features: Features | None) -> None: ...

    def settle(self, drafted: int, accepted: int) -> None: ...


class Fixed(Blind):
    """Proposes the same tokens every time, with certainty: what the target is likeliest to say first."""

    def __init__(self, sampling: str):
        law = true_law(sampling)
        self.tokens = list(max(law, key=law.__getitem__))

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        return Draft(mx.array(self.tokens[:limit]))


class Bigram(Blind):
    """Draws from a table of logits, by the token before: what the target would say there first, blurred."""

    max_draft = 2

    def __init__(self):
        logits = target().model(mx.array([[*PROMPT, token] for token in range(VOCAB)]))[:, -1]
        self.table = logits + 2.0 * mx.random.normal(logits.shape, key=mx.random.key(5))
        mx.eval(self.table)

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        fed, probs = mx.array([last]), []
        for _ in range(limit):
            token, q = self.draw(sampler, self.table[fed[-1:]], fed)
            fed = mx.concatenate([fed, token])
            probs.append(q)
        return Draft(fed[1:], None if probs[0] is None else mx.concatenate(probs))

    def draw(self, sampler: Sampler, logits: mx.array, fed: mx.array) -> tuple[mx.array, mx.array | None]:
        return sampler.draft(logits, fed)


class Twice(DraftModel):
    max_draft = 2


# Drafters that draw propose two tokens, the others three: each draw costs a third of a millisecond.
DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "draft model": lambda _: Twice(draft_target(), VOCAB),
    "bigram": lambda _: Bigram(),
    "fixed": Fixed,
    "ngram_simple": lambda _: NgramSimple(1, 3),
    "ngram_map": lambda _: NgramMap(1, 3),
    "ngram_mod": lambda _: NgramMod(2, 0, 3, Table()),
    "ngram_cache": lambda _: NgramCache(3),
    "suffix": lambda _: Suffix(),  # which remembers the runs before
}
CHAINS = {"chain": ("suffix", "bigram"), "chain of three": ("ngram_simple", "ngram_cache", "draft model")}


def counts(rule: str, sampling: str, drafters: Sequence[Drafter], runs: int) -> Counter[tuple[int, ...]]:
    """Of the first three tokens of an output that would go on, so that whole drafts stand too."""
    seen: Counter[tuple[int, ...]] = Counter()
    chain = Chain(drafters, draft_length.Fixed(max(drafter.max_draft for drafter in drafters)))
    for seed in range(runs):
        params = SamplingParams(**SAMPLING[sampling], acceptance=rule, seed=seed)
        ids: list[int] = []
        chooser, sequence = Sampler(params, PROMPT), target().sequence()
        for this in rounds(sequence, PROMPT, chooser, LENGTH + 3, chain):
            ids += this.tokens
            if len(ids) >= LENGTH:
                break
        seen[tuple(ids[:LENGTH])] += 1
    return seen


CASES = [
    ("token", "plain", "draft model"),
    ("token", "top_p", "bigram"),
    ("token", "top_k", "fixed"),
    ("token", "min_p", "ngram_simple"),
    ("token", "penalties", "bigram"),
    ("block", "plain", "fixed"),
    ("block", "top_p", "ngram_simple"),
    ("block", "top_k", "draft model"),
    ("block", "penalties", "bigram"),
    ("block", "everything", "bigram"),
    ("coupled", "plain", "ngram_simple"),
    ("coupled", "everything", "bigram"),
    ("token", "top_k", "ngram_map"),
    ("block", "penalties", "ngram_mod"),
    ("token", "everything", "ngram_cache"),
    ("block", "plain", "suffix"),
    ("token", "penalties", "chain"),
    ("block", "top_p", "chain of three"),
]


@pytest.mark.parametrize(("rule", "sampling", "drafter"), CASES)
def test_the_law_is_the_targets(rule: str, sampling: str, drafter: str):
    drafters = [DRAFTERS[name](sampling) for name in CHAINS.get(drafter, (drafter,))]
    seen = counts(rule, sampling, drafters, RUNS)
    assert misfit(seen, true_law(sampling)) < 1


# --- controls


@pytest.mark.parametrize(
    ("freedom", "value"), [(5, 25.745), (10, 35.564), (30, 67.633), (100, 161.319), (300, 399.756)]
)
def test_critical_values(freedom: int, value: float):
    """Of a table; the formula is on the lenient side, by little."""
    assert value < critical(freedom) < 1.025 * value


def test_an_output_that_cannot_be_is_a_misfit():
    law = {(0,): 0.5, (1,): 0.5, (2,): 0.0}
    assert misfit({(0,): 52, (1,): 48}, law) < 1
    assert misfit({(0,): 52, (1,): 47, (2,): 1}, law) == float("inf")
    assert misfit({(0,): 75, (1,): 25}, law) > 1


class Greedy(Bigram):
    """Proposes its likeliest token and reports the distribution that it did not draw from."""

    def draw(self, sampler: Sampler, logits: mx.array, fed: mx.array) -> tuple[mx.array, mx.array]:
        return mx.argmax(logits, axis=-1), sampler.draft(logits, fed)[1]


class Unprocessed(Bigram):
    """Draws without penalties and filters and reports a distribution with them."""

    def draw(self, sampler: Sampler, logits: mx.array, fed: mx.array) -> tuple[mx.array, mx.array]:
        bare = Sampler(SamplingParams(temperature=1.0, seed=sampler.params.seed), [0] * (sampler.offset + 1))
        return bare.draft(logits, fed)[0], sampler.draft(logits, fed)[1]


def accept_all(p: mx.array, q: mx.array, draft: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    return mx.array(draft.shape[0]), p[-1]


def with_weights_of_p(rule: Callable) -> Callable:
    def changed(p: mx.array, *rest: mx.array) -> tuple[mx.array, mx.array]:
        accepted, _ = rule(p, *rest)
        return accepted, p[accepted]

    return changed


def penalties_blind_to_drafts(self: Sampler, logits: mx.array, fed: mx.array, start: int = 0) -> mx.array:
    rows = [ORIGINAL_SCORES(self, row[None], fed[:1]) for row in logits]
    return mx.concatenate(rows)


def one_key_a_round(self: Sampler, stream: int, ahead: int, within: int) -> mx.array:
    return ORIGINAL_KEY(self, 0, 0, 0)


ORIGINAL_SCORES, ORIGINAL_KEY = Sampler.scores, Sampler._key
Patch = tuple[Any, str, Callable] | None

CONTROLS: dict[str, tuple[str, str, Callable[[str], Drafter], Patch]] = {
    "token accepts all": ("token", "plain", DRAFTERS["bigram"], (acceptance, "token", accept_all)),
    "token, residual is p": (
        "token",
        "plain",
        Fixed,
        (acceptance, "token", with_weights_of_p(acceptance.token)),
    ),
    "block accepts all": ("block", "top_k", DRAFTERS["ngram_simple"], (acceptance, "block", accept_all)),
    "block, residual is p": (
        "block",
        "plain",
        Fixed,
        (acceptance, "block", with_weights_of_p(acceptance.block)),
    ),
    "untrue distribution": ("token", "plain", lambda _: Greedy(), None),
    "drafted without processors": ("token", "penalties", lambda _: Unprocessed(), None),
    "penalties that do not see the draft": (
        "token",
        "penalties",
        DRAFTERS["bigram"],
        (Sampler, "scores", penalties_blind_to_drafts),
    ),
    "one noise for all": ("token", "plain", DRAFTERS["bigram"], (Sampler, "_key", one_key_a_round)),
    "one noise for all, coupled": ("coupled", "plain", DRAFTERS["bigram"], (Sampler, "_key", one_key_a_round)),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_broken_decoder_is_caught(name: str, monkeypatch: pytest.MonkeyPatch):
    rule, sampling, drafter, patch = CONTROLS[name]
    law = true_law(sampling)
    if patch:
        monkeypatch.setattr(*patch)
    assert misfit(counts(rule, sampling, [drafter(sampling)], FEW), law) > 1


# --- the same text, and what a perfect drafter gets


COUPLED = {"temperature": 0.8, "top_p": 0.9, "acceptance": "coupled"}


@pytest.mark.parametrize("seed", range(20))
def test_coupled_ids_are_plain_decodings(seed: int):
    """Every seed with every drafter, and over the seeds every drafter with every number of drafts from 1 to 8."""
    answer = plain(target().model, PROMPT, 40, **COUPLED, seed=seed)
    drafters = [
        DraftModel(draft_target(), VOCAB),
        NgramSimple(1, 8),
        Scripted(answer, scripts(VOCAB, seed)["mixed"]),
    ]
    for i, drafter in enumerate(drafters):
        most = 1 + (seed + 3 * i) % 8
        assert drafted(target(), drafter, PROMPT, 40, most, **COUPLED, seed=seed) == answer


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_draft_model_with_the_targets_weights_is_believed(rule: str, temperature: float):
    params = SamplingParams(temperature=temperature, acceptance=rule, seed=0)
    twin = DraftModel(Target(zoo.build("llama", **TINY)), VOCAB)
    emitting = drafted_rounds(target().sequence(), PROMPT, Sampler(params, PROMPT), 200, twin, 4)
    accepted, proposed = map(sum, zip(*((this.accepted, this.drafted) for this in emitting), strict=True))
    assert accepted >= 0.98 * proposed
