"""Programs that are killed when the process that started them ends, however it ends: Linux sends the signal.

It is sent when the *thread* that started the program ends, so start it from one that lasts, such as the main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def bound(*command: str) -> list[str]:
    """The command that starts a program so that it ends with this process."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


def become(parent: int, command: list[str]) -> None:
    """Run a command in place of this process, unless the parent has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == parent:
        os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
