"""The journal of one episode on disk: one JSON object per line."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.envs.journal import Entry
from forge.envs.state import EpisodeKey
from forge.types import INITIAL_VERSION, labelled_version

_log = logging.getLogger("forge.episodes")


@dataclass(slots=True)
class JournalFile:
    """Appends entries, and reads those that an earlier process left. A torn last line is left out.

    Attributes:
        path: the file; None for one that keeps nothing.
        was_stale: whether `read` found entries that are too old to be used.
    """

    path: Path | None = None
    was_stale: bool = field(default=False, init=False)
    _file: Any = field(default=None, init=False)

    @classmethod
    def of(cls, folder: str | None, key: EpisodeKey) -> JournalFile:
        """Return the file of an episode; without a folder, one that keeps nothing."""
        return cls(None if folder is None else Path(folder) / f"{key.group}-{key.member}.jsonl")

    def read(self, *, oldest_version: int) -> list[Entry]:
        """Return the entries. There are none, and the file is cleared, if older weights sampled a turn."""
        if self.path is None or not self.path.exists():
            return []
        entries: list[Entry] = []
        size = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break  # what is appended must not join it
            try:
                entries.append(json.loads(line))
            except ValueError:
                break
            size += len(line)
        if any(version < oldest_version for version in _versions(entries)):
            _log.warning("%s: its turns are too old; the episode starts over", self.path)
            self.was_stale = True
            self.clear()
            return []
        os.truncate(self.path, size)
        return entries

    def write(self, entry: Entry) -> None:
        """Append an entry. It is in the file when this returns, also if the process is killed afterwards."""
        if self.path is None:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")

    def clear(self) -> None:
        """Remove what is in the file."""
        self.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _versions(entries: Iterable[Entry]) -> Iterator[int]:
    for entry in entries:
        if entry["kind"] == "turn":
            yield from (part["version"] for part in entry["completion"]["versions"])


def _opponents(entries: Iterable[Entry]) -> Iterator[int]:
    """Yield the versions of the policy that answered for agents which do not learn."""
    for entry in entries:
        version = labelled_version(entry.get("policy", ""))
        if version is not None:
            yield version


def prune_journals(folder: Path, *, newest_version: int, groups: Collection[int] | None = None) -> None:
    """Remove the journals with turns of later weights. After a resume, their steps are taken again: the same number
    may then be other weights. With `groups`, remove those of all other groups as well: they may get other tasks."""
    for path in folder.glob("*.jsonl"):
        file = JournalFile(path)
        if groups is not None and int(path.name.partition("-")[0]) not in groups:
            file.clear()
            continue
        entries = file.read(oldest_version=INITIAL_VERSION)
        if any(version > newest_version for version in (*_versions(entries), *_opponents(entries))):
            file.clear()


def remove_journals(folder: Path, groups: Iterable[int]) -> None:
    """Remove the journals of groups that are done with."""
    for group in groups:
        for path in folder.glob(f"{group}-*.jsonl"):
            path.unlink(missing_ok=True)
