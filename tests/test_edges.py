"""Where an output ends, what cannot be asked for, and what must not change the text, through SpecDecoder."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Callable, Sequence
from functools import cache, partial
from random import Random
from typing import Any, ClassVar

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

from mlx_specdec import OptionError, SamplingParams, SpecDecoder
from mlx_specdec import decoder as decoder_module
from mlx_specdec.decoder import GenerationResponse
from mlx_specdec.draft_length import Auto, Outcome
from mlx_specdec.drafters.base import Draft
from mlx_specdec.drafters.ngram_simple import NgramSimple
from mlx_specdec.sampling import Sampler
from mlx_specdec.target.model import CacheOptions, Target
from tests import zoo
from tests.scripted import Scripted, drafted, reference, scripts

VOCAB, TOKENS, CONTEXT = 300, 32, 64
DRAFTS = 4  # in every round, where a test needs them: "auto" drafts only where that is measured to be faster
TOKENIZER = zoo.tokenizer(VOCAB)
PROMPT = [(7 * i * i + 3 * i + 5) % 64 for i in range(20)]


@cache
def model(**overrides: int) -> nn.Module:
    return zoo.build("llama", vocab=VOCAB, **overrides)


@cache
def draft(**overrides: int) -> nn.Module:
    return zoo.draft_of("llama", noise=zoo.NOISE[1], vocab=VOCAB, **overrides)


@cache
def answer_to(prompt: tuple[int, ...] = tuple(PROMPT), tokens: int = 2 * TOKENS) -> list[int]:
    return reference(model(), prompt, tokens)


ANSWER = answer_to()
DRAFTERS = ("plain", "right", "wrong", "mixed", "draft_model", "self", "ngram")
DRAFTING = DRAFTERS[1:]


def options(kind: str, answer: Sequence[int] = ANSWER) -> dict[str, Any]:
    """What makes SpecDecoder draft in this way, given what the target will answer."""
    if kind in ("draft_model", "self"):
        return {"draft_model": draft() if kind == "draft_model" else model()}
    if kind == "plain":
        return {}
    if kind == "ngram":
        return {"drafter": partial(NgramSimple, 1, 8)}
    return {"drafter": lambda: Scripted(answer, scripts(VOCAB)[kind])}


def decode(kind: str, prompt: Any = PROMPT, answer: Sequence[int] = ANSWER, **request: Any) -> list[GenerationResponse]:
    with SpecDecoder(model(), TOKENIZER, **options(kind, answer)) as decoder:
        return list(decoder.stream(prompt, **{"num_draft_tokens": DRAFTS, **request}))


def ids(responses: Sequence[GenerationResponse]) -> list[int]:
    return [r.token for r in responses]


def text(responses: Sequence[GenerationResponse]) -> str:
    return "".join(r.text for r in responses)


def test_the_answer_holds_no_end_of_sequence() -> None:
    assert not TOKENIZER.eos_token_ids & set(ANSWER)
    assert len(set(ANSWER)) > TOKENS / 2


# How many tokens


@pytest.mark.parametrize("kind", ["right", "self"])
def test_max_tokens_is_met_exactly(kind: str) -> None:
    with SpecDecoder(model(), TOKENIZER, **options(kind)) as decoder:
        for most in range(1, 11):
            for k in sorted({1, 2, 3, max(1, most - 2), max(1, most - 1), most, 16}):
                responses = list(decoder.stream(PROMPT, max_tokens=most, num_draft_tokens=k))
                assert ids(responses) == ANSWER[:most], (most, k)
                assert [r.finish_reason for r in responses] == [None] * (most - 1) + ["length"]
                assert [r.generation_tokens for r in responses] == list(range(1, most + 1))
                stats = responses[-1].stats
                assert stats.tokens == most
                assert stats.accepted == sum(r.from_draft for r in responses) == stats.drafted
                assert stats.rounds == most - stats.accepted == -(-most // (k + 1))


@pytest.mark.parametrize("kind", DRAFTERS)
def test_max_tokens_zero_gives_nothing(kind: str) -> None:
    assert decode(kind, max_tokens=0) == []


@pytest.mark.parametrize("kind", DRAFTERS)
def test_max_tokens_minus_one_runs_to_the_end_of_sequence_or_the_context(kind: str) -> None:
    end = first_place(ANSWER, 25)
    assert ids(decode(kind, max_tokens=-1, extra_eos_tokens=[ANSWER[end]])) == ANSWER[: end + 1]
    with SpecDecoder(model(max_position_embeddings=CONTEXT), TOKENIZER, **options(kind)) as decoder:
        responses = list(decoder.stream(PROMPT, max_tokens=-1, num_draft_tokens=DRAFTS))
    assert ids(responses) == ANSWER[: CONTEXT - len(PROMPT)]
    assert responses[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"max_tokens": -2}, "max_tokens is -2"),
        ({"max_tokens": -100}, "max_tokens is -100"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1; choose auto, 0 "),
        ({"num_draft_tokens": 1.5}, "num_draft_tokens is 1.5"),
        ({"num_draft_tokens": True}, "num_draft_tokens is True"),
        ({"num_draft_tokens": "many"}, "num_draft_tokens is many"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": mx.array([], dtype=mx.int32)}, "the prompt is empty"),
        ({"prompt": [5, VOCAB]}, f"token {VOCAB} and the model knows 0 to {VOCAB - 1}"),
        ({"prompt": [-1]}, "token -1"),
        ({"stop": ["a", ""]}, "stop string is ''; give a text"),
        ({"stop": ""}, "stop string is ''; give a text"),
        ({"stop": [1]}, "stop string is 1; give a text"),
        ({"extra_eos_tokens": [VOCAB]}, f"extra_eos_token is {VOCAB} and the model knows 0 to {VOCAB - 1}"),
        ({"extra_eos_tokens": [-5]}, "extra_eos_token is -5"),
        ({"extra_eos_tokens": [None]}, "extra_eos_token is None"),
        ({"prompt": b"ab"}, "b'ab'"),
        ({"prompt": [True]}, r"\[True\]"),
        ({"extra_eos_tokens": ["ab cd"]}, "'ab cd' is 4 tokens"),
        ({"params": SamplingParams(logit_bias={VOCAB: 1.0})}, f"logit_bias names token {VOCAB}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("kind", ["plain", "draft_model", "ngram"])
def test_what_cannot_be_used_is_refused_at_once(kind: str, request_: dict[str, Any], said: str) -> None:
    with SpecDecoder(model(), TOKENIZER, **options(kind)) as decoder, pytest.raises(OptionError, match=said) as error:
        decoder.stream(**{"prompt": PROMPT, **request_})
    assert "\n" not in str(error.value)


# Where the output ends


def first_place(answer: Sequence[int], start: int, good: Callable[[int], bool] = lambda _: True) -> int:
    """The first place from `start` of a good token that has not been there before."""
    return next(i for i in range(start, len(answer)) if good(answer[i]) and answer[i] not in answer[:i])


@pytest.mark.parametrize("how", ["tokenizer", "id", "text"])
@pytest.mark.parametrize("place", range(7))
def test_an_end_of_sequence_inside_a_block_ends_there(place: int, how: str) -> None:
    end, tokenizer, extra = first_place(ANSWER, place), TOKENIZER, ()
    if how == "tokenizer":
        tokenizer = TokenizerWrapper(TOKENIZER._tokenizer, BPEStreamingDetokenizer, eos_token_ids=[ANSWER[end]])
    elif how == "id":
        extra = (ANSWER[end],)
    else:
        end = first_place(ANSWER, place, single)
        extra = (TOKENIZER.decode([ANSWER[end]]),)
    for kind in ("plain", "right", "self"):
        with SpecDecoder(model(), tokenizer, **options(kind)) as decoder:
            for k in (1, 3, 4, 5, 8, 16):
                responses = list(decoder.stream(PROMPT, extra_eos_tokens=extra, num_draft_tokens=k))
                assert ids(responses) == ANSWER[: end + 1], (kind, k)
                assert [r.finish_reason for r in responses] == [None] * end + ["stop"]
                assert text(responses) == tokenizer.decode(ANSWER[:end])
                stats = responses[-1].stats
                assert stats.tokens == responses[-1].generation_tokens == end + 1
                assert stats.accepted == sum(r.from_draft for r in responses) <= stats.drafted


def single(token: int) -> bool:
    """Whether a token's text is that one token again."""
    return TOKENIZER.encode(TOKENIZER.decode([token]), add_special_tokens=False) == [token]


