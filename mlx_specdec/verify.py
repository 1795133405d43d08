"""Target logits and a draft in, a verdict out, as one lazy graph."""

from typing import NamedTuple

import mlx.core as mx

from . import acceptance
from .drafters.base import Draft
from .sampling import Sampler


class Verdict(NamedTuple):
    """`tokens[: accepted + 1]` are emitted: the drafts that stand, then the target's own token.

    accepted int32 scalar; tokens int32 [k+1], of which what follows `accepted` means nothing; scores
    float32 [k+1, vocab], the target's logits after processors, row i for tokens[i].
    """

    accepted: mx.array
    tokens: mx.array
    scores: mx.array


def verify(logits: mx.array, last: mx.array, draft: Draft, sampler: Sampler) -> Verdict:
    """Judge `draft` by the target's logits float32 [k+1, vocab] for the rows [last, *draft]; last is int32 [1]."""
    scores = sampler.scores(logits, mx.concatenate([last, draft.tokens]))
    judged = sampler.judged(scores)
    k = draft.tokens.shape[0]
    if k == 0 or sampler.matches:
        picks = sampler.pick(judged)
        return Verdict(acceptance.match(picks, draft.tokens), picks, scores)
    rule = {"token": acceptance.token, "block": acceptance.block}[sampler.params.rule]
    p = mx.softmax(sampler.filtered(judged), axis=-1)
    q = _one_hot(draft.tokens, p.shape[-1]) if draft.probs is None else draft.probs
    accepted, weights = rule(p, q, draft.tokens, sampler.uniforms(k))
    tokens = mx.concatenate([draft.tokens, mx.zeros((1,), dtype=mx.int32)])
    tokens = mx.where(mx.arange(k + 1) < accepted, tokens, sampler.draw(weights))
    return Verdict(accepted, tokens, scores)


def _one_hot(tokens: mx.array, vocab: int) -> mx.array:
    return (tokens[:, None] == mx.arange(vocab)).astype(mx.float32)
