"""Files that are replaced whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from .errors import CheckpointError


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