def test_nothing_follows_an_end_of_sequence_whose_text_a_stop_string_is() -> None:
    end = first_place(ANSWER, 3, single)
    said = TOKENIZER.decode([ANSWER[end]])
    for kind in DRAFTERS:
        responses = decode(kind, stop=[said], extra_eos_tokens=[said])
        assert ids(responses) == ANSWER[: end + 1]
        assert text(responses) == TOKENIZER.decode(ANSWER[:end])


# Prompts


@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("token", [0, 61])
def test_a_prompt_of_one_token(kind: str, token: int) -> None:
    answer = answer_to((token,), 16)
    with SpecDecoder(model(), TOKENIZER, **options(kind, answer)) as decoder:
        for k in range(9):
            assert ids(list(decoder.stream([token], max_tokens=16, num_draft_tokens=k))) == answer, k


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_context_bounds_prompt_and_output(kind: str) -> None:
    prompt = (PROMPT + ANSWER)[: CONTEXT + 10]
    with SpecDecoder(model(max_position_embeddings=CONTEXT), TOKENIZER, **options(kind)) as decoder:
        for length in (CONTEXT, CONTEXT + 10):
            with pytest.raises(OptionError, match=rf"has {length} tokens and the model's context is {CONTEXT}"):
                decoder.stream(prompt[:length])
        for k in (1, 4, 16):
            responses = list(decoder.stream(PROMPT, max_tokens=1000, num_draft_tokens=k))
            assert ids(responses) == ANSWER[: CONTEXT - len(PROMPT)]
            assert responses[-1].finish_reason == "length"
    answer = answer_to(tuple(prompt[: CONTEXT - 1]), 2)
    with SpecDecoder(model(max_position_embeddings=CONTEXT), TOKENIZER, **options(kind, answer)) as decoder:
        responses = list(decoder.stream(prompt[: CONTEXT - 1], num_draft_tokens=DRAFTS))
    assert ids(responses) == answer[:1]
    assert responses[-1].finish_reason == "length"


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_draft_model_with_a_shorter_context_stops_drafting(k: int) -> None:
    with SpecDecoder(model(), TOKENIZER, draft_model=draft(max_position_embeddings=CONTEXT)) as decoder:
        responses = list(decoder.stream(PROMPT, max_tokens=2 * TOKENS, num_draft_tokens=k))
        assert ids(responses) == ANSWER
        drafted = [r.stats.drafted for r in responses]
        beyond = CONTEXT + k - len(PROMPT)
        assert drafted[beyond - 3 * k] < drafted[-1] == drafted[beyond]  # it drafted nearly as far as it could
        assert not any(r.from_draft for r in responses[beyond:])
        long = PROMPT * 30
        responses = list(decoder.stream(long, max_tokens=5, num_draft_tokens=k))
        assert ids(responses) == answer_to(tuple(long), 5)
        assert responses[-1].stats.drafted == 0


