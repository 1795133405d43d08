"""DFlash drafts a block in one pass, from what the target made of every certain token."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from ..errors import OptionError, PairingError
from ..features import FeatureRequest, Features
from ..networks.dflash import DFlash
from ..sampling import Sampler
from .base import NOTHING, Draft
from .pairing import MadeFor, check_sizes

if TYPE_CHECKING:
    from ..target.model import Target

# Layers that could see everything see so many tokens: beyond that, drafters trained on shorter texts are accepted less
# (at 32,000 tokens mlx_dspark measured 1.98 tokens a pass without a window and 2.60 with one of 4096).
WINDOW = 4096


class DFlashModel:
    """A network, and how many tokens its full layers look back; None is all of them."""

    name = "dflash"

    def __init__(self, network: DFlash, window: int | None = WINDOW):
        if window is not None and window < 1:
            raise OptionError(f"the drafter's window is {window}; choose 1 or more")
        self.network, self.window = network, window

    def pair(self, target: "Target") -> Callable[[], "DFlashDrafter"]:
        """What makes its drafters. Raises PairingError when it was made for another target, in sizes or vocabulary."""
        from ..target.model import evaluate

        config = self.network.config
        made_for = MadeFor(config.target_hidden_size, config.num_target_layers, config.vocab_size, config.target_name)
        check_sizes(self.name, made_for, target)
        if (highest := self.network.highest_id) >= target.vocab:
            raise PairingError(f"the drafter dflash uses token {highest} and this target's vocabulary is "
                               f"{target.vocab}; use a drafter made for this target")  # fmt: skip
        evaluate(self.network)
        return partial(DFlashDrafter, self.network, _embedding(self.network, target), _head(self.network, target),
                       self.window)  # fmt: skip


class DFlashDrafter:
    """Keeps the context of one sequence; `embed` and `head` are the network's own or the target's."""

    name = "dflash"
    free = False

    def __init__(
        self,
        network: DFlash,
        embed: Callable[[mx.array], mx.array],
        head: Callable[[mx.array], mx.array],
        window: int | None,
    ):
        self._network, self._embed, self._head, self._window = network, embed, head, window
        config = network.config
        self.wants = FeatureRequest(layers=config.target_layer_ids)
        self._first = 0 if config.sample_from_anchor else 1  # the row of the block that gives the first draft
        self.block_size = config.block_size
        self.max_draft = config.block_size - self._first
        self.start(())

    def start(self, prompt: Sequence[int]) -> None:
        self._observed = 0
        self._contexts = self._network.make_contexts(self._window)

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        if features is not None:
            self._network.remember(features, self._observed, self._contexts)
            self._compute()
        self._observed += len(tokens)

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        """The rows of a block know nothing of each other's tokens, so each is drawn by itself; only penalties and noise
        follow the tokens drawn before it."""
        drafts = min(limit, self.max_draft)
        if drafts < 1:
            return NOTHING
        block = [last] + [self._network.config.mask_token_id] * (drafts + self._first - 1)
        output = self._network(self._embed(mx.array(block)), self._observed, self._contexts)
        logits = self._head(output[self._first :])
        fed, probs = mx.array([last], dtype=mx.int32), []
        for row in range(drafts):
            token, q = sampler.draft(logits[row : row + 1], fed)
            fed = mx.concatenate([fed, token])
            if q is not None:
                probs.append(q)
        self._compute(fed)
        return Draft(fed[1:], mx.concatenate(probs) if probs else None)

    def settle(self, drafted: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _compute(self, *more: mx.array) -> None:
        """What stays lazy belongs to this thread."""
        mx.async_eval(*more, [context.arrays for context in self._contexts])


def _embedding(network: DFlash, target: "Target") -> Callable[[mx.array], mx.array]:
    """Tokens int [n] -> [n, hidden] in the network's dtype."""
    config, dtype = network.config, network.dtype
    if (rows := config.embedding_size) is None:
        embed = partial(target.ends.embed, scaled=config.scaled_embedding)
    else:
        embed = partial(_own_embedding, network, rows)
    return lambda tokens: (embed(tokens) * config.input_embedding_scale).astype(dtype)


def _own_embedding(network: DFlash, rows: int, tokens: mx.array) -> mx.array:
    """Tokens beyond it are padding of the target's vocabulary."""
    return network.embed_tokens(mx.where(tokens < rows, tokens, 0))


def _head(network: DFlash, target: "Target") -> Callable[[mx.array], mx.array]:
    """Outputs [n, hidden] -> logits float32 [n, target's vocabulary]."""
    if network.config.draft_vocab_size is not None:
        return lambda output: network.logits(network.lm_head(output), target.vocab, capped=False)
    ends = target.ends
    dtype, capped = ends.embed(mx.array([0])).dtype, ends.caps
    return lambda output: network.logits(ends.head(output.astype(dtype)), target.vocab, capped)
