"""DFlash with random weights on every family of targets: the text stays, and the context is what was observed."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlx_specdec import SamplingParams, SpecDecoder
from mlx_specdec.draft_length import Fixed
from mlx_specdec.drafters.chain import Chain
from mlx_specdec.drafters.dflash import DFlashDrafter, DFlashModel
from mlx_specdec.errors import OptionError, PairingError
from mlx_specdec.features import Features
from mlx_specdec.networks.dflash import Context, DFlash, DFlashConfig, Sight
from mlx_specdec.rounds import rounds
from mlx_specdec.sampling import Sampler
from mlx_specdec.target.model import CacheOptions, Target
from tests import zoo
from tests.law import exact, misfit
from tests.scripted import drafted, drafted_rounds, plain

VOCAB, TOKENS = 64, 40
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(21)]
STEP = CacheOptions(prefill_step_size=8)
SIGHTS = {
    "full": (Sight(), Sight()),
    "sliding": (Sight(5, 6, True), Sight()),
    "all sliding": (Sight(5, 6, True), Sight(8, 9, False)),
    "from the anchor": (Sight(6, None, True), Sight(6, None, False)),
}


def random_network(target: Target, sights: str = "sliding", **fields: Any) -> DFlash:
    """`draft_vocab_size` gives it a head of its own over every second token."""
    assert target.hidden is not None
    config = DFlashConfig(
        hidden_size=target.hidden,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        block_size=9,
        mask_token_id=3,
        target_layer_ids=(0, len(target.model.layers) - 1),
        target_hidden_size=target.hidden,
        vocab_size=target.vocab,
        sights=SIGHTS[sights],
        ropes=((10000.0, None),) * 2,
    )
    reduced = fields.get("draft_vocab_size")
    mx.random.seed(0)
    return DFlash(replace(config, **fields), None if reduced is None else mx.arange(0, 2 * reduced, 2))


@cache
def target_of(name: str) -> Target:
    special = {"gemma4_text": {"hidden_size_per_layer_input": 0}}
    return Target(zoo.build(name, **special.get(name, {})), STEP)


def drafter_of(target: Target, network: DFlash, window: int | None = 4096) -> DFlashDrafter:
    drafter = DFlashModel(network, window).pair(target)()
    target.watch(drafter.wants)
    return drafter


FAMILIES = ("qwen3", "llama", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_5", "qwen3_5_moe", "deepseek_v3")
COUPLED = {"temperature": 1.0, "seed": 7}
PENALTIES = {"repetition_penalty": 1.4, "repetition_context_size": 30, "temperature": 0.8, "seed": 3}


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_equal_plain_decoding(name: str) -> None:
    target = target_of(name)
    drafter = drafter_of(target, random_network(target))
    for sampling in ({}, COUPLED):
        answer = plain(target.model, PROMPT, TOKENS, STEP, **sampling)
        for k in (1, 2, 4, 8):
            assert drafted(target, drafter, PROMPT, TOKENS, k, **sampling) == answer, k


KINDS: dict[str, dict[str, Any]] = {
    **{sights: {"sights": sights} for sights in SIGHTS},
    "own ends": {"draft_vocab_size": 30, "embedding_size": VOCAB},
    "anchor": {"sample_from_anchor": True, "attention_bias": True, "sinks": (1,)},
    "scales": {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 5.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_network(kind: str) -> None:
    """Prompts of one token, of more than a chunk and more than a window, with penalties too."""
    target = target_of("qwen3_5")
    drafter = drafter_of(target, random_network(target, **KINDS[kind]), window=12)
    for prompt in (PROMPT, PROMPT[:1], PROMPT[:9]):
        for sampling in ({}, PENALTIES):
            answer = plain(target.model, prompt, TOKENS, STEP, **sampling)
            assert drafted(target, drafter, prompt, TOKENS, 8, **sampling) == answer


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_network(bits: int) -> None:
    target = target_of("llama")
    network = random_network(target, "full", hidden_size=64, target_hidden_size=target.hidden, embedding_size=VOCAB,
                             draft_vocab_size=32)  # fmt: skip
    nn.quantize(network, group_size=32, bits=bits)
    assert isinstance(network.lm_head, nn.QuantizedLinear)
    answer = plain(target.model, PROMPT, TOKENS, STEP)
    assert drafted(target, drafter_of(target, network), PROMPT, TOKENS, 4) == answer


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_network_of_another_dtype(dtype: mx.Dtype) -> None:
    target = target_of("llama")
    network = random_network(target)
    network.set_dtype(dtype)
    drafter = drafter_of(target, network)
    assert drafted(target, drafter, PROMPT, TOKENS, 4) == plain(target.model, PROMPT, TOKENS, STEP)
    assert {x.dtype for context in drafter._contexts for x in context.arrays} == {dtype}


class Lucky(DFlashDrafter):
    """Replaces some of its drafts by what will be right, so that rounds keep some, none and all."""

    def right(self, answer: Sequence[int]) -> None:
        self.answer = answer

    def propose(self, last: int, limit: int, sampler: Sampler) -> Any:
        draft = super().propose(last, limit, sampler)
        right = self.answer[self._observed + 1 :][: len(draft.tokens)]
        kept = self._observed % 5 * 2
        return draft._replace(tokens=mx.array([*right[:kept], *draft.tokens.tolist()[kept:]][: len(draft.tokens)]))


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("sights", SIGHTS)
def test_the_context_is_what_was_observed(sights: str, window: int | None) -> None:
    """After rounds in which some, none and all drafts stood, it drafts as one that is told everything at once."""
    target = target_of("llama")
    network = random_network(target, sights)
    make = DFlashModel(network, window).pair(target)
    answer = [*PROMPT, *plain(target.model, PROMPT, TOKENS, STEP)]
    lucky = Lucky(*make.args)  # type: ignore[attr-defined]
    lucky.right(answer)
    target.watch(lucky.wants)
    sampler = Sampler(SamplingParams(), PROMPT)
    accepted = []
    for emitted in drafted_rounds(target.sequence(), PROMPT, sampler, TOKENS, lucky, 8):
        accepted.append(emitted.accepted)
    assert {0, 2, 8} <= set(accepted)
    fresh = make()
    sequence = target.sequence()
    _, features = sequence.forward(mx.array(answer[: lucky._observed]), certain=lucky._observed)
    assert features is not None
    fresh.observe(answer[: lucky._observed], features)
    outputs = [d._network(d._embed(mx.array([7, 3, 3])), d._observed, d._contexts) for d in (lucky, fresh)]
    assert mx.allclose(*outputs, rtol=1e-4, atol=1e-4)


def test_a_context_is_bounded_and_a_block_leaves_no_trace() -> None:
    context, seen = Context(7), []
    for i in range(400):
        rows = mx.random.normal((1, 2, i % 4 + 1, 3), key=mx.random.key(i))
        context.append(rows, -rows)
        seen.append(rows)
        if i % 10 == 0:
            block = mx.full((1, 2, 5, 3), 99.0)
            keys, values = context.beside(block, block)
            expected = mx.concatenate([mx.concatenate(seen, axis=2)[..., -7:, :], block], axis=2)
            assert mx.array_equal(keys, expected)
            assert mx.array_equal(values[..., :-5, :], -expected[..., :-5, :])
    assert max(x.shape[2] for x in context.arrays) <= 7 + Context.SLACK + 256


def test_one_pass_a_block_and_no_longer_than_asked() -> None:
    target = target_of("llama")
    passes = []

    class Counted(DFlash):
        def __call__(self, x: mx.array, position: int, contexts: list[Context]) -> mx.array:
            passes.append(x.shape[0])
            return super().__call__(x, position, contexts)

    plain_network = random_network(target)
    network = Counted(plain_network.config)
    drafter = drafter_of(target, network)
    sampler = Sampler(SamplingParams(temperature=1.0, acceptance="token"), PROMPT)
    assert drafter.max_draft == 8
    for limit in (0, 1, 5, 8, 20):
        draft = drafter.propose(1, limit, sampler)
        assert len(draft.tokens) == min(limit, 8)
        if limit:
            assert draft.probs is not None
            assert draft.probs.shape == (min(limit, 8), VOCAB)
            assert mx.allclose(draft.probs.sum(axis=-1), mx.ones(min(limit, 8)), atol=1e-5)
    assert passes == [2, 6, 9, 9]


LAWS: dict[str, dict[str, Any]] = {
    "token": {"temperature": 1.2, "acceptance": "token", "top_p": 0.9},
    "block": {"temperature": 0.8, "acceptance": "block", "frequency_penalty": 1.0, "frequency_context_size": 4},
}


@pytest.mark.parametrize("rule", LAWS)
def test_the_law_is_the_targets(rule: str) -> None:
    """q is true, with penalties on the drafted prefix and a head that lacks half of the vocabulary."""
    vocab, length, prompt = 12, 3, [1, 4, 2, 1, 5, 2, 1, 4]
    tiny = {"vocab": vocab, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
    target = Target(zoo.build("llama", **tiny))
    network = random_network(target, embedding_size=vocab, draft_vocab_size=6, block_size=3, output_multiplier=4.0)
    drafter = drafter_of(target, network)
    seen: Counter[tuple[int, ...]] = Counter()
    stood = refused = 0
    for seed in range(1000):
        sampler, ids = Sampler(SamplingParams(**LAWS[rule], seed=seed), prompt), []
        for emitted in rounds(target.sequence(), prompt, sampler, length + 3, Chain([drafter], Fixed(2))):
            ids += emitted.tokens
            stood += emitted.accepted
            refused += emitted.drafted - emitted.accepted
            if len(ids) >= length:
                break
        seen[tuple(ids[:length])] += 1
    law = exact(target.model, prompt, length, vocab, {k: v for k, v in LAWS[rule].items() if k != "acceptance"})
    assert misfit(seen, law) < 1
    assert min(stood, refused) > 100, "drafts of both fates"


def test_through_the_decoder_from_any_thread() -> None:
    model = zoo.build("qwen3_5", vocab=300)
    prompt = list(range(5, 30))
    answer = plain(model, prompt, TOKENS)
    target = Target(model)
    network = random_network(target)
    target.close()
    with SpecDecoder(model, zoo.tokenizer(300), drafter=DFlashModel(network)) as decoder:
        stream = decoder.stream(prompt, max_tokens=TOKENS, num_draft_tokens=3, extra_eos_tokens=())
        ids = []
        for _ in range(TOKENS):
            with ThreadPoolExecutor(1) as pool:
                response = pool.submit(next, stream, None).result()
            if response is None:
                break
            ids.append(response.token)
        assert ids == answer


def test_the_targets_own_scale_and_cap() -> None:
    """Gemma embeds times the root of its width, and caps the logits itself: not a second time."""
    target = target_of("gemma4_text")
    tokens = mx.array([5, 3, 3])
    drafter = drafter_of(target, random_network(target, final_logit_softcapping=30.0))
    assert mx.allclose(drafter._embed(tokens), target.model.model.embed_tokens(tokens) * 32**0.5, rtol=1e-5)
    raw = drafter_of(target, random_network(target, scaled_embedding=False, input_embedding_scale=2.0))
    assert mx.allclose(raw._embed(tokens), target.model.model.embed_tokens(tokens) * 2)
    hidden = 20 * mx.random.normal((3, 32), key=mx.random.key(1))
    once = target.ends.head(hidden)
    assert target.ends.caps
    assert mx.abs(once).max() > 20
    assert mx.allclose(drafter._head(hidden), once, rtol=1e-5)
    assert not target_of("llama").ends.caps


def test_another_targets_drafter_is_refused() -> None:
    target = target_of("llama")
    for fields, said in (
        ({"target_hidden_size": 48, "hidden_size": 48}, "hidden size is 48 and this target's is 32"),
        ({"num_target_layers": 40}, "layers is 40 and this target's is"),
        ({"vocab_size": 5000}, "vocabulary is 5000 and this target's is 64"),
        ({"mask_token_id": 64}, "uses token 64 and this target's vocabulary is 64"),
        ({"embedding_size": VOCAB, "draft_vocab_size": 40}, "uses token 78 and"),
    ):
        with pytest.raises(PairingError, match=said):
            DFlashModel(random_network(target, **fields)).pair(target)
    with pytest.raises(OptionError, match="window is 0"):
        DFlashModel(random_network(target), window=0)
    with pytest.raises(PairingError, match="the output of layer 9 and the target has"):
        drafter_of(target, random_network(target, target_layer_ids=(0, 9)))


def test_features_that_a_closed_decoder_no_longer_hands_out() -> None:
    target = target_of("llama")
    drafter = drafter_of(target, random_network(target))
    drafter.observe([1, 2], None)
    drafter.observe([3], Features((mx.ones((1, 32)),) * 2, None))
    assert len(drafter.propose(4, 2, Sampler(SamplingParams(), [1, 2, 3, 4])).tokens) == 2
