"""What is known by name: models in wheels, families of targets, and the drafters that were published for them.

The package's models.toml says it, and a file of the user's own may add to it or replace entries (`user_file`, or one
that is named): tables [models.NAME], [targets.NAME] and [drafters."SOURCE"], all described at their dataclasses here.
"""

import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError

OURS = Path(__file__).parent.parent / "models.toml"
BY_NAME, BY_SIZES = "its name", "its sizes"
METHODS = ("dflash", "eagle3", "mtp", "gemma4_assistant", "medusa", "draft_model")


@dataclass(frozen=True)
class Entry:
    """One model that can be loaded by name: the member of a wheel that it is, its length in bytes and its sha256."""

    name: str
    description: str
    license: str
    package: str
    member: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Family:
    """Targets that the same drafters fit: patterns of their `plain_name`s, and what their config says of their sizes.

    A value of `config` may be a list, of which one is in the config.
    """

    name: str
    names: list[str]
    config: dict[str, Any] | None = None


@dataclass(frozen=True)
class Drafter:
    """A published drafter: where it is, a Hub id or a folder's path; how it drafts; for which families.

    `block` is DFlash's block size, `depth` how many tokens others draft at most, `seen` a page that names it.
    """

    name: str
    method: str
    targets: list[str]
    seen: str
    license: str | None = None
    block: int | None = None
    depth: int | None = None
    note: str | None = None


class Catalogue(NamedTuple):
    """Everything by name, in order of preference: what a user's file says comes before what ours says."""

    models: dict[str, Entry]
    targets: dict[str, Family]
    drafters: dict[str, Drafter]

    def families(self, names: Iterable[str], config: Mapping[str, Any]) -> tuple[list[str], str]:
        """The families that a target belongs to, and by what it was recognised. The first of `names` that is known
        decides, then the name that its config holds, then the config's sizes unless one of these names tells that it is
        another model: Qwen3-8B-Base has the sizes of Qwen3-8B, and another drafter."""
        names, inner = list(names), str(config.get("_name_or_path") or "")
        for name in names:
            if found := self._named(name):
                return found, BY_NAME
        if found := self._named(inner):
            return found, "the name in its config"
        if any(self.tells(name) for name in (*names, inner)):
            return [], BY_NAME
        return [family.name for family in self.targets.values() if _sized(family, config)], BY_SIZES

    def tells(self, name: str) -> bool:
        """Whether a name says which model it is, if only one that no drafter is known for: it holds the first word of a
        family's, as qwen or llama, and a number."""
        lineages = {found[0] for f in self.targets.values() for n in f.names if (found := re.match("[a-z]+", n))}
        plain = plain_name(name)
        return re.search(r"\d", plain) is not None and not lineages.isdisjoint(re.findall("[a-z]+", plain))

    def same(self, name: str, other: str) -> bool:
        """Whether two names are of one model, or of one family."""
        return plain_name(name) == plain_name(other) or not set(self._named(name)).isdisjoint(self._named(other))

    def _named(self, name: str) -> list[str]:
        plain = plain_name(name)
        return [f.name for f in self.targets.values() if any(fnmatchcase(plain, pattern) for pattern in f.names)]

    def drafters_for(self, families: Iterable[str]) -> list[Drafter]:
        """The drafters for any of these families."""
        wanted = set(families)
        return [drafter for drafter in self.drafters.values() if wanted & set(drafter.targets)]


def _sized(family: Family, config: Mapping[str, Any]) -> bool:
    """Whether a config, or its language model's own section, has all sizes of a family."""
    text = config.get("text_config")
    places = (text if isinstance(text, Mapping) else {}, config)

    def said(field: str, value: Any) -> bool:
        return any(place.get(field) in (value if isinstance(value, list) else [value]) for place in places)

    sizes = family.config or {}
    return bool(sizes) and all(said(field, value) for field, value in sizes.items())


# What is said of how a model was packed, quantised or tuned to converse, and not of which model it is.
_PACKING = re.compile(
    r"""\d+-?bits? | i?q\d+(_(k|[01]|nl|xxs|xs|s|m|l|xl|hf))* | [wa]\d+(a\d+)? | (mx|nv)?fp\d+ | b?f(loat)?\d+ | int\d+
    | nf4 | gs?\d+ | mlx | gguf | awq | gptq | exl\d | bnb | dwq | qat | quantized | dynamic | static | unsloth | ud
    | optiq | hf | it | chat | instruct | mtp | meta | \d+k | \d{5,8} | of""",
    re.VERBOSE,
)


