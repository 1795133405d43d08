"""Gemma 4 assistants are exact with any weights, q is true, and they pair with the targets they were made for alone."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.gemma4_text import ModelArgs
from mlx_lm.utils import load_model

from mlx_specdec.checkpoints.drafter import read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.draft_length import Auto, Fixed
from mlx_specdec.drafters.base import Drafter
from mlx_specdec.drafters.chain import Chain
from mlx_specdec.drafters.gemma4_assistant import Gemma4AssistantModel
from mlx_specdec.errors import PairingError
from mlx_specdec.networks.gemma4_assistant import Gemma4Assistant, Gemma4AssistantConfig
from mlx_specdec.rounds import rounds
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import CacheOptions, Target
from tests import zoo
from tests.drafters.test_gemma4_assistant import ORDERED, committed, maker, network, ordered, target
from tests.law import exact, misfit
from tests.scripted import drafted, drafted_rounds, plain
from tests.test_memory import kept
from tests.test_threads import at_once

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


@pytest.mark.parametrize("sampling", SAMPLING)
def test_ordered_ids_equal_plain_decoding(sampling: str) -> None:
    _, text, made, make = ordered()
    how = SAMPLING[sampling]
    for length in (1, 18):
        answer = plain(made.model, text[:length], 25, **how)
        for k in (1, 4, 8):
            assert drafted(made, make(), text[:length], 25, k, **how) == answer, (length, k)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_law_is_the_targets(rule: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "global_head_dim": 8, "num_attention_heads": 2}
    model, prompt, sampling = zoo.build("gemma4_text", vocab=12, **sizes), [1, 4, 2, 1, 5], {"temperature": 1.2}
    made = Target(model)
    make = Gemma4AssistantModel(random(3, 4, 16, vocab_size=12, **sizes)).pair(made)
    made.watch(make().wants)
    seen: Counter[tuple[int, ...]] = Counter()
    proposed = 0
    for seed in range(400):
        chooser = Sampler(SamplingParams(**sampling, acceptance=rule, seed=seed), prompt)
        ids: list[int] = []
        for emitted in drafted_rounds(made.sequence(), prompt, chooser, 5, make(), 2):
            ids += emitted.tokens
            proposed += emitted.drafted
            if len(ids) >= 3:
                break
        seen[tuple(ids[:3])] += 1
    assert misfit(seen, exact(model, prompt, 3, 12, sampling)) < 1
    assert proposed > 400


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


def test_every_round_may_be_asked_for_by_another_thread() -> None:
    """What a drafter keeps from round to round is evaluated where it was made; passes that start ahead included."""
    _, text, made, make = ordered()
    for k, length in ((3, Fixed(3)), (0, Ahead())):
        emitting = rounds(made.sequence(), text[:25], Sampler(SamplingParams(), text[:25]), 30, Chain([make()], length))
        ids: list[int] = []
        while len(ids) < 30:
            (emitted,) = at_once(lambda emitting=emitting: next(emitting))  # type: ignore[misc]
            ids += emitted.tokens
        assert ids == text[25:55], k


class Ahead(Auto):
    """Drafts every third time, and otherwise starts the next pass before this one's token was looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def limit(self, drafter: Drafter) -> int:
        self.asked += 1
        return 2 * (self.asked % 3 == 0)

    def look_ahead(self) -> bool:
        return True


def test_nothing_of_a_prompt_is_kept() -> None:
    """Neither features nor, where the cache was cut or grew, a second copy of it."""
    folder = ORDERED / "target"
    made = Target(load_model(folder)[0], CacheOptions(prefill_step_size=256))
    make = Gemma4AssistantModel(read_network(Folder(ORDERED / "assistant"), "gemma4_assistant")).pair(made)  # type: ignore[arg-type]
    made.watch(make().wants)
    short, long = kept(made, make(), 1024), kept(made, make(), 4096)
    assert long - short < 64 * 1024, f"{long - short} bytes more; a chunk's features have {256 * 64 * 4}"


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
