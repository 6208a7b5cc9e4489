"""Counts what became of the groups of a run, by following its ledger."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from forge.ui.run_files import fingerprint, open_file

_OUTCOME: Final = re.compile(rb'"outcome": ?"((?:[^"\\]|\\.){1,60})"')
_BLOCK: Final = 1 << 22
_MAX_OUTCOMES: Final = 64


class LedgerCounts:
    """Counts outcomes of the lines that a ledger has so far, and of those that are appended later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """How many groups came to each outcome, the most frequent first."""
        return dict(self._counts.most_common(_MAX_OUTCOMES))

    def advance(self) -> bool:
        """Read the next block. Return whether there was one."""
        found = fingerprint(self._path)
        identity = None if found is None else (found.device, found.inode)
        if identity != self._file or (found is not None and found.size < self._offset):
            had = bool(self._counts)
            self._file, self._offset = identity, 0
            self._counts.clear()
            if found is None:
                return had
        if found is None or found.size == self._offset:
            return False
        try:
            with open_file(self._path) as file:
                data = os.pread(file.fileno(), _BLOCK, self._offset)
        except OSError:
            return False
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) < _BLOCK:
            return False
        end = end or len(data)
        self._offset += end
        self._counts.update(each.decode("utf-8", "replace") for each in _OUTCOME.findall(data[:end]))
        return True
