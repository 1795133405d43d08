"""`python -m mlx_specdec.generate`: a prompt in, text and figures out."""

import json
import sys
from functools import partial
from itertools import cycle
from types import ModuleType
from typing import Any

import click

from .cli import Command, DraftTokens, ModelOptions, model_options
from .errors import OptionError
from .text import encode_text


@click.command("generate", cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@model_options
@click.option("--prompt", "-p", default="hello", show_default=True, help="The message; - reads standard input.")
@click.option("--system-prompt", help="System message for the chat template.")
@click.option("--max-tokens", "-m", default=100, show_default=True, help="Most tokens generated; -1 is no limit.")
@click.option("--temp", default=0.0, show_default=True, help="Temperature; 0 takes the likeliest token.")
@click.option("--top-p", default=1.0, show_default=True, help="Keep the likeliest tokens of this total probability.")
@click.option("--top-k", default=0, show_default=True, help="Keep so many of the likeliest tokens; 0 keeps all.")
@click.option(
    "--min-p", default=0.0, show_default=True, help="Keep tokens at least so likely as this part of the best."
)
@click.option("--repetition-penalty", type=float, help="Divide the logits of recent tokens.")
@click.option("--presence-penalty", type=float, help="Subtract from the logits of recent tokens.")
@click.option("--frequency-penalty", type=float, help="Subtract for every recent occurrence of a token.")
@click.option("--seed", type=int, help="The same seed gives the same text.")
@click.option("--acceptance", type=click.Choice(["token", "block", "coupled"]),
              help="The exact rule by which drafts stand. Default: token, with a seed coupled.")  # fmt: skip
@click.option("--num-draft-tokens", type=DraftTokens(), default="auto", show_default=True,
              help="Most tokens drafted in a round; auto chooses by measurement, 0 is plain decoding.")  # fmt: skip
@click.option("--stop", multiple=True, help="End the text before this string; may be repeated.")
@click.option("--extra-eos-token", multiple=True, help="A token that ends the text; may be repeated.")
@click.option("--chat-template-config", help="More arguments of the chat template, as a JSON object.")
@click.option("--ignore-chat-template", is_flag=True, help="Use the prompt as it is.")
@click.option("--verbose", type=bool, default=True, show_default=True, help="Print figures with the text.")
@click.option("--stats", is_flag=True, help="Print what was counted and predicted, by drafter, as well.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def command(
    models: ModelOptions,
    prompt: str,
    system_prompt: str | None,
    max_tokens: int,
    num_draft_tokens: Any,
    stop: tuple[str, ...],
    extra_eos_token: tuple[str, ...],
    chat_template_config: str | None,
    ignore_chat_template: bool,
    verbose: bool,
    stats: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Generate text, drafted and verified: the same text in fewer forward passes."""
    from .api import show
    from .sampling import SamplingParams

    params = SamplingParams(temperature=sampling.pop("temp"), **sampling)
    template = _object(chat_template_config)
    text = _standard_input() if prompt == "-" else prompt.replace("\\n", "\n").replace("\\t", "\t")
    with models.decoder() as decoder:
        use_template = not ignore_chat_template and decoder.tokenizer.has_chat_template
        responses = decoder.stream(
            chat(decoder.tokenizer, text, system=system_prompt, template=template) if use_template else text,
            params,
            max_tokens=max_tokens,
            num_draft_tokens=num_draft_tokens,
            stop=stop,
            extra_eos_tokens=extra_eos_token,
        )
        if as_json:
            click.echo(json.dumps(report(list(responses))))
        elif verbose or stats:
            show(responses, partial(click.echo, nl=False), stats=stats)
        else:
            for response in responses:
                click.echo(response.text, nl=False)
            click.echo()


def chat(tokenizer: Any, *texts: str, system: str | None = None, template: dict[str, Any] | None = None) -> list[int]:
    """The ids of a conversation whose texts are by turns the user's and the model's, the user's last.

    Raises OptionError when the chat template refuses it.
    """
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages += [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), texts)]
    try:
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template or {})
    except Exception as error:  # whatever the template's own code raises
        raise OptionError(f"the chat template refuses this prompt: {error}; use --ignore-chat-template") from error
    return encode_text(tokenizer, prompt, special=False)


def report(responses: list) -> dict[str, Any]:
    """What --json prints: the text, its tokens and the figures of the last response."""
    from .stats import Stats

    text = "".join(r.text for r in responses)
    if not responses:
        nothing = dict.fromkeys(("prompt_tps", "generation_tps", "peak_memory"), 0.0)
        counts = {"prompt_tokens": 0, "generation_tokens": 0, "stats": Stats().as_dict()}  # the prompt was not read
        return {"text": text, "tokens": [], "finish_reason": "length"} | nothing | counts
    last = responses[-1]
    names = (
        "finish_reason",
        "prompt_tokens",
        "prompt_tps",
        "generation_tokens",
        "generation_tps",
        "peak_memory",
    )
    return (
        {"text": text, "tokens": [r.token for r in responses]}
        | {name: getattr(last, name) for name in names}
        | {"stats": last.stats.as_dict()}
    )


def _standard_input() -> str:
    if sys.stdin is None:
        raise OptionError("--prompt is - and there is no standard input; give a prompt")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not UTF-8 at byte {error.start}; convert it first") from error


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise OptionError(f"--chat-template-config is {text!r}, which is not JSON: {error}; give an object") from error
    if not isinstance(value, dict):
        raise OptionError(f"--chat-template-config is {text!r}; give a JSON object")
    return value


class _Callable(ModuleType):
    """As in mlx-lm, `mlx_specdec.generate` is a function as well as a command: importing this module, which puts it
    in the function's place, leaves it callable."""

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        from .api import generate

        return generate(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    command(prog_name="python -m mlx_specdec.generate")
