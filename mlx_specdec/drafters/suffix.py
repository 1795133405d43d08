"""Suffix decoding (arXiv 2411.04975): what most often followed the end of the text so far, in this request and in
earlier outputs."""

import threading
import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError, OptionError, PairingError
from ..features import FeatureRequest, Features
from ..files import check_replaceable, replacing
from ..sampling import Sampler
from .base import NOTHING, Draft
from .suffix_tree import Guess, Rule, SuffixTree

if TYPE_CHECKING:
    from ..target.model import Target

# A file: this, the CRC-32 of what follows, and in int32 how many outputs there are, their sizes and their tokens, all
# little-endian.
MAGIC = b"specdec suffix 1"
WHAT = "suffix memory"

# How little a short match tells, in the request's own text and in earlier outputs: after n tokens a guess is believed
# as n / (n + doubt). On outputs of SmolLM2 what had followed once came again in 0.38, 0.55, 0.73, 0.76 and 0.92 of the
# cases after 1, 2, 3, 5 and 8 tokens of the own text, and in 0.26, 0.21, 0.57 and 0.38 after 1, 2, 3 and 5 of others.
DOUBT_OWN, DOUBT_EARLIER = 2.0, 6.0


class SuffixMemory:
    """The newest outputs of a process and the tree of their strings, for the drafters that are made with it.

    It keeps `max_cached_requests` outputs of `max_cached_tokens` tokens together at most; the oldest go first, and
    of an output that is too long alone the beginning. A token takes about 200 bytes. Any thread may use it.
    """

    def __init__(
        self, *, max_tree_depth: int = 24, max_cached_requests: int = 10_000, max_cached_tokens: int = 500_000
    ):
        for option, value, least, most in (
            ("max_tree_depth", max_tree_depth, 2, 255),
            ("max_cached_requests", max_cached_requests, 0, 2**31 - 1),
            ("max_cached_tokens", max_cached_tokens, 0, 2**27),
        ):
            if not (isinstance(value, int) and least <= value <= most):
                raise OptionError(f"{option} is {value}; choose a whole number from {least} to {most}")
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        self.max_cached_tokens = max_cached_tokens
        self._lock = threading.Lock()
        self._tree = SuffixTree(max_tree_depth)
        self._sizes: deque[int] = deque()  # of the outputs in the tree's text, which begins with `_gone` removed tokens
        self._gone = 0

    @property
    def requests(self) -> int:
        """How many outputs are kept."""
        return len(self._sizes)

    @property
    def tokens(self) -> int:
        """How many tokens the outputs have together."""
        return len(self._tree.text) - self._gone

    @property
    def largest(self) -> int:
        """The largest token that is kept, -1 if there is none."""
        return max(self._tree.text[self._gone :], default=-1)

    def add(self, output: Sequence[int]) -> None:
        """Keep an output, and let the oldest go where there would be too many."""
        kept = array("i", output[max(0, len(output) - self.max_cached_tokens) :])
        if not kept or not self.max_cached_requests:
            return
        with self._lock:
            while self.requests == self.max_cached_requests or self.tokens + len(kept) > self.max_cached_tokens:
                self._remove_oldest()
            tree, start = self._tree, len(self._tree.text)
            tree.text.extend(kept)
            self._sizes.append(len(kept))
            for place in range(start, len(tree.text)):
                tree.insert(place, min(place + tree.depth, len(tree.text)))

    def _remove_oldest(self) -> None:
        end = self._gone + self._sizes.popleft()
        for place in range(self._gone, end):
            self._tree.remove(place, min(place + self._tree.depth, end))
        self._gone = end
        if 2 * self._gone > len(self._tree.text):  # this seldom, since it costs the size of the tree
            self._tree.forget(self._gone)
            self._gone = 0

    def guess(self, context: array, limit: int, rule: Rule) -> Guess:
        """The best draft after `context`, at most `max_tree_depth` tokens."""
        with self._lock:
            return self._tree.guess(context, limit, rule, recent=False)

    def save(self, path: str | Path) -> None:
        """Write the outputs to a file, which is replaced in one step. Raises CheckpointError where that cannot be."""
        with self._lock:
            sizes, tokens = list(self._sizes), self._tree.text[self._gone :]
        body = np.array([len(sizes), *sizes, *tokens], "<i4").tobytes()
        with replacing(Path(path), WHAT) as file:
            file.write(MAGIC + zlib.crc32(body).to_bytes(4, "little") + body)

    def load(self, path: str | Path) -> None:
        """Add the outputs of a saved file, oldest first; it takes 10 to 20 microseconds a token.

        Raises CheckpointError for a file that is not there or not whole.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read the suffix memory {path} ({error.strerror}); check the path") from error
        head, body = data[: len(MAGIC) + 4], data[len(MAGIC) + 4 :]
        if head != MAGIC + zlib.crc32(body).to_bytes(4, "little") or not body:
            raise CheckpointError(f"the suffix memory {path} is damaged; delete it or leave it out")
        requests, *numbers = np.frombuffer(body, "<i4").tolist()
        start = requests
        for size in numbers[:requests]:
            self.add(numbers[start : start + size])
            start += size


class Suffix:
    """Drafts what most often followed the end of the text, by the request's own strings or by those of `memory`.

    For each length of match the most frequent continuation is followed, for as many tokens as `Rule` allows, and the
    one with the largest score taken. Of the request's own and the memory's the one with the larger expected number of
    tokens that stand is drafted, where a short match is doubted, and more so in the memory.
    A request's text takes about 200 bytes a token while it is the current one; when it is over (`start` or `close`)
    its output goes to the memory. Drafters may share a memory, whose depth they take; without one it has its own.
    """

    name = "suffix"
    wants = FeatureRequest()
    free = True

    def __init__(
        self,
        memory: SuffixMemory | None = None,
        *,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
    ):
        self.memory = SuffixMemory() if memory is None else memory
        self._rule = Rule(max_spec_factor, max_spec_offset, min_token_prob)
        self.max_draft = self._rule.check(self.memory.max_tree_depth)  # 12 with the defaults
        self._forget(0)

    def start(self, prompt: Sequence[int]) -> None:
        self.close()
        self._forget(len(prompt))

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        tree = self._tree
        known = len(tree.text)
        tree.text.extend(tokens)
        # Strings of the full depth alone are counted here: those that begin later are in the context of `propose`.
        for place in range(max(0, known - tree.depth + 1), len(tree.text) - tree.depth + 1):
            tree.insert(place, place + tree.depth)

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        tree = self._tree
        context = tree.text[max(0, len(tree.text) - tree.depth + 1) :]
        context.append(last)
        own = tree.guess(context, limit, self._rule, recent=True)
        earlier = self.memory.guess(context, limit, self._rule)
        confidences = _confidence(own, DOUBT_OWN), _confidence(earlier, DOUBT_EARLIER)
        best, confidence = max(zip((own, earlier), confidences, strict=True), key=lambda pair: _expected(pair[1]))
        if not best.tokens:
            return NOTHING
        return Draft(mx.array(best.tokens, dtype=mx.int32), confidence=confidence)

    def settle(self, drafted: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        """The request is over: its output goes to the memory."""
        output = self._tree.text[self._prompt :]
        self._forget(0)
        self.memory.add(output)

    def _forget(self, prompt: int) -> None:
        self._tree = SuffixTree(self.memory.max_tree_depth)
        self._prompt = prompt  # its length: what is observed after it is output


def _confidence(guess: Guess, doubt: float) -> tuple[float, ...]:
    return tuple(chance * n / (n + doubt) for n, chance in enumerate(guess.chances, guess.matched))


def _expected(confidence: Sequence[float]) -> float:
    """How many tokens stand."""
    return sum(accumulate(confidence, mul))


class Suffixes:
    """Makes suffix drafters that share `memory`, which begins with what `path` holds and can be kept there."""

    name = Suffix.name

    def __init__(self, memory: SuffixMemory, rule: Rule, path: Path | None = None, *, keeps: bool = True):
        """Raises OptionError for a rule that allows no draft, CheckpointError for a file that is not whole, or that it
        `keeps` and cannot write; one that is not there yet is an empty memory."""
        rule.check(memory.max_tree_depth)
        self._memory, self._rule, self._path, self._keeps = memory, rule, path, keeps
        if path is not None:
            check_replaceable(path, WHAT, keeps)
            if path.exists():
                memory.load(path)

    def pair(self, target: "Target") -> "Suffixes":
        if self._memory.largest >= target.vocab:
            raise PairingError(
                f"the suffix memory {self._path} is of another model: it has token {self._memory.largest}, and the "
                f"target has {target.vocab} tokens; give a file for each model"
            )
        return self

    def __call__(self) -> Suffix:
        return Suffix(self._memory, **self._rule._asdict())

    def keep(self) -> None:
        if self._path is not None and self._keeps:
            self._memory.save(self._path)
