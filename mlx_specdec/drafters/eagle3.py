"""EAGLE-3: a small network drafts from hidden states of the target, taken at several depths."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import PairingError
from ..features import FeatureRequest, Features
from ..networks.eagle3 import Eagle3
from ..target.model import Target, evaluate
from .heads import HeadDrafter
from .pairing import MadeFor, check_sizes

CHAIN = 5  # tokens drafted at most where the checkpoint names no number


class Eagle3Model:
    """The weights of an EAGLE-3 drafter."""

    name = "eagle3"

    def __init__(self, network: Eagle3):
        self.network = network

    def pair(self, target: Target) -> Callable[[], HeadDrafter]:
        """What makes its drafters for sequences of `target`. Raises PairingError."""
        config = self.network.config
        check_sizes(self.name, MadeFor(config.target_hidden, None, config.layer.vocab_size, config.target_name), target)
        wants = FeatureRequest(config.layer_ids or usual_layers(len(target.model.layers)))
        head = Eagle3Head(self.network, target)
        evaluate(self.network)
        return partial(HeadDrafter, self.name, head, wants, config.draft_tokens or CHAIN)


def usual_layers(n: int) -> tuple[int, int, int]:
    """The layers whose outputs are fused where the checkpoint names none, of a target with `n`: those before layers
    2, n/2 and n - 3. Raises PairingError when it has too few."""
    if n < 4:
        raise PairingError(f"the drafter eagle3 reads three layers of a target with 4 or more, and this one has {n}; "
                           "use a drafter made for this target")  # fmt: skip
    return 1, n // 2 - 1, n - 4


class Eagle3Head:
    """The network with the target's embedding and head where it has none of its own."""

    def __init__(self, network: Eagle3, target: Target):
        """Raises PairingError when an end of the target is needed and cannot be used."""
        config = network.config
        self._network = network
        self._embed = self._own_embedding if config.own_embedding else target.ends.embed
        self._head: Callable[[mx.array], mx.array]
        if config.own_head:
            self._head = network.lm_head
        elif config.tied:
            self._head = network.embed_tokens.as_linear
        else:
            dtype = target.ends.embed(mx.array([0])).dtype
            self._head = lambda hidden: target.ends.head(hidden.astype(dtype))
        self._columns = _columns(network, target.vocab)

    def make_cache(self) -> list[Any]:
        return self._network.make_cache()

    def fuse(self, features: Features) -> mx.array:
        return self._network.fuse(features.layers)

    def rows(self, tokens: mx.array, hidden: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        output = self._network(self._embed(tokens), hidden, cache)
        normed = self._network.norm(output)
        return normed, normed if self._network.config.norm_output else output

    def logits(self, output: mx.array) -> mx.array:
        logits = self._head(output).astype(mx.float32)
        if self._columns is None:
            return logits
        unknown = mx.full((*logits.shape[:-1], 1), -mx.inf)
        return mx.take(mx.concatenate([logits, unknown], axis=-1), self._columns, axis=-1)

    def _own_embedding(self, tokens: mx.array) -> mx.array:
        last = self._network.config.layer.vocab_size - 1  # the target's vocabulary may be padded further
        return self._network.embed_tokens(mx.minimum(tokens, last))


def _columns(network: Eagle3, vocab: int) -> mx.array | None:
    """Where the logit of each of the target's `vocab` tokens stands among the head's, int [vocab]: one past their end
    for a token that is never drafted. None where the head's logits are the target's, token for token."""
    config = network.config
    rows = config.draft_vocab if config.own_head else config.layer.vocab_size if config.tied else vocab
    ids = np.arange(rows) if network.ids is None else network.ids
    heads = np.arange(rows) if config.own_head else ids
    known = ids < vocab
    columns = np.full(vocab, rows)
    columns[ids[known]] = heads[known]
    return None if rows == vocab and np.array_equal(columns, np.arange(vocab)) else mx.array(columns)
