"""The Python functions, in the shape of mlx-lm's: an app changes an import."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .sampling import LogitsProcessor, SamplingParams

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from .decoder import GenerationResponse
    from .drafters import Maker

_SAMPLING = {field.name for field in fields(SamplingParams)}


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    dtype: str | None = None,
    drafter: str | None = None,
    offline: bool = False,
    models: "str | PathLike[str] | None" = None,
) -> Any:
    """Load a model and its tokenizer: an MLX folder, a GGUF file, a name of the catalogue or a Hub id.

    Returns (model, tokenizer), with `return_config` then the config, and with `drafter` last what drafts for the model.

    As mlx-lm's, and `dtype` (float32, float16, bfloat16) makes all weights dense and of that type. Give what `drafter`
    brought to SpecDecoder or stream_generate as `drafter`: "mtp" is the heads inside the model's own checkpoint, "auto"
    the best that is known and at hand, at worst the name of drafters without weights (which and why is logged, and it
    never fails), anything else a folder or a Hub id whose kind (EAGLE-3, DFlash, MTP, Gemma 4 assistant, Medusa, a
    smaller model) is told from its files. `offline` takes only what is on this machine; `models` is a catalogue of your
    own, beside the package's. Raises CheckpointError for what cannot be found, fetched or read, PairingError for a
    named drafter of another model.
    """
    from . import checkpoints

    file = None if models is None else Path(models)
    model, tokenizer, config = checkpoints.load_with_config(
        path_or_hf_repo,
        dtype=dtype,
        tokenizer_config=tokenizer_config,
        model_config=model_config,
        adapter_path=adapter_path,
        lazy=lazy,
        revision=revision,
        trust_remote_code=trust_remote_code,
        offline=offline,
        models=file,
    )
    loaded = (model, tokenizer, config) if return_config else (model, tokenizer)
    if drafter is None:
        return loaded
    from .choice import AUTO, choose
    from .pairs import MTP, load_drafter

    options: Any = {"dtype": dtype, "trust_remote_code": trust_remote_code, "offline": offline, "models": file}
    if drafter == AUTO:
        choice = choose(path_or_hf_repo, model, tokenizer, revision=revision, **options)
        return *loaded, choice.name if choice.drafter is None else choice.drafter
    of_target = revision if drafter == MTP else None
    return *loaded, load_drafter(
        drafter, target=path_or_hf_repo, model=model, tokenizer=tokenizer, revision=of_target, **options
    )  # fmt: skip


def stream_generate(
    model: "nn.Module",
    tokenizer: Any,
    prompt: "str | Sequence[int] | mx.array",
    max_tokens: int = 256,
    draft_model: "nn.Module | None" = None,
    *,
    drafter: "str | Maker | nn.Module | Sequence[Maker | nn.Module] | None" = None,
    num_draft_tokens: "int | Literal['auto'] | None" = None,
    sampler: "Callable[[mx.array], mx.array] | None" = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    stop: Sequence[str] | None = None,
    extra_eos_tokens: Sequence[int | str] = (),
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prefill_step_size: int = 2048,
    **sampling: Any,
) -> "Iterator[GenerationResponse]":
    """Generate text, one response a token, as mlx-lm's `stream_generate` does, with its argument names and defaults.

    `drafter` is a name or several ("ngram_map,suffix"), what `load(model, drafter=...)` brought, what makes a Drafter,
    or a list of such; without it and `draft_model` decoding is plain.
    `sampling` are fields of SamplingParams (temperature, top_p, seed, repetition_penalty, acceptance, ...) or else a
    `sampler` of mlx-lm's kind. Make a SpecDecoder to serve many requests.
    """
    from .decoder import SpecDecoder
    from .target.model import CacheOptions

    unknown = sampling.keys() - _SAMPLING
    if unknown:
        raise TypeError(f"stream_generate() got an unexpected keyword argument {min(unknown)!r}")
    cache = CacheOptions(max_kv_size, kv_bits, kv_group_size, quantized_kv_start, prefill_step_size)
    with SpecDecoder(model, tokenizer, drafter, draft_model=draft_model, cache=cache) as decoder:
        yield from decoder.stream(
            prompt,
            SamplingParams(**sampling),
            max_tokens=max_tokens,
            num_draft_tokens=num_draft_tokens,
            stop=stop,
            extra_eos_tokens=extra_eos_tokens,
            logits_processors=logits_processors or (),
            sampler=sampler,
            prompt_progress_callback=prompt_progress_callback,
        )


def generate(
    model: "nn.Module", tokenizer: Any, prompt: "str | Sequence[int]", verbose: bool = False, **kwargs: Any
) -> str:
    """Generate a whole text; `verbose` prints it as it comes and then the figures. Takes what stream_generate takes."""
    responses = stream_generate(model, tokenizer, prompt, **kwargs)
    return show(responses, partial(print, end="", flush=True)) if verbose else "".join(r.text for r in responses)


def show(responses: "Iterator[GenerationResponse]", write: Callable[[str], object], *, stats: bool = False) -> str:
    """Write the text of `responses` as it comes, then mlx-lm's three lines of figures and a fourth, with `stats` all
    that was counted; returns the text."""
    write("=" * 10 + "\n")
    text, last = "", None
    for last in responses:
        write(last.text)
        text += last.text
    write("\n" + "=" * 10 + "\n")
    write((figures(last) if last else "No text generated for this prompt") + "\n")
    if stats and last:
        write(last.stats.block() + "\n")
    return text


def figures(last: "GenerationResponse") -> str:
    """The figures of a generation, from its last response."""
    return (
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {last.peak_memory:.3f} GB\n"
        f"Drafter: {last.stats}"
    )
