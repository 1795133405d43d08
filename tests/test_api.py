"""The Python functions have mlx-lm's shape, and the package is light and quiet."""

import mlx_specdec  # isort: skip

import inspect
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_specdec.generate
from mlx_specdec import (
    GenerationResponse,
    OptionError,
    SamplingParams,
    SpecDecoder,
    api,
    generate,
    load,
    stream_generate,
)
from mlx_specdec.drafters.ngram_simple import NgramSimple
from mlx_specdec.drafters.suffix import Suffix
from tests import zoo
from tests.scripted import Empty, Scripted
from tests.test_commands import save
from tests.test_threads import LLAMA3_ROPE

VOCAB, TOKENS = 300, 30
TOKENIZER = zoo.tokenizer(VOCAB)
PROMPT = "the rain in spain"
DRAFTERS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "draft_model": lambda: {"draft_model": draft(), "num_draft_tokens": 4},
    "ngram": lambda: {"drafter": partial(NgramSimple, 1, 6), "num_draft_tokens": 6},
    "ngram by name": lambda: {"drafter": "ngram_simple"},
    "auto": lambda: {"draft_model": draft(), "num_draft_tokens": "auto"},
    "chain": lambda: {"drafter": "suffix,ngram_map", "draft_model": draft(), "num_draft_tokens": 4},
}
SHOWN = {
    "plain": "none",
    "draft_model": "draft_model",
    "auto": "draft_model",
    "ngram": "ngram_simple",
    "ngram by name": "ngram_simple",
    "chain": "suffix,ngram_map,draft_model",
}
every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)


@cache
def model() -> nn.Module:
    return zoo.build("llama", vocab=VOCAB)


@cache
def draft() -> nn.Module:
    return zoo.draft_of("llama", noise=zoo.NOISE[1], vocab=VOCAB)


@cache
def theirs(max_tokens: int = TOKENS) -> list[Any]:
    """mlx-lm's own responses."""
    return list(mlx_lm.stream_generate(model(), TOKENIZER, PROMPT, max_tokens=max_tokens))


@every_drafter
def test_responses_are_those_of_mlx_lm(drafter: str) -> None:
    ours = list(stream_generate(model(), TOKENIZER, PROMPT, max_tokens=TOKENS, **DRAFTERS[drafter]()))
    assert [(r.token, r.text) for r in ours] == [(r.token, r.text) for r in theirs()]
    for n, (response, other) in enumerate(zip(ours, theirs(), strict=True), 1):
        assert isinstance(response, GenerationResponse)
        assert all(hasattr(response, name) for name in vars(other))
        assert response.prompt_tokens == other.prompt_tokens == len(TOKENIZER.encode(PROMPT))
        assert response.generation_tokens == response.stats.tokens == n
        assert response.finish_reason == other.finish_reason == ("length" if n == TOKENS else None)
        assert mx.abs(response.logprobs - other.logprobs).max().item() < 1e-4
        assert response.prompt_tps > 0
        assert response.generation_tps > 0
        assert response.peak_memory > 0
    assert sum(r.from_draft for r in ours) == ours[-1].stats.accepted
    assert ours[0].stats.tokens == 1  # each response keeps its own figures
    rounds = [r.stats.rounds for r in ours]
    assert rounds == sorted(rounds)
    assert ours[-1].stats.rounds + ours[-1].stats.accepted == TOKENS


@every_drafter
def test_generate_is_that_of_mlx_lm(drafter: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = mlx_lm.generate(model(), TOKENIZER, PROMPT, max_tokens=TOKENS)
    capsys.readouterr()
    options = DRAFTERS[drafter]()
    assert generate(model(), TOKENIZER, PROMPT, max_tokens=TOKENS, **options) == expected
    assert capsys.readouterr() == ("", "")
    assert generate(model(), TOKENIZER, PROMPT, verbose=True, max_tokens=TOKENS, **options) == expected
    ours = capsys.readouterr().out
    mlx_lm.generate(model(), TOKENIZER, PROMPT, verbose=True, max_tokens=TOKENS)
    shown = capsys.readouterr().out
    *lines, fourth = ours.splitlines()
    assert [re.sub(r"\d+\.\d+", "#", line) for line in lines] == [
        re.sub(r"\d+\.\d+", "#", line) for line in shown.splitlines()
    ]
    assert fourth.startswith(f"Drafter: {SHOWN[drafter]}, ")


def test_generate_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model(), TOKENIZER, PROMPT, max_tokens=0, verbose=True) == ""
    assert "No text generated" in capsys.readouterr().out


