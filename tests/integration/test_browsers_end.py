"""A browser that a test has started ends with the test's process, also when that is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from devtools import find_browser
from firefox import find_firefox

LIMIT_S = 600
SUPPORT = Path(__file__).parents[1] / "support"
PROGRAM = """
import asyncio, sys
from pathlib import Path
from {module} import {name} as opened

async def main() -> None:
    async with opened(Path(sys.argv[1])):
        print("open", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("module", "name", "program"),
    [("devtools", "open_browser", find_browser()), ("firefox", "open_firefox", find_firefox())],
    ids=["chromium", "firefox"],
)
def test_a_browser_ends_with_a_killed_test(tmp_path: Path, module: str, name: str, program: str | None) -> None:
    if program is None:
        pytest.skip("this browser is not on PATH")
    starter = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(module=module, name=name), str(tmp_path / "home")],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        stdout=subprocess.PIPE,
    )
    with starter:
        try:
            assert starter.stdout is not None
            assert starter.stdout.readline() == b"open\n"
            browser = psutil.Process(starter.pid).children(recursive=True)
            handles = {os.pidfd_open(process.pid): process.pid for process in browser if process.is_running()}
        finally:
            os.kill(starter.pid, signal.SIGKILL)
    assert len(handles) > 2  # it has processes of its own
    waiting = select.poll()
    for handle in handles:
        waiting.register(handle, select.POLLIN)
    left = dict(handles)
    while left:
        ended = waiting.poll(LIMIT_S * 1000)
        assert ended, f"these have not ended: {sorted(left.values())}"
        for handle, _ in ended:
            waiting.unregister(handle)
            os.close(handle)
            del left[handle]
