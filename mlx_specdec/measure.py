"""How fast ways of generating are next to each other: the same prompts, in turns, in one process, at temperature 0.

Every repeat begins with fresh decoders, one for each way, which then get all prompts in order. So what a drafter
remembers of earlier texts (the suffix memory, ngram_mod's table) is what other prompts left there, as for a user, and
never the answer of an earlier repeat; what Auto learned of costs warms up in the same manner.

Figures are taken for each repeat and given as the median, the lowest and the highest of the repeats. There are none for
a way whose ids part from plain decoding's in any run, warm-up included.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from statistics import fmean, median
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.generate import stream_generate as mlx_lm_stream_generate

from .decoder import SpecDecoder
from .drafters import DEFAULT, DrafterOptions, by_name
from .errors import OptionError
from .generate import chat
from .questions import Question
from .target.model import CacheOptions
from .text import encode


@dataclass(frozen=True)
class Run:
    """One request. Seconds: `first` until its first token, `rest` from there to its last.

    `at_once` tokens came with the first; `reached` and `stood` count drafts by place, as DrafterStats does.
    """

    ids: tuple[int, ...]
    first: float
    rest: float
    at_once: int
    passes: int
    reached: tuple[int, ...]
    stood: tuple[int, ...]


@dataclass(frozen=True)
class Parting:
    """The first token where a way's ids differ from plain decoding's, and both ids; None where the output has ended."""

    question_id: int | str
    place: int
    plain: int | None
    other: int | None


@dataclass(frozen=True)
class Spread:
    """Over the repeats."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Figures:
    """Of some prompts with one way. None where nothing was generated after the first pass.

    tokens_per_second and speedup are of generation alone, without the pass that gave the first token and what came with
    it: tokens and seconds are summed over the prompts, so that long outputs count for more, and speedup is plain
    decoding's seconds per token over the way's. request_speedup is the ratio of whole times, prefill included, as
    Spec-Bench has it. first_token is seconds, the mean over the prompts. tau is tokens a pass, by_position the share of
    drafts that stood at each place, of those that got there (empty for mlx-lm, which does not tell).
    """

    prompts: int
    tokens: int
    tokens_per_second: Spread | None
    first_token: Spread
    tau: float
    by_position: tuple[float, ...]
    speedup: Spread | None
    request_speedup: Spread


@dataclass
class Result:
    """What a way gave. Without figures if its ids part from plain decoding's, or mlx-lm `refused`, in its words."""

    speculates: bool
    parting: Parting | None = None
    refused: str | None = None
    categories: dict[str, Figures] | None = None
    overall: Figures | None = None

    @property
    def out(self) -> bool:
        return self.parting is not None or self.refused is not None


@dataclass
class Report:
    """What was measured, by the name of the way: "plain" first, "mlx-lm", "mlx-lm draft", then the drafters."""

    questions: dict[str, list[int | str]]
    max_tokens: int
    num_draft_tokens: int | str
    repeats: int
    device: str
    ways: dict[str, Result]

    def losses(self) -> Iterator[tuple[str, str, float]]:
        """Way, category (or "overall") and speed-up wherever speculation is slower than plain decoding."""
        for name, result in self.ways.items():
            if result.speculates and result.categories and result.overall:
                for place, figures in [*result.categories.items(), ("overall", result.overall)]:
                    if figures.speedup and figures.speedup.median < 1:
                        yield name, place, figures.speedup.median

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Runner = Callable[[list[int]], Iterator[Any]]  # a prompt's ids -> responses, ours or mlx-lm's
Way = Callable[[], AbstractContextManager[Runner]]


class _Refused(Exception):
    """mlx-lm cannot generate in this way."""