def plain_name(name: str) -> str:
    """Which model a Hub id, a path or a file's name names: in lower case, without owner, quantisation and packaging.

    "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit" and "Llama-3.1-8B-Q4_K_M.gguf" are "llama-3.1-8b".
    """
    last = name.rstrip("/").replace("\\", "/").rpartition("/")[2].lower().removesuffix(".gguf")
    parts = [part for part in re.split(r"[-\s]+|\.(?=[a-z])", last) if not _PACKING.fullmatch(part)]
    words = [word for part in parts for word in part.split("_")]  # q4_k_m is one word, model_name are two
    return "-".join(word for word in words if word and not _PACKING.fullmatch(word))


def config_folder() -> Path:
    """Where a user's own files are looked for: $XDG_CONFIG_HOME/mlx-specdec, or the platform's folder."""
    if chosen := os.environ.get("XDG_CONFIG_HOME"):
        return Path(chosen) / "mlx-specdec"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx-specdec"
    return Path.home() / ".config" / "mlx-specdec"


def user_file() -> Path:
    """The user's own catalogue. It need not exist."""
    return config_folder() / "models.toml"


def read_catalogue(file: Path | None = None) -> Catalogue:
    """What is known by name: `file`, then the user's own file if there is one, then ours; of an entry that comes twice
    the first counts. Raises CheckpointError for a file that cannot be read or is no catalogue."""
    paths = [path for path in (file, user_file()) if path is not None and (path is file or path.is_file())]
    merged = Catalogue({}, {}, {})
    for path in (*paths, OURS):
        more = _read(path)
        merged = Catalogue(
            merged.models | {name: e for name, e in more.models.items() if name not in merged.models},
            merged.targets | {name: e for name, e in more.targets.items() if name not in merged.targets},
            merged.drafters | {name: e for name, e in more.drafters.items() if name not in merged.drafters},
        )
    for drafter in merged.drafters.values():
        if unknown := [name for name in drafter.targets if name not in merged.targets]:
            where = " or ".join(str(path) for path in paths) or str(OURS)
            raise CheckpointError(f"{where} has a drafter {drafter.name} for the target {unknown[0]!r}, which is not a "
                                  "[targets] of it; describe that target")  # fmt: skip
    return merged


def _read(path: Path) -> Catalogue:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"the catalogue {path} cannot be read ({error.strerror}); give another file") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise CheckpointError(f"the catalogue {path} is not TOML: {error}; mend it") from error
    kinds = {"models": Entry, "targets": Family, "drafters": Drafter}
    for table, entries in tables.items():
        if table not in kinds or not isinstance(entries, dict):
            raise CheckpointError(f"the catalogue {path} has {table!r} at its top; its tables are {', '.join(kinds)}")
    return Catalogue(*(
        {name: _entry(kind, name, said, path) for name, said in tables.get(table, {}).items()}
        for table, kind in kinds.items()
    ))  # fmt: skip


def _entry(kind: type, name: str, said: Any, path: Path) -> Any:
    """An entry, all its fields there and of their types. Raises CheckpointError naming the first that is not."""
    where = f"the catalogue {path} has an entry {name!r}"
    if not isinstance(said, dict):
        raise CheckpointError(f"{where} that is {said!r}; make it a table")
    known = {field.name: field for field in fields(kind) if field.name != "name"}
    for field in said:
        if field not in known:
            raise CheckpointError(f"{where} with the field {field!r}; it may have {', '.join(known)}")
    for field in known.values():
        if field.name in said:
            if not _fits(said[field.name], field.type):
                raise CheckpointError(f"{where} whose {field.name} is {said[field.name]!r}; its type is {_type(field)}")
        elif field.default is MISSING:
            raise CheckpointError(f"{where} without {field.name}; say it")
    if kind is Drafter and "/" not in name:
        raise CheckpointError(f"{where} that is neither a Hub id nor a folder's path; give one of them")
    if kind is Drafter and said["method"] not in METHODS:
        raise CheckpointError(f"{where} whose method is {said['method']!r}; choose among {', '.join(METHODS)}")
    return kind(name=name, **said)


_TYPES: dict[Any, tuple[type, str]] = {
    str: (str, "text"),
    str | None: (str, "text"),
    int: (int, "a whole number"),
    int | None: (int, "a whole number"),
    list[str]: (list, "a list of texts"),
    dict[str, Any] | None: (dict, "a table"),
}


def _fits(value: Any, declared: Any) -> bool:
    if declared == list[str]:
        return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)
    return type(value) is _TYPES[declared][0]


def _type(field: Any) -> str:
    return _TYPES[field.type][1]
