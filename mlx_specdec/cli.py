"""What the commands share: options by mlx-lm's names, and errors as one sentence."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .errors import OptionError, SpecDecError

if TYPE_CHECKING:
    from .choice import Choice
    from .decoder import SpecDecoder
    from .drafters import DrafterOptions, Maker
    from .target.model import CacheOptions

_log = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m"
DTYPES = ("float32", "float16", "bfloat16")
DRAFTERS = ("ngram_simple", "ngram_map", "ngram_mod", "ngram_cache", "suffix", "draft_model", "mtp")


class Command(click.Command):
    """A command that says what the user can mend in one sentence and exits with 2."""

    def invoke(self, ctx: click.Context) -> Any:
        log = logging.getLogger("mlx_specdec")
        handler = logging.StreamHandler()  # standard error
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            return super().invoke(ctx)
        except SpecDecError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(2)
        finally:
            log.removeHandler(handler)


@dataclass
class ModelOptions:
    """Which target, which drafters, and how the target's sequence is remembered."""

    model: str
    dtype: str | None
    drafter: str | None
    draft_model: str | None
    ngram_n: int
    ngram_m: int
    ngram_min_hits: int
    ngram_mode: str
    ngram_n_match: int
    ngram_n_min: int
    ngram_n_max: int
    suffix_max_tree_depth: int
    suffix_max_cached_requests: int
    suffix_max_spec_factor: float
    suffix_max_spec_offset: float
    suffix_min_token_prob: float
    suffix_cache: Path | None
    lookup_cache_static: Path | None
    lookup_cache_dynamic: Path | None
    max_kv_size: int | None
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    prefill_step_size: int
    trust_remote_code: bool
    offline: bool
    models: Path | None
    keeps: bool = True  # the commands that generate write the files that drafters keep; those that measure do not

    def decoder(self) -> "SpecDecoder":
        """Load everything. Raises SpecDecError."""
        from .choice import AUTO
        from .decoder import SpecDecoder

        names = "draft_model" if self.draft_model and self.drafter == AUTO else str(self.drafter)
        makers, cache = self.makers(names), self.cache_options()
        if self.draft_model and "draft_model" not in makers:
            raise OptionError(f"--drafter is {names} and --draft-model is {self.draft_model}; name draft_model as well")
        model, tokenizer = self.load(self.model)
        if names == AUTO:
            choice = self.choose(model, tokenizer, cache)
            named = self.makers(choice.name) if choice.drafter is None else [choice.drafter]
        else:
            named = [self.load_drafter(make, model, tokenizer) if isinstance(make, str) else make for make in makers]
        return SpecDecoder(model, tokenizer, named, cache=cache)

    def makers(self, names: str, among: str | None = None) -> "list[Maker]":
        """What makes the drafters of a chain; those that take a checkpoint are names still. Of "auto" it is what is
        used at worst. `among` names the drafters of all chains, if there are more. Raises OptionError, also for an
        option that none of them uses."""
        from .choice import AUTO
        from .drafters import DEFAULT, by_name

        if names == AUTO:
            given = "the drafter is left to auto"
        elif alone := [name for name in _listed(names) if name in (AUTO, "none") and name != names]:
            raise OptionError(f"the drafters are {names}; give {alone[0]} alone, or a list without it")
        elif names == "draft_model" and self.draft_model and self.drafter in (None, AUTO):
            given = f"--draft-model is {self.draft_model}"
        else:
            given = f"the drafters are {among or names}"
        makers = by_name(DEFAULT if names == AUTO else names, self.drafter_options())
        if names != "none":  # where nothing drafts, as is compared with, the options may stay
            named = {DEFAULT if name == AUTO else name for name in _listed(among or names)}
            for option, drafter in self._unused(named):
                raise OptionError(f"{option} and {given}; only {drafter} uses that, so name it as a drafter too")
        if "draft_model" in makers and not self.draft_model:
            raise OptionError("the drafter draft_model takes a model; give one (--draft-model)")
        return makers

    def drafter_options(self) -> "DrafterOptions":
        from .drafters import DrafterOptions

        return DrafterOptions(**{f.name: getattr(self, f.name) for f in fields(DrafterOptions)})

    def _unused(self, named: set[str]) -> Iterator[tuple[str, str]]:
        """The options given whose drafters are not `named`, each with these drafters."""
        from .drafters import USED_BY, DrafterOptions

        unchanged = DrafterOptions()
        for option, users in USED_BY.items():
            value = getattr(self, option)
            if value != getattr(unchanged, option) and named.isdisjoint(users):
                yield f"--{option.replace('_', '-')} is {value}", " or ".join(users)

    def cache_options(self) -> "CacheOptions":
        """Raises OptionError."""
        from .target.model import CacheOptions

        return CacheOptions(**{f.name: getattr(self, f.name) for f in fields(CacheOptions)})

    def load(self, source: str) -> tuple[Any, Any]:
        """The model and the tokenizer that `source` names. Raises CheckpointError."""
        from .checkpoints import load

        return load(source, **self._how())

    def choose(self, model: Any, tokenizer: Any, cache: "CacheOptions | None" = None, among: str = "none") -> "Choice":
        """The drafter for the model, where none is named. An option for another, which is not `among` those that are
        named beside it, is said to be of no use."""
        from .choice import choose

        choice = choose(self.model, model, tokenizer, cache=cache, **self._how())
        for option, drafter in self._unused({choice.name, *_listed(among)}):
            _log.warning(f"{option} and auto took {choice.name}, which does not use it; for that, name {drafter}")
        return choice

    def load_drafter(self, name: str, model: Any, tokenizer: Any) -> Any:
        """What drafts for the model under `name`: draft_model, mtp, a path or a Hub id. Raises CheckpointError and
        PairingError."""
        from .pairs import load_drafter

        return load_drafter(
            str(self.draft_model) if name == "draft_model" else name,
            target=self.model,
            model=model,
            tokenizer=tokenizer,
            **self._how(),
        )

    def _how(self) -> dict[str, Any]:
        """How all checkpoints are loaded."""
        return {
            "dtype": self.precision(),
            "trust_remote_code": self.trust_remote_code,
            "offline": self.offline,
            "models": self.models,
        }

    def precision(self) -> str | None:
        """What was asked for. A CPU has no fast product of quantised or half-precision weights: 40 times slower for the
        default model; so there it is float32."""
        import mlx.core as mx

        return self.dtype or ("float32" if mx.default_device() == mx.cpu else None)


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


