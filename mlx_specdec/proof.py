"""Check on a real model that speculation changes nothing: the ids, the law, and the arithmetic below both."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import mlx.core as mx
import numpy as np

from .decoder import SpecDecoder
from .sampling import Sampler, SamplingParams
from .target.model import Target

PROMPTS = (
    "Write one paragraph about how bread is made.",
    "Count from 1 to 30, separated by commas.",
    "Write a Python function that returns the n-th Fibonacci number, and call it for n = 10.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "A train leaves at 9:40 and arrives at 12:15. How long does it travel? Think step by step.",
    "List ten animals in alphabetical order with one fact about each.",
    "Translate to German: The library opens at nine and closes at five on weekdays.",
    "Correct the spelling and repeat the whole text: I recieved teh package yesterday adn opend it.",
)


@dataclass(frozen=True)
class Difference:
    """The first place where two outputs part: the token of each, and the logits of both in the target alone."""

    place: int
    plain: int
    drafted: int
    plain_logit: float
    drafted_logit: float

    @property
    def gap(self) -> float:
        return self.plain_logit - self.drafted_logit


@dataclass(frozen=True)
class Comparison:
    """The ids of plain decoding, how many tokens were drafted and accepted beside it, and where the two outputs part,
    None if nowhere."""

    plain: list[int]
    drafted: int
    accepted: int
    difference: Difference | None


@dataclass(frozen=True)
class Arithmetic:
    """How a pass over several rows differs from passes over one: the largest difference of a logit, and how many of
    `places` have another arg-max."""

    rows: int
    places: int
    largest: float
    flips: int


def ids(
    decoder: SpecDecoder, prompt: Sequence[int], max_tokens: int, params: SamplingParams, drafts: int | None
) -> list[int]:
    """The output's ids; drafts 0 is plain decoding."""
    return [r.token for r in decoder.stream(prompt, params, max_tokens=max_tokens, num_draft_tokens=drafts)]


def compared(
    decoder: SpecDecoder, prompt: Sequence[int], max_tokens: int, params: SamplingParams, drafts: int | None
) -> Comparison:
    """Decode plainly and with the drafter, and compare."""
    plain = ids(decoder, prompt, max_tokens, params, 0)
    responses = list(decoder.stream(prompt, params, max_tokens=max_tokens, num_draft_tokens=drafts))
    drafted, stats = [r.token for r in responses], responses[-1].stats
    difference = None if plain == drafted else _parting(decoder, prompt, plain, drafted)
    return Comparison(plain, stats.drafted, stats.accepted, difference)


def _parting(decoder: SpecDecoder, prompt: Sequence[int], plain: list[int], drafted: list[int]) -> Difference:
    common = next(
        (i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b),
        min(len(plain), len(drafted)),
    )
    end = next(iter(sorted(decoder.tokenizer.eos_token_ids)), 0)
    a, b = ((output[common : common + 1] or [end])[0] for output in (plain, drafted))
    logits = list(score(decoder.target, prompt, plain[:common], rows=1))[-1]
    return Difference(common, a, b, _number(logits[a]), _number(logits[b]))


def score(target: Target, prompt: Sequence[int], output: Sequence[int], rows: int) -> Iterator[mx.array]:
    """The target's logits float32 [vocab] for each token of an output and the one after it, from passes of up to `rows`
    rows after the prompt was read as in generating."""
    sequence = target.sequence()
    for _ in sequence.prefill(list(prompt)):
        pass
    tokens = [prompt[-1], *output]
    while tokens:
        size = sequence.room(min(rows, len(tokens)))
        logits, _ = sequence.forward(mx.array(tokens[:size]), certain=size)
        sequence.settle(size)
        mx.eval(logits, sequence.state)
        yield from logits
        tokens = tokens[size:]


def arithmetic(target: Target, prompt: Sequence[int], output: Sequence[int], rows: int) -> Arithmetic:
    """Score an output in one-row passes and in passes of `rows` rows, and compare."""
    largest, flips = 0.0, 0
    for one, several in zip(score(target, prompt, output, 1), score(target, prompt, output, rows), strict=True):
        largest = max(largest, _number(mx.abs(one - several).max()))
        flips += _number(mx.argmax(one)) != _number(mx.argmax(several))
    return Arithmetic(rows, len(output) + 1, largest, flips)


def ranks(
    decoder: SpecDecoder, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, random: Random
) -> list[float]:
    """Where each token of a sampled output fell in the target's own distribution at its place, in [0, 1).

    If and only if the tokens follow that distribution these are independent and uniform (the randomised probability
    integral transform, tokens ordered from the likeliest). The distribution is scored afresh, without speculation.
    """
    sampler = Sampler(params, prompt)
    places = []
    last = prompt[-1]
    logits = list(score(decoder.target, prompt, output[:-1], rows=1))
    for token, row in zip(output, logits, strict=True):
        judged = sampler.judged(sampler.scores(row[None], mx.array([last])))
        p = np.array(mx.softmax(sampler.filtered(judged), axis=-1)[0])
        above = p[(p > p[token]) | ((p == p[token]) & (np.arange(p.size) < token))].sum()
        places.append(float(above + random.random() * p[token]))
        sampler.advance([last])
        last = token
    return places


def _number(scalar: mx.array) -> float:
    return float(np.array(scalar))


def uniform_p_value(values: Sequence[float]) -> float:
    """Kolmogorov-Smirnov: how likely values so far from uniform on [0, 1) are by chance."""
    n = len(values)
    ordered = sorted(values)
    distance = max(max((i + 1) / n - v, v - i / n) for i, v in enumerate(ordered))
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if x < 0.3:
        return 1.0  # the series below converges slowly there, and to 1
    return min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))))