def test_names_and_defaults_are_those_of_mlx_lm() -> None:
    ours = inspect.signature(stream_generate).parameters
    for function in (mlx_lm.stream_generate, mlx_lm.generate.__globals__["generate_step"]):
        for name, parameter in inspect.signature(function).parameters.items():
            if name in ours and parameter.default is not parameter.empty:
                assert ours[name].default == parameter.default, name
    assert list(ours)[:5] == list(inspect.signature(mlx_lm.stream_generate).parameters)[:5]
    assert (
        list(inspect.signature(api.generate).parameters)[:4] == list(inspect.signature(mlx_lm.generate).parameters)[:4]
    )
    missing = inspect.signature(mlx_lm.load).parameters.keys() - inspect.signature(load).parameters.keys()
    assert missing <= {"return_config"}
    with pytest.raises(TypeError, match="temprature"):
        generate(model(), TOKENIZER, PROMPT, temprature=1.0)


@every_drafter
@pytest.mark.parametrize(
    "penalties", [{"repetition_penalty": 1.3}, {"logit_bias": {5: 2.0}, "presence_penalty": 0.5}], ids=str
)
def test_logits_processors_of_mlx_lm(drafter: str, penalties: dict[str, Any]) -> None:
    processors = make_logits_processors(**penalties)
    expected = list(mlx_lm.stream_generate(model(), TOKENIZER, PROMPT, max_tokens=TOKENS, logits_processors=processors))
    assert [r.token for r in expected] != [r.token for r in theirs()]
    for given in ({"logits_processors": processors}, penalties):
        ours = stream_generate(model(), TOKENIZER, PROMPT, max_tokens=TOKENS, **given, **DRAFTERS[drafter]())
        assert [r.token for r in ours] == [r.token for r in expected]


@every_drafter
def test_samplers_of_mlx_lm(drafter: str) -> None:
    def ours(**sampler: Any) -> list[int]:
        responses = stream_generate(
            model(), TOKENIZER, PROMPT, max_tokens=TOKENS, sampler=make_sampler(**sampler), **DRAFTERS[drafter]()
        )
        return [r.token for r in responses]

    assert ours(temp=0.0) == ours(temp=1.0, top_k=1) == [r.token for r in theirs()]
    mx.random.seed(1)
    first = ours(temp=1.0, top_p=0.95, min_p=0.01)
    mx.random.seed(2)
    assert first != ours(temp=1.0, top_p=0.95, min_p=0.01)


@pytest.mark.parametrize("prompt", [PROMPT, TOKENIZER.encode(PROMPT), mx.array(TOKENIZER.encode(PROMPT))],
                         ids=["text", "ids", "array"])  # fmt: skip
def test_prompts_of_every_kind(prompt: Any) -> None:
    tokens = [r.token for r in stream_generate(model(), TOKENIZER, prompt, max_tokens=5)]
    assert tokens == [r.token for r in theirs()][:5]


def test_a_tokenizer_need_not_be_wrapped() -> None:
    """As in mlx-lm, that of transformers will do."""
    assert generate(model(), TOKENIZER._tokenizer, PROMPT, max_tokens=8) == mlx_lm.generate(
        model(), TOKENIZER._tokenizer, PROMPT, max_tokens=8
    )


def test_progress_is_told_as_the_prompt_is_read() -> None:
    told: list[tuple[int, int]] = []
    total = len(TOKENIZER.encode(PROMPT))
    for options in (DRAFTERS["plain"](), DRAFTERS["draft_model"]()):
        told.clear()
        list(
            stream_generate(
                model(), TOKENIZER, PROMPT, max_tokens=2, prefill_step_size=4,
                prompt_progress_callback=lambda *done: told.append(done), **options,
            )
        )  # fmt: skip
        assert told == [*((done, total) for done in range(4, total - 1, 4)), (total - 1, total)]


def test_cache_options_of_mlx_lm() -> None:
    wide = zoo.CACHE_KINDS["kv_quant"](vocab=VOCAB, seed=1)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 10}
    expected = [r.token for r in mlx_lm.stream_generate(wide, TOKENIZER, PROMPT, max_tokens=TOKENS, **options)]
    limited = [r.token for r in stream_generate(wide, TOKENIZER, PROMPT, max_tokens=TOKENS, max_kv_size=16)]
    for drafter in ({}, {"draft_model": wide, "num_draft_tokens": 3}):
        ours = stream_generate(wide, TOKENIZER, PROMPT, max_tokens=TOKENS, **options, **drafter)
        assert [r.token for r in ours] == expected
        ours = stream_generate(wide, TOKENIZER, PROMPT, max_tokens=TOKENS, max_kv_size=16, **drafter)
        assert [r.token for r in ours] == limited


