"""How fast ways of generating are next to each other: the same prompts, in turns, in one process, at temperature 0.

Every repeat begins with fresh decoders, one for each way, which then get all prompts in order. So what a drafter
remembers of earlier texts (the suffix memory, ngram_mod's table) is what other prompts left there, as for a user, and
never the answer of an earlier repeat; what Auto learned of costs warms up in the same manner.

Figures are taken for each repeat and given as the median, the lowest and the highest of the repeats. There are none for
a way whose ids part from plain decoding's in any run, warm-up included.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.generate import stream_generate as mlx_lm_stream_generate

from .decoder import SpecDecoder
from .drafters import DEFAULT, DrafterOptions, by_name
from .drafters.pairing import check_tokenizers
from .errors import OptionError
from .generate import chat
from .target.model import CacheOptions
from .text import encode

MULTI_TURN = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Question:
    """A prompt in Spec-Bench's form: the first turn is what is asked."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]

    @property
    def group(self) -> str:
        """What it is reported under: MT-bench's eight categories are one group, "multi-turn"."""
        return "multi-turn" if self.category in MULTI_TURN else self.category


def read_questions(path: Path) -> list[Question]:
    """A file of one JSON object a line, with question_id, category and turns. Raises OptionError naming the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}; give a file of questions") from error
    questions = [_question(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise OptionError(f"{path} holds no questions; give one JSON object a line")
    return questions


def _question(line: bytes, place: str) -> Question:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{place} is not JSON: {error}; give question_id, category and turns") from error
    if not isinstance(row, dict):
        raise OptionError(f"{place} is {str(row)[:40]!r}; give an object with question_id, category and turns")
    number, category, turns = (row.get(key) for key in ("question_id", "category", "turns"))
    if not isinstance(number, int | str) or isinstance(number, bool):
        raise OptionError(f"{place} has the question_id {number!r}; give a number or text")
    if not (isinstance(category, str) and category):
        raise OptionError(f"{place} has the category {category!r}; give a text")
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)):
        raise OptionError(f"{place} has the turns {str(turns)[:40]!r}; give a list of texts")
    return Question(number, category, tuple(turns))


def choose(questions: Sequence[Question], each: int) -> list[Question]:
    """`each` questions of every group, or all if it has fewer: distinct, evenly spaced, in the order of the file."""
    if each < 1:
        raise OptionError(f"per_category is {each}; choose 1 or more")
    distinct: dict[str, Question] = {}
    for question in questions:
        distinct.setdefault(question.turns[0], question)
    groups: dict[str, list[Question]] = {}
    for question in distinct.values():
        groups.setdefault(question.group, []).append(question)
    return [
        group[place * len(group) // min(each, len(group))]
        for group in groups.values()
        for place in range(min(each, len(group)))
    ]


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
    draft_tokenizer: Any = None,
    num_draft_tokens: int | Literal["auto"] = "auto",
    max_tokens: int = 160,
    repeats: int = 3,
    ignore_chat_template: bool = False,
    cache: CacheOptions | None = None,
    options: DrafterOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Time every way on every question: plain decoding, mlx-lm's, and `drafters`, each a chain by names.

    After a warm-up on the first question the ways take turns on each question, every other time in reverse order.
    mlx-lm drafts with its own default where num_draft_tokens is "auto". `progress` is called with the requests made and
    their total. Raises OptionError for what cannot be measured.
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
    if draft_tokenizer is not None:
        check_tokenizers(tokenizer, draft_tokenizer)

    def ours(names: str | None) -> Way:
        @contextmanager
        def opened() -> Iterator[Runner]:
            makers = by_name(names, options) if names else []
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

    ways: dict[str, Way] = {"plain": ours(None), "mlx-lm": mlx_lms(None)}
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


PASSAGES = (
    "The lighthouse at Marren Point was built in 1871 after three cargo ships were lost on the reef in a single "
    "winter. Its lamp burned rape oil at first, then paraffin, and was visible for fourteen miles in clear weather."
    " A keeper and two assistants lived in the cottages below the tower and took turns to wind the clockwork that "
    "rotated the lens. In 1934 the lamp was electrified, and in 1988 the last keeper left when the light was "
    "automated. The cottages stood empty for ten years until a local trust turned them into a museum. About nine "
    "thousand visitors climb the 142 steps of the tower every summer, and the entrance fees pay for the upkeep of "
    "the lens, which is still the original one.",
    "The town council of Eastbrook voted on Tuesday to close the central market square to cars from the first of "
    "May. Delivery vans may still enter between six and ten in the morning, and residents of the square will "
    "receive permits. Shop owners were divided: the bakery and the two cafes welcomed the plan and hope to put "
    "tables outside, while the furniture shop fears that customers will not carry heavy goods to the car park on "
    "Mill Lane. The council promised to review the decision after one year and to publish the number of visitors, "
    "which is counted by cameras, every month. A similar plan in the neighbouring town of Westbrook raised the "
    "number of visitors by a fifth.",
)

BUILT_IN = (
    Question(1, "writing", ("Write a short letter to a friend about a walk in the rain.",)),
    Question(2, "coding", ("Write a Python function that returns the n-th Fibonacci number, and call it for n = 10.",)),
    Question(3, "extraction", ("List ten animals in alphabetical order with one fact about each.",)),
    Question(4, "translation", ("Translate to German: The library opens at nine and closes at five on weekdays.",)),
    Question(5, "translation", ("Translate to French: We missed the last train, so we walked home along the river.",)),
    Question(6, "translation", ("Translate to Spanish: My sister paints the old boats in the harbour every spring.",)),
    Question(7, "summarization", (f"Summarize: {PASSAGES[0]}",)),
    Question(8, "summarization", (f"Summarize: {PASSAGES[1]}",)),
    Question(9, "qa", ("Why is the sky blue during the day and red at sunset?",)),
    Question(10, "qa", ("What does a conductor do during a concert?",)),
    Question(11, "qa", ("How is bread made, and why does the dough rise?",)),
    Question(12, "math_reasoning", ("A train leaves at 9:40 and arrives at 12:15. How long does it travel?",)),
    Question(13, "math_reasoning", ("Tom buys 3 pens at 2 dollars and 4 books at 7 dollars. What does he pay?",)),
    Question(14, "math_reasoning", ("A tank holds 240 litres and loses 5 litres an hour. When is it half empty?",)),
    Question(15, "rag", (f"{PASSAGES[0]}\n\nHow was the lamp lit over the years? Quote the sentences that say so.",)),
    Question(16, "rag", (f"{PASSAGES[1]}\n\nWhat do the shop owners think? Quote the sentences that say so.",)),
)
