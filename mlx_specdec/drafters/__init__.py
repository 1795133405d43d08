"""Drafters by the names that users choose them by."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from ..errors import OptionError
from .base import Drafter, DrafterModel
from .ngram_cache import Lookups
from .ngram_map import NgramMap
from .ngram_mod import NgramMod, Table
from .ngram_simple import NgramSimple
from .suffix import Suffixes, SuffixMemory
from .suffix_tree import Rule

TEXT_DRAFTERS = ("ngram_simple", "ngram_map", "ngram_mod", "ngram_cache", "suffix")
NAMES = (*TEXT_DRAFTERS, "draft_model", "mtp")
DEFAULT = "suffix"

# What makes drafters; or the name of one that takes a checkpoint, until that is loaded.
Maker = Callable[[], Drafter] | DrafterModel | str


@dataclass
class DrafterOptions:
    """Options of the drafters that draft from text; llama.cpp's names and defaults where it has them.

    The suffix options have vLLM's names; depth and factor are larger than its 24 and 1.0, since `auto` cuts what is not
    worth verifying: on greedy outputs of SmolLM2 translation gains 3 to 12 %, and no other group of Spec-Bench changes
    by more than 2 % for the worse or 7 % for the better (`scripts/simulate.py`). The files of `suffix_cache` and
    `lookup_cache_dynamic` are read, and written when the decoder is closed.
    """

    ngram_n: int = 12
    ngram_m: int = 48
    ngram_min_hits: int = 1
    ngram_mode: str = "k"
    ngram_n_match: int = 24
    ngram_n_min: int = 48
    ngram_n_max: int = 64
    suffix_max_tree_depth: int = 32
    suffix_max_cached_requests: int = 10_000
    suffix_max_spec_factor: float = 2.0
    suffix_max_spec_offset: float = 0.0
    suffix_min_token_prob: float = 0.1
    suffix_cache: Path | None = None
    lookup_cache_static: Path | None = None
    lookup_cache_dynamic: Path | None = None
    keeps: bool = True  # write these files; False reads them alone


USED_BY = {
    "ngram_n": ("ngram_simple", "ngram_map"),
    "ngram_m": ("ngram_simple", "ngram_map"),
    **dict.fromkeys(("ngram_min_hits", "ngram_mode"), ("ngram_map",)),
    **dict.fromkeys(("ngram_n_match", "ngram_n_min", "ngram_n_max"), ("ngram_mod",)),
    **dict.fromkeys((f.name for f in fields(DrafterOptions) if f.name.startswith("suffix_")), ("suffix",)),
    **dict.fromkeys(("lookup_cache_static", "lookup_cache_dynamic"), ("ngram_cache",)),
}


def by_name(names: str, options: DrafterOptions | None = None) -> list[Maker]:
    """What makes the drafters called `names`, in order, for a sequence: "suffix", or "ngram_map,draft_model".

    Those that take a checkpoint stay names: draft_model, mtp, and whatever is a path or a Hub id. "none" is nothing.
    Memories of earlier requests (ngram_mod's table, the suffix memory, lookup files) belong to what is returned and are
    shared by all drafters that it makes. Raises OptionError for an unknown name, one that comes twice, or a bad option.
    """
    options = options or DrafterOptions()
    if names == "none":
        return []
    chosen = [name.strip() for name in names.split(",")]
    for place, name in enumerate(chosen):
        if name not in NAMES and not _is_checkpoint(name):
            raise OptionError(f"there is no drafter {name!r}; choose among {', '.join(NAMES)}, or give "
                              "a drafter's folder or Hub id")  # fmt: skip
        if name in chosen[:place]:
            raise OptionError(f"the drafter {name} is named twice; name it once")
    makers = [_maker(name, options) for name in chosen]
    for make in makers:
        if callable(make):
            make()  # a bad option is said now, not at the first request
    return makers


def _is_checkpoint(name: str) -> bool:
    return "/" in name or (bool(name) and Path(name).expanduser().exists())


def _maker(name: str, options: DrafterOptions) -> Maker:
    if name not in TEXT_DRAFTERS:
        return name
    if name == "ngram_simple":
        return partial(NgramSimple, options.ngram_n, options.ngram_m)
    if name == "ngram_map":
        return partial(NgramMap, options.ngram_n, options.ngram_m, options.ngram_min_hits, options.ngram_mode)
    if name == "ngram_mod":
        return partial(NgramMod, options.ngram_n_match, options.ngram_n_min, options.ngram_n_max, Table())
    if name == "ngram_cache":
        return Lookups(options.lookup_cache_static, options.lookup_cache_dynamic, keeps=options.keeps)
    memory = SuffixMemory(
        max_tree_depth=options.suffix_max_tree_depth, max_cached_requests=options.suffix_max_cached_requests
    )
    rule = Rule(options.suffix_max_spec_factor, options.suffix_max_spec_offset, options.suffix_min_token_prob)
    return Suffixes(memory, rule, options.suffix_cache, keeps=options.keeps)
