"""Drafters by the names that users choose them by."""

from collections.abc import Callable
from functools import partial

from ..errors import OptionError
from .base import Drafter
from .ngram_simple import NgramSimple

NAMES = ("ngram_simple",)


def by_name(name: str, *, ngram_n: int = 12, ngram_m: int = 48) -> Callable[[], Drafter]:
    """What makes the drafter called `name` for a sequence. Raises OptionError for an unknown name or a bad option."""
    if name != "ngram_simple":
        raise OptionError(f"there is no drafter {name!r}; choose {', '.join(NAMES)}, or give a draft model")
    NgramSimple(ngram_n, ngram_m)  # a wrong option is said now, not at the first request
    return partial(NgramSimple, ngram_n, ngram_m)
