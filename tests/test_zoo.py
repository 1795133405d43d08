"""The zoo is worth something only if its models are lively, and if mlx-lm itself is consistent on them."""

import mlx_specdec  # noqa: F401  # isort: skip  # before mlx.core

from collections.abc import Iterable, Sequence
from itertools import cycle, repeat

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from tests import zoo

# mlx-lm's gemma3n lets the layers that share a cache use keys of their own when there is no cache at all.
NEEDS_ITS_CACHE = {"gemma3n"}


def prompt(length: int) -> list[int]:
    return [(7 * i * i + 3 * i + 5) % 64 for i in range(length)]


def greedy(model: nn.Module, ids: Sequence[int], count: int) -> tuple[list[int], mx.array]:
    tokens, logprobs = zip(*generate_step(mx.array(ids), model, max_tokens=count), strict=True)
    return list(tokens), mx.stack(logprobs)


def logits(model: nn.Module, ids: Sequence[int], widths: Iterable[int]) -> mx.array:
    """The logits of every position, when the ids enter the cache in passes of these widths."""
    cache, rows, done = make_prompt_cache(model), [], 0
    for width in widths:
        rows.append(model(mx.array([ids[done : done + width]]), cache=cache)[0])
        mx.eval(rows)
        done += width
        if done >= len(ids):
            break
    return mx.concatenate(rows)


def difference(a: mx.array, b: mx.array) -> float:
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


@pytest.fixture(scope="module", params=zoo.ARCHITECTURES)
def case(request: pytest.FixtureRequest) -> tuple[str, nn.Module, list[int], mx.array]:
    """A model, 100 ids of which it chose 60 itself, and their logits from one-token passes."""
    model = zoo.build(request.param)
    ids = prompt(40) + greedy(model, prompt(40), 60)[0]
    return request.param, model, ids, logits(model, ids, repeat(1))


def test_plain_decoding_is_finite_and_lively(case):
    _, model, ids, single = case
    short, logprobs = greedy(model, prompt(7), 60)
    assert mx.isfinite(logprobs).all()
    assert mx.isfinite(single).all()
    for chosen in (ids[40:], short):
        assert len(set(chosen)) >= 8
        assert len(set(chosen[-20:])) >= 3


@pytest.mark.parametrize("widths", [(3,), (7, 1, 3, 1, 1, 5, 2, 16)], ids=str)
def test_passes_over_several_rows_equal_single_steps(case, widths):
    _, model, ids, single = case
    several = logits(model, ids, cycle(widths))
    assert difference(several, single) < 1e-3
    assert (mx.argmax(several, -1) == mx.argmax(single, -1)).all()


def test_the_cache_changes_nothing(case):
    name, model, ids, single = case
    whole = model(mx.array([ids]))[0]
    consistent = difference(whole, single) < 1e-3 and (mx.argmax(whole, -1) == mx.argmax(single, -1)).all()
    assert consistent == (name not in NEEDS_ITS_CACHE)


def test_the_past_matters(case):
    _, model, ids, single = case
    changed = logits(model, [*ids[:50], (ids[50] + 11) % 64, *ids[51:]], [100])
    assert difference(changed[51:60], single[51:60]) > 0.01
    assert difference(changed[60:70], single[60:70]) > 0.01


@pytest.mark.parametrize("kind", zoo.CACHE_KINDS)
def test_long_decoding_stays_finite(kind):
    ids, logprobs = greedy(zoo.CACHE_KINDS[kind](), prompt(7), 400)
    assert mx.isfinite(logprobs).all()
    assert len(set(ids)) >= 16


@pytest.mark.parametrize(
    ("kind", "classes"),
    [
        ("kv", {KVCache}),
        ("kv_quant", {KVCache}),
        ("window8", {RotatingKVCache, KVCache}),
        ("window24", {RotatingKVCache, KVCache}),
        ("chunked", {ChunkedKVCache, KVCache}),
        ("gated_delta", {ArraysCache, KVCache}),
        ("mamba", {ArraysCache}),
        ("short_conv", {ArraysCache, KVCache}),
        ("rwkv", {ArraysCache}),
        ("hybrid", {CacheList}),
        ("hybrid_window", {ArraysCache, RotatingKVCache}),
    ],
)
def test_a_cache_kind_has_the_caches_it_stands_for(kind, classes):
    assert {type(cache) for cache in make_prompt_cache(zoo.CACHE_KINDS[kind]())} == classes


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [64, 32])
def test_kv_quant_can_be_quantized(bits, group):
    model = zoo.CACHE_KINDS["kv_quant"]()
    quantized = {"kv_bits": bits, "kv_group_size": group, "quantized_kv_start": 0}
    ids = [token for token, _ in generate_step(mx.array(prompt(7)), model, max_tokens=20, **quantized)]
    assert len(set(ids)) > 3


def weights(model: nn.Module) -> dict[str, list]:
    return {path: value.tolist() for path, value in tree_flatten(model.parameters())}


def test_a_build_depends_on_its_arguments_alone():
    mx.random.seed(1)
    first = zoo.build("qwen3_5")
    mx.random.seed(2)
    assert weights(zoo.build("qwen3_5")) == weights(first)
    assert weights(zoo.build("qwen3_5", seed=1)) != weights(first)
    assert all(value.dtype == mx.float32 for _, value in tree_flatten(first.parameters()))


def test_overrides_and_vocab_reach_the_config():
    assert zoo.build("gemma3_text", sliding_window=24).args.sliding_window == 24
    assert zoo.build("qwen3_5", vocab=300)(mx.array([[299]])).shape == (1, 1, 300)


def agreement(draft: nn.Module, ids: Sequence[int], single: mx.array) -> float:
    return (mx.argmax(logits(draft, ids, [len(ids)]), -1) == mx.argmax(single, -1)).astype(mx.float32).mean().item()


def test_more_noise_agrees_less():
    model = zoo.build("llama")
    ids = prompt(40) + greedy(model, prompt(40), 60)[0]
    single = logits(model, ids, [100])
    rates = [agreement(zoo.draft_of("llama", noise=noise), ids, single) for noise in (0.0, *zoo.NOISE)]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    assert 0.1 < rates[-1] < rates[1] < 1.0


TEXT = "hello there, ünïcode 漢字 🙂\n<eos>"


@pytest.mark.parametrize("options", [{}, {"vocab": 259}, {"vocab": 900}, {"shuffle": 3}, {"extra": ("<x>",)}], ids=str)
def test_the_tokenizer_round_trips_and_streams(options):
    tokenizer = zoo.tokenizer(**options)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert ids[-1] in tokenizer.eos_token_ids
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == TEXT
    assert len(tokenizer) == options.get("vocab", 300) + len(options.get("extra", ()))


def test_tokenizers_can_differ():
    plain, shuffled = zoo.tokenizer(), zoo.tokenizer(shuffle=3)
    assert set(plain.get_vocab()) == set(shuffled.get_vocab())
    assert plain.encode(TEXT) != shuffled.encode(TEXT)
    assert zoo.tokenizer(rename={"<eos>": "</s>"}).eos_token == "</s>"
    with pytest.raises(ValueError, match="vocab"):
        zoo.tokenizer(100)


def test_the_chat_template():
    tokenizer = zoo.tokenizer()
    turn = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert text == "<user>hi<eos><assistant>"
    assert tokenizer.apply_chat_template(turn, add_generation_prompt=True) == tokenizer.encode(text)
