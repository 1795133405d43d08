"""The exact law of a model's sampled output, written without the package, and a test of counts against it."""

import mlx_specdec  # noqa: F401  # isort: skip  # before mlx.core

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

QUANTILE = 3.719  # of the standard normal distribution, at 1 - 1e-4
LEAST = 5.0  # expected counts below this are put together

Law = dict[tuple[int, ...], float]


def exact(model: Any, prompt: Sequence[int], length: int, vocab: int, sampling: Mapping[str, Any]) -> Law:
    """The probability of every output of `length` tokens, each context run through the model on its own."""
    law: Law = {(): 1.0}
    for _ in range(length):
        histories = [[*prompt, *output] for output in law]
        logits = np.array(model(mx.array(histories))[:, -1].astype(mx.float32), dtype=np.float64)
        rows = [distribution(row, history, sampling) for row, history in zip(logits, histories, strict=True)]
        law = {
            (*output, token): mass * float(row[token])
            for (output, mass), row in zip(law.items(), rows, strict=True)
            for token in range(vocab)
        }
    return law


def distribution(logits: np.ndarray, history: Sequence[int], sampling: Mapping[str, Any]) -> np.ndarray:
    """mlx-lm's meaning of its options, in its order: bias, penalties, top-p, min-p, top-k, temperature."""
    logits = logits.copy()
    for token, bias in sampling.get("logit_bias", {}).items():
        logits[token] += bias

    def window(penalty: str) -> list[int]:
        return list(history[-sampling.get(f"{penalty}_context_size", 20) :])

    for token in set(window("repetition")):
        penalty = sampling.get("repetition_penalty", 1.0)
        logits[token] *= penalty if logits[token] < 0 else 1 / penalty
    for token in set(window("presence")):
        logits[token] -= sampling.get("presence_penalty", 0.0)
    for token in window("frequency"):
        logits[token] -= sampling.get("frequency_penalty", 0.0)

    p = np.exp(logits - logits.max())
    p /= p.sum()
    best_first = np.argsort(-p)
    kept = np.ones(len(p), dtype=bool)
    if 0 < sampling.get("top_p", 0) < 1:
        above = np.cumsum(p[best_first]) - p[best_first]
        kept[best_first[above >= sampling["top_p"]]] = False
    kept &= p >= sampling.get("min_p", 0) * p.max()
    if sampling.get("top_k", 0):
        kept[best_first[sampling["top_k"] :]] = False
    p = np.where(kept, p, 0) ** (1 / sampling.get("temperature", 1.0))
    return p / p.sum()


def misfit(counts: Mapping[tuple[int, ...], int], law: Law) -> float:
    """Pearson's chi-square of `counts` over its critical value at 1e-4: above 1, they are not of this law.

    Infinite where something came out that cannot.
    """
    total = sum(counts.values())
    if any(law.get(output, 0.0) == 0.0 for output in counts):
        return float("inf")
    bins = [(mass * total, counts.get(output, 0)) for output, mass in law.items() if mass > 0]
    rare = [(expected, seen) for expected, seen in bins if expected < LEAST]
    bins = [(expected, seen) for expected, seen in bins if expected >= LEAST]
    together = tuple(np.sum(rare, axis=0)) if rare else (0.0, 0)
    if together[0] >= LEAST:
        bins.append(together)
    elif rare:
        smallest = bins.index(min(bins))
        bins[smallest] = tuple(np.add(bins[smallest], together))
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in bins)
    return float(statistic / critical(len(bins) - 1))


def critical(freedom: int) -> float:
    """What chi-square exceeds with probability 1e-4 (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + QUANTILE * spread**0.5) ** 3
