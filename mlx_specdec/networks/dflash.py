"""DFlash (Chen 2026, arXiv 2602.06036): one pass over an anchor and masks drafts a whole block.

What the target made of the certain tokens is fused once and enters every layer as keys and values beside the block's
own. Those rows, the context, are all that is kept from pass to pass.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from ..features import Features


@dataclass(frozen=True)
class Sight:
    """What the rows of a block see in one layer.

    Of the context, its newest `reach` rows (all of them if None), and, counting through context and block, only what is
    nearer than `window`; of the block itself all rows, or if `causal` none that come later.
    """

    reach: int | None = None
    window: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class DFlashConfig:
    """Sizes and conventions of one checkpoint.

    `target_*` say what it was made for, `target_layer_ids` by the output of a layer numbered from 0. `sights` and
    `ropes` (theta, and the scaling as mlx-lm reads it) have an entry for each layer, `sinks` names those with attention
    sinks. `embedding_size` and `draft_vocab_size` are the rows of its own embedding and head, None for the target's.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    vocab_size: int
    sights: tuple[Sight, ...]
    ropes: tuple[tuple[float, dict[str, Any] | None], ...]
    num_target_layers: int | None = None
    target_name: str | None = None
    attention_bias: bool = False
    sinks: tuple[int, ...] = ()
    sample_from_anchor: bool = False
    scaled_embedding: bool = True
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    embedding_size: int | None = None
    draft_vocab_size: int | None = None


