"""Who holds the lock of a folder: a run, or a process that its killed controller has left behind for a moment."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from forge.runtime.rank_stub import OWNER

ENDING_S: Final = 10.0
"""How long a process may take to end when its controller has ended."""
_PAUSE_S: Final = 0.05


def name_of(pid: int) -> str:
    """Return what a lock file says of the process that holds it."""
    return f"process {pid} on {socket.gethostname()}"


def is_ending(holder: str) -> bool:
    """Return whether a holder is a process of this machine that ends, because its controller has."""
    found = re.fullmatch(r"process (\d+) on (.+)", holder)
    if found is None or found[2] != socket.gethostname():
        return False
    try:
        variables = Path(f"/proc/{found[1]}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # of another user
        return False
    if not variables:  # its memory is gone already
        return True
    owner = re.search(rf"(?:^|\0){OWNER}=(\d+)\0".encode(), variables)
    return owner is not None and _has_ended(int(owner[1]))


def _has_ended(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return stat.rpartition(b")")[2].split()[0] in (b"Z", b"X")


def wait_while_ending(holder: Callable[[], str | None], *, limit_s: float = ENDING_S) -> None:
    """Wait while who holds a lock is about to end. `holder` says who; None when nobody does."""
    until = time.monotonic() + limit_s
    while (held_by := holder()) is not None and is_ending(held_by) and time.monotonic() < until:
        time.sleep(_PAUSE_S)
