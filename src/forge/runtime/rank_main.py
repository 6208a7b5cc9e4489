"""What a rank process runs first.

It must not die of the Ctrl-C that a terminal sends to the whole group, nor of the SIGTERM that a scheduler sends to
every process of a job: the controller saves first, and ends its workers itself. And it must not outlive the process
that started it, whatever happens to that one.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys
import threading
from types import FrameType

from forge.runtime.rank_stub import OWNER

GROUP = "FORGE_GROUP"
RANK = "FORGE_RANK"
"""Which group of ranks a process belongs to, and which of them it is: found even in one that hangs while it starts."""

MODULE_FOLDERS = "FORGE_MODULE_FOLDERS"
"""Lists the folders that are searched for modules after all others (`forge.config.command_line`, which is not
imported here: a rank starts with nothing but the standard library)."""


def exit_with(*pids: int) -> None:
    """End this process as soon as one of the others has ended."""
    try:
        watched = [os.pidfd_open(pid) for pid in pids]
    except ProcessLookupError:
        os._exit(1)
    select.select(watched, [], [])
    os._exit(1)


def leave_to_controller() -> None:
    """Do nothing on SIGTERM and SIGHUP in this process. What it starts has the default again.

    They are caught rather than ignored: a program that is started inherits an ignored signal, and a user's
    `process.terminate()` would have no effect on it.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _do_nothing)
    os.register_at_fork(after_in_child=_restore_defaults)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal that is for the controller."""


def _restore_defaults() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _do_nothing:
            signal.signal(number, signal.SIG_DFL)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_to_controller()
    sys.path.extend(folder for folder in os.environ.get(MODULE_FOLDERS, "").split(os.pathsep) if folder)
    masters = {os.getppid(), int(os.environ.get(OWNER, os.getppid()))}
    threading.Thread(target=exit_with, args=tuple(masters), name="forge-parent-watch", daemon=True).start()
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
