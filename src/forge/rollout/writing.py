"""What a run raises when a file of its records cannot be written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from forge.errors import RecordError


@contextlib.contextmanager
def recording(path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside the block, an OSError becomes a `RecordError` that names the file and says how to continue."""
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"a record of the run could not be written: {error.strerror or error}",
            path=str(path),
            rule="a file that can be written, on a disk with room for it",
            repair="free space or correct the permissions, then continue with --resume",
        ) from error
