"""Multi-token-prediction heads: layers of the target's own kind that look one token further than the target does.

A row is made of what the target made of token i, after its last norm, and of the embedding of token i + 1; it predicts
token i + 2 (DeepSeek-V3, arXiv 2412.19437, section 2.2). Embedding and vocabulary head are the target's and are not in
here.
"""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache


@dataclass(frozen=True)
class MtpConfig:
    """Sizes are those of the target that the heads belong to."""

    hidden: int
    eps: float
    target_layers: int | None = None
    vocab: int | None = None
    hidden_first: bool = False  # the projection takes [hidden, embedding], as in MiMo; else [embedding, hidden]
    recurrence: Literal["post", "pre"] = "post"  # what a row after it takes: the output after or before the last norm


class MtpLayer(nn.Module):
    """One head: two norms, a projection of both to one width, a decoder layer, and a last norm."""

    def __init__(self, config: MtpConfig, block: nn.Module):
        """`block` is a decoder layer of the target's family, called with (x, mask, cache)."""
        super().__init__()
        self.enorm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.hnorm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.eh_proj = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        self.block = block
        self.norm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.hidden_first = config.hidden_first
        # mlx-lm's latent attention adds its mask to scores of its own and so cannot take the word "causal".
        self.mask_array = hasattr(block.self_attn, "embed_q")

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: KVCache) -> tuple[mx.array, mx.array]:
        """embedded and hidden [n, hidden] -> the output [n, hidden] after and before the last norm."""
        parts = [self.enorm(embedded), self.hnorm(hidden)]
        x = self.eh_proj(mx.concatenate(parts[::-1] if self.hidden_first else parts, axis=-1))[None]
        x = self.block(x, create_attention_mask(x, cache, return_array=self.mask_array), cache)[0]
        return self.norm(x), x


class MtpNetwork(nn.Module):
    """The heads of a target: one, which drafts a chain with its own output, or several, of which j drafts token j."""

    def __init__(self, config: MtpConfig, blocks: list[nn.Module]):
        super().__init__()
        self.config = config
        self.heads = [MtpLayer(config, block) for block in blocks]

    def make_cache(self) -> list[KVCache]:
        """One for each head. A position is a row's number, since a rotary position matters only next to others."""
        return [KVCache() for _ in self.heads]

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: KVCache, step: int) -> tuple[mx.array, mx.array]:
        """Rows of head `step`: embedded tokens and hidden, both [n, hidden], in any dtype.

        Returns [n, hidden] for the vocabulary head, and [n, hidden] for the rows that come after.
        """
        head = self.heads[step]
        dtype = head.hnorm.weight.dtype
        post, pre = head(embedded.astype(dtype), hidden.astype(dtype), cache)
        return post, post if self.config.recurrence == "post" else pre
