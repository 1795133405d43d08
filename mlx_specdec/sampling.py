"""From logits to the distribution that is sampled, and the noise it is sampled with.

The order of things is mlx-lm's: processors on logits, log-probabilities, top-p, min-p, top-k, temperature. Every row
has its own true history, the drafted tokens before it included. Target and drafter both go through here, so that what
a drafter says it drew from is what it drew from.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import mlx.core as mx

from .errors import OptionError
from .history import History

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
COLD = 1e-6  # a temperature below this is 0: its inverse would not be a float32
BOUND = 1e30  # of a drafter's logits: its exponential is 0 beside any ordinary one, and a temperature leaves it finite
ACCEPTANCE_RULES = ("token", "block", "coupled")

# Independent streams of noise: a shared one would tie the acceptance to what was drafted and bias the output.
_DRAW, _DRAFT, _ACCEPT = range(3)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, under mlx-lm's names and defaults. Raises OptionError for a value that cannot be used.

    `acceptance` picks among three exact rules: `token` and `block` keep the distribution, `coupled` also gives the
    very ids of plain decoding with the same seed. By default it is `coupled` with a seed, so that the text does not
    depend on what was drafted, and `token` without. Without a seed every request draws its own.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    logit_bias: dict[int, float] | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    seed: int | None = None
    acceptance: str | None = None

    def __post_init__(self) -> None:
        self._check("temperature", _within(self.temperature, 0, math.inf), "0 or more")
        self._check("top_p", _within(self.top_p, 0, 1), "a value from 0 to 1 (0 and 1 keep every token)")
        self._check("top_k", _whole(self.top_k, 0), "0 (every token) or a whole number")
        self._check("min_p", _within(self.min_p, 0, 1), "a value from 0 to 1")
        self._check("min_tokens_to_keep", _whole(self.min_tokens_to_keep, 1), "a whole number from 1")
        for kind, least in (("repetition", 0), ("presence", -math.inf), ("frequency", -math.inf)):
            penalty = getattr(self, f"{kind}_penalty")
            self._check(
                f"{kind}_penalty",
                penalty is None or _within(penalty, least, math.inf),
                "a number (repetition: from 0)",
            )
            self._check(
                f"{kind}_context_size", _whole(getattr(self, f"{kind}_context_size"), 1), "a whole number from 1"
            )
        biases = (self.logit_bias or {}).items()
        wanted = "whole token ids and numbers, or -inf to forbid a token"
        self._check("logit_bias", all(_whole(t, 0) and (_within(b) or b == -math.inf) for t, b in biases), wanted)
        self._check("seed", self.seed is None or type(self.seed) is int, "a whole number")
        self._check("acceptance", self.acceptance in (None, *ACCEPTANCE_RULES), ", ".join(ACCEPTANCE_RULES))

    @property
    def rule(self) -> str:
        """The acceptance rule, the default resolved."""
        return self.acceptance or ("token" if self.seed is None else "coupled")

    def _check(self, name: str, holds: bool, want: str) -> None:
        if not holds:
            raise OptionError(f"{name} is {getattr(self, name)}; choose {want}")


def _within(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and least <= value <= most


def _whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def log_probabilities(scores: mx.array) -> mx.array:
    """Of logits float32 [..., vocab]."""
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


class Sampler:
    """Chooses the tokens of one sequence, of which `offset` are in the target's cache.

    `choose`, mlx-lm's `sampler`, picks a token int [1] from one row of log-probabilities [1, vocab] in its own way; a
    draft then stands where it is what was picked, which is exact whatever the function.
    A logits processor is called with (tokens so far [n], logits [1, vocab]) for drafted tokens too, which may be
    refused afterwards, so it must be a function of what it is given and keep no count of its calls.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        processors: Sequence[LogitsProcessor] = (),
        choose: Callable[[mx.array], mx.array] | None = None,
    ):
        from mlx_lm.sample_utils import make_logits_processors

        self.params, self.choose = params, choose
        self.processors = [
            *make_logits_processors(
                params.logit_bias,
                params.repetition_penalty,
                params.repetition_context_size,
                params.presence_penalty,
                params.presence_context_size,
                params.frequency_penalty,
                params.frequency_context_size,
            ),
            *processors,
        ]
        self._history = History(len(prompt) + 256)
        self.advance(prompt[:-1])
        words = Random(secrets.token_hex() if params.seed is None else str(params.seed))  # of an int it drops the sign
        self._streams = [(words.getrandbits(32), words.getrandbits(32)) for _ in range(3)]

    @property
    def greedy(self) -> bool:
        return self.params.temperature < COLD and self.choose is None

    @property
    def matches(self) -> bool:
        """Whether drafts stand by matching the target's picks, and not by their probabilities."""
        return self.greedy or self.choose is not None or self.params.rule == "coupled"

    @property
    def offset(self) -> int:
        """How many tokens are in the target's cache."""
        return len(self._history)

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens are in the cache now."""
        self._history.extend(tokens)

    def scores(self, logits: mx.array, fed: mx.array, start: int = 0) -> mx.array:
        """Logits float32 [n, vocab] after processors, of logits [n, vocab] that follow fed[: start + i + 1].

        `fed` int32 [start + n] are the tokens after the history: `last`, then drafted ones.
        """
        if not self.processors:
            return logits
        tokens = mx.concatenate([mx.array(self._history.tokens), fed.astype(mx.int32)])
        before = self.offset + start + 1
        return mx.concatenate([self._process(logits[i : i + 1], tokens[: before + i]) for i in range(logits.shape[0])])

    def judged(self, scores: mx.array) -> mx.array:
        """What `pick` takes, float32 [n, vocab]: log-probabilities; at temperature 0 the scores themselves will do."""
        return scores if self.greedy else log_probabilities(scores)

    def _process(self, row: mx.array, tokens: mx.array) -> mx.array:
        for process in self.processors:
            row = process(tokens, row)
        return row

    def filtered(self, logprobs: mx.array) -> mx.array:
        """Logits float32 [n, vocab] of the distribution that is sampled: filters and temperature applied."""
        from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

        params, vocab = self.params, logprobs.shape[-1]
        if 0 < params.top_p < 1:
            logprobs = apply_top_p(logprobs, params.top_p)
        if params.min_p > 0:
            logprobs = apply_min_p(logprobs, params.min_p, min(params.min_tokens_to_keep, vocab))
        if 0 < params.top_k < vocab:
            logprobs = apply_top_k(logprobs, params.top_k)
        return logprobs * (1 / params.temperature)

    def pick(self, judged: mx.array, start: int = 0) -> mx.array:
        """The target's own choice int32 [n] for rows that follow start, start + 1, ... fed tokens after `last`.

        The noise of a row depends on the seed and its absolute position alone.
        """
        if self.choose is not None:
            return mx.concatenate([self.choose(row[None]).reshape(1) for row in judged]).astype(mx.int32)
        if self.greedy:
            return mx.argmax(judged, axis=-1).astype(mx.int32)
        logits = self.filtered(judged)
        noise = mx.stack([self._gumbel(_DRAW, start + i, logits.shape[-1]) for i in range(logits.shape[0])])
        return mx.argmax(logits + noise, axis=-1).astype(mx.int32)

    def draw(self, weights: mx.array) -> mx.array:
        """One token, int32 scalar, from weights float32 [vocab] that need not be normalised."""
        return mx.argmax(mx.log(weights) + self._gumbel(_DRAW, 0, weights.shape[-1])).astype(mx.int32)

    def draft(self, logits: mx.array, fed: mx.array) -> tuple[mx.array, mx.array | None]:
        """A drafter's own draw: logits [1, vocab] that follow fed int32 [n] -> token int32 [1] and its q [1, vocab].

        Where drafts stand by matching, q is not asked for and is None; the draft is then the likeliest token, or
        under `coupled` the one that the target's noise picks. q is a distribution whatever the logits are, infinite or
        NaN, and also where all tokens that the drafter knows are forbidden.
        """
        bounded = mx.clip(mx.nan_to_num(logits, nan=-BOUND), -BOUND, BOUND)
        judged = self.judged(self.scores(bounded, fed, start=fed.shape[0] - 1))
        if self.greedy or self.choose is not None:
            return mx.argmax(judged, axis=-1).astype(mx.int32), None
        if self.matches:
            return self.pick(judged, start=fed.shape[0] - 1), None
        logits = self.filtered(judged)
        noise = self._gumbel(_DRAFT, 0, logits.shape[-1], within=fed.shape[0])
        return mx.argmax(logits + noise, axis=-1).astype(mx.int32), mx.softmax(logits, axis=-1)

    def uniforms(self, n: int) -> mx.array:
        """float32 [n] in [0, 1), for accepting the drafts of this round."""
        return mx.random.uniform(shape=(n,), key=self._key(_ACCEPT, 0, 0))

    def _gumbel(self, stream: int, ahead: int, vocab: int, within: int = 0) -> mx.array:
        return mx.random.gumbel((vocab,), key=self._key(stream, ahead, within))

    def _key(self, stream: int, ahead: int, within: int) -> mx.array:
        """The key of a place: so many positions ahead of this round's first, and within it. No round begins where
        another did, so noise that is keyed by the round (ahead 0) is never used twice, even where a position is."""
        first, second = self._streams[stream]
        return mx.array([first ^ (self.offset + ahead), second ^ within], dtype=mx.uint32)
