"""Any thread may ask for the next token, several may at once, and a decoder leaves its model as it was."""

import mlx_specdec  # noqa: F401  # isort: skip

import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from statistics import median_low
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from mlx_specdec import SamplingParams, SpecDecError, SpecDecoder, measured
from mlx_specdec.drafters.base import NOTHING, Draft
from mlx_specdec.drafters.ngram_simple import NgramSimple
from mlx_specdec.features import FeatureRequest
from mlx_specdec.measured import Costs
from mlx_specdec.sampling import Sampler
from tests import zoo
from tests.scripted import Empty, reference

VOCAB, TOKENS = 300, 18
TOKENIZER = zoo.tokenizer(VOCAB)
MODELS = {"kv": "llama", "gated_delta": "qwen3_5"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@cache
def model(kind: str) -> nn.Module:
    return zoo.build(MODELS[kind], vocab=VOCAB)


@cache
def draft(kind: str) -> nn.Module:
    return zoo.draft_of(MODELS[kind], noise=zoo.NOISE[1], vocab=VOCAB)


@cache
def answer(kind: str, start: int) -> list[int]:
    said = reference(model(kind), prompt(start), TOKENS)
    return said[: said.index(TOKENIZER.eos_token_id) + 1] if TOKENIZER.eos_token_id in said else said


def prompt(start: int) -> list[int]:
    return [(7 * i * i + 3 * i + start) % 64 for i in range(10 + start)]


def options(kind: str, drafter: str) -> dict[str, Any]:
    ways = {
        "plain": {},
        "draft_model": {"draft_model": draft(kind)},
        "self": {"draft_model": model(kind)},
        "ngram": {"drafter": partial(NgramSimple, 1, 6)},
    }
    return ways[drafter]


DRAFTS = 4  # in every round, where a test needs them: "auto" drafts only where that is measured to be faster
DRAFTERS = ("plain", "draft_model", "self", "ngram")
every_kind = pytest.mark.parametrize("kind", MODELS)
every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)


def ids(responses: Any) -> list[int]:
    return [r.token for r in responses]


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """What each job returns, all started at the same moment, each in a thread of its own."""
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        start.wait()
        try:
            return job()
        finally:
            mx.clear_streams()  # MLX asks for this at the end of a thread

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [f.result(timeout=120) for f in [pool.submit(run, job) for job in jobs]]


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """No test leaves a hook behind."""
    before = [(kind, shape(model(kind)), shape(draft(kind))) for kind in MODELS]
    yield
    for kind, target, other in before:
        assert shape(model(kind)) == target
        assert shape(draft(kind)) == other


def shape(module: nn.Module) -> list[tuple[str, Any]]:
    """Every submodule with its class and every parameter with its array."""
    return [(path, type(m)) for path, m in module.named_modules()] + [
        (path, id(value)) for path, value in tree_flatten(module.parameters())
    ]


@every_drafter
@every_kind
@pytest.mark.parametrize(("count", "most"), [(2, DRAFTS), (8, DRAFTS), (8, "auto")])
def test_threads_at_once_on_one_decoder(kind: str, drafter: str, count: int, most: Any) -> None:
    with SpecDecoder(model(kind), TOKENIZER, **options(kind, drafter)) as decoder:

        def run(n: int) -> list[int]:
            return ids(decoder.stream(prompt(n), max_tokens=TOKENS, num_draft_tokens=most))

        outputs = at_once(*(partial(run, n) for n in range(count)))
    assert outputs == [answer(kind, n) for n in range(count)]


@every_kind
@pytest.mark.parametrize("params", [{"temperature": 1.0, "acceptance": "token"},
                                    {"temperature": 1.0, "acceptance": "block", "top_p": 0.9},
                                    {"temperature": 1.0},
                                    {"repetition_penalty": 1.3, "logit_bias": {5: 1.0}}], ids=str)  # fmt: skip
def test_threads_at_once_with_samplers_of_their_own(kind: str, params: dict[str, Any]) -> None:
    with SpecDecoder(model(kind), TOKENIZER, **options(kind, "draft_model")) as decoder:
        most = DRAFTS if "acceptance" in params else "auto"  # the others do not depend on what was drafted

        def output(n: int) -> list[int]:
            sampled = SamplingParams(seed=n, **params)
            return ids(decoder.stream(prompt(n), sampled, max_tokens=TOKENS, num_draft_tokens=most))

        alone = [output(n) for n in range(4)]
        assert at_once(*(partial(output, n) for n in range(4))) == alone


