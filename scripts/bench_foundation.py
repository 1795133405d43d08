"""The figures of the README's "Speed" section: interleaved runs in one process, medians over repeats. Of a question of
several turns the first is asked.

python scripts/bench_foundation.py plain
python scripts/bench_foundation.py draft
python scripts/bench_foundation.py ngram --questions spec_bench_question.jsonl
python scripts/bench_foundation.py worst --questions spec_bench_question.jsonl
python scripts/bench_foundation.py host
python scripts/bench_foundation.py memory
"""

import mlx_specdec  # isort: skip  # before mlx.core

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import mlx.core as mx
from mlx_lm.generate import stream_generate as mlx_lm_stream_generate

from mlx_specdec import SamplingParams, SpecDecoder
from mlx_specdec.drafters import DrafterOptions, by_name
from mlx_specdec.generate import chat
from mlx_specdec.proof import PROMPTS
from mlx_specdec.questions import choose, read_questions

Run = Callable[[list[int]], tuple[list[int], float]]  # prompt -> ids, and the seconds they took


def load() -> tuple[Any, Any]:
    return mlx_specdec.load("smollm2-135m", dtype="float32")


def ours(decoder: SpecDecoder, tokens: int, drafts: int | None = None, prefill: bool = True) -> Run:
    """`prefill` False counts from the end of reading the prompt, which is the same for every drafter."""

    def run(prompt: list[int]) -> tuple[list[int], float]:
        marks = [time.perf_counter()]
        responses = decoder.stream(
            prompt,
            max_tokens=tokens,
            num_draft_tokens=drafts,
            prompt_progress_callback=lambda *_: marks.append(time.perf_counter()),
        )
        ids = [r.token for r in responses]
        return ids, time.perf_counter() - marks[0 if prefill else -1]

    return run


def mlx_lms(model: Any, tokenizer: Any, tokens: int, **options: Any) -> Run:
    def run(prompt: list[int]) -> tuple[list[int], float]:
        start = time.perf_counter()
        ids = [r.token for r in mlx_lm_stream_generate(model, tokenizer, prompt, max_tokens=tokens, **options)]
        return ids, time.perf_counter() - start

    return run


def compare(ways: dict[str, Run], prompts: list[list[int]], repeats: int) -> dict[str, float]:
    """Seconds by way: the median over repeats, summed over prompts. Ways take turns, and the ids must be the same."""
    for run in ways.values():
        run(prompts[0])  # the warm-up
    total = dict.fromkeys(ways, 0.0)
    for number, prompt in enumerate(prompts):
        times: dict[str, list[float]] = {name: [] for name in ways}
        outputs = set()
        for repeat in range(repeats):
            order = list(ways) if (number + repeat) % 2 == 0 else list(ways)[::-1]
            for name in order:
                ids, seconds = ways[name](prompt)
                outputs.add(tuple(ids))
                times[name].append(seconds)
        assert len(outputs) == 1, "the ids differ: no figure"
        for name, measured in times.items():
            total[name] += median(measured)
    return total


def say(times: dict[str, float], base: str) -> None:
    for name, seconds in times.items():
        click.echo(f"  {name:28s} {seconds:7.3f} s   {times[base] / seconds:5.2f} x {base}")


@click.group()
def main() -> None:
    """Measure the default model, float32 on a CPU."""


@main.command()
@click.option("--tokens", default=128)
@click.option("--repeats", default=4)
def plain(tokens: int, repeats: int) -> None:
    """Our plain decoding against mlx-lm's."""
    model, tokenizer = load()
    prompts = [chat(tokenizer, text) for text in PROMPTS[:3]]
    with SpecDecoder(model, tokenizer) as decoder:
        ways = {"mlx-lm": mlx_lms(model, tokenizer, tokens), "plain": ours(decoder, tokens)}
        say(compare(ways, prompts, repeats), "mlx-lm")


@main.command()
@click.option("--tokens", default=96)
@click.option("--repeats", default=2)
@click.option("--drafts", default=3)
def draft(tokens: int, repeats: int, drafts: int) -> None:
    """Our draft-model decoding against mlx-lm's, the draft being the model itself."""
    model, tokenizer = load()
    prompts = [chat(tokenizer, text) for text in PROMPTS[:3]]
    with SpecDecoder(model, tokenizer, draft_model=model) as decoder:
        theirs = mlx_lms(model, tokenizer, tokens, draft_model=model, num_draft_tokens=drafts)
        say(compare({"mlx-lm": theirs, "draft_model": ours(decoder, tokens, drafts)}, prompts, repeats), "mlx-lm")


