"""EAGLE-3 (Li et al., arXiv 2503.01840): a transformer layer over what a target made of a token and over the next one.

Row i takes hidden states of the target at token i, from several depths and fused into one, and the embedding of token
i + 1. Past the last certain token it takes its own output in the place of fused hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama, qwen3
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import initialize_rope


@dataclass(frozen=True)
class Eagle3Config:
    """What a checkpoint says of its drafter. `layer` are the sizes of its layers, in mlx-lm's terms."""

    layer: llama.ModelArgs
    target_hidden: int
    draft_vocab: int  # rows of its head
    layer_ids: tuple[int, ...] | None = None  # outputs of these layers of the target are fused; None: the usual three
    windows: tuple[int | None, ...] = (None,)  # by layer: how many tokens it sees, None for all
    rotary: float = 1.0  # the part of a head that is rotated
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    fc_bias: bool = False
    own_embedding: bool = True
    own_head: bool = True
    tied: bool = False  # its head is its own embedding
    norm_before_residual: bool = False  # the residual of the first layer starts after hidden_norm
    norm_before_fc: bool = False  # one norm over all fused hidden states
    fc_norm: bool = False  # a norm for each of them
    norm_output: bool = False  # a row hands on its output after the last norm, not before it
    draft_tokens: int | None = None  # how many tokens in a chain it was made for
    target_name: str | None = None

    @property
    def taps(self) -> int:
        """How many hidden states of the target are fused."""
        return len(self.layer_ids or (0, 0, 0))


class Eagle3(nn.Module):
    """The drafter's layers, and the embedding and head where it has its own."""

    def __init__(self, config: Eagle3Config, ids: np.ndarray | None = None):
        """`ids` int [draft_vocab] are the target's ids of the head's rows, None where they are the same.

        Raises KeyError or ValueError for a rope scaling that cannot be built.
        """
        super().__init__()
        self.config, self.ids = config, ids
        hidden, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.layer.vocab_size, hidden)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.taps * config.target_hidden, eps=eps)
        if config.fc_norm:
            self.fc_norm = [nn.RMSNorm(config.target_hidden, eps=eps) for _ in range(config.taps)]
        self.fc = nn.Linear(config.taps * config.target_hidden, hidden, bias=config.fc_bias)
        self.layers = [FirstLayer(config), *(_block(config, hidden) for _ in config.windows[1:])]
        self.norm = nn.RMSNorm(hidden, eps=eps)
        if config.own_head:
            self.lm_head = nn.Linear(hidden, config.draft_vocab, bias=False)

    @property
    def dtype(self) -> mx.Dtype:
        """What it computes in, also where its matrices are quantised."""
        return self.norm.weight.dtype

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self.layers]

    def fuse(self, hiddens: Sequence[mx.array]) -> mx.array:
        """Hidden states [n, target_hidden] of the layers that were asked for -> [n, hidden]."""
        hiddens = [h.astype(self.dtype) for h in hiddens]
        if self.config.fc_norm:
            hiddens = [norm(h) for norm, h in zip(self.fc_norm, hiddens, strict=True)]
        joined = mx.concatenate(hiddens, axis=-1)
        return self.fc(self.input_norm(joined) if self.config.norm_before_fc else joined)

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: list[KVCache]) -> mx.array:
        """Rows of embeddings [n, hidden] and of fused hidden states, or a row's output, [n, hidden] -> [n, hidden],
        before the last norm."""
        rows, past = embedded.shape[0], cache[0].offset
        x = hidden[None]
        for number, (layer, window) in enumerate(zip(self.layers, self.config.windows, strict=True)):
            mask = _mask(rows, past, window)
            if number == 0:
                x = layer(embedded[None].astype(self.dtype), x, mask, cache[0])
            else:
                x = layer(x, mask, cache[number])
        return x[0]


class FirstLayer(nn.Module):
    """A transformer block whose attention reads a token's embedding beside the hidden state that it adds to."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        block = _block(config, 2 * config.layer.hidden_size)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = nn.RMSNorm(config.layer.hidden_size, eps=config.layer.rms_norm_eps)
        self.input_layernorm, self.self_attn = block.input_layernorm, block.self_attn
        self.post_attention_layernorm, self.mlp = block.post_attention_layernorm, block.mlp

    def __call__(
        self, embedded: mx.array, hidden: mx.array, mask: mx.array | str | None, cache: KVCache | None
    ) -> mx.array:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        x = residual + self.self_attn(both, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


def _block(config: Eagle3Config, width: int) -> nn.Module:
    """mlx-lm's block, its attention reading inputs of `width`."""
    args = config.layer
    block = (qwen3 if config.qk_norm else llama).TransformerBlock(args)
    attention, head_dim = block.self_attn, args.head_dim
    attention.q_proj = nn.Linear(width, args.num_attention_heads * head_dim, bias=config.qkv_bias)
    attention.k_proj = nn.Linear(width, args.num_key_value_heads * head_dim, bias=config.qkv_bias)
    attention.v_proj = nn.Linear(width, args.num_key_value_heads * head_dim, bias=config.qkv_bias)
    attention.o_proj = nn.Linear(args.num_attention_heads * head_dim, args.hidden_size, bias=config.o_bias)
    attention.rope = initialize_rope(
        int(head_dim * config.rotary), args.rope_theta, False, args.rope_scaling, args.max_position_embeddings
    )
    return block


def _mask(rows: int, past: int, window: int | None) -> mx.array | str | None:
    if window is not None:
        return create_causal_mask(rows, past, window_size=window)
    return "causal" if rows > 1 else None
