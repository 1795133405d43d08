"""How often each string of up to `depth` tokens occurs in a text, and which draft that speaks for: the rule of
suffix decoding (arXiv 2411.04975) as snowflakedb/ArcticInference has it."""

import math
from array import array
from typing import NamedTuple

import numpy as np

from ..errors import OptionError

STALE = -1  # the favourite child has to be looked for


class Rule(NamedTuple):
    """How long a draft may be, and when it ends: vLLM's option names and defaults."""

    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1

    def check(self, depth: int) -> int:
        """The longest draft that these options allow in a tree of this depth; refuses options that allow none."""
        factor, offset, prob = self
        if not (math.isfinite(factor) and factor >= 0):
            raise OptionError(f"max_spec_factor is {factor}; choose 0 or more")
        if not math.isfinite(offset):
            raise OptionError(f"max_spec_offset is {offset}; choose a finite number")
        if not 0 <= prob <= 1:
            raise OptionError(f"min_token_prob is {prob}; choose a value from 0 to 1")
        most = max(self.longest(matched, depth) for matched in range(1, depth))
        if most < 1:
            raise OptionError(f"max_spec_factor is {factor} and max_spec_offset is {offset}, which allow no draft; "
                              "choose a larger factor or offset")  # fmt: skip
        return most

    def longest(self, matched: int, depth: int) -> int:
        """The longest draft after a match of `matched` tokens: match and draft lie within the depth together."""
        most = matched * self.max_spec_factor + self.max_spec_offset + 1e-6
        return max(0, math.floor(min(most, depth - matched)))


class Guess(NamedTuple):
    """A draft after a match of `matched` tokens, the expected number of its tokens that stand, which is the sum of the
    products of their `chances`, and these: the estimated probability of each where those before it stand."""

    tokens: list[int]
    score: float
    chances: list[float]
    matched: int = 0


