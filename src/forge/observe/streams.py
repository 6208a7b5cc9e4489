"""Standard streams that are closed, or whose reader ends before the program does."""

from __future__ import annotations

import os
import sys


def open_missing_streams() -> None:
    """Let /dev/null stand for a standard stream that the caller closed (`>&-`).

    Otherwise `sys.stdout` is None, and the next file or socket that is opened becomes standard output.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        nothing = os.open(os.devnull, os.O_RDWR)
        if nothing != descriptor:
            os.dup2(nothing, descriptor)
            os.close(nothing)
        setattr(sys, name, open(descriptor, mode, closefd=False, encoding="utf-8"))  # noqa: SIM115 - for good


def discard_output(descriptor: int = 1) -> None:
    """Send what is still to be printed nowhere: nothing reads it, and Python's end would fail on it."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)
