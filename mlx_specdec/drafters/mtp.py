"""Drafting with the multi-token-prediction heads that a target was published with."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..features import FeatureRequest, Features
from ..networks.mtp import MtpNetwork
from ..sampling import Sampler
from .base import NOTHING, Draft, Drafter
from .heads import CHUNK, HeadDrafter
from .pairing import MadeFor, check_sizes

if TYPE_CHECKING:
    from ..target.model import Target

MAX_DRAFT = 3  # with one head, which was trained for a single step
WANTS = FeatureRequest(final=True)


class MtpModel:
    """The heads of one target, as its drafter: one that is used again and again, or several of which each drafts one
    token."""

    name = "mtp"

    def __init__(self, network: MtpNetwork):
        self._network = network

    def pair(self, target: "Target") -> Callable[[], Drafter]:
        config = self._network.config
        check_sizes(self.name, MadeFor(config.hidden, config.target_layers, config.vocab), target)
        head = MtpHead(self._network, target)
        if len(self._network.heads) > 1:
            return partial(HeadsInTurn, self.name, head, len(self._network.heads))
        return partial(HeadDrafter, self.name, head, WANTS, MAX_DRAFT)


class MtpHead:
    """The heads between the target's own embedding and vocabulary head."""

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


class HeadsInTurn:
    """Head j drafts token j. Its row i is made of what head j - 1 made of its own row i, and of token i + j + 1.

    So the newest j rows of head j rest on guesses and are dropped when the round is over. What head j - 1 made of
    certain tokens waits until the token that makes a row of it is certain, or guessed. (transformers' MtpModel comes to
    the same numbers; it keeps the rows whose guesses stood.)
    """

    free = False
    wants = WANTS

    def __init__(self, name: str, head: MtpHead, heads: int):
        self.name, self.max_draft = name, heads
        self._head = head
        self.start(())

    def start(self, prompt: Sequence[int]) -> None:
        self._cache = self._head.make_cache()
        self._tokens: list[int] = []  # all certain ones
        self._waiting: list[list[mx.array]] = [[] for _ in self._cache]  # [n, width], of which rows are to be made
        self._guesses = [0] * len(self._cache)  # rows in each cache that rest on guesses

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        if features is None:
            return
        for cache, guesses in zip(self._cache, self._guesses, strict=True):
            cache.trim(guesses)
        self._guesses = [0] * len(self._cache)
        self._tokens.extend(tokens)
        self._waiting[0].append(self._head.fuse(features))
        if max(sum(len(h) for h in waiting) for waiting in self._waiting) > CHUNK:
            self._catch_up()
        mx.async_eval(self._waiting)  # what stays lazy belongs to this thread

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        if limit < 1 or not self._waiting[0]:
            return NOTHING
        fed, probs = [mx.array([last], dtype=mx.int32)], []
        made: list[mx.array] = []  # by the head before
        for step in range(min(limit, self.max_draft)):
            hidden = mx.concatenate(self._waiting[step] + made)
            output, passed_on = self._rows(step, hidden, fed)
            token, q = sampler.draft(self._head.logits(output[-1:]), mx.concatenate(fed))
            fed.append(token)
            if q is not None:
                probs.append(q)
            certain = max(len(hidden) - step, 0)
            self._guesses[step] = len(hidden) - certain
            self._waiting[step] = [hidden[certain : certain + 1]] if 0 < step <= len(hidden) else []
            made = [passed_on]
            mx.async_eval(token)  # the device starts while the next head's rows are being built
        if step + 1 < self.max_draft:
            self._waiting[step + 1].append(passed_on[:certain])
        mx.async_eval(self._waiting, [c.state for c in self._cache[: step + 1]])
        return Draft(mx.concatenate(fed[1:]), mx.concatenate(probs) if probs else None)

    def settle(self, drafted: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _catch_up(self) -> None:
        """Let each head make its rows of certain tokens, all but what waits for the next one."""
        made: list[mx.array] = []
        for step in range(self.max_draft):
            hidden = self._waiting[step] + made
            if sum(len(h) for h in hidden) < 2:
                self._waiting[step], made = hidden, []
                continue
            rows = mx.concatenate(hidden)
            _, passed_on = self._rows(step, rows[:-1], [])
            self._waiting[step], made = [rows[-1:]], [passed_on]
            mx.async_eval(self._cache[step].state)

    def _rows(self, step: int, hidden: mx.array, fed: list[mx.array]) -> tuple[mx.array, mx.array]:
        """The next rows of a head, the last of which takes the last token there is."""
        known = mx.array(self._tokens[-len(hidden) :], dtype=mx.int32)
        return self._head.rows(mx.concatenate([known, *fed])[-len(hidden) :], hidden, self._cache, step)
