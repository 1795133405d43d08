"""Gemma 4 assistants against Hugging Face's numbers, and exact with any weights.

tests/golden/gemma4_assistant_plain/README.md says what the arrays are. `alt_` arrays are other engines' conventions.
"""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.gemma4_text import ModelArgs
from mlx_lm.utils import load_model

from mlx_specdec.checkpoints.drafter import kind_of, read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.drafters.gemma4_assistant import Gemma4AssistantDrafter, Gemma4AssistantModel
from mlx_specdec.errors import PairingError
from mlx_specdec.features import Features, KeysValues
from mlx_specdec.networks.gemma4_assistant import Gemma4Assistant, Gemma4AssistantConfig
from mlx_specdec.rounds import Round
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import CacheOptions, Target
from tests import zoo
from tests.scripted import drafted, drafted_rounds, plain

GOLDEN = Path(__file__).parents[1] / "golden" / "gemma4_assistant_plain"
KINDS = ("sliding_attention", "full_attention")  # in the order of the drafter's layers


@cache
def expected() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "expected.npz"))


def network(**conventions: int) -> Gemma4Assistant:
    folder = Folder(GOLDEN / "assistant")
    assert kind_of(folder) == "gemma4_assistant"
    read: Any = read_network(folder, "gemma4_assistant")
    read.config = replace(read.config, **conventions)
    return read


@cache
def target() -> Target:
    model, _ = load_model(GOLDEN / "target")
    model.eval()
    made = Target(model)
    made.watch(maker()().wants)
    return made


def maker(drafter: Gemma4Assistant | None = None) -> Any:
    unwatched, _ = load_model(GOLDEN / "target")
    return Gemma4AssistantModel(drafter or network()).pair(Target(unwatched))


class Noting(Sampler):
    """Greedy, keeping the logits that it was asked to draft from."""

    def __init__(self) -> None:
        super().__init__(SamplingParams(), [0])
        self.logits: list[mx.array] = []

    def draft(self, logits: mx.array, fed: mx.array) -> tuple[mx.array, mx.array | None]:
        self.logits.append(logits)
        return super().draft(logits, fed)


def committed() -> list[int]:
    return [*expected()["prompt_ids"].tolist(), *expected()["greedy_ids"].tolist()]


def observe(drafter: Gemma4AssistantDrafter, start: int, end: int) -> None:
    """Tokens start to end with what the reference's target made of them."""
    gold = expected()
    held = [KeysValues(*(mx.array(gold[f"shared_{x}_{kind}"][:, :end]) for x in ("k", "v"))) for kind in KINDS]
    final = mx.array(gold["all_hidden"][start:end])
    drafter.observe(committed()[start:end], Features((), final, tuple(held)))


def proposed(drafter: Gemma4AssistantDrafter, last: int) -> tuple[list[int], np.ndarray]:
    noting = Noting()
    tokens = drafter.propose(last, 3, noting).tokens.tolist()
    return tokens, np.array(mx.concatenate(noting.logits))


def two_rounds(**conventions: int) -> Iterator[tuple[str, list[int], np.ndarray]]:
    drafter = maker(network(**conventions))()
    observe(drafter, 0, 24)
    yield "r1", *proposed(drafter, committed()[24])
    observe(drafter, 24, 26)
    yield "r2", *proposed(drafter, committed()[26])