class Context:
    """Keys and values [1, heads, n, head_dim] of certain tokens in one layer: the newest `reach`, or all if None."""

    SLACK = 256  # so many rows beyond `reach` may stay before they are cut off, which copies the others

    def __init__(self, reach: int | None):
        self.reach = reach
        self._cache = KVCache()

    @property
    def arrays(self) -> list[mx.array]:
        return [x for x in (self._cache.keys, self._cache.values) if x is not None]

    def newest(self, rows: mx.array) -> mx.array:
        """Of new rows [n, ...] those that it would keep."""
        return rows if self.reach is None else rows[-self.reach :]

    def append(self, keys: mx.array, values: mx.array) -> None:
        self._cache.update_and_fetch(keys, values)
        held = self._cache.offset
        if self.reach is not None and held > self.reach + self.SLACK:
            kept = [mx.contiguous(x[..., held - self.reach : held, :]) for x in self.arrays]
            self._cache.state = (*kept, self.reach)

    def beside(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """What it holds and, after that, a block's keys and values, which the next rows to come overwrite."""
        block = keys.shape[2]
        keys, values = self._cache.update_and_fetch(keys, values)
        self._cache.trim(block)
        beyond = 0 if self.reach is None else max(self._cache.offset - self.reach, 0)
        return keys[..., beyond:, :], values[..., beyond:, :]


class Attention(nn.Module):
    """Attention of a block's rows over context and block."""

    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.sight = config.sights[layer]
        self.scale = config.head_dim**-0.5
        hidden, size, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        if layer in config.sinks:
            self.sinks = mx.zeros((self.heads,))
        theta, scaling = config.ropes[layer]
        self.rope = initialize_rope(size, theta, False, scaling, config.max_position_embeddings)

    def keys_values(self, x: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """Of rows [n, hidden], the first of them at `position`: both [1, kv_heads, n, head_dim]."""
        keys = self.k_norm(_split(self.k_proj(x), self.kv_heads))
        return self.rope(keys, offset=position), _split(self.v_proj(x), self.kv_heads)

    def __call__(self, x: mx.array, position: int, context: Context) -> mx.array:
        queries = self.rope(self.q_norm(_split(self.q_proj(x), self.heads)), offset=position)
        keys, values = context.beside(*self.keys_values(x, position))
        mask = visible(x.shape[0], keys.shape[2], self.sight)
        sinks = self.sinks if "sinks" in self else None
        seen = scaled_dot_product_attention(queries, keys, values, None, scale=self.scale, mask=mask, sinks=sinks)
        return self.o_proj(seen[0].swapaxes(0, 1).reshape(x.shape[0], -1))


class Layer(nn.Module):
    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, position: int, context: Context) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), position, context)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlash(nn.Module):
    """The drafter's layers, under the names that its files use."""

    def __init__(self, config: DFlashConfig, draft_ids: mx.array | None = None):
        """`draft_ids` int32 [draft_vocab_size]: which token of the target each row of its own head stands for."""
        super().__init__()
        self.config = config
        self._draft_ids = draft_ids  # not a weight
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [Layer(config, i) for i in range(len(config.sights))]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.embedding_size is not None:
            self.embed_tokens = nn.Embedding(config.embedding_size, config.hidden_size)
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    @property
    def dtype(self) -> mx.Dtype:
        return self.norm.weight.dtype

    @property
    def highest_id(self) -> int:
        """The highest token that it has to have of the target: drafted, or its mask embedded."""
        mask = [self.config.mask_token_id] if self.config.embedding_size is None else []
        drafted = [] if self._draft_ids is None else np.array(self._draft_ids).tolist()
        return max([0, *mask, *drafted])

    def make_contexts(self, window: int | None) -> list[Context]:
        """Empty ones, a layer each; `window` bounds those that would keep every token."""
        reaches = [layer.self_attn.sight.reach for layer in self.layers]
        return [Context(window if reach is None else reach) for reach in reaches]

    def remember(self, features: Features, position: int, contexts: list[Context]) -> None:
        """Append what the target made of n certain tokens, the first of them at `position`, to the contexts."""
        count = features.layers[0].shape[0]
        kept = max(context.newest(features.layers[0]).shape[0] for context in contexts)
        taps = mx.concatenate([x[count - kept :] for x in features.layers], axis=-1)
        fused = self.hidden_norm(self.fc(taps.astype(self.dtype)))
        for layer, context in zip(self.layers, contexts, strict=True):
            rows = context.newest(fused)
            context.append(*layer.self_attn.keys_values(rows, position + count - rows.shape[0]))

    def __call__(self, x: mx.array, position: int, contexts: list[Context]) -> mx.array:
        """A block [n, hidden] whose first row, the anchor, is at `position` -> [n, hidden], after the final norm."""
        for layer, context in zip(self.layers, contexts, strict=True):
            x = layer(x, position, context)
        return self.norm(x)

    def logits(self, raw: mx.array, vocab: int, capped: bool) -> mx.array:
        """What a head made of a block, scaled and capped: float32 [n, vocab], -inf for what its own head lacks.

        `capped` says that the head was the target's and has capped already, as this would.
        """
        config = self.config
        logits = raw.astype(mx.float32) * config.output_multiplier
        if config.final_logit_softcapping and not capped:
            logits = mx.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
        if self._draft_ids is not None:
            full = mx.full((logits.shape[0], vocab), -mx.inf)
            full[:, self._draft_ids] = logits
            return full
        missing = max(vocab - logits.shape[1], 0)
        return mx.pad(logits[:, :vocab], [(0, 0), (0, missing)], constant_values=-mx.inf)


def visible(rows: int, total: int, sight: Sight) -> mx.array | str | None:
    """Which of `total` keys, the last `rows` of them the block's own, each row of the block sees: a mask as attention
    takes it, bool [rows, total] where it needs one."""
    if sight.window is None or total <= sight.window:
        return "causal" if sight.causal else None
    ahead = mx.arange(total) - mx.arange(total - rows, total)[:, None]
    return (ahead > -sight.window) & (ahead < (1 if sight.causal else sight.window))


def _split(x: mx.array, heads: int) -> mx.array:
    """[n, heads * size] -> [1, heads, n, size]"""
    return x.reshape(x.shape[0], heads, -1).swapaxes(0, 1)[None]
