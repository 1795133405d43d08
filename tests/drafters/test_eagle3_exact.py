"""EAGLE-3 never changes the text, whatever its weights, and is refused by a target that it was not made for."""

import mlx_specdec  # noqa: F401  # isort: skip

import threading
from collections import Counter
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.models.llama import ModelArgs

from mlx_specdec import PairingError, SpecDecoder
from mlx_specdec.drafters.base import Draft
from mlx_specdec.drafters.eagle3 import CHAIN, Eagle3Head, Eagle3Model, usual_layers
from mlx_specdec.drafters.heads import HeadDrafter
from mlx_specdec.networks.eagle3 import Eagle3, Eagle3Config
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import Target
from tests import zoo
from tests.drafters.test_eagle3 import GOLDEN, NAMES, expected, golden_target, network
from tests.law import exact, misfit
from tests.scripted import drafted, drafted_rounds, plain, reference

DRAFTS = (1, 2, 4, 8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", DRAFTS)
def test_greedy_ids_are_the_targets(name: str, k: int) -> None:
    greedy = dict(np.load(GOLDEN / "target_llama" / "expected.npz"))[f"{name}_greedy_ids"].tolist()
    prompt = expected(name)["prompt_ids"].tolist()
    assert decoded(golden_target().model, network(name), prompt, len(greedy), k) == greedy


def decoded(model: nn.Module, network: Eagle3, prompt: list[int], tokens: int, k: int, **sampling: Any) -> list[int]:
    target = Target(model)
    make = Eagle3Model(network).pair(target)
    target.watch(make().wants)
    try:
        return drafted(target, make(), prompt, tokens, k, **sampling)
    finally:
        target.close()


VOCAB, TOKENS = 64, 20
FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_5", "deepseek_v3")
PROMPTS = [[(7 * i * i + 3 * i + 5) % VOCAB for i in range(n)] for n in (1, 2, 30)]


@cache
def family(name: str) -> nn.Module:
    return zoo.build(name)


def random_network(model: nn.Module, seed: int = 0, vocab: int = VOCAB, **fields: Any) -> Eagle3:
    """A drafter for `model` with weights that know nothing."""
    hidden = Target(model).hidden
    assert hidden is not None
    layer = ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=len(fields.get("windows", (None,))),
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        vocab_size=vocab,
        max_position_embeddings=256,
    )
    rows = fields.pop("reduced", vocab)
    ids = np.sort(np.random.default_rng(seed).permutation(vocab)[:rows]) if rows < vocab else None
    made = Eagle3(Eagle3Config(layer=layer, target_hidden=hidden, draft_vocab=rows, **fields), ids)
    keys = iter(mx.random.split(mx.random.key(seed), 64))
    made.update(tree_map(lambda p: p + 0.2 * mx.random.normal(p.shape, key=next(keys)), made.parameters()))
    return made