CONVENTIONS = {
    "": {},
    "alt_posNm1_": {"behind": 1},
    "alt_rowsW_": {"beyond": 0},
    "alt_rowsWm1_": {"beyond": -1},
    "alt_posNm1_rowsW_": {"behind": 1, "beyond": 0},
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_rounds_are_the_references(name: str) -> None:
    gold = expected()
    for which, tokens, logits in two_rounds(**CONVENTIONS[name]):
        assert tokens == gold[f"{name}{which}_draft_ids"].tolist()
        np.testing.assert_allclose(logits, gold[f"{name}{which}_draft_logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in CONVENTIONS if name])
def test_a_convention_makes_a_difference(name: str) -> None:
    gold = expected()
    for which, _, logits in two_rounds(**CONVENTIONS[name]):
        assert np.abs(logits - gold[f"{which}_draft_logits"]).max() > 1e-2


def test_hidden_states_are_the_references() -> None:
    gold, net = expected(), network()
    held = {
        kind: KeysValues(*(mx.array(gold[f"shared_{x}_{kind}"][:, 15 * (kind == KINDS[0]) : 24]) for x in ("k", "v")))
        for kind in KINDS
    }
    hidden = mx.array(gold["all_hidden"][23:24])
    for step, token in enumerate([committed()[24], *gold["r1_draft_ids"][:2].tolist()]):
        output, hidden = net(target().ends.embed(mx.array([token])), hidden, held, 24)
        np.testing.assert_allclose(output[0], gold["r1_draft_hidden"][step], rtol=0, atol=1e-4)
        np.testing.assert_allclose(hidden[0], gold["r1_h_next"][step], rtol=0, atol=1e-4)


def test_rounds_on_our_own_target() -> None:
    """With the keys and values of mlx-lm's target, whose windows have wrapped and whose refused rows were rewound."""
    gold, sequence, drafter = expected(), target().sequence(), maker()()
    for chunk, known in sequence.prefill(committed()[:25]):
        drafter.observe(chunk, known)
    tokens, logits = proposed(drafter, committed()[24])
    assert tokens == gold["r1_draft_ids"].tolist()
    np.testing.assert_allclose(logits, gold["r1_draft_logits"], rtol=0, atol=1e-3)
    _, features = sequence.forward(mx.array([committed()[24], *tokens]))
    sequence.settle(1 + int(gold["r1_accepted"]))
    drafter.observe(committed()[24:26], sequence.known(features, 2))
    tokens, logits = proposed(drafter, committed()[26])
    assert tokens == gold["r2_draft_ids"].tolist()
    np.testing.assert_allclose(logits, gold["r2_draft_logits"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("step", [2048, 7, 1])
@pytest.mark.parametrize("k", [1, 3])
def test_whole_runs_are_the_references(k: int, step: int) -> None:
    """All drafts and counts of 40 tokens; near the end fewer are drafted, as no more than 40 are wanted."""
    gold, drafter = expected(), maker()()
    drafts, starts = [], []
    propose = drafter.propose

    def noting(last: int, limit: int, sampler: Sampler) -> Any:
        draft = propose(last, limit, sampler)
        drafts.append(draft.tokens.tolist())
        starts.append(drafter._position + 1)
        return draft

    drafter.propose = noting
    prompt = committed()[:25]
    chooser = Sampler(SamplingParams(), prompt)
    made = Target(target().model, CacheOptions(prefill_step_size=step))
    made.watch(drafter.wants)
    emitted: list[Round] = list(drafted_rounds(made.sequence(), prompt, chooser, 39, drafter, k))
    made.close()
    assert [t for r in emitted for t in r.tokens] == committed()[25:]
    assert [r.accepted for r in emitted] == gold[f"trace_k{k}_accepted"].tolist()
    assert starts == gold[f"trace_k{k}_start"].tolist()[: len(starts)]
    assert len(starts) >= len(emitted) - 1
    for ours, theirs in zip(drafts, gold[f"trace_k{k}_drafts"].tolist(), strict=False):
        assert ours == theirs[: len(ours)]
    assert sum(map(len, drafts)) >= k * (len(emitted) - 2)


# --- exact with any weights


TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size": 64,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "sliding_window": 8,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rms_norm_eps": 1e-5,
}


def random(seed: int = 0, centroids: int | None = None, backbone: int = 32, **text: Any) -> Gemma4Assistant:
    """Random weights, drawn like the zoo's."""
    args = ModelArgs.from_dict({**TEXT, **text})
    made = Gemma4Assistant(Gemma4AssistantConfig(args, backbone, centroids, 3))
    zoo._rewrite(made, seed, lambda _, old, n, __: old if old.dtype == mx.int32 else 0.3 * n + (old.ndim == 1))
    if centroids:
        keys = mx.random.uniform(shape=(args.vocab_size,), key=mx.random.key(seed))
        made.masked_embedding.token_ordering = mx.argsort(keys).astype(mx.int32)
    return made


def quantised(net: Gemma4Assistant, bits: int) -> Gemma4Assistant:
    nn.quantize(net, group_size=32, bits=bits)
    return net


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "seed": 4, "temperature": 1.0},
}


NETWORKS: dict[str, tuple[Callable[[], Gemma4Assistant], tuple[int, ...]]] = {
    "the reference's": (network, (1, 2, 4, 8)),
    "8 bits": (lambda: quantised(network(), 8), (3,)),
    "4 bits": (lambda: quantised(network(), 4), (3,)),
    "ordered": (lambda: random(1, 12, 64, num_key_value_heads=2, vocab_size=96), (1, 8)),
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", NETWORKS)
def test_ids_equal_plain_decoding(name: str, sampling: str) -> None:
    """The reference's target, the drafts of whose own drafter stand now and then."""
    (make, lengths), how = NETWORKS[name], SAMPLING[sampling]
    made = maker(make())
    for length in (1, 7, 8, 17):
        prompt = committed()[:length]
        answer = plain(target().model, prompt, 30, **how)
        for k in lengths:
            assert drafted(target(), made(), prompt, 30, k, **how) == answer, (length, k)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("centroids", [None, 8])
def test_ids_equal_plain_decoding_where_layers_share_keys(centroids: int | None, sampling: str) -> None:
    """A target like E2B: its last layers read the keys of earlier ones, and every layer is given tokens of its own."""
    how, made = SAMPLING[sampling], Target(zoo.build("gemma4_text"), CacheOptions(prefill_step_size=16))
    make = Gemma4AssistantModel(random(2, centroids)).pair(made)
    assert make().wants.keys_values == (1, 2)
    made.watch(make().wants)
    for length in (1, 8, 18, 40):
        prompt = [(7 * i * i + 3 * i + 5) % 64 for i in range(length)]
        answer = plain(made.model, prompt, 20, made.options, **how)
        for k in (1, 2, 4, 8) if length == 18 else (4,):
            assert drafted(made, make(), prompt, 20, k, **how) == answer, (length, k)


# --- the ordered head


def test_the_ordered_head_scores_the_likeliest_clusters_alone() -> None:
    net = random(5, 8)
    output = mx.random.normal((1, 32), key=mx.random.key(6))
    logits = np.array(net.logits(output))[0]
    y, table = np.array(output[0], dtype=np.float64), np.array(net.embed_tokens.weight, dtype=np.float64)
    clusters = np.argsort(-(np.array(net.masked_embedding.centroids.weight, dtype=np.float64) @ y))[:3]
    tokens = np.array(net.masked_embedding.token_ordering).reshape(8, 8)[clusters].ravel()
    np.testing.assert_allclose(logits[tokens], table[tokens] @ y, rtol=1e-4, atol=1e-5)
    assert np.isneginf(np.delete(logits, tokens)).all()
    assert len(set(tokens)) == 24


def test_q_is_zero_for_tokens_that_are_not_scored() -> None:
    made = Target(zoo.build("gemma4_text"))
    make = Gemma4AssistantModel(random(2, 8)).pair(made)
    made.watch(make().wants)
    drafter, sequence = make(), made.sequence()
    for chunk, known in sequence.prefill([3, 1, 4, 1, 5]):
        drafter.observe(chunk, known)
    draft = drafter.propose(5, 4, Sampler(SamplingParams(temperature=1.0), [3, 1, 4, 1, 5]))
    assert draft.probs is not None
    q = np.array(draft.probs)
    np.testing.assert_allclose(q.sum(axis=-1), 1, rtol=1e-5)
    assert ((q > 0).sum(axis=-1) == 24).all()
    assert all(row[token] > 0 for row, token in zip(q, draft.tokens.tolist(), strict=True))


# --- targets that it was not made for


def test_another_target_is_refused() -> None:
    gemma, llama = Target(zoo.build("gemma4_text")), Target(zoo.build("llama"))
    refused = [
        (random(backbone=48), gemma, "hidden size is 48 and this target's is 32"),
        (random(vocab_size=2048), gemma, "vocabulary is 2048 and this target's is 64"),
        (random(vocab_size=96), gemma, "drafts among 96 tokens and this target has 64"),
        (random(), llama, "reads the keys of a sliding_attention layer and this target has none"),
        (
            random(global_head_dim=16),
            gemma,
            "has 4 heads of 16 in its full_attention layers and this target has 1 of 32",
        ),
    ]
    for net, made, said in refused:
        with pytest.raises(PairingError, match=said):
            Gemma4AssistantModel(net).pair(made)
