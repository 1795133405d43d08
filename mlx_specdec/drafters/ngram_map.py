"""Prompt lookup that remembers how its drafts fared (llama.cpp's `ngram-map-k` and `ngram-map-k4v`).

A key is the newest n tokens, a value the m tokens that followed it somewhere earlier. Mode "k" drafts the newest value.
Mode "k4v" counts up to four values of a key and drafts the one seen at least twice as often as the others together.
Of a value that failed, no more is drafted than stood.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

import mlx.core as mx
import numpy as np

from ..errors import OptionError
from ..features import FeatureRequest, Features
from ..history import History
from ..sampling import Sampler
from .base import NOTHING, Draft
from .ngrams import hashes, occurrences

VALUES = 4  # of one key that are counted
RECENT = 32  # occurrences that one look at a key takes in, so that none takes long
COUNT_MOST = 16380  # llama.cpp's counters stop here
SLOTS = 1 << 18
NARROW = np.uint32(2654435761)  # the multiplier of llama.cpp's hash
WIDE = np.uint64(6364136223846793005)  # so wide that two n-grams practically never share a hash


class NgramMap:
    """Drafts up to `m` tokens that followed the newest `n` before, if these were there `min_hits` times.

    Option names and defaults are llama.cpp's. What it does otherwise, and `compat=True` repeats:

    - It finds keys through 2^18 slots that keep the first place put there. So a later occurrence is never drafted from,
      and a key whose slot another one has is not found, nor is one at place 0 or about where the prompt ended.
      Here every occurrence is found, the newest first.
    - k ignores `min_hits` and k4v counts how often it was asked; here both count occurrences, as the manual says.
    - k4v counts the newest occurrence again at every call, and drafts what followed that one even where another value
      won. Here an occurrence counts once, and the winner is drafted.
    - A value is never again drafted further than it stood last: not after a draft that `limit` had cut and that stood
      whole, and never at all after a failure at its first token. In k this even holds for whatever follows the key
      later. Here a draft that stood whole shortens nothing, and a value seen again is whole again.
    - A new sequence keeps what was learnt from the beginning that it is assumed to share; here it starts afresh.
    """

    name = "ngram_map"
    wants = FeatureRequest()
    free = True

    def __init__(self, n: int = 12, m: int = 48, min_hits: int = 1, mode: str = "k", compat: bool = False):
        for option, value in (("ngram_n", n), ("ngram_m", m), ("ngram_min_hits", min_hits)):
            if value not in range(1, 1025):
                raise OptionError(f"{option} is {value}; choose a whole number from 1 to 1024")
        if mode not in ("k", "k4v"):
            raise OptionError(f"ngram_mode is {mode!r}; choose 'k' or 'k4v'")
        self.n, self.m, self.min_hits, self.mode, self.compat = n, m, min_hits, mode, compat
        self.max_draft = m
        self._start()

    def start(self, prompt: Sequence[int]) -> None:
        self._history = History(len(prompt) + 1024)
        self._drafted: Value | None = None
        if not self.compat:
            self._start()
        # llama.cpp begins when the whole prompt is in the cache and its first new token is `last`. Our first `propose`
        # comes one token earlier, so the prompt that llama.cpp begins with is ours without its last token.
        self._rule.begin(np.array(prompt[:-1], dtype=np.int32))

    def _start(self) -> None:
        rule = LlamaRule if self.compat else Rule
        self._rule: Rule | LlamaRule = rule(self.n, self.m, self.min_hits, self.mode == "k4v")

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        self._history.extend(tokens)

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        if len(self._history) < self.n + self.m:
            return NOTHING
        found = self._rule.find(self._history.tokens, self._history.ending(self.n, last))
        if found is None:
            return NOTHING
        self._drafted, place = found
        length = min(self._drafted.stood, limit)
        return Draft(mx.array(self._history.tokens[place : place + length])) if length > 0 else NOTHING

    def settle(self, drafted: int, accepted: int) -> None:
        if self._drafted is not None:
            whole = accepted == drafted and not self.compat
            self._drafted.stood = self.m if whole else accepted

    def close(self) -> None:
        pass


@dataclass
class Value:
    """m tokens that followed a key."""

    place: int  # where they begin
    stood: int  # how many of them may be drafted
    count: int = 0


@dataclass
class Key:
    """n tokens that were looked up and found."""

    place: int  # where they begin
    counted: int  # the place up to which values were counted
    hits: int = 0
    values: list[Value] = field(default_factory=list)

    def count(self, tokens: np.ndarray, place: int, m: int) -> Value | None:
        """One more of the value at `place`; a fifth value is not taken in."""
        seen = tokens[place : place + m].tobytes()
        for value in self.values:
            if tokens[value.place : value.place + m].tobytes() == seen:
                value.count = min(value.count + 1, COUNT_MOST)
                return value
        if len(self.values) == VALUES:
            return None
        self.values.append(Value(place, stood=m, count=1))
        return self.values[-1]

    def majority(self) -> Value | None:
        """The value seen at least twice as often as the others together."""
        winner = max(self.values, key=lambda value: value.count)
        others = sum(value.count for value in self.values) - winner.count
        return winner if winner.count >= 2 * others else None


class Rule:
    """Finds every place of a key that m known tokens follow."""

    def __init__(self, n: int, m: int, min_hits: int, vote: bool):
        self.n, self.m, self.min_hits, self.vote = n, m, min_hits, vote
        self._newest: dict[int, int] = {}  # the newest place of every hash
        self._older: list[int] = []  # for every place, the one before it with its hash, or -1
        self._keys: dict[bytes, Key] = {}

    def begin(self, prompt: np.ndarray) -> None:
        pass

    def find(self, tokens: np.ndarray, pattern: np.ndarray) -> tuple[Value, int] | None:
        """The value to draft for the key `pattern`, and where it stands in `tokens`."""
        self._learn(tokens)
        name = pattern.tobytes()
        key = self._keys.get(name) or Key(place=-1, counted=-1)
        unseen = takewhile(lambda place: place > key.counted, self._places(pattern))
        fresh = list(islice(unseen, max(RECENT, self.min_hits)))
        if fresh:
            self._keys[name] = key
            key.counted = fresh[0]
            key.hits += len(fresh)
            self._see(key, tokens, fresh)
        if key.hits < self.min_hits:
            return None
        value = key.majority() if self.vote else key.values[0]
        return None if value is None else (value, value.place)

    def _learn(self, tokens: np.ndarray) -> None:
        known = len(self._older)
        for place, h in enumerate(hashes(tokens[known : len(tokens) - self.m], self.n, WIDE).tolist(), known):
            self._older.append(self._newest.get(h, -1))
            self._newest[h] = place

    def _places(self, pattern: np.ndarray) -> Iterator[int]:
        """Where the key was, the newest first. A hash that two keys share would cost a wrong draft, no more."""
        place = self._newest.get(hashes(pattern, self.n, WIDE).item(), -1)
        while place >= 0:
            yield place
            place = self._older[place]

    def _see(self, key: Key, tokens: np.ndarray, fresh: list[int]) -> None:
        """`fresh` are the key's places that were not seen before, the newest first."""
        if not self.vote:
            key.values = [Value(fresh[0] + self.n, stood=self.m)]
            return
        for place in reversed(fresh):
            value = key.count(tokens, place + self.n, self.m)
            if value is not None:
                value.stood = self.m  # whole again


