"""MTP heads against transformers' own numbers, and that whatever they draft the text stays the target's."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.utils import load_model

from mlx_specdec import PairingError, SpecDecoder
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.checkpoints.mtp import read_heads
from mlx_specdec.checkpoints.mtp_layout import trunk_classes
from mlx_specdec.drafters import heads as chained
from mlx_specdec.drafters import mtp as in_turn
from mlx_specdec.drafters.base import NOTHING, Draft, Drafter
from mlx_specdec.drafters.mtp import MtpModel
from mlx_specdec.features import Features
from mlx_specdec.networks.mtp import MtpConfig, MtpNetwork
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import Target
from tests import law, zoo
from tests.scripted import drafted, drafted_rounds, plain

GOLDEN = Path(__file__).parents[1] / "golden"
REPLAYED = ("mtp_qwen3_5", "mtp_glm4_moe")  # with whole rounds of the reference
FORMATS = (
    "mtp_qwen3_next",
    "mtp_qwen3_5_moe",
    "mtp_deepseek_v3",
    "mtp_glm4_moe_lite",
    "mtp_mimo",
    "mtp_glm4_moe_three",
)


class Listening(Sampler):
    """Greedy, and keeps the logits that drafts were taken from."""

    def __init__(self, prompt: Sequence[int]):
        super().__init__(SamplingParams(), prompt)
        self.heard: list[mx.array] = []

    def draft(self, logits: mx.array, fed: mx.array) -> tuple[mx.array, mx.array | None]:
        self.heard.append(logits)
        return super().draft(logits, fed)


@cache
def golden(name: str) -> tuple[Target, MtpNetwork, dict[str, np.ndarray]]:
    """A target, its heads, and what the reference made of both."""
    path = GOLDEN / name
    model, _ = load_model(path, get_model_classes=trunk_classes)
    network = read_heads(Folder(path), model)
    assert network is not None
    target = Target(model)
    target.watch(in_turn.WANTS)
    return target, network, dict(np.load(path / "expected.npz"))


def propose(drafter: Drafter, last: int, limit: int, prompt: Sequence[int]) -> tuple[list[int], np.ndarray]:
    sampler = Listening(prompt)
    draft = drafter.propose(last, limit, sampler)
    assert draft.probs is None
    return draft.tokens.tolist(), np.array(mx.concatenate(sampler.heard))


def two_rounds(
    drafter: Drafter, want: dict[str, np.ndarray], hidden: str = "all_hidden"
) -> list[tuple[list[int], np.ndarray]]:
    """What it drafts where the reference did, given the reference's hidden states and count of accepted tokens."""
    prompt, states = want["prompt_ids"].tolist(), mx.array(want[hidden])
    first, accepted = want["first_token_id"].item(), want["r1_accepted"].item()

    def observe(tokens: list[int], start: int) -> None:
        drafter.observe(tokens, Features((), states[start : start + len(tokens)]))

    drafter.start(prompt)
    observe(prompt[:9], 0)
    observe(prompt[9:], 9)
    one = propose(drafter, first, 3, prompt)
    if len(states) > len(prompt):
        observe([first, *one[0][:accepted]], len(prompt))
        return [one, propose(drafter, want["r1_bonus_id"].item(), 3, prompt)]
    return [one]


