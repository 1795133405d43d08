"""How many drafted tokens stand. Arrays in, arrays out; every rule leaves the law of the output the target's own.

Shapes: draft int32 [k] with token i drawn from q[i]; p float32 [k+1, vocab], row i the target's distribution at
draft i and row k after them all; q float32 [k, vocab], one-hot where tokens were proposed with certainty; uniforms
float32 [k] in [0, 1), independent of how the draft was drawn. `accepted` is a scalar int32 array. `token` and
`block` need k >= 1.
"""

import mlx.core as mx


def match(picks: mx.array, draft: mx.array) -> mx.array:
    """A draft stands as far as the target picks the very same tokens; `picks` int32 [k+1] are its own choices.

    Exact however the picks were made: the output is the picks. With noise shared by drafter and target this is the
    coupled rule (Gumbel noise keyed by position), at temperature 0 the greedy one.
    """
    agree = (picks[: draft.shape[0]] == draft).astype(mx.int32)
    return mx.cumprod(agree).sum().astype(mx.int32)


def token(p: mx.array, q: mx.array, draft: mx.array, uniforms: mx.array) -> tuple[mx.array, mx.array]:
    """Token by token: accept with min(1, p/q), stop at the first refusal (Leviathan 2023, Chen 2023).

    Returns `accepted` and weights float32 [vocab], not normalised, that the token after the accepted ones is drawn
    from: max(0, p - q) at the refused place, p after a draft that stands whole.
    """
    px, qx = _at(p, draft), _at(q, draft)
    stands = ((uniforms * qx < px) & (qx > 0)).astype(mx.int32)
    accepted = mx.cumprod(stands).sum().astype(mx.int32)
    return accepted, _residual(p, q, accepted, mx.array(1.0))


def block(p: mx.array, q: mx.array, draft: mx.array, uniforms: mx.array) -> tuple[mx.array, mx.array]:
    """Block verification (Sun et al., arXiv 2403.10444): judge each prefix as a whole; the longest that passes stands.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i)/q(x_i)), prefix i < k passes with probability r/(r + 1 - w_i) where r
    is the mass of max(0, w_i p - q) at the next place, and the whole draft with w_k. Accepts at least as many tokens
    as `token` in expectation. Returns as `token` does, the weights being max(0, w p - q).
    """
    k = draft.shape[0]
    px, qx = _at(p, draft), _at(q, draft)
    ratio = mx.where(qx > 0, px / mx.maximum(qx, 1e-38), 0.0)
    # The running minimum with 1 is, in logarithms, how far the sum lies below its highest point so far.
    total = mx.cumsum(mx.log(ratio))
    w = mx.exp(total - mx.maximum(mx.cummax(total), 0.0))
    w = mx.concatenate([mx.ones((1,)), w])
    rest = mx.maximum(w[:k, None] * p[:k] - q, 0.0).sum(axis=-1)[1:]
    short = rest + 1 - w[1:k]
    passes = mx.concatenate([mx.where(short > 0, rest / mx.maximum(short, 1e-38), 1.0), w[k:]])
    accepted = mx.where(uniforms < passes, mx.arange(1, k + 1), 0).max().astype(mx.int32)
    return accepted, _residual(p, q, accepted, w[accepted])


def _at(rows: mx.array, tokens: mx.array) -> mx.array:
    """rows[i, tokens[i]] for each token."""
    return mx.take_along_axis(rows[: tokens.shape[0]], tokens[:, None], axis=-1)[:, 0]


def _residual(p: mx.array, q: mx.array, accepted: mx.array, weight: mx.array) -> mx.array:
    """max(0, weight p - q) at row `accepted`, with q zero after the last draft.

    Where p and q agree to the last bit there is no residual, and a refusal can only be rounding: p itself then.
    """
    q = mx.concatenate([q, mx.zeros((1, p.shape[-1]))])
    rest = mx.maximum(weight * p[accepted] - q[accepted], 0.0)
    return mx.where(rest.sum() > 0, rest, p[accepted])
