"""`python -m mlx_specdec.bench`: how much faster, on which kind of prompt, and whether at all."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .cli import Command, DraftTokens, ModelOptions, model_options

if TYPE_CHECKING:
    from .figures import Figures, Spread
    from .measure import Parting, Report

POSITIONS = 8  # of a draft, as many as are printed


@click.command("bench", cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@partial(model_options, drafter=False, keeps=False)
@click.option("--drafters", help="What is compared: lists of drafters, a semicolon between them, as in "
              "'suffix;ngram_map,suffix'. Default: that of generate.")  # fmt: skip
@click.option("--num-draft-tokens", type=DraftTokens(), default="auto", show_default=True,
              help="Most tokens drafted in a round; auto chooses by measurement.")  # fmt: skip
@click.option("--questions", type=click.Path(path_type=Path), help="Questions in Spec-Bench's form. Default: a few.")
@click.option("--per-category", default=5, show_default=True, help="Most questions of each category.")
@click.option("--max-tokens", "-m", default=160, show_default=True, help="Most tokens of an answer.")
@click.option("--repeats", default=3, show_default=True, help="How often everything is measured.")
@click.option("--ignore-chat-template", is_flag=True, help="Prompts as they are, later turns after a blank line.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw it in this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def command(
    models: ModelOptions,
    drafters: str | None,
    num_draft_tokens: Any,
    questions: Path | None,
    per_category: int,
    max_tokens: int,
    repeats: int,
    ignore_chat_template: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure drafters against plain decoding and mlx-lm's, at temperature 0. There are figures only for what gives
    plain decoding's ids."""
    import mlx.nn as nn

    from . import plots
    from .choice import AUTO
    from .measure import measure
    from .questions import BUILT_IN, choose, read_questions

    # A wrong file or name is said before a model is loaded.
    chosen = choose(BUILT_IN if questions is None else read_questions(questions), per_category)
    default = "draft_model" if models.draft_model else AUTO
    chains = [default] if drafters is None else [chain.strip() for chain in drafters.split(";")]
    options, cache = models.drafter_options(), models.cache_options()
    named = {make for chain in chains for make in models.makers(chain, ",".join(chains)) if isinstance(make, str)}
    if plot is not None:
        plots.check(plot)
    model, tokenizer = models.load(models.model)
    if models.draft_model:
        named.add("draft_model")
    loaded = {name: models.load_drafter(name, model, tokenizer) for name in sorted(named)}
    if AUTO in chains:
        choice = models.choose(model, tokenizer, cache, ",".join(chains))
        chains = list(dict.fromkeys(choice.name if chain == AUTO else chain for chain in chains))
        if choice.drafter is not None:
            loaded[choice.name] = choice.drafter
    whole = isinstance(loaded.get("draft_model"), nn.Module)  # which mlx-lm can draft with too
    draft_model = loaded.pop("draft_model") if whole else None
    with progress_bar() as progress:
        report = measure(
            model,
            tokenizer,
            chosen,
            chains,
            draft_model=draft_model,
            num_draft_tokens=num_draft_tokens,
            max_tokens=max_tokens,
            repeats=repeats,
            ignore_chat_template=ignore_chat_template,
            cache=cache,
            options=options,
            loaded=loaded,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps({"model": models.model, "draft_model": models.draft_model} | report.as_dict()))
    else:
        click.echo(text(report, tokenizer))
    if plot is not None:
        plots.draw(report, plot)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """What shows progress, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label="measuring", file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield show


def text(report: "Report", tokenizer: Any) -> str:
    """A table for each category and for all, acceptance by position, and what must be said in words."""
    drafts = report.num_draft_tokens
    lines = [f"{report.device}, temperature 0, at most {report.max_tokens} tokens an answer, "
             f"{'drafts of any length' if drafts == 'auto' else f'at most {drafts} drafts a round'}; "
             f"medians over {report.repeats} repeat{'s'[: report.repeats != 1]} (lowest to highest); a speed-up is the "
             "median of the repeats' ratios, and ~ marks one whose range includes 1"]  # fmt: skip
    sound = {name: result for name, result in report.ways.items() if result.categories and result.overall}
    for group, ids in report.questions.items():
        lines += table(group, len(ids), {name: result.categories[group] for name, result in sound.items()})  # type: ignore[index]
    total = sum(len(ids) for ids in report.questions.values())
    whole = {name: result.overall for name, result in sound.items() if result.overall}
    lines += table("overall", total, whole)
    drafted = {name: figures.by_position for name, figures in whole.items() if figures.by_position}
    if drafted:
        lines += ["", "acceptance by position: the share of drafts that stood, of those that got there"]
        lines += [f"  {name:24s}" + "".join(f" {rate:5.2f}" for rate in r[:POSITIONS]) for name, r in drafted.items()]
    lines.append("")
    lost: dict[str, list[str]] = {}
    for name, group, speedup in report.losses():
        lost.setdefault(name, []).append(f"{group} ({speedup:.2f}x)")
    lines += [f"{name} is slower than plain decoding: {', '.join(where)}" for name, where in lost.items()]
    for name, result in report.ways.items():
        if result.refused is not None:
            lines.append(f"{name}: no figures, mlx-lm refuses: {result.refused}")
        if result.parting is not None:
            lines.append(f"{name}: no figures, its ids are not plain decoding's: {parted(result.parting, tokenizer)}")
    return "\n".join(lines).rstrip()


def table(title: str, questions: int, rows: "dict[str, Figures]") -> list[str]:
    """Of one category. Tokens per second are of generation alone; tau is tokens a pass."""
    turns = rows["plain"].prompts
    asked = f"{questions} question{'s'[: questions != 1]}" + (f", {turns} turns" if turns > questions else "")
    head = f"  {'way':24s} {'tokens/s':>24s} {'first token, s':>24s} {'tau':>6s} {'speed-up':>21s}"
    return ["", f"{title}: {asked}", head] + [
        f"  {name:24s} {spread(f.tokens_per_second, 1):>24s} {spread(f.first_token, 3):>24s} {f.tau:6.2f} "
        f"{'' if name == 'plain' else noisy(f.speedup) + spread(f.speedup, 2):>21s}".rstrip()
        for name, f in rows.items()
    ]


def noisy(value: "Spread | None") -> str:
    return "~" if value is not None and value.low < 1 < value.high else ""


def spread(value: "Spread | None", digits: int) -> str:
    """The median and, in brackets, the lowest and the highest where they are known."""
    if value is None:
        return "-"
    if value.low == value.high:
        return f"{value.median:.{digits}f}"
    return f"{value.median:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"


def parted(parting: "Parting", tokenizer: Any) -> str:
    """Where, and with what."""
    from .measure import named

    plain, other = ("the end" if t is None else repr(tokenizer.decode([t])) for t in (parting.plain, parting.other))
    request = named(parting.question_id, parting.turn)
    return f"they part at token {parting.place} of {request}, {plain} there and {other} here"


if __name__ == "__main__":
    command(prog_name="python -m mlx_specdec.bench")