def measure(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    drafters: Sequence[str] = (DEFAULT,),
    *,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int | Literal["auto"] = "auto",
    max_tokens: int = 160,
    repeats: int = 3,
    ignore_chat_template: bool = False,
    cache: CacheOptions | None = None,
    options: DrafterOptions | None = None,
    loaded: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Time every way on every question: plain decoding, mlx-lm's, and `drafters`, each a chain by names.

    `loaded` has, by the names that chains call them, the drafters that `load` brought. After a warm-up on the first
    question the ways take turns on each question, every other time in reverse order. mlx-lm drafts with its own default
    where num_draft_tokens is "auto". `progress` is called with the requests made and their total. Raises OptionError
    for what cannot be measured.
    """
    if num_draft_tokens != "auto" and num_draft_tokens < 1:
        raise OptionError(f"num_draft_tokens is {num_draft_tokens}; choose auto, or 1 or more: plain decoding is "
                          "always measured")  # fmt: skip
    if max_tokens < 2:
        raise OptionError(f"max_tokens is {max_tokens}; choose 2 or more")
    if repeats < 1:
        raise OptionError(f"repeats is {repeats}; choose 1 or more")
    if not questions:
        raise OptionError("there are no questions; give at least one")
    if len(set(drafters)) < len(drafters):
        raise OptionError(f"drafters are {'; '.join(drafters)}; name each way once")
    named = loaded or {}

    def ours(names: str) -> Way:
        @contextmanager
        def opened() -> Iterator[Runner]:
            makers = [named.get(make, make) if isinstance(make, str) else make for make in by_name(names, options)]
            drafts = draft_model if "draft_model" in makers else None
            with SpecDecoder(model, tokenizer, makers, draft_model=drafts, cache=cache) as decoder:
                yield lambda ids: decoder.stream(ids, max_tokens=max_tokens, num_draft_tokens=num_draft_tokens)

        return opened

    def mlx_lms(drafts: nn.Module | None) -> Way:
        arguments = asdict(cache or CacheOptions())
        if num_draft_tokens != "auto":
            arguments["num_draft_tokens"] = num_draft_tokens

        def run(ids: list[int]) -> Iterator[Any]:
            try:
                yield from mlx_lm_stream_generate(model, tokenizer, ids, max_tokens, drafts, **arguments)
            except (ValueError, NotImplementedError) as error:
                raise _Refused(str(error)) from error
            mx.synchronize(generation_stream)  # it began a pass too many, which is not the next way's to wait for

        @contextmanager
        def opened() -> Iterator[Runner]:
            yield run

        return opened

    ways: dict[str, Way] = {"plain": ours("none"), "mlx-lm": mlx_lms(None)}
    if draft_model is not None:
        ways["mlx-lm draft"] = mlx_lms(draft_model)
    ways |= {names: ours(names) for names in drafters}
    with ways["plain"]() as run:
        prompts = [_ids(tokenizer, question, ignore_chat_template, run) for question in questions]

    results = {name: Result(name not in ("plain", "mlx-lm")) for name in ways}
    runs = _runs(ways, results, questions, prompts, repeats, progress)
    for name, result in results.items():
        if not result.out:
            result.categories = {
                group: _figures(runs[name], runs["plain"], [i for i, q in enumerate(questions) if q.group == group])
                for group in _groups(questions)
            }
            result.overall = _figures(runs[name], runs["plain"], range(len(questions)))
    return Report(_groups(questions), max_tokens, num_draft_tokens, repeats, str(mx.default_device()), results)


def _groups(questions: Sequence[Question]) -> dict[str, list[int | str]]:
    groups: dict[str, list[int | str]] = {}
    for question in questions:
        groups.setdefault(question.group, []).append(question.question_id)
    return groups


def _ids(tokenizer: Any, question: Question, ignore_chat_template: bool, plain: Runner) -> list[int]:
    """A question's prompt, checked against what the model takes."""
    template = tokenizer.has_chat_template and not ignore_chat_template
    try:
        ids = chat(tokenizer, question.turns[0], None, {}) if template else encode(tokenizer, question.turns[0])
        plain(ids)  # a stream that is never asked for a token
    except OptionError as error:
        raise OptionError(f"question {question.question_id}: {error}") from error
    return ids


def _runs(
    ways: dict[str, Way],
    results: dict[str, Result],
    questions: Sequence[Question],
    prompts: Sequence[list[int]],
    repeats: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, list[list[Run]]]:
    """By way, repeat and question. A way that parts from plain decoding's ids says so in `results` and is left out."""
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in range(repeats)] for name in ways}
    done, total = 0, len(ways) * (1 + repeats * len(prompts))
    for repeat in range(-1, repeats):  # the warm-up is -1
        with ExitStack() as opened:
            runners = {name: opened.enter_context(way()) for name, way in ways.items()}
            for place, prompt in enumerate(prompts if repeat >= 0 else prompts[:1]):
                turn: dict[str, Run] = {}
                for name in list(ways)[:: -1 if (repeat + place) % 2 else 1]:
                    if not results[name].out:
                        try:
                            turn[name] = timed(runners[name], prompt)
                        except _Refused as refused:
                            results[name].refused = str(refused)
                    done += 1
                    if progress is not None:
                        progress(done, total)
                for name, run in turn.items():
                    results[name].parting = _parting(questions[place].question_id, turn["plain"].ids, run.ids)
                    if repeat >= 0:
                        runs[name][repeat].append(run)
    return runs