VARIANTS: dict[str, dict[str, Any]] = {
    "shared ends": {"own_embedding": False, "own_head": False},
    "reduced": {"reduced": 40, "own_embedding": False},
    "three layers, one windowed": {"reduced": 40, "windows": (None, 5, None), "norm_before_residual": True},
    "norms": {"fc_norm": True, "norm_output": True, "qk_norm": True, "qkv_bias": True, "o_bias": True},
    "tied": {"own_head": False, "tied": True, "norm_before_fc": True, "rotary": 0.5},
    "five taps": {"layer_ids": (0, 0, 1, 1, 2), "fc_bias": True},
}
RULES: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 5, "acceptance": "coupled"})


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rule", RULES, ids=["greedy", "coupled"])
def test_random_weights_never_change_the_text(name: str, rule: dict[str, Any]) -> None:
    model = family(name)
    layers = (0, 1, len(model.layers) - 1)
    for prompt in PROMPTS:
        answer = plain(model, prompt, TOKENS, **rule)
        if not rule:
            assert answer == reference(model, prompt, TOKENS)
        for variant in ("shared ends", "reduced"):
            drafter = random_network(model, layer_ids=layers, **VARIANTS[variant])
            for k in DRAFTS:
                assert decoded(model, drafter, prompt, TOKENS, k, **rule) == answer, (k, variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_variants_and_quantised_drafters_never_change_the_text(variant: str, bits: int | None) -> None:
    model = zoo.build("llama", num_hidden_layers=4)
    drafter = random_network(model, **VARIANTS[variant])
    if bits:
        nn.quantize(drafter, group_size=32, bits=bits)
        assert drafter.dtype == mx.float32
    assert decoded(model, drafter, PROMPTS[2], TOKENS, 4) == plain(model, PROMPTS[2], TOKENS)


def test_a_drafter_in_another_precision() -> None:
    model = family("llama")
    for dtype in (mx.float16, mx.bfloat16):
        for variant in ("shared ends", "reduced"):
            drafter = random_network(model, layer_ids=(0, 1, 1), **VARIANTS[variant])
            drafter.set_dtype(dtype)
            head = Eagle3Head(drafter, Target(model))
            cache = head.make_cache()
            output, _ = head.rows(mx.array([1, 2]), mx.ones((2, 32)).astype(dtype), cache)
            assert cache[0].keys.dtype == output.dtype == dtype
            assert head.logits(output).dtype == mx.float32
            assert decoded(model, drafter, PROMPTS[2], TOKENS, 4) == plain(model, PROMPTS[2], TOKENS)


TINY = {"vocab": 12, "num_hidden_layers": 2, "hidden_size": 16, "head_dim": 8, "intermediate_size": 16}
PROMPT = [1, 4, 2, 1, 5, 2]


class Untrue(HeadDrafter):
    """Says that its drafts were drawn from another distribution."""

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        draft = super().propose(last, limit, sampler)
        return draft._replace(probs=mx.full(draft.probs.shape, 1 / TINY["vocab"])) if draft.tokens.size else draft


def fit(runs: int, make: type[HeadDrafter], rule: str) -> float:
    """The misfit of sampled outputs of three tokens with a random drafter that knows 5 of 12 tokens."""
    target = Target(zoo.build("llama", **TINY))
    drafter = random_network(target.model, reduced=5, vocab=TINY["vocab"], layer_ids=(0, 1, 1), own_embedding=False)
    wants = Eagle3Model(drafter).pair(target)().wants
    target.watch(wants)
    head = Eagle3Head(drafter, target)
    sampling = {"temperature": 1.2, "acceptance": rule}
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(runs):
        counts[tuple(drafted(target, make("eagle3", head, wants, 3), PROMPT, 3, 3, seed=seed, **sampling))] += 1
    target.close()
    return misfit(counts, exact(target.model, PROMPT, 3, TINY["vocab"], sampling))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_law_of_sampled_output_is_the_targets(rule: str) -> None:
    assert fit(1200, HeadDrafter, rule) < 1


def test_an_untrue_q_shows_in_the_law() -> None:
    assert fit(800, Untrue, "token") > 1


def test_any_thread_may_ask_for_the_next_round() -> None:
    model = zoo.build("llama", num_hidden_layers=4)
    target = Target(model)
    make = Eagle3Model(random_network(model, **VARIANTS["reduced"])).pair(target)
    target.watch(make().wants)
    prompt, ids = PROMPTS[2], []
    emitting = drafted_rounds(target.sequence(), prompt, Sampler(SamplingParams(), prompt), TOKENS, make(), 3)

    def ask() -> None:
        ids.extend(next(emitting).tokens)
        mx.clear_streams()

    while len(ids) < TOKENS:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    target.close()
    assert ids == plain(model, prompt, TOKENS)


class TestPairing:
    def test_the_usual_layers_follow_from_the_targets(self) -> None:
        for n, outputs in ((4, (1, 1, 0)), (8, (1, 3, 4)), (32, (1, 15, 28))):
            assert usual_layers(n) == outputs

    def test_the_checkpoint_says_how_far_to_draft(self) -> None:
        assert Eagle3Model(network(NAMES[1])).pair(golden_target())().max_draft == 4
        assert Eagle3Model(network(NAMES[0])).pair(golden_target())().max_draft == CHAIN

    @pytest.mark.parametrize(
        ("sizes", "said"),
        [
            ({"hidden_size": 32, "vocab": 128}, "hidden size is 64 and this target's is 32"),
            ({"hidden_size": 64, "vocab": 5000}, "vocabulary is 128 and this target's is 5000"),
            ({"hidden_size": 64, "vocab": 128, "num_hidden_layers": 3}, "4 or more, and this one has 3"),
        ],
    )
    def test_another_target_is_refused(self, sizes: dict[str, Any], said: str) -> None:
        with pytest.raises(PairingError, match=said):
            Eagle3Model(network(NAMES[0])).pair(Target(zoo.build("llama", **sizes)))

    def test_a_layer_that_the_target_lacks_is_refused(self) -> None:
        model = zoo.build("llama", hidden_size=64, vocab=128, num_hidden_layers=4)
        with pytest.raises(PairingError, match="output of layer 5 and the target has 4 layers"):
            SpecDecoder(model, zoo.tokenizer(), drafter=Eagle3Model(network(NAMES[1])))

    @pytest.mark.parametrize("vocab", [VOCAB - 10, VOCAB + 10])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_a_vocabulary_may_be_padded(self, variant: str, vocab: int) -> None:
        """Rows that the other side lacks are never drafted, and their tokens can still be read."""
        model = zoo.build("llama", num_hidden_layers=4, vocab=vocab)
        target, drafter = Target(model), random_network(model, **VARIANTS[variant])
        head = Eagle3Head(drafter, target)
        output, _ = head.rows(mx.array([vocab - 1, 0]), mx.zeros((2, target.hidden)), head.make_cache())
        logits = head.logits(output)
        assert logits.shape == (2, vocab)
        known = np.arange(VOCAB) if drafter.ids is None else drafter.ids
        full = not drafter.config.own_head and not drafter.config.tied and drafter.ids is None
        finite = set(range(vocab)) if full else {i for i in known.tolist() if i < vocab}
        assert set(np.flatnonzero(np.isfinite(np.array(logits[0]))).tolist()) == finite

    def test_a_shared_embedding_is_scaled_and_an_own_one_is_not(self) -> None:
        target = Target(family("gemma3_text"))
        own = random_network(target.model, layer_ids=(0, 1, 2))
        shared = random_network(target.model, layer_ids=(0, 1, 2), own_embedding=False)
        tokens = mx.array([3, 4])
        theirs = target.model.model.embed_tokens(tokens)
        assert mx.allclose(Eagle3Head(shared, target)._embed(tokens), theirs * target.hidden**0.5, rtol=1e-2)
        assert mx.allclose(Eagle3Head(own, target)._embed(tokens), own.embed_tokens(tokens))
        target.close()
