"""`prove` scores as generating does, whatever the cache, and can tell a right law from a wrong one."""

import mlx_specdec  # noqa: F401  # isort: skip

from random import Random

import pytest

from mlx_specdec import CacheOptions, SamplingParams, SpecDecoder, proof
from mlx_specdec.drafters import DrafterOptions, by_name
from tests import zoo

EAGER = DrafterOptions(ngram_n=1, ngram_m=4)
CACHES = {
    "plain": ("kv", CacheOptions()),
    "sinks": ("kv", CacheOptions(max_kv_size=16)),
    "quantised": ("kv_quant", CacheOptions(kv_bits=8, quantized_kv_start=0)),
    "quantised late": ("kv_quant", CacheOptions(kv_bits=8, quantized_kv_start=30)),
    "window": ("window8", CacheOptions()),
}


def decoder_of(kind: str) -> SpecDecoder:
    name, cache = CACHES[kind]
    model = zoo.CACHE_KINDS[name](vocab=300, seed=1)
    return SpecDecoder(model, zoo.tokenizer(), by_name("ngram_simple", EAGER), cache=cache)


@pytest.mark.parametrize("kind", CACHES)
def test_scores_are_those_of_generating(kind: str) -> None:
    prompt = [(7 * i * i + 3 * i + 5) % 290 for i in range(21)]
    with decoder_of(kind) as decoder:
        plain = list(decoder.stream(prompt, max_tokens=30, num_draft_tokens=0))
        output = [r.token for r in plain]
        logits = list(proof.score(decoder.target, prompt, output[:-1], rows=1))
        assert [int(row.argmax()) for row in logits] == output
        several = proof.arithmetic(decoder.target, prompt, output, rows=5)
        assert several.places == 31
        if not kind.startswith("quantised"):
            assert several.flips == 0
        compared = proof.compared(decoder, prompt, 30, SamplingParams(), 4)
        assert (compared.plain, compared.difference) == (output, None)
        assert 0 <= compared.accepted <= compared.drafted


@pytest.mark.parametrize("kind", ["plain", "sinks", "window"])
def test_the_law_holds_and_a_wrong_one_does_not(kind: str) -> None:
    right, wrong = SamplingParams(temperature=0.8, seed=3, acceptance="token"), SamplingParams(temperature=0.5, seed=3)
    places: dict[str, list[float]] = {"right": [], "wrong": []}
    random = Random(0)
    with decoder_of(kind) as decoder:
        for start in range(4):
            prompt = [(5 * i * i + 3 * i + start) % 290 for i in range(19)]
            output = proof.ids(decoder, prompt, 60, right, 4)
            places["right"] += proof.ranks(decoder, prompt, output, right, random)
            places["wrong"] += proof.ranks(decoder, prompt, output, wrong, random)
    assert proof.uniform_p_value(places["right"]) > 1e-3
    assert proof.uniform_p_value(places["wrong"]) < 1e-3


def test_p_values() -> None:
    random = Random(1)
    assert proof.uniform_p_value([random.random() for _ in range(500)]) > 0.01
    assert proof.uniform_p_value([random.random() ** 2 for _ in range(500)]) < 1e-3
    assert proof.uniform_p_value([(i + 0.5) / 100 for i in range(100)]) == 1.0