# Vocabularies of another size


@cache
def resized(rows: int, noise: float = 0.0) -> nn.Module:
    """A draft model that agrees with the target on the tokens both have; those of its own it finds likeliest."""
    wider = dict(tree_flatten(zoo.build("llama", vocab=rows, seed=5).parameters()))
    ours = dict(tree_flatten((draft() if noise else model()).parameters()))
    both = min(rows, VOCAB)
    for path, value in ours.items():
        own = wider[path].shape != value.shape
        wider[path] = mx.concatenate([value[:both], 5 * wider[path][both:]]) if own else value
    resized_model = zoo.build("llama", vocab=rows)
    resized_model.update(tree_unflatten(list(wider.items())))
    mx.eval(resized_model.parameters())
    return resized_model


def test_the_wider_draft_model_does_want_tokens_of_its_own() -> None:
    wanted = mx.argmax(resized(VOCAB + 56)(mx.array([PROMPT + ANSWER]))[0], axis=-1)
    assert (wanted >= VOCAB).sum().item() > TOKENS / 2


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("rows", [VOCAB + 56, VOCAB - 40])
def test_a_draft_vocabulary_of_another_size(rows: int, processed: bool) -> None:
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, logit_bias={3: 2.0, VOCAB - 1: 1.0})
    params = params if processed else SamplingParams()
    plain = ids(decode("plain", params=params, max_tokens=2 * TOKENS))
    assert max(plain) >= VOCAB - 40
    with SpecDecoder(model(), TOKENIZER, draft_model=resized(rows)) as decoder:
        for k in (1, 4, 8):
            responses = list(decoder.stream(PROMPT, params, max_tokens=2 * TOKENS, num_draft_tokens=k))
            assert ids(responses) == plain
            rate = responses[-1].stats.acceptance_rate
            assert rate == 1.0 if rows > VOCAB else 0 < rate < 1.0


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 60, "min_p": 0.01}], ids=str)
@pytest.mark.parametrize("rows", [VOCAB + 56, VOCAB - 40])
def test_a_draft_vocabulary_of_another_size_when_sampling(rows: int, filters: dict[str, Any]) -> None:
    with SpecDecoder(model(), TOKENIZER, draft_model=resized(rows)) as decoder:

        def sampled(rule: str, k: int) -> list[GenerationResponse]:
            params = SamplingParams(temperature=1.0, seed=7, acceptance=rule, **filters)
            return list(decoder.stream(PROMPT, params, max_tokens=TOKENS, num_draft_tokens=k))

        plain = ids(sampled("token", 0))
        for k in (1, 4):
            assert ids(sampled("coupled", k)) == plain
            for rule in ("token", "block"):
                responses = sampled(rule, k)
                assert len(responses) == TOKENS or responses[-1].finish_reason == "stop"
                assert all(0 <= token < VOCAB for token in ids(responses))
                assert responses[-1].stats.acceptance_rate > (0.95 if rows > VOCAB else 0.05)


