"""Which drafter is used where none is named: heads inside the checkpoint, else a published drafter on this machine,
else one from the Hub, else what drafts from text alone.

A bad drafter costs speed and nothing else, so whatever is wrong with one is said and the next is tried: a load never
fails for it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .checkpoints.catalogue import BY_SIZES, Drafter, read_catalogue
from .checkpoints.hub import Unreachable, cached, hub_offline
from .drafters import DEFAULT
from .errors import SpecDecError, UnsupportedModelError
from .pairs import MTP, PICKLED_FILES, identity, load_drafter, load_heads

if TYPE_CHECKING:
    import mlx.nn as nn

    from .target.model import CacheOptions

AUTO = "auto"
_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """What was chosen: its name in a chain of drafters, what `load` brings under that name (None where the name is
    enough), and the sentence that says why."""

    name: str
    drafter: Any
    why: str


class Candidate(NamedTuple):
    """A drafter that may do; `load` brings it, or None if there is none after all."""

    name: str
    why: str
    load: Callable[[], Any]
    remote: bool = False


def choose(
    source: str,
    model: "nn.Module",
    tokenizer: Any,
    *,
    cache: "CacheOptions | None" = None,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    offline: bool = False,
    models: Path | None = None,
) -> Choice:
    """The drafter for `model`, which `load` brought from `source`, paired with it on trial. The choice is logged.

    "none" is chosen only for a model whose cache cannot be rewound. `offline`, as HF_HUB_OFFLINE, never asks the
    network, and nothing is fetched for a model that is known by its sizes alone: others may have the same, and where
    the catalogue has several, nothing is taken. The other options are load_drafter's, `revision` that of `source`.
    Raises OptionError for `cache` options that the model cannot have, CheckpointError for a catalogue that cannot be
    read, and nothing else.
    """
    from .target.model import Target

    known = read_catalogue(models)
    try:
        Target(model, cache).close()
    except UnsupportedModelError as error:
        return _said(Choice("none", None, reason(error)), {})
    names, config = identity(source, revision, models)
    families, by = known.families(names, config or _arguments(model))
    nothing = "no drafter with weights is known for this model"
    if by == BY_SIZES and len(families) > 1:
        nothing = f"its sizes are those of {' and '.join(families)}, and no name tells which it is"
        families = []
    fitting = known.drafters_for(families)
    here = [drafter.name for drafter in fitting if on_this_machine(drafter)]
    away = [drafter.name for drafter in fitting if drafter.name not in here]
    why = {drafter.name: f"the {drafter.method} drafter for {' and '.join(families)} (known by {by}), "
                         for drafter in fitting}  # fmt: skip
    bring = partial(
        load_drafter,
        target=source,
        model=model,
        tokenizer=tokenizer,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        models=models,
        warn=False,
    )
    heads = partial(load_heads, source, model, dtype=dtype, revision=revision, offline=True, models=models)

    def candidates() -> Iterator[Candidate]:
        yield Candidate(MTP, "the heads inside the checkpoint", heads)
        for name in here:
            yield Candidate(name, why[name] + "on this machine", partial(bring, name, offline=True))
        for name in () if offline or hub_offline() or by == BY_SIZES else away:
            yield Candidate(name, why[name] + "from the Hub", partial(bring, name), remote=True)

    choice, failed = _first(candidates(), model, tokenizer, cache)
    if choice is None:
        choice = Choice(DEFAULT, None, "nothing else can be used" if fitting or failed else nothing)
        absent = "is not on this machine" + (", and sizes alone fetch nothing" if by == BY_SIZES else "")
        failed |= {name: absent for name in away if name not in failed}
    return _said(choice, failed)


def _first(
    candidates: Iterable[Candidate], model: "nn.Module", tokenizer: Any, cache: "CacheOptions | None"
) -> tuple[Choice | None, dict[str, str]]:
    """The first candidate that loads and pairs, and what is wrong with those before it."""
    from .decoder import SpecDecoder

    failed: dict[str, str] = {}
    for name, why, load, remote in candidates:
        try:
            drafter = load()
            if drafter is not None:
                SpecDecoder(model, tokenizer, [drafter], cache=cache).close()
                return Choice(name, drafter, why), failed
        except (SpecDecError, OSError) as error:
            if remote and isinstance(error, Unreachable):
                break  # the others would fare the same
            failed[name] = reason(error)
    return None, failed


def _said(choice: Choice, failed: Mapping[str, str]) -> Choice:
    """The choice with its whole sentence, which is logged."""
    others = (f"{name}: {wrong}" for name, wrong in failed.items())
    choice = choice._replace(why=f"drafter {choice.name}: {'; '.join((choice.why, *others))}")
    _log.info(choice.why)
    return choice


def reason(error: Exception) -> str:
    """What is wrong, without what to do about it."""
    return " ".join(str(error).split()).partition("; ")[0].rstrip(".")


def _arguments(model: "nn.Module") -> dict[str, Any]:
    """The configuration that a model was made from, where there is no file of it."""
    args = getattr(model, "args", None)
    return dict(vars(args)) if hasattr(args, "__dict__") else {}


def on_this_machine(drafter: Drafter) -> bool:
    """Whether a catalogued drafter need not be fetched."""
    path = Path(drafter.name).expanduser()
    folder = path if path.exists() else cached(drafter.name)
    if folder is None or folder.is_file():
        return folder is not None
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", *PICKLED_FILES))
