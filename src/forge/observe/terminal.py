"""The terminal of a program: whatever prints on it does so above what moves at its foot."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Final, Protocol

from forge.observe.printing import print_patiently, printable

_CONTROLS: Final = re.compile(
    r"\x1b\[[0-9;:]*m|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)


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
    """Print a line on standard output or standard error, above what moves there.

    It does not wait for a console that is not read, see `forge.observe.printing`.
    """
    foot, stream = _foot, sys.stderr if to_stderr else sys.stdout
    if foot is not None:
        print_patiently(partial(foot.print, line, to_stderr=to_stderr), sys.stdout, sys.stderr)
    elif stream is not None:
        print_patiently(partial(print, printable(line, stream), file=stream, flush=True), stream)


def without_controls(line: str) -> str:
    """Return a line that another program has printed, without what would move the cursor or change the terminal, such
    as an escape sequence in a model's answer. Colors stay, and end with the line."""
    last = line.rstrip("\r").rpartition("\r")[2]
    plain = _CONTROLS.sub(
        lambda found: found[0] if found[0].endswith("m") and found[0].startswith("\x1b[") else "", last
    )
    return f"{plain}\x1b[0m" if "\x1b" in plain else plain