class DraftTokens(click.ParamType):
    """A number, or "auto"."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto" or isinstance(value, int):
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor auto", param, ctx)


_DRAFTER = click.option(
    "--drafter",
    default="auto",
    show_default=True,
    help="auto, none, or a list: " + ", ".join(DRAFTERS) + ", a drafter's folder or Hub id. auto is the draft model "
    "given, else heads in the checkpoint, else a known drafter here or on the Hub, else suffix.",
)
OFFLINE = click.option("--offline", is_flag=True, help="Never ask the network: use only what is on this machine.")
MODELS = click.option(
    "--models", type=click.Path(path_type=Path), help="A catalogue of your own, beside the package's."
)
_MODEL_OPTIONS = [
    click.option("--model", default=DEFAULT_MODEL, show_default=True, help="A folder, .gguf file, name or Hub id."),
    click.option("--dtype", type=click.Choice(DTYPES), help="Make all weights of this type. On a CPU: float32."),
    _DRAFTER,
    click.option("--draft-model", help="A smaller model with the same tokenizer, or a drafter's checkpoint."),
    click.option("--ngram-n", default=12, show_default=True, help="ngram_simple, ngram_map: length of the pattern."),
    click.option("--ngram-m", default=48, show_default=True, help="ngram_simple, ngram_map: longest draft."),
    click.option("--ngram-min-hits", default=1, show_default=True, help="ngram_map: matches before it drafts."),
    click.option("--ngram-mode", default="k", show_default=True, help="ngram_map: k drafts the newest, k4v votes."),
    click.option("--ngram-n-match", default=24, show_default=True, help="ngram_mod: length of the pattern."),
    click.option("--ngram-n-min", default=48, show_default=True, help="ngram_mod: shortest draft."),
    click.option("--ngram-n-max", default=64, show_default=True, help="ngram_mod: longest draft."),
    click.option("--suffix-max-tree-depth", default=32, show_default=True, help="suffix: longest match and draft."),
    click.option("--suffix-max-cached-requests", default=10_000, show_default=True, help="suffix: outputs remembered."),
    click.option("--suffix-max-spec-factor", default=2.0, show_default=True, help="suffix: draft by length of match."),
    click.option("--suffix-max-spec-offset", default=0.0, show_default=True, help="suffix: and so many more."),
    click.option("--suffix-min-token-prob", default=0.1, show_default=True, help="suffix: end drafts below this."),
    click.option("--suffix-cache", type=click.Path(path_type=Path), help="suffix: a file that keeps earlier outputs."),
    click.option("--lookup-cache-static", type=click.Path(path_type=Path), help="ngram_cache: a lookup file."),
    click.option("--lookup-cache-dynamic", type=click.Path(path_type=Path), help="ngram_cache: one that is kept."),
    click.option("--max-kv-size", type=int, help="Remember only so many tokens (the first 4 always)."),
    click.option("--kv-bits", type=int, help="Quantise the key-value cache to so many bits."),
    click.option("--kv-group-size", default=64, show_default=True, help="Group size of the quantised cache."),
    click.option("--quantized-kv-start", default=5000, show_default=True, help="Quantise from this token on."),
    click.option("--prefill-step-size", default=2048, show_default=True, help="Prompt tokens in one pass."),
    click.option("--trust-remote-code", is_flag=True, help="Let a checkpoint's own tokenizer code run."),
    OFFLINE,
    MODELS,
]  # fmt: skip


def model_options(function: Callable[..., Any], *, drafter: bool = True, keeps: bool = True) -> Callable[..., Any]:
    """Give a command the options of ModelOptions; it is called with `models`, all of them, and its other options.

    With `drafter` False it has no --drafter, and that of `models` is None; with `keeps` False no memory of a drafter is
    written."""
    names = [name for name in ModelOptions.__dataclass_fields__ if name != "keeps"]

    @wraps(function)  # which also hands on the options given to it so far
    def call(**given: Any) -> Any:
        given["drafter"] = given["drafter"].strip() if drafter else None
        models = ModelOptions(**{name: given.pop(name) for name in names}, keeps=keeps)
        return function(models=models, **given)

    for option in reversed(_MODEL_OPTIONS):
        if drafter or option is not _DRAFTER:
            option(call)
    return call
