"""The terminal of a program: whatever prints on it does so above what moves at its foot."""

from __future__ import annotations

import sys
from typing import Protocol


class Foot(Protocol):
    """Something that is redrawn at the foot of a terminal."""

    def print(self, line: str, *, to_stderr: bool) -> None:
        """Print a line above it."""


_foot: Foot | None = None


def set_foot(foot: Foot | None) -> None:
    """Say what moves at the foot of the terminal from now on; None for nothing."""
    global _foot
    _foot = foot


def current_foot() -> Foot | None:
    """Return what moves at the foot of the terminal."""
    return _foot


def print_above(line: str, *, to_stderr: bool = False) -> None:
    """Print a line on standard output or standard error, above what moves there."""
    foot = _foot
    if foot is not None:
        foot.print(line, to_stderr=to_stderr)
        return
    stream = sys.stderr if to_stderr else sys.stdout
    if stream is not None:
        print(line, file=stream, flush=True)
