"""The clocks of a run's decisions and records. `forge chaos` shifts them; otherwise they are the system's."""

from __future__ import annotations

import mmap
import os
import struct
import time
from functools import cache
from typing import Final

CLOCK_FILE: Final = "FORGE_CLOCK_FILE"
"""The environment variable with the path of a file of two numbers: seconds added to the wall and monotonic clock."""
CLOCK_FORMAT: Final = "<dd"


def wall_s() -> float:
    """Return seconds since 1970, for records."""
    shift = _shift()
    return time.time() if shift is None else time.time() + struct.unpack_from(CLOCK_FORMAT, shift)[0]


def monotonic_s() -> float:
    """Return seconds of a clock that never goes back, for limits and intervals."""
    shift = _shift()
    return time.monotonic() if shift is None else time.monotonic() + struct.unpack_from(CLOCK_FORMAT, shift)[1]


@cache
def _shift() -> mmap.mmap | None:
    path = os.environ.get(CLOCK_FILE)
    if path is None:
        return None
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), struct.calcsize(CLOCK_FORMAT), access=mmap.ACCESS_READ)
