"""What the commands share: options by mlx-lm's names, and errors as one sentence."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from .errors import OptionError, SpecDecError

if TYPE_CHECKING:
    from .decoder import SpecDecoder

DEFAULT_MODEL = "smollm2-135m"
DTYPES = ("float32", "float16", "bfloat16")
DRAFTERS = ("none", "ngram_simple", "draft_model")


class Command(click.Command):
    """A command that says what the user can mend in one sentence and exits with 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpecDecError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(2)


@dataclass
class ModelOptions:
    """Which target, which drafter, and how the target's sequence is remembered."""

    model: str
    dtype: str | None
    drafter: str | None
    draft_model: str | None
    ngram_n: int
    ngram_m: int
    max_kv_size: int | None
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    prefill_step_size: int
    trust_remote_code: bool

    def decoder(self) -> "SpecDecoder":
        """Load everything. Raises SpecDecError."""
        from .api import load
        from .decoder import SpecDecoder
        from .drafters import by_name
        from .target.model import CacheOptions

        name = self.drafter or ("draft_model" if self.draft_model else "ngram_simple")
        if (name == "draft_model") != (self.draft_model is not None):
            raise OptionError(f"--drafter is {name} and --draft-model is {self.draft_model or 'missing'}; "
                              "they go together")  # fmt: skip
        cache = CacheOptions(
            self.max_kv_size,
            self.kv_bits,
            self.kv_group_size,
            self.quantized_kv_start,
            self.prefill_step_size,
        )
        make = by_name(name, ngram_n=self.ngram_n, ngram_m=self.ngram_m) if name == "ngram_simple" else None
        model, tokenizer = self._load(load, self.model)
        if self.draft_model is None:
            return SpecDecoder(model, tokenizer, make, cache=cache)
        draft_model, draft_tokenizer = self._load(load, self.draft_model)
        return SpecDecoder(model, tokenizer, draft_model=draft_model, draft_tokenizer=draft_tokenizer, cache=cache)

    def _load(self, load: Callable[..., tuple[Any, Any]], source: str) -> tuple[Any, Any]:
        import mlx.core as mx

        # A CPU has no fast product of quantised or half-precision weights: 40 times slower for the default model.
        dtype = self.dtype or ("float32" if mx.default_device() == mx.cpu else None)
        return load(source, dtype=dtype, trust_remote_code=self.trust_remote_code)


_MODEL_OPTIONS = [
    click.option("--model", default=DEFAULT_MODEL, show_default=True, help="A folder, .gguf file, name or Hub id."),
    click.option("--dtype", type=click.Choice(DTYPES), help="Make all weights of this type. On a CPU: float32."),
    click.option("--drafter", type=click.Choice(DRAFTERS), help="Default: ngram_simple, or the draft model given."),
    click.option("--draft-model", help="A smaller model with the same tokenizer."),
    click.option("--ngram-n", default=12, show_default=True, help="Length of the pattern that is looked up."),
    click.option("--ngram-m", default=48, show_default=True, help="Most tokens drafted after a match."),
    click.option("--max-kv-size", type=int, help="Remember only so many tokens (the first 4 always)."),
    click.option("--kv-bits", type=int, help="Quantise the key-value cache to so many bits."),
    click.option("--kv-group-size", default=64, show_default=True, help="Group size of the quantised cache."),
    click.option("--quantized-kv-start", default=5000, show_default=True, help="Quantise from this token on."),
    click.option("--prefill-step-size", default=2048, show_default=True, help="Prompt tokens in one pass."),
    click.option("--trust-remote-code", is_flag=True, help="Let a checkpoint's own tokenizer code run."),
]  # fmt: skip


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of ModelOptions; it is called with `models` and its other options."""
    names = ModelOptions.__dataclass_fields__

    @wraps(function)  # which also hands on the options given to it so far
    def call(**given: Any) -> Any:
        models = ModelOptions(**{name: given.pop(name) for name in names})
        return function(models=models, **given)

    for option in reversed(_MODEL_OPTIONS):
        option(call)
    return call
