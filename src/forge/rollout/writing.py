"""How a run writes its records, and what it raises when a file cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from io import FileIO

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


def append(file: FileIO, data: bytes, *, sync: bool = False) -> None:
    """Append to an unbuffered file, all of it or nothing. On a full disk a write may take a part without an error.

    With `sync` it is written through to the disk.
    """
    start = os.fstat(file.fileno()).st_size
    with recording(os.fsdecode(file.name)):
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "only a part of the lines was written")
            if sync:
                os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), start)
            raise
