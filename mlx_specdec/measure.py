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
from itertools import count, zip_longest
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.generate import stream_generate as mlx_lm_stream_generate

from .decoder import SpecDecoder
from .drafters import DEFAULT, DrafterOptions, by_name
from .errors import OptionError
from .figures import Figures, Run, added, summary
from .generate import chat
from .questions import Question
from .target.model import CacheOptions
from .text import encode


@dataclass(frozen=True)
class Request:
    """A turn of a question, from 1 on. The prompt is the conversation until there, with plain decoding's answers."""

    question: Question
    turn: int
    prompt: list[int]


@dataclass(frozen=True)
class Parting:
    """The first token where a way's ids differ from plain decoding's, and both ids; None where the output has ended.
    Turns count from 1, places from 0."""

    question_id: int | str
    turn: int
    place: int
    plain: int | None
    other: int | None


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

    `loaded` has, by the names that chains call them, the drafters that `load` brought. A question of several turns is a
    conversation, as Spec-Bench has it: each turn is a request. After a warm-up on the first request the ways take turns
    on each, every other time in reverse order. mlx-lm drafts with its own default where num_draft_tokens is "auto".
    `progress` is called with the requests made and their total. Raises OptionError for what cannot be measured.
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
    brought = loaded or {}

    def ours(names: str) -> Way:
        @contextmanager
        def opened() -> Iterator[Runner]:
            makers = [brought.get(make, make) if isinstance(make, str) else make for make in by_name(names, options)]
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
    turns = sum(len(question.turns) for question in questions)
    total = turns - len(questions) + len(ways) * (1 + repeats * turns)
    done = count(1)

    def step() -> None:
        if progress is not None:
            progress(next(done), total)

    with ways["plain"]() as run:
        requests = conversations(tokenizer, questions, ignore_chat_template, run, step)
    results = {name: Result(name not in ("plain", "mlx-lm")) for name in ways}
    runs = _runs(ways, results, requests, repeats, step)
    for name, result in results.items():
        if not result.out:
            result.categories = {
                group: summary(runs[name], runs["plain"], places) for group, places in _groups(requests).items()
            }
            result.overall = summary(runs[name], runs["plain"], range(turns))
    asked: dict[str, list[int | str]] = {}
    for question in questions:
        asked.setdefault(question.group, []).append(question.question_id)
    return Report(asked, max_tokens, num_draft_tokens, repeats, str(mx.default_device()), results)


def _groups(requests: Sequence[Request]) -> dict[str, list[int]]:
    """Places by group."""
    groups: dict[str, list[int]] = {}
    for place, request in enumerate(requests):
        groups.setdefault(request.question.group, []).append(place)
    return groups


def conversations(
    tokenizer: Any, questions: Sequence[Question], ignore_chat_template: bool, plain: Runner, step: Callable[[], None]
) -> list[Request]:
    """All turns of all questions, in order. What the model does not take is said before any answer is waited for, but
    for a conversation that grows too long."""
    template = tokenizer.has_chat_template and not ignore_chat_template

    def prompt(question: Question, turn: int, *texts: str) -> list[int]:
        try:
            ids = chat(tokenizer, *texts) if template else encode(tokenizer, "".join(texts))
            plain(ids)  # a stream that is never asked for a token
        except OptionError as error:
            raise OptionError(f"{named(question.question_id, turn)}: {error}") from error
        return ids

    for question in questions:
        for number, turn in enumerate(question.turns, 1):
            prompt(question, number, turn)
    requests: list[Request] = []
    for question in questions:
        said: list[str] = []
        for number, turn in enumerate(question.turns, 1):
            if said:
                said.append("".join(response.text for response in plain(requests[-1].prompt)))
                step()
            said.append(turn if template or not said else f"\n\n{turn}")
            requests.append(Request(question, number, prompt(question, number, *said)))
    return requests


def named(question_id: int | str, turn: int) -> str:
    """What a person reads of a request."""
    return f"question {question_id}" + (f" turn {turn}" if turn > 1 else "")


def _runs(
    ways: dict[str, Way],
    results: dict[str, Result],
    requests: Sequence[Request],
    repeats: int,
    step: Callable[[], None],
) -> dict[str, list[list[Run]]]:
    """By way, repeat and request. A way that parts from plain decoding's ids says so in `results` and is left out."""
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in range(repeats)] for name in ways}
    for repeat in range(-1, repeats):  # the warm-up is -1
        with ExitStack() as opened:
            runners = {name: opened.enter_context(way()) for name, way in ways.items()}
            for place, request in enumerate(requests if repeat >= 0 else requests[:1]):
                made: dict[str, Run] = {}
                for name in list(ways)[:: -1 if (repeat + place) % 2 else 1]:
                    if not results[name].out:
                        try:
                            made[name] = timed(runners[name], request.prompt)
                        except _Refused as refused:
                            results[name].refused = str(refused)
                    step()
                for name, run in made.items():
                    results[name].parting = _parting(request, made["plain"].ids, run.ids)
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
        reached=added([d.reached for d in drafters]),
        stood=added([d.stood for d in drafters]),
    )


def _parting(request: Request, plain: Sequence[int], other: Sequence[int]) -> Parting | None:
    for place, (a, b) in enumerate(zip_longest(plain, other)):
        if a != b:
            return Parting(request.question.question_id, request.turn, place, a, b)
    return None