@pytest.mark.parametrize("chunk", [512, 4])
@pytest.mark.parametrize("name", REPLAYED)
def test_rounds_equal_the_reference(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`chunk` 4 has prompts go into the head's cache before anything is drafted."""
    monkeypatch.setattr(chained, "CHUNK", chunk)
    target, network, want = golden(name)
    for number, (ids, logits) in enumerate(two_rounds(MtpModel(network).pair(target)(), want), start=1):
        assert ids == want[f"r{number}_draft_ids"].tolist()
        np.testing.assert_allclose(logits, want[f"r{number}_draft_logits"], atol=1e-4)


@pytest.mark.parametrize("name", REPLAYED)
def test_recurrence_before_the_last_norm(name: str) -> None:
    """Some engines feed a head its output of before its last norm; the first draft of a round is the same."""
    target, network, want = golden(name)
    network.config = replace(network.config, recurrence="pre")
    try:
        rounds = two_rounds(MtpModel(network).pair(target)(), want)
    finally:
        network.config = replace(network.config, recurrence="post")
    for number, (ids, logits) in enumerate(rounds, start=1):
        assert ids == want[f"alt_prenorm_r{number}_draft_ids"].tolist()
        np.testing.assert_allclose(logits, want[f"alt_prenorm_r{number}_draft_logits"], atol=1e-4)
        assert not np.allclose(logits[1:], want[f"r{number}_draft_logits"][1:], atol=1e-2)


def broken(network: MtpNetwork, how: str) -> None:
    """Undo with the same call again."""
    layer = network.heads[0]
    if how == "hidden first":
        layer.hidden_first = not layer.hidden_first
    elif how == "norms swapped":
        layer.enorm, layer.hnorm = layer.hnorm, layer.enorm
    elif how == "norms without 1":
        sign = 1 if layer.norm.weight.mean().item() < 0.5 else -1
        for norm in (layer.enorm, layer.hnorm, layer.norm):
            norm.weight = norm.weight + sign


@pytest.mark.parametrize("how", ["hidden first", "norms swapped", "norms without 1", "hidden before the last norm"])
@pytest.mark.parametrize("name", REPLAYED)
def test_what_is_got_wrong_shows_in_the_numbers(name: str, how: str) -> None:
    target, network, want = golden(name)
    broken(network, how)
    try:
        hidden = "target_hidden_prenorm" if how.startswith("hidden before") else "all_hidden"
        _, logits = two_rounds(MtpModel(network).pair(target)(), want, hidden)[0]
    finally:
        broken(network, how)
    assert not np.allclose(logits[0], want["r1_draft_logits"][0], atol=1e-2)


class Kept:
    """A drafter that is silent once, as the reference is on the prompt, and then has its drafts written down."""

    def __init__(self, drafter: Drafter):
        self._drafter, self._silent = drafter, True
        self.drafts: list[list[int]] = []

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._drafter, attribute)

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        if self._silent:
            self._silent = False
            return NOTHING
        draft = self._drafter.propose(last, limit, sampler)
        self.drafts.append(draft.tokens.tolist())
        return draft


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", REPLAYED)
def test_whole_runs_equal_the_reference(name: str, k: int) -> None:
    """Every draft and every count of a decode, up to the last round, which the reference drafts for in full."""
    target, network, want = golden(name)
    prompt, answer = want["prompt_ids"].tolist(), want["greedy_ids"].tolist()
    drafter = Kept(MtpModel(network).pair(target)())
    ids, starts, accepted = [], [], []
    for emitted in drafted_rounds(target.sequence(), prompt, Sampler(SamplingParams(), prompt), 40, drafter, k):
        starts.append(len(prompt) + len(ids))
        ids += emitted.tokens
        accepted.append(emitted.accepted)
    assert ids == answer
    trace = {key: want[f"trace_k{k}_{key}"].tolist() for key in ("drafts", "accepted", "start")}
    assert starts[1:] == trace["start"][: len(starts) - 1]
    for ours, theirs in zip(drafter.drafts, trace["drafts"], strict=False):
        assert ours == theirs[: len(ours)]
    assert accepted[1:] == trace["accepted"][: len(accepted) - 1]
    assert sum(accepted) > 8