class SuffixTree:
    """The strings that were inserted, with the counts of all their prefixes, one node for each place where they part.

    A node stands for the string of labels from the root down to it; its label is text[start : start + length] and
    its count is the number of inserted strings that reach it. `start` lies in the newest of them: when strings are
    removed in the order they came, no label outlives its text. Two nodes a string at most; node 0 is the root, and
    stands for nothing where a node is asked for.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.text = array("i")
        self.edges: dict[int, int] = {}  # node << 32 + first token of the label -> child
        self.counts = array("i", [0])  # the root's stays 0
        self.starts = array("i", [0])
        self.lengths = array("B", [0])
        self.favourites = array("i", [0])  # the child with the largest count, of equals the one seen last; or STALE
        self.first = array("i", [0])  # a child; the others hang on it, in both directions, by `after` and `before`
        self.after = array("i", [0])
        self.before = array("i", [0])
        self._free: list[int] = []
        self._fields = (self.counts, self.starts, self.lengths, self.favourites, self.first, self.after, self.before)

    @property
    def nodes(self) -> int:
        return len(self.edges)

    def insert(self, start: int, stop: int) -> None:
        """Count text[start:stop], at most `depth` tokens, and its prefixes."""
        text, edges, counts, favourites = self.text, self.edges, self.counts, self.favourites
        node, at = 0, start
        while at < stop:
            key = (node << 32) + text[at]
            child = edges.get(key, 0)
            if child:
                begin, length = self.starts[child], self.lengths[child]
                size, same = min(length, stop - at), 1
                while same < size and text[begin + same] == text[at + same]:
                    same += 1
                if same < length:
                    child = self._split(node, child, same)
                counts[child] += 1
                self.starts[child] = at
            else:
                child = self._new(1, at, stop - at)
                self._hang(node, child)
                same = stop - at
            favourite = favourites[node]
            if favourite != STALE and counts[child] >= counts[favourite]:
                favourites[node] = child
            node, at = child, at + same

    def remove(self, start: int, stop: int) -> None:
        """Take back insert(start, stop). The oldest string goes first."""
        above = node = 0
        at = start
        while at < stop:
            child = self.edges[(node << 32) + self.text[at]]
            at += self.lengths[child]
            self.counts[child] -= 1
            if self.favourites[node] == child:
                self.favourites[node] = STALE
            if self.counts[child] == 0:  # nothing is below: a node where strings part has two at least
                self._drop(node, child)
                break
            above, node = node, child
        # Perhaps no string parts any more where this one did.
        child = self.first[node]
        if node and child and self.counts[child] == self.counts[node]:
            self._merge(above, node, child)

    def forget(self, size: int) -> None:
        """Drop the first `size` tokens of the text, whose strings have been removed."""
        del self.text[:size]
        np.frombuffer(self.starts, np.intc)[:] -= size

    def guess(self, context: array, limit: int, rule: Rule, recent: bool) -> Guess:
        """The best draft over all lengths of match with the end of `context`, which has `depth` tokens at most.

        A draft follows a match along the most frequent tokens, each with the probability count / count before it,
        until their product is below `min_token_prob`; the score is the sum of these products. The occurrence at the
        end of the context does not count (in Arctic it does, which halves the first probability after a string that
        occurred once; on code and mathematics the drafts are as good either way).

        With `recent` the strings that begin in the context and end before its last token count too, since they are
        not in the tree yet. Of equal scores that of the longer match wins.
        """
        size = len(context)
        best = Guess([], 0.0, [])
        ends = list(range(1, size)) if recent else []  # where occurrences of the matched string end in the context
        for matched in range(1, size):
            first = context[size - matched]
            ends = [end for end in ends if end >= matched and context[end - matched] == first]
            node, offset = self._find(context[size - matched :])
            if not node and not ends:
                break
            most = min(limit, rule.longest(matched, self.depth))
            if most >= best.score:
                guess = self._follow(node, offset, context, ends, most, rule.min_token_prob)
                if guess.score >= best.score:
                    best = guess._replace(matched=matched)
        return best

    def _follow(self, node: int, offset: int, context: array, ends: list[int], most: int, floor: float) -> Guess:
        """The most frequent continuation, of `most` tokens at most, of what ends at this place and at these `ends`.

        Of tokens as frequent as each other the one seen last goes on.
        """
        tokens: list[int] = []
        chances: list[float] = []
        score, prob = 0.0, 1.0
        while len(tokens) < most:
            seen = self.counts[node] + len(ends)
            token, count = self._favourite(node, offset)
            ends = [end for end in ends if end < len(context) - 1]  # the last token is not counted
            if ends:
                # Any other child that does not follow in the context too is behind the favourite.
                follow = {context[end]: 0 for end in reversed(ends)}  # newest first: the first of equals is taken
                for end in ends:
                    follow[context[end]] += 1
                for other in follow:
                    follow[other] += self.counts[self._step(node, offset, other)[0]]
                if count:
                    follow.setdefault(token, count)
                token = max(follow, key=follow.__getitem__)
                count = follow[token]
            prob *= count / seen
            if not count or prob < floor:
                break
            tokens.append(token)
            chances.append(count / seen)
            score += prob
            ends = [end + 1 for end in ends if context[end] == token]
            node, offset = self._step(node, offset, token)
        return Guess(tokens, score, chances)

    def _find(self, string: array) -> tuple[int, int]:
        """The node that `string` ends in, and after how many tokens of its label."""
        node = at = size = 0
        while at < len(string):
            node = self.edges.get((node << 32) + string[at], 0)
            size = min(self.lengths[node], len(string) - at)
            begin = self.starts[node]
            if not node or self.text[begin : begin + size] != string[at : at + size]:
                return 0, 0
            at += size
        return node, size

    def _step(self, node: int, offset: int, token: int) -> tuple[int, int]:
        """The place one token on."""
        if not node:
            return 0, 0
        if offset == self.lengths[node]:
            return self.edges.get((node << 32) + token, 0), 1
        return (node, offset + 1) if self.text[self.starts[node] + offset] == token else (0, 0)

    def _favourite(self, node: int, offset: int) -> tuple[int, int]:
        """The most frequent token after this place and its count, which is 0 where nothing follows."""
        if not node:
            return 0, 0
        if offset < self.lengths[node]:
            return self.text[self.starts[node] + offset], self.counts[node]
        if self.favourites[node] == STALE:
            best, child = 0, self.first[node]
            while child:
                if (self.counts[child], self.starts[child]) > (self.counts[best], self.starts[best]):
                    best = child
                child = self.after[child]
            self.favourites[node] = best
        favourite = self.favourites[node]
        return (self.text[self.starts[favourite]], self.counts[favourite]) if favourite else (0, 0)

    def _new(self, count: int, start: int, length: int) -> int:
        """A node that hangs nowhere yet."""
        if not self._free:
            for field in self._fields:
                field.append(0)
            self._free.append(len(self.counts) - 1)
        node = self._free.pop()
        self.counts[node], self.starts[node], self.lengths[node] = count, start, length
        self.favourites[node] = self.first[node] = 0
        return node

    def _hang(self, node: int, child: int) -> None:
        """Make `child` a child of `node`."""
        self.edges[(node << 32) + self.text[self.starts[child]]] = child
        other = self.first[node]
        self.after[child], self.before[child], self.first[node] = other, 0, child
        if other:
            self.before[other] = child

    def _drop(self, node: int, child: int) -> None:
        """Take the leaf `child` away from `node`."""
        del self.edges[(node << 32) + self.text[self.starts[child]]]
        before, after = self.before[child], self.after[child]
        if before:
            self.after[before] = after
        else:
            self.first[node] = after
        if after:
            self.before[after] = before
        self._free.append(child)

    def _replace(self, node: int, old: int, new: int) -> None:
        """Put `new`, whose label begins with the same token, where `old` hangs on `node`.

        `insert` and `remove` see to the node's favourite.
        """
        self.edges[(node << 32) + self.text[self.starts[new]]] = new
        before, after = self.before[old], self.after[old]
        self.before[new], self.after[new] = before, after
        if before:
            self.after[before] = new
        else:
            self.first[node] = new
        if after:
            self.before[after] = new

    def _split(self, node: int, child: int, size: int) -> int:
        """A new node between `node` and `child` after the first `size` tokens of the child's label."""
        middle = self._new(self.counts[child], self.starts[child], size)
        self._replace(node, child, middle)
        self.starts[child] += size
        self.lengths[child] -= size
        self._hang(middle, child)
        self.favourites[middle] = child
        return middle

    def _merge(self, above: int, node: int, child: int) -> None:
        """Take `node` out from between `above` and its only child."""
        del self.edges[(node << 32) + self.text[self.starts[child]]]
        self.starts[child] -= self.lengths[node]
        self.lengths[child] += self.lengths[node]
        self._replace(above, node, child)
        self._free.append(node)
