"""The files that hold a run's rollouts: which there are, and their bytes. Links are not followed."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from forge.observe.report.reading import EVAL_SAMPLES

KINDS: Final = ("fruitless", "step", "evaluation")
"""In the order of time: while a step was prepared, what it learned from, what was asked after it."""
_DIGITS: Final = (6, 15)
_FOLDER: Final = "rollouts"
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_SETTLED_S: Final = 3.0
"""A folder that was changed this recently is listed again: a file system may give two changes one time."""
_SHARE: Final = 20
_MANY: Final = 4_000
"""Listing a folder with more files than this, which changes, takes at most a twentieth of the time."""

Place = tuple[str, int]
"""A file of rollouts: its kind and its step."""


def place_of(name: str) -> Place | None:
    """Return what the name of a file says; None for the name of another file."""
    if name == EVAL_SAMPLES:
        return "evaluation", 0
    kind, _, rest = name.partition("_")
    digits = rest.removesuffix(".jsonl")
    if kind not in KINDS or digits == rest or not (digits.isascii() and digits.isdigit()):
        return None
    is_whole = _DIGITS[0] <= len(digits) <= _DIGITS[1] and (len(digits) == _DIGITS[0] or digits[0] != "0")
    return (kind, int(digits)) if is_whole else None


def name_of(place: Place) -> str:
    """Return the name that a recorder gives a file."""
    return f"{place[0]}_{place[1]:06d}.jsonl"


class RolloutFolder:
    """Lists the files of rollouts below a run's folder: those in `rollouts/`, or the samples of an evaluation."""

    def __init__(self, run_folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._run_folder, self._clock = run_folder, clock
        self._seen: tuple[int, int, int] | None = None
        self._listed_at, self._took = 0.0, 0.0
        self._is_settled = self._is_large = False

    @property
    def is_there(self) -> bool:
        """Whether there is a folder of rollouts, or a file with the samples of an evaluation."""
        places = (self._run_folder / _FOLDER, self._run_folder / EVAL_SAMPLES)
        return any(os.path.lexists(place) for place in places)

    def files(self) -> Mapping[str, int] | None:
        """Return the files by name, each with a number that another file of that name does not have. None where the
        folder has not changed since the last call, as far as is known."""
        with self._opened() as handle:
            if handle is None:
                was_there, self._seen = self._seen is not None, None
                return {} if was_there else None
            facts, now = os.fstat(handle), self._clock()
            seen = (facts.st_dev, facts.st_ino, facts.st_mtime_ns)
            is_recent = self._is_large and 0 <= now - self._listed_at < _SHARE * self._took
            if self._seen is not None and (is_recent or (seen == self._seen and self._is_settled)):
                return None
            self._seen, self._listed_at = seen, now
            self._is_settled = abs(now - facts.st_mtime) > _SETTLED_S
            files = dict(self._scan(handle))
            self._took, self._is_large = self._clock() - now, len(files) > _MANY
            return files

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[int | None]:
        """Yield a descriptor of a file; None where it is not there any more, or cannot be read."""
        handle = None
        with self._opened() as folder:
            if folder is not None:
                with contextlib.suppress(OSError):
                    handle = os.open(name, _FILE_FLAGS, dir_fd=folder)
        try:
            is_file = handle is not None and stat.S_ISREG(os.fstat(handle).st_mode)
            yield handle if is_file else None
        finally:
            if handle is not None:
                os.close(handle)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Yield a descriptor of the folder; None where there is none."""
        handle = None
        for place in (self._run_folder / _FOLDER, self._run_folder):
            with contextlib.suppress(OSError):
                handle = os.open(place, _FOLDER_FLAGS)
                break
        try:
            yield handle
        finally:
            if handle is not None:
                os.close(handle)

    @staticmethod
    def _scan(handle: int) -> Iterator[tuple[str, int]]:
        with os.scandir(handle) as entries:
            for entry in entries:
                if entry.name.endswith(".jsonl") and entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.inode()


def read_at(handle: int, offset: int, length: int) -> bytes:
    """Return up to `length` bytes of a file from a place on; fewer at its end, or where it cannot be read."""
    pieces, left = [], length
    while left > 0:
        try:
            piece = os.pread(handle, left, offset + length - left)
        except OSError:
            break
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
