"""The bench: what is compared, what is reported of it, and that there is no figure for another text."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result

from mlx_specdec import OptionError, SpecDecError, acceptance, bench, measure
from mlx_specdec.__main__ import main
from mlx_specdec.bench import command as bench_command
from mlx_specdec.drafters import DrafterOptions
from mlx_specdec.figures import Figures, Run, Spread, summary
from mlx_specdec.measure import Parting, Report, Request
from mlx_specdec.questions import Question
from tests import zoo
from tests.scripted import reference
from tests.test_commands import CHOSEN, accept_all, refused, save
from tests.test_questions import SPEC_BENCH, written

VOCAB = 300
MODEL, TOKENIZER = zoo.build("llama", vocab=VOCAB), zoo.tokenizer(VOCAB)
DRAFT = zoo.draft_of("llama", noise=zoo.NOISE[1], vocab=VOCAB)
EAGER = DrafterOptions(ngram_n=1, ngram_m=4)
QUESTIONS = (
    Question(81, "writing", ("the rain in spain stays mainly in the plain", "and now in rhyme")),
    Question(91, "roleplay", ("one two three one two three one two",)),
    Question(241, "summarization", ("the rain the rain the rain the rain",)),
    Question("mine", "poems", ("roses are red",)),
)
DRAFTERS = ("ngram_simple", "suffix", "ngram_map,draft_model", "draft_model")


def measured(drafters: Sequence[str] = DRAFTERS, questions: Sequence[Question] = QUESTIONS, **more: Any) -> Report:
    options: dict[str, Any] = {"draft_model": DRAFT, "num_draft_tokens": 4, "max_tokens": 12, "repeats": 2}
    return measure.measure(MODEL, TOKENIZER, questions, drafters, options=EAGER, **options | more)


@pytest.fixture(scope="module")
def report() -> Report:
    return measured()


# measuring


def conversation(question: Question, max_tokens: int = 12) -> list[list[int]]:
    """The target's answers to a question's turns, by its own loop."""
    messages: list[dict[str, str]] = []
    answers = []
    for turn in question.turns:
        messages.append({"role": "user", "content": turn})
        prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)
        answers.append(reference(MODEL, prompt, max_tokens))
        text = TOKENIZER.decode([token for token in answers[-1] if token not in TOKENIZER.eos_token_ids])
        messages.append({"role": "assistant", "content": text})
    return answers


def test_every_way_gives_the_same_ids_and_has_figures(report: Report) -> None:
    assert list(report.ways) == ["plain", "mlx-lm", "mlx-lm draft", *DRAFTERS]
    assert report.questions == {"multi-turn": [81, 91], "summarization": [241], "poems": ["mine"]}
    answers = [answer for question in QUESTIONS for answer in conversation(question)]
    tokens = [len(answer) for answer in answers]
    for name, result in report.ways.items():
        assert (result.parting, result.refused) == (None, None), name
        assert result.categories is not None
        assert result.overall is not None
        assert list(result.categories) == list(report.questions)
        assert [f.prompts for f in result.categories.values()] == [3, 1, 1]
        assert [f.tokens for f in result.categories.values()] == [sum(tokens[:3]), *tokens[3:]]
        assert result.overall.tokens == sum(tokens)
        for figures in (*result.categories.values(), result.overall):
            for spread in (figures.first_token, figures.tokens_per_second, figures.speedup, figures.request_speedup):
                assert spread is not None
                assert 0 < spread.low <= spread.median <= spread.high
    overall = {name: result.overall for name, result in report.ways.items() if result.overall}
    assert overall["plain"].speedup == overall["plain"].request_speedup == Spread(1, 1, 1)
    assert overall["plain"].tau == overall["mlx-lm"].tau == 1
    # The same drafts stand in the same places, so mlx-lm's tokens a pass, counted from its responses, are ours.
    assert overall["draft_model"].tau == overall["mlx-lm draft"].tau > 1.5
    assert len(overall["draft_model"].by_position) == 4
    assert all(0 < rate <= 1 for rate in overall["draft_model"].by_position)
    assert overall["mlx-lm draft"].by_position == overall["plain"].by_position == ()


@pytest.mark.parametrize("ignore_chat_template", [False, True])
def test_a_later_turn_is_asked_after_plain_decoding_s_answers(
    ignore_chat_template: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[int]] = []
    timed = measure.timed

    def noted(run: Any, prompt: list[int]) -> Run:
        prompts.append(prompt)
        return timed(run, prompt)

    monkeypatch.setattr(measure, "timed", noted)
    question = Question(1, "writing", ("the rain in spain", "in rhyme", "and in prose"))
    measured((), [question], draft_model=None, repeats=1, ignore_chat_template=ignore_chat_template)
    said = list(question.turns[:1])
    for number in range(3):
        if ignore_chat_template:
            later = (f"\n\n{text}" if i and i % 2 == 0 else text for i, text in enumerate(said))
            prompt = TOKENIZER.encode("".join(later))  # the model's words go on where it wrote them
        else:
            messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
            prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)
        assert prompts[2:][2 * number : 2 * number + 2] == [prompt, prompt], number
        answer = [token for token in reference(MODEL, prompt, 12) if token not in TOKENIZER.eos_token_ids]
        said += [TOKENIZER.decode(answer), *question.turns[number + 1 : number + 2]]


def test_a_parting_in_a_later_turn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, asked = measure.timed, iter(range(100))

    def wrong(run: Any, prompt: list[int]) -> Run:
        made = timed(run, prompt)
        return replace(made, ids=(*made.ids[:-1], -1)) if next(asked) == 5 else made  # the second way's second turn

    monkeypatch.setattr(measure, "timed", wrong)
    report = measured((), QUESTIONS[:1], draft_model=None, repeats=1)
    parting = next(result.parting for result in report.ways.values() if result.parting)
    assert (parting.question_id, parting.turn, parting.place) == (81, 2, 11)


def test_a_conversation_that_grows_too_long_is_said_and_bad_turns_before_any_answer() -> None:
    long = [Question(3, "writing", ("word " * 600, "word " * 600))]
    with pytest.raises(OptionError, match="question 3 turn 2: "):
        measured((), long, draft_model=None, max_tokens=2)
    steps: list[tuple[int, int]] = []
    bad = [QUESTIONS[0], Question(4, "writing", ("a", "\ud800"))]
    with pytest.raises(OptionError, match="question 4 turn 2: "):
        measured((), bad, progress=lambda *step: steps.append(step))
    assert not steps


def test_auto_runs_and_progress_reaches_its_total() -> None:
    steps: list[tuple[int, int]] = []
    report = measured(("suffix",), QUESTIONS[:2], num_draft_tokens="auto", draft_model=None,
                      progress=lambda *step: steps.append(step))  # fmt: skip
    assert list(report.ways) == ["plain", "mlx-lm", "suffix"]
    assert not report.ways["suffix"].out
    assert steps == [(i, 22) for i in range(1, 23)]  # an answer, 3 in the warm-up, 2 repeats of 3 ways and 3 turns


def test_a_repeat_does_not_remember_the_answers_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_specdec.drafters.suffix import SuffixMemory

    requests: list[int] = []
    add = SuffixMemory.add

    def counted(self: SuffixMemory, output: Sequence[int]) -> None:
        if output:
            requests.append(self.requests)
        add(self, output)

    monkeypatch.setattr(SuffixMemory, "add", counted)
    measured(("suffix",), QUESTIONS[:3], draft_model=None)
    assert requests == [0, 0, 1, 2, 3, 0, 1, 2, 3]  # the warm-up, then both repeats


def test_the_ways_take_turns_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    timed = measure.timed

    def noted(run: Any, prompt: list[int]) -> Run:
        order.append("mlx-lm" if "mlx_lms" in run.__qualname__ else "ours")
        return timed(run, prompt)

    monkeypatch.setattr(measure, "timed", noted)
    measured((), QUESTIONS[1:3], draft_model=None)
    a, b = "ours", "mlx-lm"
    assert order[2:] == [a, b, b, a, b, a, a, b]


def test_figures_are_sums_over_prompts_and_medians_over_repeats() -> None:
    def run(first: float, rest: float, at_once: int = 1, passes: int = 9) -> Run:
        return Run(tuple(range(9)), first, rest, at_once, passes, (4, 3), (3, 0))

    plain = [[run(1, 8), run(3, 8)]] * 3
    way = [[run(1, 2, 3, 3), run(1, 4)], [run(1, 1), run(1, 1)], [run(1, 16), run(1, 16)]]
    found = summary(way, plain, [0, 1])
    assert found == Figures(
        prompts=2,
        tokens=18,
        tokens_per_second=Spread(14 / 6, 0.5, 8.0),
        first_token=Spread(1, 1, 1),
        tau=54 / 48,
        by_position=(3 / 4, 0.0),
        speedup=Spread(14 / 6, 0.5, 8.0),
        request_speedup=Spread(20 / 8, 20 / 34, 20 / 4),
    )
    assert summary(way, plain, [1]).first_token == Spread(1, 1, 1)
    at_once = [[run(1, 0, 9, 1)]]
    assert summary(at_once, [[run(1, 8)]], [0]).speedup is None  # nothing came after the first pass


def test_requests_are_read_off_the_responses() -> None:
    class Response:
        def __init__(self, token: int, from_draft: bool):
            self.token, self.from_draft = token, from_draft

    def of(flags: str) -> Run:
        return measure.timed(lambda _: iter([Response(i, flag == "d") for i, flag in enumerate(flags)]), [0])

    assert [(of(f).at_once, of(f).passes) for f in ("t", "tt", "ddt", "ddtdt", "tdd", "dd")] == [
        (1, 1), (1, 2), (3, 1), (3, 2), (1, 2), (3, 1),
    ]  # fmt: skip
    assert of("ddt").ids == (0, 1, 2)


@pytest.mark.parametrize(("plain", "other", "parting"), [
    ((1, 2), (1, 2), None), ((1, 2), (1, 3), Parting("q", 2, 1, 2, 3)), ((1, 2), (1,), Parting("q", 2, 1, 2, None)),
    ((1,), (1, 2), Parting("q", 2, 1, None, 2)),
])  # fmt: skip
def test_where_ids_part(plain: tuple[int, ...], other: tuple[int, ...], parting: Parting | None) -> None:
    request = Request(Question("q", "writing", ("a", "b")), 2, [1])
    assert measure._parting(request, plain, other) == parting


def test_a_way_that_mlx_lm_refuses_is_said() -> None:
    model = zoo.build("mamba2", vocab=VOCAB)
    report = measure.measure(model, TOKENIZER, QUESTIONS[:1], ("draft_model",), draft_model=model, num_draft_tokens=2,
                             max_tokens=6, repeats=1)  # fmt: skip
    assert "trimmable" in (report.ways["mlx-lm draft"].refused or "")
    assert report.ways["mlx-lm draft"].overall is None
    assert report.ways["draft_model"].overall is not None
    assert "mlx-lm draft: no figures, mlx-lm refuses: " in bench.text(report, TOKENIZER)


@pytest.mark.parametrize(("changes", "kind", "says"), [
    ({"num_draft_tokens": 0}, OptionError, "num_draft_tokens is 0"),
    ({"max_tokens": 1}, OptionError, "max_tokens is 1"),
    ({"repeats": 0}, OptionError, "repeats is 0"),
    ({"questions": ()}, OptionError, "no questions"),
    ({"drafters": ("suffix", "suffix")}, OptionError, "once"),
    ({"drafters": ("magic",)}, OptionError, "'magic'"),
    ({"drafters": ("draft_model",), "draft_model": None}, OptionError, "--draft-model"),
    ({"questions": [Question(7, "qa", ("word " * 3000,))]}, OptionError, "question 7: "),
    ({"questions": [Question(8, "qa", ("\ud800",))]}, OptionError, "question 8: "),
], ids=lambda value: str(value)[:40].encode("ascii", "replace").decode())  # fmt: skip
def test_what_cannot_be_measured_is_said(changes: dict[str, Any], kind: type[SpecDecError], says: str) -> None:
    with pytest.raises(kind, match=re.escape(says)):
        measured(**changes)


# the text and the plot


def test_the_text_has_a_table_for_each_category_and_for_all(report: Report) -> None:
    blocks = bench.text(report, TOKENIZER).split("\n\n")
    assert blocks[0].startswith(str(mx.default_device()))
    titles = [block.splitlines()[0] for block in blocks[1:5]]
    assert titles == [
        "multi-turn: 2 questions, 3 turns", "summarization: 1 question", "poems: 1 question",
        "overall: 4 questions, 5 turns",
    ]  # fmt: skip
    for block in blocks[1:5]:
        header, *rows = block.splitlines()[1:]
        assert header.split() == ["way", "tokens/s", "first", "token,", "s", "tau", "speed-up"]
        assert [re.split(r" {2,}", row.strip())[0] for row in rows] == list(report.ways)
    assert blocks[5].startswith("acceptance by position")
    assert [line.split()[0] for line in blocks[5].splitlines()[1:]] == list(DRAFTERS)


def test_the_text_says_plainly_when_speculation_loses(report: Report) -> None:
    def figures(speedup: float) -> Figures:
        once = Spread(1.0, 1.0, 1.0)
        return Figures(1, 9, once, once, 1.0, (0.0,), Spread(speedup, speedup, speedup), once)

    ways = {
        "plain": measure.Result(False, categories={"qa": figures(1), "rag": figures(1)}, overall=figures(1)),
        "mlx-lm": measure.Result(False, categories={"qa": figures(0.5), "rag": figures(1)}, overall=figures(0.7)),
        "suffix": measure.Result(True, categories={"qa": figures(0.9), "rag": figures(1.5)}, overall=figures(0.97)),
        "ngram_map": measure.Result(True, categories={"qa": figures(1.2), "rag": figures(1)}, overall=figures(1.1)),
    }
    lines = bench.text(Report({"qa": [1], "rag": [2]}, 9, "auto", 1, "cpu", ways), TOKENIZER).splitlines()
    assert lines[-1] == "suffix is slower than plain decoding: qa (0.90x), overall (0.97x)"
    assert sum("is slower than" in line for line in lines) == 1


@pytest.fixture(scope="module")
def broken() -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "match", accept_all)
        return measured(("draft_model",), QUESTIONS[:2], max_tokens=30, repeats=1)


def test_no_figure_for_a_way_whose_ids_part(broken: Report) -> None:
    result = broken.ways["draft_model"]
    assert (result.categories, result.overall) == (None, None)
    assert result.parting is not None
    assert result.parting.plain != result.parting.other
    assert broken.ways["mlx-lm draft"].overall is not None
    text = bench.text(broken, TOKENIZER)
    lines = [line for line in text.splitlines() if line.strip().startswith("draft_model")]
    assert len(lines) == 1
    start = f"draft_model: no figures, its ids are not plain decoding's: they part at token {result.parting.place} of "
    assert lines[0].startswith(f"{start}question {result.parting.question_id}, ")
    assert repr(TOKENIZER.decode([result.parting.plain])) in lines[0]
    ended = bench.parted(Parting(7, 1, 3, 5, None), TOKENIZER)
    assert ended == f"they part at token 3 of question 7, {TOKENIZER.decode([5])!r} there and the end here"
    assert "of question 7 turn 2, " in bench.parted(Parting(7, 2, 3, 5, None), TOKENIZER)


PNG = b"\x89PNG\r\n\x1a\n"


def test_the_plot_is_a_png(report: Report, broken: Report, tmp_path: Path) -> None:
    from mlx_specdec import plots

    for number, drawn in enumerate((report, broken)):
        path = tmp_path / f"{number}.png"
        plots.check(path)
        plots.draw(drawn, path)
        assert path.read_bytes().startswith(PNG)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(OptionError, match="cannot be written"):
        plots.draw(report, tmp_path / "folder.png")


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mlx_specdec import plots

    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"mlx-specdec\[plot\]"):
        plots.check(tmp_path / "a.png")


# the command


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("bench")
    rows = [{"question_id": q.question_id, "category": q.category, "turns": q.turns} for q in QUESTIONS]
    made = {
        "model": save(MODEL, TOKENIZER, root / "model"),
        "draft": save(DRAFT, TOKENIZER, root / "draft"),
        "questions": written(root / "questions.jsonl", rows),
        "bad": written(root / "bad.jsonl", [rows[0], {"question_id": 1}]),
        "none": written(root / "none.jsonl", []),
        "root": root,
    }
    return {name: str(path) for name, path in made.items()}


BENCH = (
    "bench",
    "--model",
    "{model}",
    "--questions",
    "{questions}",
    "--per-category",
    "1",
    "-m",
    "6",
    "--repeats",
    "1",
)


def run(arguments: Sequence[str], folders: dict[str, str]) -> Result:
    return CliRunner().invoke(main, [a.format_map(folders) for a in (*BENCH, *arguments)])


def test_json(folders: dict[str, str]) -> None:
    plot = Path(folders["root"]) / "plot.png"
    done = run(["--draft-model", "{draft}", "--drafters", "suffix; ngram_map,draft_model", "--num-draft-tokens", "3",
                "--json", "--plot", str(plot)], folders)  # fmt: skip
    assert (done.exit_code, done.stderr) == (0, "")
    assert plot.read_bytes().startswith(PNG)
    found = json.loads(done.stdout)
    assert found.keys() == {
        "model", "draft_model", "questions", "max_tokens", "num_draft_tokens", "repeats", "device", "ways",
    }  # fmt: skip
    assert (found["max_tokens"], found["num_draft_tokens"], found["repeats"]) == (6, 3, 1)
    assert found["questions"] == {"multi-turn": [81], "summarization": [241], "poems": ["mine"]}
    assert list(found["ways"]) == ["plain", "mlx-lm", "mlx-lm draft", "suffix", "ngram_map,draft_model"]
    for way in found["ways"].values():
        assert way.keys() == {"speculates", "parting", "refused", "categories", "overall"}
        assert way["parting"] is way["refused"] is None
        assert way["categories"].keys() == found["questions"].keys()
        assert way["overall"].keys() == {
            "prompts", "tokens", "tokens_per_second", "first_token", "tau", "by_position", "speedup", "request_speedup",
        }  # fmt: skip
        assert way["overall"]["first_token"].keys() == {"median", "low", "high"}


def test_text_and_the_default_drafters(folders: dict[str, str]) -> None:
    done = run([], folders)
    assert (done.exit_code, done.stderr) == (0, CHOSEN)
    assert "overall: 3 questions, 4 turns" in done.stdout
    for lists in ("suffix;ngram_simple", "auto;ngram_simple"):
        done = run(["--drafters", lists, "--ngram-n", "2"], folders)
        assert (done.exit_code, "does not use it" in done.stderr) == (0, False)
    assert "\n  suffix " in done.stdout
    assert "\n  draft_model " in run(["--draft-model", "{draft}"], folders).stdout


def test_a_broken_rule_is_noticed(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "match", accept_all)
    done = run(["--draft-model", "{draft}", "--num-draft-tokens", "4", "-m", "20"], folders)
    assert done.exit_code == 0
    assert "draft_model: no figures, its ids are not plain decoding's: they part at token " in done.stdout
    assert "\n  draft_model " not in done.stdout


@pytest.mark.parametrize(("arguments", "says"), [
    (("--questions", "{bad}"), ("bad.jsonl line 3", "category None")),
    (("--questions", "{none}"), ("holds no questions",)),
    (("--questions", "{root}"), ("cannot be read",)),
    (("--questions", "{root}/nowhere"), ("nowhere", "cannot be read")),
    (("--drafters", "suffix;magic"), ("'magic'",)),
    (("--drafters", ""), ("there is no drafter ''",)),
    (("--drafters", "suffix;suffix"), ("once",)),
    (("--drafters", "draft_model"), ("--draft-model",)),
    (("--drafter", "suffix"), ("--drafter",)),
    (("--ngram-n", "0", "--drafters", "ngram_simple"), ("ngram_n is 0",)),
    (("--ngram-n", "2", "--drafters", "suffix;ngram_mod"), ("--ngram-n is 2", "suffix,ngram_mod", "uses that")),
    (("--num-draft-tokens", "0"), ("num_draft_tokens is 0",)),
    (("--num-draft-tokens", "few"), ("few",)),
    (("--per-category", "0"), ("per_category is 0",)),
    (("--max-tokens", "-1"), ("max_tokens is -1",)),
    (("--repeats", "0"), ("repeats is 0",)),
    (("--kv-bits", "7"), ("kv_bits is 7",)),
    (("--model", "{root}/nowhere"), ("does not exist",)),
    (("--plot", "a.jpg"), ("a.jpg", ".png")),
    (("--plot", "{root}/no/a.png"), ("is no folder",)),
], ids=lambda value: " ".join(value)[:40])  # fmt: skip
def test_one_sentence_for_what_cannot_be_used(
    arguments: tuple[str, ...], says: tuple[str, ...], folders: dict[str, str]
) -> None:
    refused(run(arguments, folders), *says)


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with bench.progress_bar() as progress:
        assert progress is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with bench.progress_bar() as progress:
        assert progress is not None
        for done in range(1, 5):
            progress(done, 4)
    said = capsys.readouterr()
    assert said.out == ""
    assert "100%" in said.err


def test_the_command_of_the_module_is_that_of_the_group() -> None:
    assert main.commands["bench"] is bench_command


def test_a_kept_memory_is_read_anew_for_every_repeat_and_never_written(folders: dict[str, str], tmp_path: Path) -> None:
    """What one repeat said must not draft the next one's answer."""
    questions, memory = written(tmp_path / "q.jsonl", SPEC_BENCH[:1]), tmp_path / "memory"
    arguments = ["--questions", str(questions), "--drafters", "suffix", "--repeats", "3", "-m", "30",
                 "--num-draft-tokens", "4"]  # fmt: skip
    alone = run([*arguments, "--json"], folders)
    kept = run([*arguments, "--suffix-cache", str(memory), "--json"], folders)
    assert (alone.exit_code, kept.exit_code) == (0, 0), kept.output
    assert not memory.exists()
    taus = [json.loads(done.stdout)["ways"]["suffix"]["overall"]["tau"] for done in (alone, kept)]
    assert taus[0] == taus[1]