# The same again


@pytest.mark.parametrize("kind", ["plain", "draft_model", "self", "ngram"])
def test_a_request_does_not_depend_on_those_before_it(kind: str) -> None:
    sampled = [SamplingParams(temperature=0.9, seed=seed, acceptance=rule)
               for seed, rule in enumerate(("token", "block", "coupled"))]  # fmt: skip
    every = [(SamplingParams(), "auto"), *((params, DRAFTS) for params in sampled), (sampled[2], "auto")]
    requests = [(PROMPT[:length], *each) for length in (1, 20) for each in every]
    order = [number for number in range(len(requests)) for _ in range(3)]
    Random(0).shuffle(order)
    seen: dict[int, set[tuple[int, ...]]] = {number: set() for number in order}
    with SpecDecoder(model(), TOKENIZER, **options(kind)) as decoder:
        for number in order:
            prompt, params, most = requests[number]
            seen[number].add(tuple(ids(list(decoder.stream(prompt, params, max_tokens=14, num_draft_tokens=most)))))
    assert all(len(outputs) == 1 for outputs in seen.values())
    for number, (output,) in seen.items():
        prompt, params, _ = requests[number]
        if params.temperature == 0:
            assert list(output) == reference(model(), prompt, 14)
        elif params.acceptance == "coupled":
            assert list(output) == ids(decode("plain", prompt, params=params, max_tokens=14))


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("kind", ["plain", "draft_model", "self", "ngram"])
def test_sampling_varies_without_a_seed_and_repeats_with_one(kind: str, rule: str) -> None:
    with SpecDecoder(model(), TOKENIZER, **options(kind)) as decoder:

        def outputs(seeds: Sequence[int | None]) -> set[tuple[int, ...]]:
            each = [SamplingParams(temperature=1.0, seed=seed, acceptance=rule) for seed in seeds]
            most = "auto" if rule == "coupled" else DRAFTS
            return {
                tuple(ids(list(decoder.stream(PROMPT, params, max_tokens=12, num_draft_tokens=most))))
                for params in each
            }

        assert len(outputs([None] * 4)) == 4
        assert len(outputs([3] * 4)) == 1
        assert len(outputs(range(4))) == 4


