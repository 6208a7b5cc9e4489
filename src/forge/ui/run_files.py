"""Opens the files of a run's folder. Nothing in a folder can make the server read a file outside of it, or wait."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

METRICS: Final = "metrics.jsonl"
CONFIG: Final = "config.yaml"
MAX_TEXT: Final = 1 << 20
"""Bytes that are read of a file that is shown as text."""
_READ_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity, size and time of change of a file: another one means other content."""

    device: int
    inode: int
    size: int
    changed_ns: int


def fingerprint(path: Path) -> Fingerprint | None:
    """Return the fingerprint of a file; None where there is no regular file."""
    try:
        facts = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(facts.st_mode):
        return None
    return Fingerprint(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. A link, a pipe or a device raises `OSError`."""
    handle = os.open(path, _READ_FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_text(path: Path, *, limit: int = MAX_TEXT) -> str | None:
    """Return a file's text, its first `limit` bytes at most; None where it cannot be read."""
    data = read_bytes(path, limit=limit)
    return None if data is None else data.decode("utf-8", "replace")


def read_bytes(path: Path, *, limit: int) -> bytes | None:
    """Return the first bytes of a file, `limit` at most; None where it cannot be read."""
    try:
        with open_file(path) as file:
            return file.read(limit)
    except OSError:
        return None


def read_tail(path: Path, *, limit: int = 1 << 16) -> list[bytes]:
    """Return the last whole lines of a file, without line breaks; none where it cannot be read."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - limit)
            file.seek(start)
            data = file.read(limit)
    except OSError:
        return []
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    return lines[1:] if start > 0 else lines


def read_json_lines(path: Path, *, limit: int = MAX_TEXT) -> Iterator[dict[str, Any]]:
    """Yield the objects on the last whole lines of a file. What is not an object is left out."""
    for line in read_tail(path, limit=limit):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict):
            yield fields
