"""Prompt lookup that counts what followed the newest 4, 3, 2 and 1 tokens (llama.cpp's `ngram-cache`)."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError, OptionError, PairingError
from ..features import FeatureRequest, Features
from ..files import check_replaceable, replacing
from ..history import History
from ..sampling import Sampler
from .base import NOTHING, Draft

if TYPE_CHECKING:
    from ..target.model import Target

WHAT = "lookup file"
LONGEST = 4  # tokens of an n-gram
STATIC = 2  # tokens of an n-gram in a static lookup
INT32_MOST = 2**31 - 1
STATIC_WEIGHT = 100  # what a token's count is multiplied with, times its static count

HEAD = Struct("<5i")  # of an n-gram in a file: its tokens, -1 where it has fewer than four, and how many followers
FOLLOWER = Struct("<2i")  # its token and count

# For n = 1, 2, 3, 4: how many followers must have been counted, and how many of a hundred the drafted one must be.
LAX = ((2, 66), (2, 50), (1, 50), (1, 50))
STRICT = ((4, 75), (3, 66), (2, 66), (2, 66))


class Followers:
    """The tokens that followed an n-gram, counted."""

    __slots__ = ("best", "counts", "most", "total")

    def __init__(self, token: int, count: int):
        self.counts = {token: count}
        self.best = token  # the most frequent one, the lowest of equals
        self.most = self.total = count  # its count, and the sum of all

    def add(self, token: int, count: int) -> None:
        self.total += count
        count += self.counts.get(token, 0)
        self.counts[token] = count
        if count > self.most or (count == self.most and token < self.best):
            self.best, self.most = token, count


class Lookup:
    """Counted followers of n-grams, in memory and as llama.cpp's lookup file.

    The file is, for one n-gram after the other, little-endian int32: four tokens (-1 where it has fewer), how many
    followers, and for each the token and its count.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # By the n-gram as in the file, without the -1. Most were seen once: for these the one token is all there is.
        self._known: dict[bytes, Followers | int] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, ngram: bytes) -> Followers | None:
        followers = self._known.get(ngram)
        return None if followers is None else _in_full(followers)

    def learn(self, tokens: Sequence[int], new: int, shortest: int = 1, longest: int = LONGEST) -> None:
        """The last `new` of `tokens` are counted, each after the n-grams before it."""
        packed = pack(tokens)
        for i in range(max(len(tokens) - new, shortest), len(tokens)):
            for n in range(shortest, min(longest, i) + 1):
                self._add(packed[4 * (i - n) : 4 * i], tokens[i], 1)

    def merge(self, other: "Lookup") -> None:
        """The other's counts are added to these; any thread may, while others read."""
        with self._lock:
            for ngram, followers in list(other):
                for token, count in followers.counts.items():
                    self._add(ngram, token, count)

    def check(self, vocab: int, path: str | Path) -> None:
        """Raise PairingError if the lookup, which is of `path`, drafts a token beyond a target's `vocab` logits."""
        largest = max((token for _, followers in self for token in followers.counts), default=0)
        if largest >= vocab:
            raise PairingError(
                f"the lookup file {path} was made for another model: it has token {largest}, and the target has "
                f"{vocab} tokens; make one with the target's tokenizer"
            )

    def __iter__(self) -> Iterator[tuple[bytes, Followers]]:
        for ngram, followers in self._known.items():
            yield ngram, _in_full(followers)

    def _add(self, ngram: bytes, token: int, count: int) -> None:
        followers = self._known.get(ngram)
        if followers is None:
            self._known[ngram] = token if count == 1 else Followers(token, count)
        else:
            self._known[ngram] = followers = _in_full(followers)
            followers.add(token, count)

    @classmethod
    def load(cls, path: str | Path) -> "Lookup":
        """Raises CheckpointError for a file that is not there or not whole."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read the lookup file {path} ({error.strerror}); check the path") from error
        lookup = cls()
        for ngram, token, count in _records(data, path):
            lookup._add(ngram, token, count)
        return lookup

    def save(self, path: str | Path) -> None:
        """Replaces the file in one step: whoever reads it, even after a crash, sees the old or the new one whole."""
        with self._lock, replacing(Path(path), WHAT) as file:
            for ngram, followers in sorted(self, key=lambda entry: entry[0]):
                counts = [(token, min(count, INT32_MOST)) for token, count in sorted(followers.counts.items())]
                file.write(ngram.ljust(4 * LONGEST, b"\xff"))
                file.write(pack([len(counts), *chain.from_iterable(counts)]))


def _in_full(followers: Followers | int) -> Followers:
    return Followers(followers, 1) if isinstance(followers, int) else followers


def pack(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def _records(data: bytes, path: str | Path) -> Iterator[tuple[bytes, int, int]]:
    """The n-grams of a lookup file with each follower and its count."""

    def damaged(why: str) -> CheckpointError:
        return CheckpointError(f"the lookup file {path} is damaged at byte {at}: {why}; make it again or leave it out")

    at = 0
    while at < len(data):
        if at + HEAD.size > len(data):
            raise damaged(f"it ends within an n-gram, after {len(data)} bytes")
        *ngram, followers = HEAD.unpack_from(data, at)
        n = ngram.index(-1) if -1 in ngram else LONGEST
        if n == 0 or min(ngram[:n]) < 0 or ngram[n:] != [-1] * (LONGEST - n):
            raise damaged(f"{ngram} is no n-gram")
        if followers < 1:
            raise damaged(f"the n-gram {ngram} has {followers} followers")
        first, end = at + HEAD.size, at + HEAD.size + FOLLOWER.size * followers
        if end > len(data):
            raise damaged(f"it ends within the {followers} followers of {ngram}, after {len(data)} bytes")
        for token, count in FOLLOWER.iter_unpack(data[first:end]):
            if token < 0 or count < 1:
                raise damaged(f"token {token} follows {ngram} {count} times")
            yield data[at : at + 4 * n], token, count
        at = end


class NgramCache:
    """Drafts token by token what mostly followed the newest ones here, else in earlier sequences, else anywhere.

    `dynamic` holds earlier sequences and `static` a corpus, as 2-grams; sequences may share them. What this one counts
    is in `context`, which goes to `dynamic` when the sequence is over if it `keeps`. Thresholds are llama.cpp's. Of
    equals the lowest token is drafted, where llama.cpp leaves it to chance.

    What llama.cpp does otherwise, and `compat=True` repeats:

    - It counts the tokens since the last draft as if nothing stood before them: a round of one token teaches nothing.
    - A new sequence keeps what the one before counted, and teaches nothing until it is longer; here it starts afresh.
    """

    name = "ngram_cache"
    wants = FeatureRequest()
    free = True

    def __init__(
        self,
        n_draft: int = 8,
        static: Lookup | None = None,
        dynamic: Lookup | None = None,
        *,
        keeps: bool = False,
        compat: bool = False,
    ):
        if n_draft not in range(1, 1025):
            raise OptionError(f"ngram_n_draft is {n_draft}; choose a whole number from 1 to 1024")
        self.n_draft, self.keeps, self.compat = n_draft, keeps, compat
        self.max_draft = n_draft
        self.static = Lookup() if static is None else static
        self.dynamic = Lookup() if dynamic is None else dynamic
        self._forget()

    def _forget(self) -> None:
        self.context = Lookup()
        self._history = History()
        self._learnt = 0  # tokens that are counted, `last` of the newest draft included

    def start(self, prompt: Sequence[int]) -> None:
        if not self.compat:
            self._forget()
        self._history = History(len(prompt) + 1024)

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        self._history.extend(tokens)

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        self._learn(last)
        if not len(self._history):
            return NOTHING  # the static lookup needs two tokens, and without them llama.cpp drafts nothing at all
        recent = [*self._history.tokens[-(LONGEST - 1) :].tolist(), last]
        drafted: list[int] = []
        while len(drafted) < min(limit, self.n_draft):
            token = self._next(pack(recent[-LONGEST:]))
            if token is None:
                break
            drafted.append(token)
            recent.append(token)
        return Draft(mx.array(drafted, dtype=mx.int32)) if drafted else NOTHING

    def settle(self, drafted: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        if self.keeps:
            self.dynamic.merge(self.context)
            self._forget()

    def _learn(self, last: int) -> None:
        """All observed tokens and `last`, which is as certain as they are."""
        length = len(self._history) + 1
        new = length - self._learnt
        if new <= 0:
            return
        before = 0 if self.compat else LONGEST
        tokens = [*self._history.tokens[max(self._learnt - before, 0) :].tolist(), last]
        self.context.learn(tokens, new)
        self._learnt = length

    def _next(self, recent: bytes) -> int | None:
        """The token to draft after the `recent` ones, up to four."""
        static = self.static.get(recent[-4 * STATIC :])
        for lookup, thresholds in ((self.context, LAX), (self.dynamic, STRICT)):
            for n in range(len(recent) // 4, 0, -1):
                followers = lookup.get(recent[-4 * n :])
                if followers is not None:
                    token, count = choose(followers, static)
                    if passes(count, followers.total, thresholds[n - 1]):
                        return token
        if static is not None and passes(static.most, static.total, LAX[STATIC - 1]):
            return static.best
        return None


class Lookups:
    """Makes ngram_cache drafters with lookup files: a static one, and one of earlier sequences, which can be kept."""

    name = NgramCache.name

    def __init__(self, static: Path | None, dynamic: Path | None, *, keeps: bool = True):
        """Raises CheckpointError for a file that is not whole, a static one that is not there, or a dynamic one that it
        `keeps` and cannot write; one that is not there yet is empty."""
        self._paths, self._keeps = (static, dynamic), keeps
        if dynamic is not None:
            check_replaceable(dynamic, WHAT, keeps)
        self._static = Lookup.load(static) if static else Lookup()
        self._dynamic = Lookup.load(dynamic) if dynamic and dynamic.exists() else Lookup()

    def pair(self, target: "Target") -> "Lookups":
        for lookup, path in zip((self._static, self._dynamic), self._paths, strict=True):
            if path is not None:
                lookup.check(target.vocab, path)
        return self

    def __call__(self) -> NgramCache:
        return NgramCache(static=self._static, dynamic=self._dynamic, keeps=self._paths[1] is not None)

    def keep(self) -> None:
        if self._paths[1] is not None and self._keeps:
            self._dynamic.save(self._paths[1])


def choose(followers: Followers, static: Followers | None) -> tuple[int, int]:
    """The follower with the greatest weight, and its count: a count weighs a hundred times its static count, if any.

    Cheap however many followers there are: of those without a static count only the most frequent can win.
    """
    if static is None:
        return followers.best, followers.most
    weights = {followers.best: followers.most}
    for token in followers.counts.keys() & static.counts.keys():
        weights[token] = followers.counts[token] * STATIC_WEIGHT * static.counts[token]
    token = min(weights, key=lambda token: (-weights[token], token))
    return token, followers.counts[token]


def passes(count: int, total: int, threshold: tuple[int, int]) -> bool:
    samples, percent = threshold
    return total >= samples and 100 * count >= percent * total
