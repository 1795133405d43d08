"""MLX gives each thread its own streams, and aborts the process at exit if a thread ended without giving them up."""

import threading

import mlx.core as mx


class _AtThreadEnd:
    def __del__(self) -> None:
        mx.clear_streams()


_of_thread = threading.local()


def give_up_streams_at_thread_end() -> None:
    """Say that this thread uses MLX. Thread-local values die with their thread, which is when its streams must go."""
    if threading.current_thread() is not threading.main_thread() and not hasattr(_of_thread, "end"):
        _of_thread.end = _AtThreadEnd()
