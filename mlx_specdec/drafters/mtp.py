"""Drafting with the multi-token-prediction heads that a target was published with."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..features import FeatureRequest, Features
from ..networks.mtp import MtpNetwork
from .base import Drafter
from .heads import HeadDrafter
from .pairing import MadeFor, check_sizes

if TYPE_CHECKING:
    from ..target.model import Target

MAX_DRAFT = 3  # of one head that was trained for a single step
WANTS = FeatureRequest(final=True)


class MtpModel:
    """The heads of one target, as its drafter."""

    name = "mtp"

    def __init__(self, network: MtpNetwork):
        self._network = network

    def pair(self, target: "Target") -> Callable[[], Drafter]:
        config = self._network.config
        check_sizes(self.name, MadeFor(config.hidden, config.target_layers, config.vocab), target)
        return partial(HeadDrafter, self.name, MtpHead(self._network, target), WANTS, MAX_DRAFT)


class MtpHead:
    """One head between the target's own embedding and vocabulary head, as a chain is drafted with it."""

    def __init__(self, network: MtpNetwork, target: "Target"):
        self._network, self._ends = network, target.ends

    def make_cache(self) -> list[Any]:
        return self._network.make_cache()

    def fuse(self, features: Features) -> mx.array:
        assert features.final is not None
        return features.final

    def rows(self, tokens: mx.array, hidden: mx.array, cache: list[Any], step: int = 0) -> tuple[mx.array, mx.array]:
        return self._network(self._ends.embed(tokens), hidden, cache[step], step)

    def logits(self, output: mx.array) -> mx.array:
        return self._ends.head(output)
