"""Gemma 4's assistant: a small model whose layers have queries alone and read the target's keys and values.

It has the layers of Gemma 4 itself (google-deepmind's model as in Hugging Face's `gemma4_assistant`), between two
projections to and from the width of the target.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs

from ..features import KeysValues


@dataclass(frozen=True)
class Gemma4AssistantConfig:
    """`text` are the sizes of its own layers; `backbone` is the hidden size of its target.

    With `centroids` its head looks at the tokens of the `clusters` likeliest of so many clusters alone.

    Engines disagree on two things that no file says; the defaults are Hugging Face's. `behind`: so many places before
    the token that it is fed a query stands (vLLM: 1). `beyond`: so many rows more than `sliding_window` a sliding layer
    reads (0 if the distance is counted exclusively, -1 if from `behind` 0 as well).
    """

    text: ModelArgs
    backbone: int
    centroids: int | None = None
    clusters: int = 32
    behind: int = 0
    beyond: int = 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its layers (full_attention, sliding_attention), each once."""
        return tuple(dict.fromkeys(self.text.layer_types))


class Gemma4Assistant(nn.Module):
    """One row in, one row out; it remembers nothing."""

    def __init__(self, config: Gemma4AssistantConfig):
        super().__init__()
        text = config.text
        self.config = config
        self.pre_projection = nn.Linear(2 * config.backbone, text.hidden_size, bias=False)
        self.layers = [DecoderLayer(text, i) for i in range(text.num_hidden_layers)]
        self.norm = nn.RMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        self.post_projection = nn.Linear(text.hidden_size, config.backbone, bias=False)
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)  # the head; what goes in is the target's
        if config.centroids is not None:
            self.masked_embedding = Clusters(text, config.centroids, config.clusters)

    @property
    def dtype(self) -> mx.Dtype:
        """That of its activations."""
        return self.norm.weight.dtype

    def __call__(
        self, embedding: mx.array, hidden: mx.array, held: dict[str, KeysValues], position: int
    ) -> tuple[mx.array, mx.array]:
        """A row of a token's `embedding`, as the target's first layer gets it, and of `hidden`, both [1, backbone].

        `held` is by kind of layer what it attends to: every row of it, so a window is to be cut beforehand. `position`
        is where the query stands. Returns [1, hidden_size], which `logits` takes, and [1, backbone], the next `hidden`.
        """
        x = self.pre_projection(mx.concatenate([embedding, hidden], axis=-1).astype(self.dtype))[None]
        for layer in self.layers:
            keys, values = held[layer.layer_type]
            x, _, _ = layer(x, shared_kv=(keys[None], values[None]), offset=position)
        output = self.norm(x)[0]
        return output, self.post_projection(output)

    def logits(self, output: mx.array) -> mx.array:
        """float32 [1, vocab] of `output` [1, hidden_size]; -inf for tokens that the head does not look at."""
        if self.config.centroids is None:
            return self.embed_tokens.as_linear(output).astype(mx.float32)
        tokens = self.masked_embedding(output)
        scores = (self.embed_tokens(tokens) @ output[0]).astype(mx.float32)
        logits = mx.full((self.config.text.vocab_size,), -mx.inf)
        logits[tokens] = scores
        return logits[None]


class Clusters(nn.Module):
    """Which tokens are worth scoring: those of the clusters whose centroids are nearest."""

    def __init__(self, text: ModelArgs, centroids: int, chosen: int):
        super().__init__()
        self.chosen = chosen
        self.centroids = nn.Linear(text.hidden_size, centroids, bias=False)
        self.token_ordering = mx.zeros((text.vocab_size,), dtype=mx.int32)  # tokens, cluster by cluster
        self.freeze(keys=["token_ordering"], recurse=False)

    def __call__(self, output: mx.array) -> mx.array:
        """Tokens int32 [chosen * vocab / centroids] for `output` [1, hidden_size]."""
        scores = self.centroids(output)[0].astype(mx.float32)
        likeliest = mx.argpartition(-scores, kth=self.chosen - 1)[: self.chosen]
        return self.token_ordering.reshape(scores.shape[0], -1)[likeliest].reshape(-1)
