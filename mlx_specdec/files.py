"""Files that are replaced whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from .errors import CheckpointError


def check_replaceable(path: Path, what: str, wanted: bool = True) -> None:
    """Say now that `replacing` will not be able to write `path`, if that is `wanted`. Raises CheckpointError."""
    folder = path.parent
    if wanted and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise CheckpointError(
            f"cannot write the {what} {path} (its folder is missing or read-only); choose a folder that can be "
            "written to"
        )


@contextmanager
def replacing(path: Path, what: str) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` in one step at the end: whoever reads it, even after a crash, sees
    the old or the new one whole. Raises CheckpointError, calling it `what`, where it cannot be written."""
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the {what} {path} ({error.strerror}); choose a folder that can be written to"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
