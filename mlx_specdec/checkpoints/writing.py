"""Tensors to files: a folder that appears whole or not at all, and shards written with one of them in memory."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import mlx.core as mx

from ..errors import CheckpointError, OptionError

Progress = Callable[[int, int], object]  # bytes written, and to be written
Tensors = dict[str, mx.array]

SIDECAR = "mtp.safetensors"  # the file of the heads
NAMED = 40  # letters of its name that a hidden folder repeats; with all, it may be longer than a name can be
SHARD = 5 << 30  # the largest that the Hub and mlx-lm like


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to work in, beside `path`: what is then in its folder `result` takes the name `path` in one step at the
    end. However that goes, nothing else is left.

    Raises OptionError where `path` exists, CheckpointError where it cannot be written.
    """
    prefix = f".{path.name[:NAMED]}."
    try:
        if path.exists() or path.is_symlink():
            raise OptionError(f"{path} exists and is never overwritten; remove it or choose another path (--mlx-path)")
        with _parents(path), tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as workshop:
            result = Path(workshop) / "result"
            result.mkdir()
            yield Path(workshop)
            for file in sorted(result.rglob("*")):
                _to_disk(file)
            result.rename(path)
    except OSError as error:
        said = error.strerror or " ".join(str(error).split())
        if isinstance(error.filename, str) and not error.filename.startswith(str(path.parent / prefix)):
            said += f": {error.filename}"
        raise CheckpointError(f"{path} cannot be written ({said}); free space there or choose another path "
                              "(--mlx-path)") from error  # fmt: skip


@contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Make the folders above `path`; those that were not there go again if what is done then fails."""
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):  # not made, or in use by others
                folder.rmdir()
        raise


def _to_disk(file: Path) -> None:
    """Wait until it is: a name that outlives a power cut must not be that of an empty file."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_shards(folder: Path, tensors: Tensors, largest: int, progress: Progress | None = None) -> None:
    """Write `tensors` as model*.safetensors of at most `largest` bytes each, with their index, emptying the dict.

    They may be lazy: each is computed by itself, and no more than one shard and what the next tensor is computed from
    are in memory, provided that nobody else holds them. Raises OSError.
    """
    total = sum(value.nbytes for value in tensors.values())
    check_space(folder, total)
    groups = _grouped({name: value.nbytes for name, value in tensors.items()}, min(largest, SHARD))
    place: dict[str, str] = {}
    done = 0
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        shard: Tensors = {}
        for name in names:
            shard[name] = tensors.pop(name)
            mx.eval(shard[name])
            done += shard[name].nbytes
            if progress:
                progress(done, total)
        save(folder / file, shard)
        place |= dict.fromkeys(names, file)
        del shard
        mx.clear_cache()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=4), encoding="utf-8")


def _grouped(sizes: dict[str, int], largest: int) -> list[list[str]]:
    """The names in their order, as many to a group as `largest` bytes hold; a larger tensor is alone."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = largest
        groups[-1].append(name)
        room -= size
    return groups


def check_space(folder: Path, needed: int) -> None:
    """Raises OSError if a disk has not so many bytes left, rather than after an hour."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"it needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free")


def save(file: Path, tensors: Tensors) -> None:
    """Write one .safetensors file. Raises OSError."""
    try:
        mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
    except RuntimeError as error:  # which does not say why, and a full disk is all that is left to go wrong
        raise OSError(str(error)) from error