def test_the_model_is_given_back_however_a_stream_ends() -> None:
    hybrid = zoo.build("qwen3_5", vocab=VOCAB)
    before = [type(m) for m in hybrid.modules()]
    stream = stream_generate(hybrid, TOKENIZER, PROMPT, draft_model=hybrid)
    next(stream)
    assert [type(m) for m in hybrid.modules()] != before
    stream.close()  # type: ignore[attr-defined]
    assert [type(m) for m in hybrid.modules()] == before
    with pytest.raises(OptionError):
        generate(hybrid, TOKENIZER, "", draft_model=hybrid)
    assert [type(m) for m in hybrid.modules()] == before
    with SpecDecoder(hybrid, TOKENIZER, draft_model=hybrid) as decoder:
        next(decoder.stream(PROMPT))
    assert [type(m) for m in hybrid.modules()] == before


REPEATING = [(7 * i * i + 3 * i + 5) % 64 for i in range(30)] * 4


@pytest.mark.parametrize(
    ("drafter", "names"),
    [
        ("ngram_simple", ["ngram_simple", "draft_model"]),  # the draft model comes last where it is not named
        ("ngram_simple,draft_model", ["ngram_simple", "draft_model"]),
        ("draft_model,ngram_simple", ["draft_model", "ngram_simple"]),
        (" draft_model , ngram_simple ", ["draft_model", "ngram_simple"]),
        (partial(NgramSimple, 1, 8), ["ngram_simple", "draft_model"]),
        ([partial(NgramSimple, 1, 8)], ["ngram_simple", "draft_model"]),
        ([partial(NgramSimple, 1, 8), "draft_model", Suffix], ["ngram_simple", "draft_model", "suffix"]),
        (("draft_model", partial(NgramSimple, 1, 8)), ["draft_model", "ngram_simple"]),
        ([], ["draft_model"]),
        (None, ["draft_model"]),
    ],
    ids=str,
)
def test_drafters_and_a_draft_model_are_a_chain(drafter: Any, names: list[str]) -> None:
    expected = [r.token for r in mlx_lm.stream_generate(model(), TOKENIZER, REPEATING, max_tokens=TOKENS)]
    ours = list(stream_generate(
        model(), TOKENIZER, REPEATING, max_tokens=TOKENS, drafter=drafter, draft_model=draft(), num_draft_tokens=4
    ))  # fmt: skip
    assert [r.token for r in ours] == expected
    stats = ours[-1].stats
    assert stats.drafter == ",".join(names)
    assert stats.drafters.keys() == ({"draft_model"} if names[0] == "draft_model" else {"ngram_simple", "draft_model"})
    assert sum(r.from_draft for r in ours) == stats.accepted > 0


def test_the_drafters_of_a_chain_are_asked_in_order() -> None:
    """One that never drafts hands its turn on, one that always does keeps it."""
    ids = [r.token for r in theirs()]
    right, silent = partial(Scripted, ids, lambda _, token: token), partial(Empty, ids)
    for chain in ([right], [silent, right], [silent, right, "draft_model"]):
        more = {"draft_model": draft()} if "draft_model" in chain else {}
        with SpecDecoder(model(), TOKENIZER, chain, **more) as decoder:
            last = list(decoder.stream(PROMPT, max_tokens=TOKENS, num_draft_tokens=4))[-1]
        assert (last.stats.rounds, last.stats.accepted) == (TOKENS // 5, TOKENS * 4 // 5)
        assert last.stats.drafters.keys() == {"scripted"}
    with SpecDecoder(model(), TOKENIZER, [silent]) as decoder:
        last = list(decoder.stream(PROMPT, max_tokens=TOKENS, num_draft_tokens=4))[-1]
    assert (last.stats.rounds, last.stats.plain_rounds, last.stats.drafters) == (TOKENS, TOKENS, {})


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        ("magic", "no drafter 'magic'; choose among ngram_simple, .*suffix, draft_model"),
        ("suffix,magic", "no drafter 'magic'"),
        ("suffix,", "no drafter ''"),
        ("", "no drafter ''"),
        ("suffix,ngram_map,suffix", "drafter suffix is named twice"),
        ("draft_model", "draft_model takes a model"),
        ("suffix,draft_model", "draft_model takes a model"),
        (["draft_model"], "draft_model takes a model"),
    ],
    ids=str,
)
def test_drafters_that_cannot_be(drafter: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said) as error:
        generate(model(), TOKENIZER, PROMPT, drafter=drafter)
    assert "\n" not in str(error.value)


