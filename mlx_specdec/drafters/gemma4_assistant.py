"""Gemma 4 assistants: a chain of drafts off the target's own keys and values.

The assistant has no memory of its own, so nothing is fed to it beforehand and nothing has to be undone: each row reads
what the target has in its cache of the tokens before `last`, and stands where `last` stands, whichever draft it makes.
"""

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from ..errors import PairingError
from ..features import FeatureRequest, Features, KeysValues
from ..networks.gemma4_assistant import Gemma4Assistant
from ..sampling import Sampler
from ..target.model import Target, evaluate
from .base import NOTHING, Draft
from .pairing import MadeFor, check_sizes

SLIDING = "sliding_attention"


class Gemma4AssistantModel:
    """The weights of an assistant."""

    name = "gemma4_assistant"

    def __init__(self, network: Gemma4Assistant):
        self.network = network

    def pair(self, target: Target) -> Callable[[], "Gemma4AssistantDrafter"]:
        """What makes its drafters. Raises PairingError unless `target` is a Gemma 4 whose keys it can read."""
        config = self.network.config
        check_sizes(self.name, MadeFor(config.backbone, vocab=config.text.vocab_size), target)
        if config.text.vocab_size != target.vocab:
            raise PairingError(
                f"the drafter {self.name} drafts among {config.text.vocab_size} tokens and this target has "
                f"{target.vocab}; use a drafter made for this target"
            )
        layers = {kind: self._layer(kind, target) for kind in config.kinds}
        evaluate(self.network)
        return partial(Gemma4AssistantDrafter, self.network, target.ends.embed, layers)

    def _layer(self, kind: str, target: Target) -> int:
        """The target's last layer of a kind that has keys of its own."""
        remembering = target.model.layers[: target.remembering]
        fitting = [i for i, layer in enumerate(remembering) if getattr(layer, "layer_type", None) == kind]
        if not fitting:
            raise PairingError(
                f"the drafter {self.name} reads the keys of a {kind} layer and this target has none; use it with the "
                "Gemma 4 that it was made for"
            )
        theirs = getattr(target.model.layers[fitting[-1]], "self_attn", None)
        heads, width = getattr(theirs, "n_kv_heads", 0), getattr(theirs, "head_dim", 0)
        own = next(layer.self_attn for layer in self.network.layers if layer.layer_type == kind)
        if own.head_dim != width or heads == 0 or own.n_heads % heads:
            raise PairingError(
                f"the drafter {self.name} has {own.n_heads} heads of {own.head_dim} in its {kind} layers and this "
                f"target has {heads} of {width} in layer {fitting[-1]}; use a drafter made for this target"
            )
        return fitting[-1]


class Gemma4AssistantDrafter:
    """Drafts for one sequence.

    It copies the rows of its window as they come, since it looks back further than the target's own layer has to keep.
    """

    name = "gemma4_assistant"
    max_draft = 8
    free = False

    def __init__(self, network: Gemma4Assistant, embed: Callable[[mx.array], mx.array], layers: dict[str, int]):
        """`embed` is the target's; `layers` are its layers that are read, by the kind of layer that reads them."""
        self._network, self._embed, self._kinds = network, embed, tuple(layers)
        self.wants = FeatureRequest(final=True, keys_values=tuple(layers.values()))
        config = network.config
        self._window, self._behind = config.text.sliding_window + config.beyond, config.behind
        self.start(())

    def start(self, prompt: Sequence[int]) -> None:
        self._position = 0  # of `last`: so many tokens were observed
        self._hidden: mx.array | None = None  # [1, backbone], the target's, of the newest of them
        self._held: dict[str, KeysValues] = {}
        self._recent: KeysValues | None = None  # the window's rows, copied

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        if features is None or features.final is None:
            return
        self._position += len(tokens)
        self._hidden = features.final[-1:]
        for kind, held in zip(self._kinds, features.keys_values, strict=True):
            self._held[kind] = self._slide(held, len(tokens)) if kind == SLIDING else held
        mx.async_eval(self._hidden, self._held)  # what stays lazy belongs to this thread

    def _slide(self, held: KeysValues, new: int) -> KeysValues:
        """The window, moved on by `new` tokens."""
        rows = [x[:, -new:] for x in held]
        if self._recent is not None:
            rows = [mx.concatenate([old, x], axis=1) for old, x in zip(self._recent, rows, strict=True)]
        self._recent = KeysValues(*(x[:, -self._window :] for x in rows))
        return self._recent

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        if limit < 1 or self._hidden is None:
            return NOTHING
        hidden, position, probs = self._hidden, self._position - self._behind, []
        held = {kind: held.astype(self._network.dtype) for kind, held in self._held.items()}
        self._hidden, self._held = None, {}  # a slice of the target's cache that lived on would have the cache copied
        fed = [mx.array([last], dtype=mx.int32)]
        for _ in range(limit):
            output, hidden = self._network(self._embed(fed[-1]), hidden, held, position)
            token, q = sampler.draft(self._network.logits(output), mx.concatenate(fed))
            fed.append(token)
            if q is not None:
                probs.append(q)
            mx.async_eval(token)  # the device starts while the next row is being built
        return Draft(mx.concatenate(fed[1:]), mx.concatenate(probs) if probs else None)

    def settle(self, drafted: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        pass
