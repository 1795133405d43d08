"""What drafters would gain on recorded outputs at given costs of a pass: parameters compared in seconds, none is run.

Left out are the host's work and looking ahead; a group is a decoder's, and no draft goes beyond an output's end.

python scripts/simulate.py record outputs.json --questions spec_bench_question.jsonl --per-category 3
python scripts/simulate.py run outputs.json
"""

import mlx_specdec  # isort: skip  # before mlx.core

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import numpy as np

from mlx_specdec import SamplingParams, SpecDecoder
from mlx_specdec.cli import Command
from mlx_specdec.draft_length import Auto, DraftLength, Fixed, Outcome
from mlx_specdec.drafters import DrafterOptions, by_name
from mlx_specdec.drafters.base import NOTHING, Draft
from mlx_specdec.drafters.chain import Chain
from mlx_specdec.features import FeatureRequest
from mlx_specdec.measure import conversations
from mlx_specdec.measured import Measured
from mlx_specdec.questions import choose, read_questions
from mlx_specdec.sampling import Sampler

# Passes of so many rows, in passes of one: what was measured on two cores with OpenBLAS.
CURVE = "2:1.1,4:1.3,8:1.6,16:1.9,49:3.1"


class PromptLookup:
    """Prompt lookup decoding: what followed the newest earlier occurrence of the last 5 tokens, or 4, 3, 2."""

    name, wants, max_draft, free = "prompt_lookup", FeatureRequest(), 10, True

    def start(self, prompt: Sequence[int]) -> None:
        self.text: list[int] = []

    def observe(self, tokens: Sequence[int], features: Any) -> None:
        self.text += tokens

    def settle(self, drafted: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        pass

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        text = [*self.text, last]
        for n in (5, 4, 3, 2):
            for at in range(len(text) - n - 1, -1, -1):
                if text[at : at + n] == text[-n:]:
                    return Draft(mx.array(text[at + n : at + n + min(limit, self.max_draft)], dtype=mx.int32))
        return NOTHING


WAYS: dict[str, tuple[Callable[[], list[Any]], Callable[[Measured], DraftLength]]] = {
    "patterns of 2 to 5, 10 drafts": (lambda: [PromptLookup], lambda _: Fixed(10)),
    "ngram_simple, n 12, m 48": (lambda: by_name("ngram_simple"), lambda _: Fixed(48)),
    "suffix with vLLM's depth and factor, auto": (
        lambda: by_name("suffix", DrafterOptions(suffix_max_tree_depth=24, suffix_max_spec_factor=1.0)),
        Auto,
    ),
    "suffix, auto": (lambda: by_name("suffix"), Auto),
}


def simulated(
    outputs: Sequence[dict[str, Any]], makers: list[Any], length: Callable[[Measured], DraftLength], curve: np.ndarray
) -> tuple[float, float]:
    """Speed-up and tokens a pass over the requests of one decoder, without the pass that gives the first token."""
    known, spent, tokens, passes = Measured(), 0.0, 0, 0
    anything = Sampler(SamplingParams(), [0])
    for output in outputs:
        prompt, ids, at = output["prompt"], output["ids"], 0
        chain = Chain([make() for make in makers], length(known))
        chain.start(prompt)
        chain.observe(prompt[:-1], None)
        last = prompt[-1]
        while at < len(ids):
            drafts = np.array(chain.propose(last, len(ids) - at - 1, anything).tokens).tolist()
            right = next((i for i, (a, b) in enumerate(zip(drafts, ids[at:], strict=False)) if a != b), len(drafts))
            new = ids[at : at + right + 1]
            seconds = float(np.interp(len(drafts) + 1, *curve))
            if at > 0:
                spent, tokens, passes = spent + seconds, tokens + len(new), passes + 1
            chain.observe([last, *new[:-1]], None)
            chain.settle(len(drafts), right)
            chain.length.record(Outcome(chain.winner, len(drafts), new, seconds))
            last, at = new[-1], at + len(new)
        chain.close([last])
    return (tokens / spent, tokens / passes) if passes else (1.0, 1.0)


@click.group()
def main() -> None:
    """Compare text drafters on recorded greedy outputs."""


@main.command(cls=Command)
@click.argument("outputs", type=click.Path(path_type=Path))
@click.option("--questions", type=click.Path(path_type=Path), required=True, help="Questions in Spec-Bench's form.")
@click.option("--per-category", default=3)
@click.option("--tokens", default=160)
def record(outputs: Path, questions: Path, per_category: int, tokens: int) -> None:
    """Write the default model's greedy answers, each turn of a question an output."""
    model, tokenizer = mlx_specdec.load("smollm2-135m", dtype="float32")
    chosen = choose(read_questions(questions), per_category)
    with SpecDecoder(model, tokenizer, "suffix") as decoder:
        asked = conversations(
            tokenizer, chosen, False, lambda ids: decoder.stream(ids, max_tokens=tokens), lambda: None
        )
        made = [
            {"group": each.question.group, "turn": each.turn, "prompt": each.prompt,
             "ids": [response.token for response in decoder.stream(each.prompt, max_tokens=tokens)]}
            for each in asked
        ]  # fmt: skip
    outputs.write_text(json.dumps(made))


@main.command(cls=Command)
@click.argument("outputs", type=click.Path(exists=True, path_type=Path))
@click.option("--curve", default=CURVE, show_default=True, help="Rows and what a pass with them costs.")
@click.option("--first-turns", is_flag=True, help="Leave out what was asked later in a conversation.")
def run(outputs: Path, curve: str, first_turns: bool) -> None:
    """Speed-up and tokens a pass by group."""
    try:
        points = np.array(
            sorted([float(number) for number in point.split(":")] for point in f"1:1,{curve}".split(","))
        ).T
    except ValueError as error:
        raise click.BadParameter(f"{curve} is no list of rows:cost ({error})") from error
    groups: dict[str, list[dict[str, Any]]] = {}
    for output in json.loads(outputs.read_text()):
        if not first_turns or output["turn"] == 1:
            groups.setdefault(output["group"], []).append(output)
    click.echo(f"{'':42s}" + "".join(f"{group[:14]:>15s}" for group in groups))
    for name, (makers, length) in WAYS.items():
        found = [simulated(each, makers(), length, points) for each in groups.values()]
        click.echo(f"{name:42s}" + "".join(f"{speed:8.2f} ({tau:4.2f})" for speed, tau in found))


if __name__ == "__main__":
    main()