class Erratic:
    """Chooses at random, round by round, as the worst of timing might."""

    lengths: ClassVar[list[int]] = []

    def __init__(self, _: object) -> None:
        self.random = Random(1)

    def limit(self, drafter: Any) -> int:
        return self.random.choice([0, 1, 2, 5, drafter.max_draft])

    def cut(self, drafter: Any, draft: Draft, others: Any) -> int:
        return self.random.randint(0, len(draft.tokens)) if drafter.free else len(draft.tokens)

    def look_ahead(self) -> bool:
        return self.random.random() < 0.5

    def record(self, outcome: Outcome) -> None:
        self.lengths.append(outcome.drafted)

    def state(self) -> dict[str, Any]:
        return {}


LIST = (partial(NgramSimple, 1, 8), "draft_model")


@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.3, "presence_penalty": 0.5},
                                    {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "seed": 5, "top_p": 0.9,
                                    "frequency_penalty": 0.5}], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["right", "draft_model", "ngram", "chain", "chain reversed"])
def test_ids_do_not_depend_on_how_many_were_drafted(
    kind: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0 and under `coupled`, which a seed chooses; whatever lengths the measurements may choose."""
    sampled = SamplingParams(**params)
    plain = ids(decode("plain", params=sampled, max_tokens=TOKENS))
    chains = {"chain": {"drafter": LIST, "draft_model": draft()},
              "chain reversed": {"drafter": LIST[::-1], "draft_model": draft()}}  # fmt: skip
    how = chains.get(kind) or options(kind, plain)
    Erratic.lengths.clear()
    for controller in (Auto, Erratic):
        monkeypatch.setattr(decoder_module, "Auto", controller)
        with SpecDecoder(model(), TOKENIZER, **how) as decoder:
            for most in ("auto", None):
                responses = list(decoder.stream(PROMPT, sampled, max_tokens=TOKENS, num_draft_tokens=most))
                assert ids(responses) == plain
        if controller is Erratic:
            assert len(set(Erratic.lengths)) > 2 or kind == "ngram"  # which may have nothing to say


def test_a_negative_seed_is_a_seed_of_its_own() -> None:
    one, other = (decode("plain", params=SamplingParams(temperature=1.0, seed=seed), max_tokens=12) for seed in (5, -5))
    assert ids(one) != ids(other)


# Processors and log-probabilities

PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition_strong": {"repetition_penalty": 2.5, "repetition_context_size": 200},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.5, "frequency_context_size": 100},
    "bias": {"logit_bias": {7: 3.0, 25: -3.0, 150: 2.0}},
    "all": {"repetition_penalty": 1.1, "presence_penalty": 0.7, "frequency_penalty": 0.3, "logit_bias": {9: 1.0}},
}
HOLDING = PROMPT + ANSWER[:12] + PROMPT  # a prompt that holds what is likely to be said


def mlx_lm_steps(prompt: Sequence[int], tokens: int, **penalties: Any) -> tuple[list[int], list[mx.array]]:
    steps = generate_step(
        mx.array(prompt), model(), max_tokens=tokens, logits_processors=make_logits_processors(**penalties)
    )
    chosen, logprobs = zip(*steps, strict=True)
    return list(chosen), list(logprobs)


@pytest.mark.parametrize("name", PENALTIES)
def test_processors_see_the_true_history(name: str) -> None:
    expected, logprobs = mlx_lm_steps(HOLDING, TOKENS, **PENALTIES[name])
    assert expected != answer_to(tuple(HOLDING), TOKENS)
    params = SamplingParams(**PENALTIES[name])
    for kind in DRAFTERS:
        for k in (1, 4, 8) if kind in ("mixed", "draft_model", "self") else (4,):
            responses = decode(kind, HOLDING, expected, params=params, max_tokens=TOKENS, num_draft_tokens=k)
            assert ids(responses) == expected, (kind, k)
            worst = max(mx.abs(r.logprobs - row).max().item() for r, row in zip(responses, logprobs, strict=True))
            assert worst < 1e-4, (kind, k)
            if kind in ("mixed", "draft_model"):
                assert {r.from_draft for r in responses} == {True, False}
            if kind in ("right", "self"):  # the draft model's own logits go through the processors too
                assert responses[-1].stats.acceptance_rate == 1.0


class Forgetful(Sampler):
    """A history that misses the prompt."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], *more: Any):
        super().__init__(params, prompt[-1:] * len(prompt), *more)


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "all"])
def test_a_history_without_the_prompt_would_be_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = mlx_lm_steps(HOLDING, TOKENS, **PENALTIES[name])
    monkeypatch.setattr(decoder_module, "Sampler", Forgetful)
    for kind in ("plain", "draft_model", "ngram"):
        assert ids(decode(kind, HOLDING, params=SamplingParams(**PENALTIES[name]), max_tokens=TOKENS)) != expected


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_processor_is_shown_prompt_and_output(kind: str) -> None:
    seen: list[list[int]] = []

    def watch(tokens: mx.array, logits: mx.array) -> mx.array:
        assert logits.shape == (1, VOCAB)
        seen.append(tokens)
        return logits

    responses = decode(kind, logits_processors=[watch], max_tokens=TOKENS, num_draft_tokens=4)
    assert ids(responses) == ANSWER[:TOKENS]
    histories = [tokens.tolist() for tokens in seen]
    true = [(PROMPT + ANSWER)[: len(PROMPT) + n] for n in range(TOKENS)]
    assert all(history in histories for history in true)
    if kind in ("plain", "right", "self"):
        assert all(history in true for history in histories)


