"""Let the GPU keep what it uses resident while anything generates, as mlx-lm does; nothing without a GPU."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit


class _Limit:
    """MLX's limit is one for the whole process: the first to generate raises it, the last puts it back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.before: int | None = None


_limit = _Limit()


@contextmanager
def wired_memory() -> Iterator[None]:
    """Around everything that generates; may overlap with itself, in threads and in any order."""
    with _limit.lock:
        if _limit.users == 0:
            _limit.before = maybe_set_recommended_wired_limit()
        _limit.users += 1
    try:
        yield
    finally:
        with _limit.lock:
            _limit.users -= 1
            if _limit.users == 0 and _limit.before is not None:
                mx.synchronize()
                mx.set_wired_limit(_limit.before)
