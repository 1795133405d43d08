"""`python -m mlx_specdec.prove`: is the text really the same, with this model and this drafter, on this machine?"""

import json
from dataclasses import asdict
from functools import partial
from random import Random
from typing import Any

import click

from .cli import Command, ModelOptions, model_options
from .errors import OptionError

# A right implementation fails the distribution test once in so many seeds; the default seed is fixed.
SIGNIFICANCE = 1e-3


@click.command("prove", cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@partial(model_options, keeps=False)
@click.option("--prompt", "-p", "prompts", multiple=True, help="A prompt; may be repeated. Default: built-in ones.")
@click.option("--max-tokens", "-m", default=128, show_default=True, help="Tokens compared for each prompt.")
@click.option("--num-draft-tokens", type=click.IntRange(1), default=8, show_default=True, help="Drafts a round.")
@click.option("--temp", default=0.8, show_default=True, help="Temperature of the distribution test; 0 leaves it out.")
@click.option("--acceptance", type=click.Choice(["token", "block", "coupled"]), default="token", show_default=True,
              help="The rule that the distribution test runs.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of the distribution test.")
@click.option("--ignore-chat-template", is_flag=True, help="Use the prompts as they are.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.pass_context
def command(
    ctx: click.Context,
    models: ModelOptions,
    prompts: tuple[str, ...],
    max_tokens: int,
    num_draft_tokens: int,
    temp: float,
    acceptance: str,
    seed: int,
    ignore_chat_template: bool,
    as_json: bool,
) -> None:
    """Compare speculative with plain decoding: the ids at temperature 0, and at a temperature the distribution (under
    `coupled` the ids again). Exit status 0 only when both hold and something was drafted."""
    from . import proof
    from .generate import chat
    from .sampling import SamplingParams
    from .text import encode

    if max_tokens < 1:
        raise OptionError(f"max_tokens is {max_tokens}; choose 1 or more")
    if models.drafter == "none":
        raise OptionError("--drafter is none, so there is nothing to prove; choose a drafter")
    rows = num_draft_tokens + 1
    greedy = SamplingParams()
    found: dict[str, Any] = {"prompts": [], "arithmetic": [], "law": None}
    places: list[float] = []
    random = Random(seed)
    with models.decoder() as decoder:
        template = decoder.tokenizer.has_chat_template and not ignore_chat_template
        for number, text in enumerate(prompts or proof.PROMPTS, 1):
            prompt = chat(decoder.tokenizer, text) if template else encode(decoder.tokenizer, text)
            sampled = SamplingParams(temperature=temp, seed=seed + number, acceptance=acceptance)
            greedily = proof.compared(decoder, prompt, max_tokens, greedy, num_draft_tokens)
            drafted, accepted, difference = greedily.drafted, greedily.accepted, greedily.difference
            if temp > 0 and acceptance == "coupled" and difference is None:
                again = proof.compared(decoder, prompt, max_tokens, sampled, num_draft_tokens)
                drafted, accepted, difference = drafted + again.drafted, accepted + again.accepted, again.difference
            elif temp > 0:
                output = proof.ids(decoder, prompt, max_tokens, sampled, num_draft_tokens)
                places += proof.ranks(decoder, prompt, output, sampled, random)
            arithmetic = proof.arithmetic(decoder.target, prompt, greedily.plain, rows)
            found["prompts"].append(
                {
                    "tokens": len(greedily.plain),
                    "drafted": drafted,
                    "accepted": accepted,
                    "difference": difference and asdict(difference),
                }
            )
            found["arithmetic"].append(asdict(arithmetic))
            if not as_json:
                verdict = _verdict(difference, decoder.tokenizer)
                click.echo(f"prompt {number}: {len(greedily.plain)} tokens, {accepted}/{drafted} accepted, {verdict}")
    if places:
        found["law"] = {"tokens": len(places), "p_value": proof.uniform_p_value(places)}
    found["drafted"] = sum(p["drafted"] for p in found["prompts"])
    found["holds"] = (
        found["drafted"] > 0
        and all(p["difference"] is None for p in found["prompts"])
        and (found["law"] is None or found["law"]["p_value"] >= SIGNIFICANCE)
    )
    click.echo(json.dumps(found) if as_json else _summary(found, temp))
    ctx.exit(0 if found["holds"] else 1)


def _verdict(difference: Any, tokenizer: Any) -> str:
    if difference is None:
        return "identical"
    plain, drafted = (repr(tokenizer.decode([t])) for t in (difference.plain, difference.drafted))
    return (
        f"different from token {difference.place}: plain decoding gives {plain} (logit {difference.plain_logit:.5f}), "
        f"with drafts {drafted} (logit {difference.drafted_logit:.5f}), gap {difference.gap:.2g}"
    )


def _summary(found: dict[str, Any], temp: float) -> str:
    arithmetic = found["arithmetic"]
    lines = [
        f"passes of {arithmetic[0]['rows']} rows against passes of one, over {sum(a['places'] for a in arithmetic)} "
        f"tokens: logits differ by at most {max(a['largest'] for a in arithmetic):.2g}, "
        f"{sum(a['flips'] for a in arithmetic)} arg-max changed"
    ]
    if found["law"]:
        law = found["law"]
        lines.append(f"distribution at temperature {temp}: p-value {law['p_value']:.3f} over {law['tokens']} tokens")
    if not found["drafted"]:
        lines.append("nothing was drafted, so nothing was shown: give longer prompts or other options of the drafter")
    else:
        lines.append("holds" if found["holds"] else "does not hold")
    return "\n".join(lines)


if __name__ == "__main__":
    command(prog_name="python -m mlx_specdec.prove")