def timed(run: Runner, prompt: list[int]) -> Run:
    """Make a request. The first pass gave the accepted drafts that the output begins with and a token of the target's
    own, and so did every pass after it, but that the output may end within the last one's drafts."""
    ids: list[int] = []
    drafted: list[bool] = []
    began = first = last = time.perf_counter()
    response = None
    for response in run(prompt):
        last = time.perf_counter()
        first = last if not ids else first
        ids.append(response.token)
        drafted.append(response.from_draft)
    assert response is not None, "a response for each of at least one token"
    drafters = response.stats.drafters.values() if hasattr(response, "stats") else ()
    return Run(
        ids=tuple(ids),
        first=first - began,
        rest=last - first,
        at_once=[*drafted, False].index(False) + 1,
        passes=drafted.count(False) + drafted[-1],
        reached=_added([d.reached for d in drafters]),
        stood=_added([d.stood for d in drafters]),
    )


def _added(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Place by place."""
    return tuple(sum(column) for column in zip_longest(*counts, fillvalue=0))


def _parting(question_id: int | str, plain: Sequence[int], other: Sequence[int]) -> Parting | None:
    for place, (a, b) in enumerate(zip_longest(plain, other)):
        if a != b:
            return Parting(question_id, place, a, b)
    return None


def _figures(way: list[list[Run]], plain: list[list[Run]], places: Sequence[int]) -> Figures:
    """Of the questions at `places`."""
    mine, base = ([[repeat[place] for place in places] for repeat in runs] for runs in (way, plain))
    every = [run for repeat in mine for run in repeat]
    reached, stood = _added([run.reached for run in every]), _added([run.stood for run in every])
    rates, base_rates = [_rate(repeat) for repeat in mine], [_rate(repeat) for repeat in base]
    return Figures(
        prompts=len(places),
        tokens=sum(len(run.ids) for run in mine[0]),
        tokens_per_second=_spread(rates),
        first_token=_over([fmean(run.first for run in repeat) for repeat in mine]),
        tau=sum(len(run.ids) for run in every) / sum(run.passes for run in every),
        by_position=tuple(s / r for s, r in zip(stood, reached, strict=True) if r),
        speedup=_spread([a / b if a and b else None for a, b in zip(rates, base_rates, strict=True)]),
        request_speedup=_over([_whole(b) / _whole(a) for a, b in zip(mine, base, strict=True)]),
    )


def _rate(runs: Sequence[Run]) -> float | None:
    """Tokens per second after the first pass."""
    tokens, seconds = sum(max(len(run.ids) - run.at_once, 0) for run in runs), sum(run.rest for run in runs)
    return tokens / seconds if tokens else None


def _whole(runs: Sequence[Run]) -> float:
    """Seconds from the call to the last token."""
    return sum(run.first + run.rest for run in runs)


def _over(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return _over(known) if len(known) == len(values) else None