@pytest.mark.parametrize("penalties", [{}, PENALTIES["all"]], ids=["plain", "penalties"])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8, "top_k": 30}], ids=["whole", "filtered"])
def test_log_probabilities_are_the_targets_when_sampling(penalties: dict[str, Any], filters: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.9, seed=11, acceptance="coupled", **penalties, **filters)
    plain = decode("plain", HOLDING, params=params, max_tokens=TOKENS)
    for kind in ("right", "wrong", "mixed", "draft_model", "self", "ngram"):
        responses = decode(kind, HOLDING, ids(plain), params=params, max_tokens=TOKENS, num_draft_tokens=4)
        assert ids(responses) == ids(plain)
        for ours, theirs in zip(responses, plain, strict=True):
            assert mx.abs(ours.logprobs - theirs.logprobs).max().item() < 1e-4
            assert abs(mx.exp(ours.logprobs).sum().item() - 1) < 1e-4


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["draft_model", "self", "ngram"])
def test_log_probabilities_are_those_of_the_text_so_far(kind: str, rule: str) -> None:
    params = SamplingParams(temperature=1.0, seed=3, acceptance=rule)
    responses = decode(kind, params=params, max_tokens=TOKENS, num_draft_tokens=4)
    logits = model()(mx.array([PROMPT + ids(responses)]))[0, len(PROMPT) - 1 : -1]
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert mx.abs(mx.stack([r.logprobs for r in responses]) - expected).max().item() < 1e-4


def test_a_drafter_may_propose_what_is_no_token() -> None:
    """Ids beyond the embedding would read foreign memory; they are a bad guess like any other."""

    def nonsense(place: int, token: int) -> int:
        return (99_999, -7, VOCAB, token)[place % 4]

    target = Target(zoo.build("llama", vocab=VOCAB))
    prompt = list(range(5, 16))
    answer = reference(target.model, prompt, 30)
    assert drafted(target, Scripted(answer, nonsense), prompt, 30, 4) == answer


def test_a_temperature_too_small_for_its_inverse_is_none() -> None:
    with SpecDecoder(zoo.build("llama", vocab=VOCAB), zoo.tokenizer(VOCAB)) as decoder:
        ids = [
            [r.token for r in decoder.stream([5, 6, 7], SamplingParams(temperature=t, seed=1), max_tokens=20)]
            for t in (0.0, 1e-39, 1e-9)
        ]
    assert ids[0] == ids[1] == ids[2]


def test_quantising_where_nothing_can_be_quantised_is_refused() -> None:
    with pytest.raises(OptionError, match="mamba2 has no cache that can be quantised"):
        Target(zoo.build("mamba2"), CacheOptions(kv_bits=8))
