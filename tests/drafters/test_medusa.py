"""Medusa heads as one chain: the right hidden state goes in, and no weights change the text."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_specdec.drafters.medusa import MedusaDrafter, MedusaModel
from mlx_specdec.errors import PairingError
from mlx_specdec.networks.medusa import Medusa, MedusaConfig
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.ends import Ends
from mlx_specdec.target.model import Target
from tests import zoo
from tests.law import exact, misfit
from tests.scripted import drafted, drafted_rounds, plain

HEADS, VOCAB = 4, 64


def heads(seed: int = 1, vocab: int = VOCAB, hidden: int = 32, ids: np.ndarray | None = None, **config: Any) -> Medusa:
    """Random weights, drawn like the zoo's."""
    rows = vocab if ids is None else len(ids)
    made = Medusa(MedusaConfig(hidden, vocab, rows, HEADS, 1, **config), ids)
    zoo._rewrite(made, seed, lambda _, old, normal, __: 0.3 * normal)
    return made


def quantised(network: Medusa, bits: int) -> Medusa:
    nn.quantize(network, group_size=32, bits=bits)
    return network


def watched(model: Any) -> Target:
    target = Target(model)
    target.watch(MedusaDrafter.wants)
    return target


@cache
def target_of(kind: str) -> Target:
    return watched(zoo.CACHE_KINDS[kind]())


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + 3 * i + 5) % VOCAB for i in range(length)]


class Noting(Sampler):
    """Greedy, keeping the logits that it was asked to draft from."""

    def __init__(self) -> None:
        super().__init__(SamplingParams(), [0])
        self.logits: list[mx.array] = []

    def draft(self, logits: mx.array, fed: mx.array) -> tuple[mx.array, mx.array | None]:
        self.logits.append(logits)
        return super().draft(logits, fed)


def started(drafter: MedusaDrafter, target: Target, tokens: list[int], *refused: int) -> MedusaDrafter:
    """Having observed `tokens`, the last of them in a pass in which others were refused."""
    sequence = target.sequence()
    for chunk, known in sequence.prefill(tokens):
        drafter.observe(chunk, known)
    _, features = sequence.forward(mx.array([tokens[-1], *refused]))
    sequence.settle(1)
    drafter.observe(tokens[-1:], sequence.known(features, 1))
    return drafter


@pytest.mark.parametrize("ids", [None, np.array([3, 60, 5, 9, 41, 22])])
@pytest.mark.parametrize("kind", ["kv", "window8", "gated_delta"])
def test_heads_are_given_the_newest_certain_tokens_hidden_state(kind: str, ids: np.ndarray | None) -> None:
    target, network, tokens = target_of(kind), heads(ids=ids), prompt_of(12)
    drafter = started(MedusaModel(network).pair(target)(), target, tokens, 7, 8, 9)
    noting = Noting()
    draft = drafter.propose(5, 3, noting)
    _, alone = target.sequence().forward(mx.array(tokens), certain=len(tokens))
    assert alone is not None
    assert alone.final is not None
    state = np.array(alone.final[-1], dtype=np.float64)
    assert len(draft.tokens) == 3
    for head, (token, logits) in enumerate(zip(draft.tokens.tolist(), noting.logits, strict=True)):
        block = network.blocks[head].layers[0]
        inner = np.array(block.weight) @ state + np.array(block.bias)
        scores = np.array(network.lm_heads[head].weight) @ (state + inner / (1 + np.exp(-inner)))
        whole = np.full(VOCAB, -np.inf)
        whole[np.arange(VOCAB) if ids is None else ids] = scores
        np.testing.assert_allclose(logits[0], whole, rtol=1e-3, atol=1e-3)
        assert token == whole.argmax()


