"""SpecDecoder: rounds of a target and a drafter as a stream of responses, for apps and commands."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .draft_length import Auto, Fixed
from .drafters import Maker, by_name
from .drafters.base import Drafter
from .drafters.chain import Chain
from .drafters.draft_model import DraftModel
from .drafters.pairing import check_tokenizers
from .errors import CheckpointError, OptionError, SpecDecError
from .measured import Measured
from .rounds import Round, rounds
from .sampling import LogitsProcessor, Sampler, SamplingParams, log_probabilities
from .stats import DrafterStats, Stats
from .target.model import CacheOptions, Target
from .target.threads import give_up_streams_at_thread_end
from .target.wired import wired_memory
from .text import TextStream, encode, stop_tokens

_log = logging.getLogger(__name__)


@dataclass
class GenerationResponse:
    """One token of the output, in the shape of mlx-lm's response, with `stats` beside it.

    scores float32 [vocab] are the target's logits after processors, logprobs float32 [vocab], computed where they are
    read, its log-probabilities; prompt_tps and generation_tps are tokens per second; peak_memory is in GB;
    finish_reason is "stop", "length" or, before the last response, None.
    """

    text: str
    token: int
    scores: mx.array
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None
    stats: Stats

    @property
    def logprobs(self) -> mx.array:
        logprobs = log_probabilities(self.scores)
        mx.eval(logprobs)  # what is lazy belongs to this thread
        return logprobs


class SpecDecoder:
    """Generates with a target model and a drafter exactly what the target would generate alone.

    May be used from any thread, and by several at once; every stream has a memory of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        drafter: str | Maker | nn.Module | Sequence[Maker | nn.Module] | None = None,
        *,
        draft_model: nn.Module | None = None,
        draft_tokenizer: Any = None,
        cache: CacheOptions | None = None,
    ):
        """`drafter` is a name or several ("ngram_map,suffix"), what makes a drafter for a sequence (a class will do),
        what `load(model, drafter=...)` brought, or a list of such, asked in that order; `draft_model` drafts after
        them, or where "draft_model" stands among them. With neither, decoding is plain.

        Raises UnsupportedModelError for a model whose cache cannot be rewound, and PairingError when a drafter was made
        for another target or `draft_tokenizer` is given and is another than the target's.
        """
        if draft_tokenizer is not None:
            check_tokenizers(tokenizer, draft_tokenizer)
        self.tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        self._closed = False
        self._measured = Measured()
        self._fared: dict[str, DrafterStats] = {}  # drafters with weights, over all requests
        self._accused: set[str] = set()
        makers = _makers(drafter)
        if drafter == "none" and draft_model is not None:
            raise OptionError("drafter is none and a draft_model is given; leave one out")
        for place, make in enumerate(makers):
            if isinstance(make, nn.Module):
                draft_model, makers[place] = make, "draft_model"
            elif isinstance(make, str) and make != "draft_model":
                raise OptionError(f"the drafter {make} is a checkpoint; load it with load(model, drafter={make!r})")
        if draft_model is not None and "draft_model" not in makers:
            makers.append("draft_model")
        if draft_model is None and "draft_model" in makers:
            raise OptionError("the drafter draft_model takes a model; give one (draft_model, --draft-model)")
        self.target = Target(model, cache, rewinds=bool(makers))
        self._draft_target: Target | None = None
        self._makers: list[Callable[[], Drafter]] = []
        self._unkept: list[Any] = []  # makers whose memory has not been written
        try:
            if draft_model is not None:
                self._draft_target = Target(draft_model)
            self._makers = [self._ready(make) for make in makers]
            self._unkept = [make for make in self._makers if hasattr(make, "keep")]
            self.target.watch(Chain([make() for make in self._makers], Fixed(0)).wants)
        except BaseException:
            self.close()
            raise

    def _ready(self, make: Maker) -> Callable[[], Drafter]:
        """What makes a drafter for a sequence, a drafter's model paired with the target."""
        if isinstance(make, str):
            assert self._draft_target is not None
            return partial(DraftModel, self._draft_target, self.target.vocab)
        return make.pair(self.target) if hasattr(make, "pair") else make

    def close(self) -> None:
        """Stop the streams that run, before their next round, leave the models as they were, and keep the drafters'
        memories where files were named for them. Raises CheckpointError when one cannot be written."""
        self._closed = True
        self.target.close()
        if self._draft_target is not None:
            self._draft_target.close()
        failed, self._unkept = self._unkept, []
        for make in list(failed):
            try:
                make.keep()
                failed.remove(make)
            except CheckpointError as error:
                self._unkept.append(make)  # closing again tries again
                said = error
        if failed:
            raise said

    def __enter__(self) -> "SpecDecoder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def stream(
        self,
        prompt: str | Sequence[int] | mx.array,
        params: SamplingParams | None = None,
        *,
        max_tokens: int = 256,
        num_draft_tokens: int | Literal["auto"] | None = None,
        stop: Sequence[str] | None = None,
        extra_eos_tokens: Sequence[int | str] = (),
        logits_processors: Sequence[LogitsProcessor] = (),
        sampler: Callable[[mx.array], mx.array] | None = None,
        prompt_progress_callback: Callable[[int, int], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[GenerationResponse]:
        """Generate, one response a token, as they come.

        max_tokens -1 is no limit, 0 gives nothing. num_draft_tokens is the most drafted in a round; "auto", also None,
        chooses by measurement what gives the most tokens per second, 0 is plain decoding. `stop` strings end the text
        before them. `sampler` chooses tokens in its own way (see Sampler). `cancel`, set from any thread, ends the
        stream before its next round; closing the iterator does too. Raises OptionError for a value or a prompt that
        cannot be used.
        """
        params = params or SamplingParams()
        ids = encode(self.tokenizer, prompt)
        self._check(ids, params, max_tokens, num_draft_tokens)
        limit = self._limit(len(ids), max_tokens)
        drafters = [] if num_draft_tokens == 0 else [make() for make in self._makers]
        fixed = 0 if not drafters else num_draft_tokens if isinstance(num_draft_tokens, int) else None
        chain = Chain(drafters, Auto(self._measured) if fixed is None else Fixed(fixed))
        chooser = Sampler(params, ids, logits_processors, sampler)
        emitting = rounds(self.target.sequence(), ids, chooser, limit, chain, prompt_progress_callback)
        text = TextStream(self.tokenizer, () if stop is None else stop)
        ends = stop_tokens(self.tokenizer, extra_eos_tokens, self.target.vocab)
        stats = Stats(",".join(d.name for d in drafters) or None)
        return self._responses(emitting, chain, ids, limit, text, ends, stats, cancel)

    def _check(self, ids: list[int], params: SamplingParams, max_tokens: int, num_draft_tokens: object) -> None:
        vocab, context = self.target.vocab, self.target.context
        if self._closed:
            raise SpecDecError("this decoder is closed; make a new one")
        if not ids:
            raise OptionError("the prompt is empty; give at least one token")
        for name, values in (("the prompt has", ids), ("logit_bias names", params.logit_bias or ())):
            wrong = next((token for token in values if not 0 <= token < vocab), None)
            if wrong is not None:
                raise OptionError(f"{name} token {wrong} and the model knows 0 to {vocab - 1}; use its own tokenizer")
        if type(max_tokens) is not int or max_tokens < -1:
            raise OptionError(f"max_tokens is {max_tokens}; choose 0 or more, or -1 for no limit")
        fixed = type(num_draft_tokens) is int and num_draft_tokens >= 0
        if not fixed and num_draft_tokens not in (None, "auto"):
            raise OptionError(f"num_draft_tokens is {num_draft_tokens}; choose auto, 0 (plain decoding) or more")
        if context is not None and len(ids) >= context and self.target.options.max_kv_size is None:
            raise OptionError(f"the prompt has {len(ids)} tokens and the model's context is {context}; shorten it or "
                              "set max_kv_size")  # fmt: skip

    def _limit(self, prompt_tokens: int, max_tokens: int) -> int:
        """How many tokens may be generated: what was asked for, within the model's context."""
        limit = sys.maxsize if max_tokens < 0 else max_tokens
        if self.target.context is None or self.target.options.max_kv_size is not None:
            return limit
        return min(limit, self.target.context - prompt_tokens)

    def _judge(self, name: str, over: bool = False) -> None:
        """Say once, of a drafter with weights, that what it drafts is hardly ever right."""
        of = self._fared.get(name)
        if of is not None and of.hopeless(over) and name not in self._accused:
            self._accused.add(name)
            _log.warning(
                f"of {of.drafted} drafts of {name} {sum(of.stood)} were right: perhaps it was made for another model or"
                " version, or its checkpoint is converted wrongly; the text is the same, but for speed use another "
                "drafter"
            )

    def _responses(
        self,
        emitting: Iterator[Round],
        chain: Chain,
        prompt: list[int],
        limit: int,
        text: TextStream,
        ends: frozenset[int],
        stats: Stats,
        cancel: threading.Event | None,
    ) -> Iterator[GenerationResponse]:
        """Cut the rounds where the output ends, and give each token its text and figures."""
        finish: str | None = None
        began = first = time.perf_counter()
        prompt_tokens, unseen = len(prompt), prompt[-1:]  # certain tokens that the drafters have not observed
        try:
            with wired_memory():
                while stats.tokens < limit and not self._closed and not (cancel and cancel.is_set()):
                    give_up_streams_at_thread_end()
                    emitted = next(emitting)
                    stats.add(emitted)
                    if chain.winner is not None and not chain.winner.free:
                        self._fared.setdefault(chain.winner.name, DrafterStats()).add(emitted)
                        self._judge(chain.winner.name)
                    if stats.rounds % 256 == 0:
                        mx.clear_cache()  # buffers of sizes that a growing sequence never asks for again
                    if stats.tokens == 0:
                        first = time.perf_counter()
                    del unseen[:-1]
                    for place, token in enumerate(emitted.tokens):
                        from_draft = place < emitted.accepted
                        stats.emit(emitted.drafter if from_draft else None)
                        unseen.append(token)
                        ended = token in ends
                        piece = "" if ended else text.add(token)
                        if ended or text.stopped or stats.tokens == limit:
                            piece += text.finish()  # which may complete a stop string
                            finish = "stop" if ended or text.stopped else "length"
                            stats.draft_length = chain.length.state()
                        yield GenerationResponse(
                            text=piece,
                            token=token,
                            scores=emitted.scores[place],
                            from_draft=from_draft,
                            prompt_tokens=prompt_tokens,
                            prompt_tps=prompt_tokens / (first - began),
                            generation_tokens=stats.tokens,
                            generation_tps=stats.tokens / (time.perf_counter() - first),
                            peak_memory=mx.get_peak_memory() / 1e9,
                            finish_reason=finish,
                            stats=stats.copy(),
                        )
                        if finish:
                            return
        finally:
            chain.close(unseen if stats.rounds else ())
            for name in stats.drafters:
                self._judge(name, over=True)


def _makers(drafter: Any) -> list[Any]:
    """What makes drafters, whole models among them as they are."""
    if drafter is None:
        return []
    if isinstance(drafter, str):
        return by_name(drafter)
    makers = list(drafter) if isinstance(drafter, Sequence) else [drafter]
    for make in makers:
        if not callable(make) and not hasattr(make, "pair") and (make != "draft_model" or makers.count(make) > 1):
            raise OptionError(
                f"drafter is {drafter!r}; give a name, what makes a drafter, or a list of such, each once"
            )
    return makers
