"""Tools that run in processes of their own, which import this module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import forge


@forge.tool(process=True)
def add(one: int, other: int) -> int:
    """Add two numbers."""
    print("noise on standard output")
    return one + other


@forge.tool(process=True)
async def wait() -> str:
    """Waits without end."""
    time.sleep(3600)
    return "never"


@forge.tool(process=True)
def leave(marker: str) -> str:
    """Starts a process, writes its number down, and hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with open(f"{marker}.part", "w") as file:
        file.write(str(child.pid))
    os.rename(f"{marker}.part", marker)
    time.sleep(3600)
    return "never"


@forge.tool(process=True)
def fail(how: str) -> object:
    """Fails in many ways."""
    if how == "raise":
        raise KeyError("nothing there")
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "abort":
        os._exit(7)
    if how == "large":
        return "x" * (8 << 20)
    return b"\xff\x00bytes"