def test_what_goes_in_is_what_last_was_chosen_from() -> None:
    """Heads that do nothing and have the target's own projection say `last` again."""
    model = zoo.build("llama")
    target, network = watched(model), heads()
    for block, head in zip(network.blocks, network.lm_heads, strict=True):
        block.layers[0].weight, block.layers[0].bias = mx.zeros((32, 32)), mx.zeros(32)
        head.weight = model.lm_head.weight
    tokens = prompt_of(9)
    drafter = started(MedusaModel(network).pair(target)(), target, tokens)
    last = plain(model, tokens, 1)[0]
    assert drafter.propose(last, 9, Noting()).tokens.tolist() == [last] * HEADS


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8, "top_p": 0.9, "seed": 5},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "seed": 4, "temperature": 1.0},
}
NETWORKS: dict[str, Callable[[], Medusa]] = {
    "dense": heads,
    "8 bits": lambda: quantised(heads(), 8),
    "4 bits": lambda: quantised(heads(), 4),
    "reduced": lambda: heads(ids=np.array([3, 60, 5, 9, 41, 22])),
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("kind", ["kv", "window8", "gated_delta", "short_conv"])
def test_ids_equal_plain_decoding(kind: str, sampling: str) -> None:
    target, how = target_of(kind), SAMPLING[sampling]
    for length, name in ((1, "dense"), (7, "8 bits"), (9, "4 bits"), (18, "reduced")):
        prompt, make = prompt_of(length), MedusaModel(NETWORKS[name]()).pair(target)
        answer = plain(target.model, prompt, 25, **how)
        for k in (1, 2, 4, 8) if length == 18 else (3,):
            assert drafted(target, make(), prompt, 25, k, **how) == answer, (length, k)


def trained(target: Target, prompt: list[int], tokens: int) -> Medusa:
    """Heads that know one continuation by heart: least squares from its hidden states to its tokens."""
    network, answer = heads(), plain(target.model, prompt, tokens)
    text = [*prompt, *answer]
    _, features = target.sequence().forward(mx.array(text), certain=len(text))
    assert features is not None
    states = np.array(features.final)
    for head in range(HEADS):
        network.blocks[head].layers[0].weight = mx.zeros((32, 32))
        rows, wanted = states[: len(text) - head - 2], np.eye(VOCAB)[text[head + 2 :]]
        network.lm_heads[head].weight = mx.array(np.linalg.lstsq(rows, wanted, rcond=None)[0].T.astype(np.float32))
    return network


def test_heads_that_know_the_text_are_believed() -> None:
    """Head k is about the token k + 1 after `last`: heads off by one would not be."""
    target, prompt = target_of("kv"), prompt_of(6)
    network = trained(target, prompt, 16)
    answer = plain(target.model, prompt, 14)
    make = MedusaModel(network).pair(target)
    chooser = Sampler(SamplingParams(), prompt)
    emitted = list(drafted_rounds(target.sequence(), prompt, chooser, 14, make(), HEADS))
    assert [t for r in emitted for t in r.tokens] == answer
    assert sum(r.accepted for r in emitted) >= 0.8 * sum(r.drafted for r in emitted)


KNOWN = [0, 2, 4, 6, 8, 10]
LAWS: dict[str, dict[str, Any]] = {
    "half of the vocabulary": {"temperature": 1.2, "top_k": 9},
    "nothing that is allowed": {"temperature": 1.2, "logit_bias": dict.fromkeys(KNOWN, -np.inf)},
}


@pytest.mark.parametrize("known", LAWS)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_law_is_the_targets(rule: str, known: str) -> None:
    """With heads that know half of the vocabulary, so that q is 0 for the other half, or nothing that may be said."""
    sampling, prompt = LAWS[known], [1, 4, 2, 1, 5]
    model = zoo.build("llama", vocab=12, num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    target = watched(model)
    make = MedusaModel(heads(3, 12, 16, np.array(KNOWN))).pair(target)
    seen: Counter[tuple[int, ...]] = Counter()
    proposed = 0
    for seed in range(600):
        chooser = Sampler(SamplingParams(**sampling, acceptance=rule, seed=seed), prompt)
        ids: list[int] = []
        for emitted in drafted_rounds(target.sequence(), prompt, chooser, 5, make(), 2):
            ids += emitted.tokens
            proposed += emitted.drafted
            if len(ids) >= 3:
                break
        seen[tuple(ids[:3])] += 1
    assert misfit(seen, exact(model, prompt, 3, 12, sampling)) < 1
    assert proposed > 600


def test_a_vocabulary_of_other_length() -> None:
    """Of padding: rows that only one of the two has are never drafted."""
    for vocab in (VOCAB - 10, VOCAB + 10):
        target = target_of("kv")
        noting = Noting()
        drafter = started(MedusaModel(heads(vocab=vocab)).pair(target)(), target, prompt_of(5))
        assert max(drafter.propose(1, 4, noting).tokens.tolist()) < min(vocab, VOCAB)
        for logits in noting.logits:
            assert logits.shape == (1, VOCAB)
            assert mx.isinf(logits[0, vocab:]).all()


def test_another_target_is_refused() -> None:
    network = heads(hidden=48, target_name="lmsys/vicuna-7b-v1.3")
    with pytest.raises(
        PairingError, match=r"target \(lmsys/vicuna-7b-v1.3\) whose hidden size is 48 and this target's"
    ):
        MedusaModel(network).pair(target_of("kv"))


def test_no_end_of_the_target_is_needed() -> None:
    """A model whose embedding cannot be told from its layers can have Medusa heads all the same."""
    model = zoo.build("gemma3n")
    with pytest.raises(PairingError):
        Ends(model)
    assert MedusaModel(heads()).pair(watched(model))