class LlamaRule:
    """llama.cpp's own way, step for step; NgramMap says what is odd about it."""

    def __init__(self, n: int, m: int, min_hits: int, vote: bool):
        self.n, self.m, self.min_hits, self.vote = n, m, min_hits, vote
        self._slots = np.zeros(SLOTS, dtype=np.int32)  # a place by its hash; 0 is none
        self._prompt = 0  # length of the prompt that was begun with
        self._checked = 0  # length at the last draft
        self._hashed = 0  # places up to here are in slots, or never will be
        self._keys: dict[bytes, Key] = {}

    def begin(self, prompt: np.ndarray) -> None:
        """Drops what lies beyond the beginning that a shorter prompt is assumed to share with the sequence so far."""
        keep = self._prompt if self._prompt <= len(prompt) else max(len(prompt) - self.n - self.m, 0)
        keys = list(self._keys.values())
        if len(prompt) < self._checked:
            self._slots[self._slots >= keep] = 0
            self._hashed = max(keep - 1, 0)
            for key in keys if self.vote else ():
                key.values = [value for value in key.values if value.place < keep]
            keys = [key for key in keys if key.place < keep and key.values]
        self._keys = {prompt[key.place : key.place + self.n].tobytes(): key for key in keys}
        self._prompt = self._checked = len(prompt)

    def find(self, tokens: np.ndarray, pattern: np.ndarray) -> tuple[Value, int] | None:
        """The value whose counters rule, and where the draft stands in `tokens`."""
        if len(tokens) < 2 * self.n + self.m:
            return None
        self._checked = len(tokens)
        match = self._match(tokens, pattern)
        if match is None:
            return None
        key = self._keys.setdefault(pattern.tobytes(), Key(match, counted=0))
        key.hits = min(key.hits + 1, COUNT_MOST)
        if self.vote:
            if key.hits < self.min_hits:
                return None
            for place in occurrences(tokens, pattern, key.counted, match + 1).tolist():
                key.count(tokens, place + self.n, self.m)
            key.counted = match
            value = key.majority()
        else:
            key.values = key.values or [Value(match + self.n, stood=self.m)]
            value = key.values[0]
        return None if value is None else (value, match + self.n)

    def _match(self, tokens: np.ndarray, pattern: np.ndarray) -> int | None:
        """Where the key was before: by its slot, else among the places not hashed yet; these are hashed now."""
        end = len(tokens) - self.n - self.m - 1
        match = int(self._slots[hashes(pattern, self.n, NARROW).item() % SLOTS])
        found = 0 < match < end and np.array_equal(tokens[match : match + self.n], pattern)
        of_prompt = range(self._hashed + 1, self._prompt - self.n - self.m)
        of_answer = range(max(self._prompt, self._hashed) + 1, end + 1)
        for fresh in filter(None, (of_prompt, of_answer)):
            if not found:
                places = occurrences(tokens, pattern, fresh.start, fresh.stop)
                match, found = (int(places[-1]), True) if len(places) else (0, False)
            self._hash(tokens, fresh)
        self._hashed = max(self._hashed, end)
        return match if found else None

    def _hash(self, tokens: np.ndarray, fresh: range) -> None:
        """Puts these places into slots that are empty, the newest first."""
        slots = hashes(tokens[fresh.start : fresh.stop + self.n - 1], self.n, NARROW) % SLOTS
        slots, newest = np.unique(slots[::-1], return_index=True)
        empty = self._slots[slots] == 0
        self._slots[slots[empty]] = fresh.stop - 1 - newest[empty]
