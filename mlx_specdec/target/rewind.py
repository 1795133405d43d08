"""Undo rejected tokens in mlx-lm's prompt caches, by cache kind. Nothing outside `target/` names a cache class.

Every pass says how many of its leading rows are certain; only what may have to be undone is remembered.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..errors import UnsupportedModelError
from ..features import KeysValues
from .mixers import Mixers, Tape


class KeyValues:
    """Keys and values in the order of the tokens, plain, quantised or in chunks: the last rows are trimmed off."""

    def __init__(self, cache: KVCache | QuantizedKVCache | ChunkedKVCache):
        self.cache = cache

    def mark(self, rows: int, certain: int) -> int:
        return self.cache.offset

    def done(self) -> None:
        pass

    def restore(self, mark: int) -> None:
        self.cache.trim(self.cache.offset - mark)

    def cut(self, mark: int, rows: int, keep: int) -> None:
        self.cache.trim(rows - keep)

    def read(self) -> tuple[mx.array, mx.array]:
        """Keys and values [1, heads, n, dim] of its tokens, in their order."""
        keys, values = self.cache.keys_and_values()
        if isinstance(self.cache, QuantizedKVCache):
            width = {"group_size": self.cache.group_size, "bits": self.cache.bits}
            return mx.dequantize(*keys, **width), mx.dequantize(*values, **width)
        return keys, values


class Window:
    """A sliding window. A pass of several rows leaves the window plus its new rows in temporal order, and cutting the
    last of them is exact, where moving the offset back (mlx-lm's own trim) is not once the window has wrapped.
    A pass of one row overwrites the oldest entry, so undoing it needs the arrays from before."""

    def __init__(self, cache: RotatingKVCache):
        self.cache = cache

    def mark(self, rows: int, certain: int) -> tuple | None:
        if certain:
            return None
        keys, values, *rest = self.cache.state
        # A slice is an array of its own: assigning into the cache's keys would otherwise reach the mark as well.
        return (None, None, *rest) if keys is None else (keys[...], values[...], *rest)

    def done(self) -> None:
        pass

    def restore(self, mark: tuple) -> None:
        self.cache.state = mark

    def cut(self, mark: tuple | None, rows: int, keep: int) -> None:
        drop = rows - keep
        keys, values, offset, sinks, size, index = self.cache.state
        self.cache.state = (
            keys[..., :-drop, :],
            values[..., :-drop, :],
            offset - drop,
            sinks,
            size,
            index - drop,
        )

    def read(self) -> tuple[mx.array, mx.array]:
        """Keys and values [1, heads, n, dim] of the tokens it still holds, in their order: the ring unrolled."""
        keys, values, offset, sinks, _, index = self.cache.state
        if index == keys.shape[2] or index >= offset:
            return keys[..., :index, :], values[..., :index, :]

        def unrolled(rows: mx.array) -> mx.array:
            return mx.concatenate([rows[..., :sinks, :], rows[..., index:, :], rows[..., sinks:index, :]], axis=2)

        return unrolled(keys), unrolled(values)


class Recurrent:
    """A recurrent or convolution state: put back, then advanced by its mixers over the rows that stand."""

    def __init__(self, cache: ArraysCache, mixers: Mixers):
        self.cache, self.mixers = cache, mixers
        self.cache.tape = None

    def mark(self, rows: int, certain: int) -> tuple[list, Tape]:
        states, *_ = self.cache.state
        self.cache.tape = Tape(self.mixers, rows)
        return list(states), self.cache.tape

    def done(self) -> None:
        self.cache.tape = None

    def restore(self, mark: tuple[list, Tape]) -> None:
        _, *rest = self.cache.state
        self.cache.state = (list(mark[0]), *rest)

    def cut(self, mark: tuple[list, Tape], rows: int, keep: int) -> None:
        self.restore(mark)
        mark[1].replay(keep)


class SinkWindow(RotatingKVCache):
    """A window that always keeps its first tokens (`max_kv_size`), for passes of several rows after the prompt.

    mlx-lm masks such a pass as if the whole buffer slid, so a row further down loses the kept tokens, which single
    rows never do. Here each row sees what it would see alone.
    """

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if N == 1:
            return super().make_mask(N, window_size=window_size, return_array=return_array)
        past = min(self.max_size - 1, self.offset)
        column, row = mx.arange(past + N)[None], mx.arange(past, past + N)[:, None]
        dropped = mx.maximum(row + 1 - self.max_size, 0)
        return create_causal_mask(N, past) & ((column < self.keep) | (column >= self.keep + dropped))


Entry = KeyValues | Window | Recurrent


class Pass(NamedTuple):
    rows: int
    marks: list[Any] | None  # by entry; None where the whole pass is certain


class Rewinder:
    """How to take the caches of one sequence back to any row that was not certain. `offset` tokens are in them.

    Raises UnsupportedModelError for a cache that it does not understand.
    """

    def __init__(self, caches: list, mixers: Mixers | None):
        self.entries: list[Entry] = [_entry(c, mixers) for c in leaves(caches)]
        self.offset = 0
        self._passes: list[Pass] = []

    def rebind(self, caches: list) -> None:
        """The caches were replaced, one for one, by others that hold the same tokens."""
        for entry, cache in zip(self.entries, leaves(caches), strict=True):
            entry.cache = cache

    @contextmanager
    def advance(self, rows: int, certain: int) -> Iterator[None]:
        """Around a forward pass over `rows` rows, of which the first `certain` are never undone."""
        undoable = certain < rows
        marks = [e.mark(rows, certain) for e in self.entries] if undoable else None
        yield
        for entry in self.entries:
            entry.done()
        self._passes.append(Pass(rows, marks))
        self.offset += rows

    def settle(self, keep: int) -> None:
        """Of all rows since the last call the first `keep` stand; the rest leave no trace."""
        total = sum(p.rows for p in self._passes)
        assert 0 <= keep <= total, f"cannot keep {keep} of {total} rows"
        start = 0
        for index, (rows, _) in enumerate(self._passes):
            if start + rows > keep:
                self._cut(index, keep - start)
                break
            start += rows
        self._passes.clear()
        self.offset -= total - keep
        self._check()

    def keys_values(self, cache: Any) -> KeysValues:
        """What `cache`, one of those that are rewound, holds of the tokens that stand. Call it after `settle`."""
        entry = next(e for e in self.entries if e.cache is cache)
        assert not isinstance(entry, Recurrent), "a recurrent state has no keys"
        keys, values = entry.read()
        return KeysValues(keys[0], values[0])  # of the only sequence; an index gives arrays apart from the cache's own

    def _cut(self, index: int, keep: int) -> None:
        """Back to the state after the first `keep` rows of pass `index`."""
        rows, marks = self._passes[index]
        later = self._passes[index + 1 :]
        assert marks is not None, "a certain row was to be undone"
        for number, entry in enumerate(self.entries):
            if keep == 0:
                entry.restore(marks[number])
                continue
            if later:
                assert later[0].marks is not None
                entry.restore(later[0].marks[number])
            entry.cut(marks[number], rows, keep)

    def _check(self) -> None:
        for entry in self.entries:
            offset = getattr(entry.cache, "offset", self.offset)
            if offset != self.offset:  # a fault of ours, which must not become a wrong text in silence
                raise AssertionError(f"{type(entry.cache).__name__} holds {offset} tokens, not {self.offset}")


def leaves(caches: list) -> list:
    """Prompt caches with composites opened up."""
    flat = []
    for cache in caches:
        flat.extend(leaves(list(cache.caches)) if isinstance(cache, CacheList) else [cache])
    return flat


def attends(cache: Any) -> bool:
    """Whether it holds keys and values, token by token."""
    return isinstance(cache, KVCache | QuantizedKVCache | ChunkedKVCache | RotatingKVCache)


def recurrent(caches: list) -> list:
    return [c for c in leaves(caches) if type(c) is ArraysCache]


def _entry(cache: Any, mixers: Mixers | None) -> Entry:
    # Exact types: a subclass may store its tokens in another way, and would be rewound wrongly in silence.
    if type(cache) in (KVCache, QuantizedKVCache, ChunkedKVCache):
        return KeyValues(cache)
    if type(cache) in (RotatingKVCache, SinkWindow):
        return Window(cache)
    if type(cache) is ArraysCache and mixers is not None:
        return Recurrent(cache, mixers)
    raise UnsupportedModelError(
        f"the cache of this model cannot be rewound: {type(cache).__name__} is not one that is understood; "
        "generate without a drafter"
    )