def test_measurements_are_whole_whenever_another_thread_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests of a decoder share them: in the middle of taking one in, what was known before is still known."""
    costs, seen = Costs(), list[float]()
    for rows, cost in ((2, 1.5), (2, 1.5), (5, 3.0), (5, 3.0)):
        costs.add(rows, cost)

    def meanwhile(seconds: Any) -> float:
        assert (costs.most, costs.sure(2), costs.sure(3)) == (5, True, False)
        seen.extend(costs.of(rows) for rows in (2, 3, 5))
        return median_low(seconds)

    monkeypatch.setattr(measured, "median_low", meanwhile)
    costs.add(3, 1.0)
    assert seen == [1.5, 2.0, 3.0] * 3


@every_kind
@pytest.mark.parametrize("drafters", [("draft_model", "ngram"), ("self", "self"), ("plain", "draft_model")], ids=str)
def test_two_decoders_that_share_a_model(kind: str, drafters: Sequence[str]) -> None:
    def run(decoder: SpecDecoder, n: int) -> list[int]:
        return ids(decoder.stream(prompt(n), max_tokens=TOKENS, num_draft_tokens=DRAFTS))

    first, second = (SpecDecoder(model(kind), TOKENIZER, **options(kind, drafter)) for drafter in drafters)
    with second:
        with first:
            for n in (1, 3):
                outputs = at_once(*(partial(run, decoder, m) for m in range(n) for decoder in (first, second)))
                assert outputs == [answer(kind, m) for m in range(n) for _ in range(2)]
        assert run(second, 0) == answer(kind, 0)


@every_drafter
@every_kind
def test_one_stream_continued_by_threads_in_turn(kind: str, drafter: str) -> None:
    hands = [ThreadPoolExecutor(1) for _ in range(2)]
    with SpecDecoder(model(kind), TOKENIZER, **options(kind, drafter)) as decoder:
        request = {"max_tokens": TOKENS, "num_draft_tokens": DRAFTS}
        sampled = SamplingParams(temperature=0.8, seed=1, repetition_penalty=1.2, acceptance="token")
        for params in (SamplingParams(), sampled):
            alone = list(decoder.stream(prompt(0), params, **request))
            stream = hands[0].submit(partial(decoder.stream, prompt(0), params, **request)).result()
            turns = [hands[n % 2].submit(next, stream).result(timeout=60) for n in range(TOKENS - 4)] + list(stream)
            assert ids(turns) == ids(alone)
            assert "".join(r.text for r in turns) == "".join(r.text for r in alone)
            largest = max(mx.abs(a.logprobs - b.logprobs).max().item() for a, b in zip(turns, alone, strict=True))
            assert largest < 1e-5
    for hand in hands:
        hand.submit(mx.clear_streams).result()
        hand.shutdown()


class Lazy(NgramSimple):
    """Proposes, as a drafter may, what is not evaluated yet."""

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        draft = super().propose(last, limit, sampler)
        return draft._replace(tokens=draft.tokens + 0) if len(draft.tokens) else draft


def test_what_a_thread_got_any_other_may_read() -> None:
    """Log-probabilities that one thread asked for, and a stream whose drafts were lazy."""
    hand, request = ThreadPoolExecutor(1), {"max_tokens": TOKENS, "num_draft_tokens": "auto"}
    with SpecDecoder(model("kv"), TOKENIZER, partial(Lazy, 1, 6)) as decoder:
        alone = list(decoder.stream(prompt(0), **request))
        stream = decoder.stream(prompt(0), **request)
        logprobs = []
        for response in alone:
            other = hand.submit(next, stream).result(timeout=60)
            assert other.token == response.token
            logprobs.append(hand.submit(lambda of: of.logprobs, other).result())
    for mine, of in zip(alone, logprobs, strict=True):
        assert mx.abs(mine.logprobs - of).max().item() < 1e-5
    hand.submit(mx.clear_streams).result()
    hand.shutdown()


@pytest.mark.parametrize("overrides", [{}, {"rope_scaling": LLAMA3_ROPE}], ids=["rope", "llama3_rope"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma4_text"])
def test_a_model_may_be_used_first_in_another_thread(name: str, overrides: dict[str, Any]) -> None:
    """What a model computes lazily when it is built, its rope frequencies for one, belongs to the building thread."""
    expected = reference(zoo.build(name, vocab=VOCAB, **overrides), prompt(0), 8)
    for drafted in (False, True):
        built = zoo.build(name, vocab=VOCAB, **overrides)
        with SpecDecoder(built, TOKENIZER, draft_model=built if drafted else None) as decoder:
            run = partial(decoder.stream, prompt(0), max_tokens=8, num_draft_tokens=3)
            assert at_once(lambda run=run: ids(run())) == [expected]


def test_a_decoder_may_be_made_in_another_thread() -> None:
    for kind in MODELS:
        (decoder,) = at_once(partial(SpecDecoder, model(kind), TOKENIZER, **options(kind, "draft_model")))
        with decoder:
            for most in (DRAFTS, "auto"):
                said = ids(decoder.stream(prompt(0), max_tokens=TOKENS, num_draft_tokens=most))
                assert said == answer(kind, 0)


def test_a_process_that_generated_in_a_thread_ends_well() -> None:
    code = (
        "import mlx_specdec, threading; from tests import zoo\n"
        "decoder = mlx_specdec.SpecDecoder(zoo.build('llama', vocab=300), zoo.tokenizer())\n"
        "thread = threading.Thread(target=lambda: print(len(list(decoder.stream([1, 2, 3], max_tokens=5)))))\n"
        "thread.start(); thread.join()\n"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")


# Ending early


@every_drafter
@every_kind
@pytest.mark.parametrize("how", ["event", "close", "drop"])
def test_cancelled_and_run_again(kind: str, drafter: str, how: str) -> None:
    request = {"max_tokens": TOKENS, "num_draft_tokens": DRAFTS}
    with SpecDecoder(model(kind), TOKENIZER, **options(kind, drafter)) as decoder:
        for after in (0, 5):
            cancel = threading.Event()
            stream = decoder.stream(prompt(0), cancel=cancel, **request)
            begun = [next(stream) for _ in range(after)]
            assert ids(begun) == answer(kind, 0)[:after]
            if how == "event":
                cancel.set()
                rest = list(stream)  # what its last round had found already
                assert len(rest) < DRAFTS + 1
                assert ids(begun + rest) == answer(kind, 0)[: after + len(rest)]
            elif how == "close":
                stream.close()  # type: ignore[attr-defined]
                assert list(stream) == []
            else:
                del stream
            assert ids(decoder.stream(prompt(0), **request)) == answer(kind, 0)


def test_a_stream_is_cancelled_from_another_thread() -> None:
    cancel = threading.Event()
    endless = zoo.build("llama", vocab=VOCAB, max_position_embeddings=10**9)
    no_end = SamplingParams(logit_bias=dict.fromkeys(TOKENIZER.eos_token_ids, -math.inf))
    with SpecDecoder(endless, TOKENIZER, draft_model=endless) as decoder:
        timer = threading.Timer(0.3, cancel.set)
        timer.start()
        (said,) = at_once(lambda: list(decoder.stream(prompt(0), no_end, max_tokens=-1, cancel=cancel)))
        assert said
        assert said[-1].finish_reason is None


# Closing


@every_drafter
@every_kind
def test_close_gives_the_model_back(kind: str, drafter: str) -> None:
    before = shape(model(kind)), shape(draft(kind))
    expected = answer(kind, 0)
    decoder = SpecDecoder(model(kind), TOKENIZER, **options(kind, drafter))
    list(decoder.stream(prompt(0), max_tokens=3, num_draft_tokens=DRAFTS))
    stream = decoder.stream(prompt(0), max_tokens=TOKENS, num_draft_tokens=DRAFTS)
    next(stream)
    decoder.close()
    assert (shape(model(kind)), shape(draft(kind))) == before
    assert len(list(stream)) < DRAFTS + 1
    with pytest.raises(SpecDecError, match="closed"):
        decoder.stream(prompt(0))
    decoder.close()  # again does nothing
    assert reference(model(kind), prompt(0), TOKENS) == expected


def test_a_model_that_does_not_fit_is_left_as_it_was() -> None:
    odd = zoo.build("baichuan_m1", vocab=VOCAB)
    before = shape(odd), shape(model("gated_delta"))
    for target, drafter in ((odd, model("gated_delta")), (model("gated_delta"), odd)):
        with pytest.raises(SpecDecError):
            SpecDecoder(target, TOKENIZER, draft_model=drafter)
        assert (shape(odd), shape(model("gated_delta"))) == before


class Interrupted(Empty):
    """Calls `act` where another thread might: in the middle of a round."""

    def __init__(self, act: Callable[[], None], wants: FeatureRequest):
        super().__init__([])
        self.act, self.wants = act, wants

    def observe(self, tokens: Sequence[int], features: Any) -> None:
        pass

    def propose(self, last: int, limit: int, sampler: Any) -> Draft:
        self.act()
        return NOTHING


@every_kind
@pytest.mark.parametrize("wants", [FeatureRequest(), FeatureRequest(layers=(0, 1), final=True)], ids=["", "features"])
def test_closing_in_the_middle_of_a_round_ends_the_stream_quietly(kind: str, wants: FeatureRequest) -> None:
    rounds = 0

    def act() -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 5:
            decoder.close()

    decoder = SpecDecoder(model(kind), TOKENIZER, lambda: Interrupted(act, wants))
    said = ids(decoder.stream(prompt(0), max_tokens=TOKENS, num_draft_tokens=DRAFTS))
    assert said == answer(kind, 0)[: len(said)]
    assert 4 <= len(said) <= 5


@every_kind
def test_decoders_come_and_go_while_another_runs(kind: str) -> None:
    done = threading.Event()

    def run() -> bool:
        try:
            return all(
                ids(running.stream(prompt(n), max_tokens=TOKENS, num_draft_tokens=most)) == answer(kind, n)
                for most in (DRAFTS, "auto", DRAFTS)
                for n in range(3)
            )
        finally:
            done.set()

    def come_and_go() -> int:
        made = 0
        while not done.is_set():
            for way in ("draft_model", "self", "ngram"):
                with SpecDecoder(model(kind), TOKENIZER, **options(kind, way)) as decoder:
                    said = ids(decoder.stream(prompt(0), max_tokens=4, num_draft_tokens=3))
                    assert said == answer(kind, 0)[:4]
            made += 1
        return made

    assert all(answer(kind, n) for n in range(3))
    with SpecDecoder(model(kind), TOKENIZER, **options(kind, "draft_model")) as running:
        right, *made = at_once(run, come_and_go, come_and_go)
    assert right
    assert all(made)