@pytest.mark.parametrize("chunk", [512, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_every_published_format_equals_the_reference(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that keep one to four tokens and draft one to three, some of them none."""
    for module in (chained, in_turn):
        monkeypatch.setattr(module, "CHUNK", chunk)
    target, network, want = golden(name)
    ids, start, hidden = want["ids"].tolist(), want["prompt"].item(), mx.array(want["hidden"])
    logits = target.model(mx.array([ids]))[0]
    np.testing.assert_allclose(np.array(logits), want["logits"], atol=1e-4)
    drafter = MtpModel(network).pair(target)()
    drafter.start(ids[:start])
    known, plan = 0, [(3, 1), (2, 3), (3, 3), (1, 1), (1, 2), (3, 1), (0, 2), (0, 1), (3, 4), (2, 1), (3, 1)]
    now = start
    for limit, kept in plan:
        drafter.observe(ids[known:now], Features((), hidden[known:now]))
        if limit:
            drafts, heard = propose(drafter, ids[now], limit, ids[:start])
            assert drafts == want["draft_ids"][now - start].tolist()[:limit]
            np.testing.assert_allclose(heard, want["draft_logits"][now - start][:limit], atol=1e-4)
        known, now = now, now + kept


def test_of_several_heads_each_drafts_one_token() -> None:
    target, network, want = golden("mtp_glm4_moe_three")
    drafter = MtpModel(network).pair(target)()
    assert drafter.max_draft == 3
    drafter.observe(want["ids"][:5].tolist(), Features((), mx.array(want["hidden"][:5])))
    assert len(propose(drafter, want["ids"][5].item(), 8, [0])[0]) == 3


HEADED = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe")


def random_heads(model: nn.Module, count: int = 1, bits: int | None = None) -> MtpNetwork:
    """Heads of the target's last layer's kind, loud and random."""
    args = getattr(model, "language_model", model).args
    last = len(model.layers) - 1
    blocks = [type(model.layers[last])(args, last) for _ in range(count)]
    network = MtpNetwork(MtpConfig(args.hidden_size, args.rms_norm_eps, len(model.layers), args.vocab_size), blocks)
    keys = iter(mx.random.split(mx.random.key(0), 400))
    network.update(
        tree_map(lambda x: mx.random.normal(x.shape, key=next(keys)) / x.shape[-1] ** 0.5, network.parameters())
    )
    if bits:
        nn.quantize(
            network, 32, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
        )
    return network


@cache
def headed(name: str) -> Target:
    target = Target(zoo.build(name))
    target.watch(in_turn.WANTS)
    return target


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "seed": 3, "acceptance": "coupled"},
}


@cache
def answer_of(name: str, sampling: str) -> list[int]:
    return plain(zoo.build(name), [5, 3, 9, 1], 30, **SAMPLING[sampling])


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", HEADED)
def test_random_heads_do_not_change_the_text(name: str, sampling: str) -> None:
    target, answer = headed(name), answer_of(name, sampling)
    for count, bits in ((1, None), (1, 4), (1, 8), (2, None)):
        make = MtpModel(random_heads(target.model, count, bits)).pair(target)
        for k in (1, 2, 4, 8) if bits is None else (3,):
            assert drafted(target, make(), [5, 3, 9, 1], 30, k, **SAMPLING[sampling]) == answer, (count, bits, k)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", [*REPLAYED, *FORMATS])
def test_published_heads_do_not_change_the_text(name: str, sampling: str) -> None:
    target, network, _ = golden(name)
    prompt = [7, 1, 30, 2, 2, 11]
    answer = plain(target.model, prompt, 30, **SAMPLING[sampling])
    for k in (1, 2, 4, 8):
        assert drafted(target, MtpModel(network).pair(target)(), prompt, 30, k, **SAMPLING[sampling]) == answer, k


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("count", [1, 2])
def test_sampled_drafts_say_what_they_were_drawn_from(count: int, rule: str) -> None:
    target = headed("glm4_moe")
    drafter = MtpModel(random_heads(target.model, count)).pair(target)()
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1, acceptance=rule), [0, 1, 2])
    features = Features((), mx.random.normal((2, 32), key=mx.random.key(1)))
    drafter.observe([0, 1], features)
    draft = drafter.propose(2, 2, sampler)
    assert draft.probs is not None
    assert draft.probs.shape == (2, target.vocab)
    assert mx.allclose(draft.probs.sum(-1), mx.ones(2))


@pytest.mark.parametrize(("count", "rule"), [(1, "token"), (2, "block")])
def test_the_law_of_the_output_is_the_targets(count: int, rule: str) -> None:
    """Of the first three tokens, from drafts of two by heads that are right now and then."""
    model, prompt, runs = zoo.build("glm4_moe", vocab=5, num_hidden_layers=2), [0, 1, 2], 500
    target = Target(model)
    target.watch(in_turn.WANTS)
    make = MtpModel(random_heads(model, count)).pair(target)
    seen: Counter[tuple[int, ...]] = Counter()
    stood = refused = 0
    for seed in range(runs):
        sampler = Sampler(SamplingParams(temperature=1.5, seed=seed, acceptance=rule), prompt)
        ids: list[int] = []
        for emitted in drafted_rounds(target.sequence(), prompt, sampler, 5, make(), 2):
            ids += emitted.tokens
            stood += emitted.accepted
            refused += emitted.drafted - emitted.accepted
            if len(ids) >= 3:
                break
        seen[tuple(ids[:3])] += 1
    assert min(stood, refused) > runs / 10
    assert law.misfit(seen, law.exact(model, prompt, 3, 5, {"temperature": 1.5})) < 1


def test_heads_in_a_decoder() -> None:
    vocab = 300
    model, tokenizer = zoo.build("qwen3_5", vocab=vocab), zoo.tokenizer(vocab)
    with SpecDecoder(model, tokenizer) as decoder:
        want = [r.token for r in decoder.stream("hello", max_tokens=20)]
    with SpecDecoder(model, tokenizer, drafter=MtpModel(random_heads(model))) as decoder:
        responses = list(decoder.stream("hello", max_tokens=20, num_draft_tokens=3))
    assert [r.token for r in responses] == want
    assert responses[-1].stats.drafted > 0


def test_a_target_of_another_size_is_refused() -> None:
    heads = random_heads(zoo.build("qwen3_5"))
    with pytest.raises(
        PairingError, match="mtp was made for a target whose vocabulary is 64 and this target's is 3000"
    ):
        MtpModel(heads).pair(Target(zoo.build("qwen3_5", vocab=3000)))
    with pytest.raises(PairingError, match="layers is 4 and this target's is 8"):
        MtpModel(heads).pair(Target(zoo.build("qwen3_5", num_hidden_layers=8)))


def test_before_anything_was_observed_nothing_is_drafted() -> None:
    target = headed("glm4_moe")
    for count in (1, 2):
        drafter: Callable[[], Drafter] = MtpModel(random_heads(target.model, count)).pair(target)
        assert len(drafter().propose(3, 4, Sampler(SamplingParams(), [3])).tokens) == 0