@main.command()
@click.option(
    "--questions", type=click.Path(exists=True, path_type=Path), required=True, help="Spec-Bench's question.jsonl."
)
@click.option("--group", multiple=True, default=("summarization", "rag"))
@click.option("--each", default=5, help="Prompts of each group.")
@click.option("--tokens", default=160)
@click.option("--repeats", default=2)
@click.option("--ngram-n", default=3)
@click.option("--ngram-m", default=8)
def ngram(
    questions: Path, group: tuple[str, ...], each: int, tokens: int, repeats: int, ngram_n: int, ngram_m: int
) -> None:
    """Prompt lookup against plain decoding, on Spec-Bench's prompts; the time to read the prompt is left out."""
    model, tokenizer = load()
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    make = by_name("ngram_simple", DrafterOptions(ngram_n=ngram_n, ngram_m=ngram_m))
    with SpecDecoder(model, tokenizer, make) as decoder:
        ways = {
            "plain": ours(decoder, tokens, 0, prefill=False),
            "ngram_simple": ours(decoder, tokens, prefill=False),
        }
        for name in group:
            texts = [row["turns"][0] for row in rows if row["category"] == name][:each]
            click.echo(f"{name}, {len(texts)} prompts")
            say(compare(ways, [chat(tokenizer, text) for text in texts], repeats), "plain")


@main.command()
@click.option(
    "--questions", type=click.Path(exists=True, path_type=Path), required=True, help="Spec-Bench's question.jsonl."
)
@click.option("--tokens", default=300)
@click.option("--repeats", default=2)
def worst(questions: Path, tokens: int, repeats: int) -> None:
    """The default drafter against plain decoding on one prompt of every group, each by itself."""
    model, tokenizer = load()
    forgetful = DrafterOptions(suffix_max_cached_requests=0)  # or the second repeat would be drafted from the first
    with SpecDecoder(model, tokenizer, by_name("suffix", forgetful)) as decoder:
        ways = {"plain": ours(decoder, tokens, 0, prefill=False), "suffix": ours(decoder, tokens, prefill=False)}
        ratios = []
        for question in choose(read_questions(questions), 1):
            times = compare(ways, [chat(tokenizer, question.turns[0])], repeats)
            ratios.append(times["plain"] / times["suffix"])
            click.echo(f"  {question.group} {question.question_id}: {ratios[-1]:.2f} x plain")
        click.echo(f"  worst: {min(ratios):.2f} x plain")


@main.command()
@click.option("--tokens", default=128)
def host(tokens: int) -> None:
    """The part of a round in which the device has nothing of it to compute, drafting included."""
    model, tokenizer = load()
    marks: list[float] = []  # when a round's first part is handed over, and when its result is there
    begin, evaluate = mx.async_eval, mx.eval

    def handed_over(*arrays: Any) -> None:
        if len(marks) % 2 == 0:
            marks.append(time.perf_counter())
        begin(*arrays)

    def evaluated(*arrays: Any) -> None:
        if len(marks) % 2 == 0:
            marks.append(time.perf_counter())
        evaluate(*arrays)
        marks.append(time.perf_counter())

    prompt = chat(tokenizer, PROMPTS[2])
    with SpecDecoder(model, tokenizer, by_name("ngram_simple", DrafterOptions(ngram_n=2, ngram_m=4))) as decoder:
        shares = []
        for _ in range(5):
            responses = decoder.stream(prompt, SamplingParams(), max_tokens=tokens, num_draft_tokens=4)
            next(responses)
            marks.clear()
            mx.async_eval, mx.eval = handed_over, evaluated  # this process only measures
            start = time.perf_counter()
            for _ in responses:
                pass
            total = time.perf_counter() - start
            mx.async_eval, mx.eval = begin, evaluate
            shares.append(1 - sum(marks[1::2]) / total + sum(marks[::2]) / total)
        click.echo(f"  host work: {100 * median(shares):.1f} % of a round ({len(marks) // 2} rounds)")


@main.command()
@click.option("--tokens", default=256)
def memory(tokens: int) -> None:
    """Peak memory with prompt lookup against plain decoding."""
    model, tokenizer = load()
    prompt = chat(tokenizer, " ".join(PROMPTS) * 4)
    peaks = {}
    with SpecDecoder(model, tokenizer, by_name("ngram_simple", DrafterOptions(ngram_n=3, ngram_m=8))) as decoder:
        for name, drafts in (("plain", 0), ("ngram_simple", 8)):
            mx.clear_cache()
            mx.reset_peak_memory()
            ours(decoder, tokens, drafts)(prompt)
            peaks[name] = mx.get_peak_memory() / 1e6
    for name, peak in peaks.items():
        click.echo(f"  {name:28s} {peak:7.0f} MB   {peak / peaks['plain']:5.3f} x plain")


if __name__ == "__main__":
    main()