NAN, INF = float("nan"), float("inf")
WRONG: tuple[dict[str, Any], ...] = (
    {"temperature": -1.0},
    {"temperature": NAN},
    {"temperature": INF},
    {"top_p": 1.1},
    {"top_k": -1},
    {"top_k": 1.5},
    {"min_p": -0.1},
    {"min_tokens_to_keep": 0},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": INF},
    {"presence_penalty": NAN},
    {"frequency_penalty": -INF},
    {"logit_bias": {5: NAN}},
    {"repetition_context_size": 0},
    {"presence_context_size": -1},
    {"acceptance": "always"},
)


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_sampling_values_that_cannot_be_used(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))) as error:
        SamplingParams(**wrong)
    assert "\n" not in str(error.value)


# The package


def process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_importing_is_fast_and_quiet() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import mlx_specdec; took = time.perf_counter() - start\n"
        "print(took, *sorted(sys.modules.keys() & {'mlx.core', 'mlx_lm', 'transformers', 'numpy', 'huggingface_hub'}))"
    )
    runs = [process(code).split() for _ in range(3)]
    assert [loaded for _, *loaded in runs] == [[]] * 3
    assert min(float(took) for took, *_ in runs) < 0.5
    assert process("import mlx_specdec") == ""
    assert process("from mlx_specdec import load, generate, stream_generate, SpecDecoder, SamplingParams") == ""
    assert process("import mlx_specdec, mlx_specdec.__main__, sys; print('mlx_lm' in sys.modules)") == "False\n"


def test_the_public_names() -> None:
    for name in ("load", "generate", "stream_generate", "SpecDecoder", "SamplingParams", "GenerationResponse"):
        assert name in mlx_specdec.__all__
        assert callable(getattr(mlx_specdec, name))
    assert not hasattr(mlx_specdec, "no_such_name")


def test_generate_stays_callable_after_its_command_was_imported() -> None:
    assert inspect.ismodule(mlx_specdec.generate)
    text = mlx_specdec.generate(model(), TOKENIZER, PROMPT, max_tokens=5)
    assert text == generate(model(), TOKENIZER, PROMPT, max_tokens=5)
    code = (
        "from mlx_specdec import generate; import mlx_specdec.generate as command, mlx_specdec\n"
        "print(callable(generate), callable(command), callable(mlx_specdec.generate), command.command.name)"
    )
    assert process(code) == "True True True generate\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(model(), TOKENIZER, tmp_path / "model")


def test_a_local_path_needs_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    for path in (str(folder), folder):
        loaded, tokenizer = load(path)
        assert [r.token for r in stream_generate(loaded, tokenizer, PROMPT, max_tokens=TOKENS)] == [
            r.token for r in theirs()
        ]


def test_load_gives_what_was_saved(folder: Path) -> None:
    loaded, tokenizer = load(str(folder))
    theirs_loaded, their_tokenizer = mlx_lm.load(str(folder))
    ours, others = (dict(tree_flatten(m.parameters())) for m in (loaded, theirs_loaded))
    assert ours.keys() == others.keys()
    assert all(mx.array_equal(value, others[path]) for path, value in ours.items())
    assert type(tokenizer) is type(their_tokenizer)
    assert tokenizer.eos_token_ids == their_tokenizer.eos_token_ids == TOKENIZER.eos_token_ids
    assert tokenizer.encode(PROMPT) == TOKENIZER.encode(PROMPT)


@pytest.mark.parametrize("rope", [None, LLAMA3_ROPE], ids=["rope", "llama3_rope"])
def test_a_loaded_model_may_be_used_in_another_thread(tmp_path: Path, rope: dict[str, Any] | None) -> None:
    built = zoo.build("llama", vocab=VOCAB, rope_scaling=rope)
    loaded, tokenizer = load(str(save(built, TOKENIZER, tmp_path / "model")))
    said: list[str] = []

    def run() -> None:
        said.append(generate(loaded, tokenizer, PROMPT, max_tokens=8))
        mx.clear_streams()  # MLX asks for this at the end of a thread

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert said == [mlx_lm.generate(built, TOKENIZER, PROMPT, max_tokens=8)]


def test_ends_of_every_source_are_known(folder: Path) -> None:
    """The tokenizer's, the configuration's and the generation configuration's end of sequence are all ends."""
    ids = [r.token for r in theirs()]
    tokenizer, configured = (next(t for t in ids[n:] if t not in ids[:n]) for n in (12, 6))
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", f'{{"eos_token_id": {configured}, ', 1))
    loaded, known = load(str(folder))
    known.add_eos_token(str(tokenizer))
    assert {configured, tokenizer, TOKENIZER.eos_token_id} <= set(known.eos_token_ids)
    said = list(stream_generate(loaded, known, PROMPT, max_tokens=TOKENS))
    assert [r.token for r in said] == ids[: ids.index(configured) + 1]
    assert said[-1].finish_reason == "stop"
