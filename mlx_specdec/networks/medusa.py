"""Medusa: heads on the target's last hidden state, one for each of the tokens to come (arXiv 2401.10774)."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np


@dataclass(frozen=True)
class MedusaConfig:
    """`vocab` is the target's, `draft_vocab` what a head has rows for; `layers` are the residual blocks of each head.

    With `shared_head` the blocks differ and the projection onto the vocabulary is one for all.
    """

    hidden: int
    vocab: int
    draft_vocab: int
    heads: int
    layers: int
    bias: bool = True
    shared_head: bool = False
    logit_scale: float = 1.0
    target_name: str | None = None


class Medusa(nn.Module):
    """`ids` int64 [draft_vocab] are the tokens that the rows of a head stand for; None if row i is token i."""

    def __init__(self, config: MedusaConfig, ids: np.ndarray | None = None):
        super().__init__()
        self.config, self.ids = config, ids
        self.blocks = [ResidualBlock(config) for _ in range(config.heads)]
        projections = 1 if config.shared_head else config.heads
        self.lm_heads = [nn.Linear(config.hidden, config.draft_vocab, bias=False) for _ in range(projections)]

    @property
    def dtype(self) -> mx.Dtype:
        """That of its activations: its weights', or that of their scales where they are packed."""
        head = self.lm_heads[0]
        kind = head.get("scales", head.weight).dtype
        return kind if mx.issubdtype(kind, mx.floating) else mx.bfloat16

    def __call__(self, head: int, hidden: mx.array) -> mx.array:
        """Logits float32 [n, draft_vocab] of `head`, 0 for the token after the next, from hidden [n, hidden]."""
        output = self.blocks[head](hidden.astype(self.dtype))
        project = self.lm_heads[0 if self.config.shared_head else head]
        return project(output).astype(mx.float32) * self.config.logit_scale


class ResidualBlock(nn.Module):
    """Layers that each add SiLU of a linear map."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.layers = [nn.Linear(config.hidden, config.hidden, bias=config.bias) for _ in range(config.layers)]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = x + nn.silu(layer(x))
        return x
