"""`forge worker` and rank processes, as far as they go without Monarch: odd addresses, and dying with the parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from forge.errors import LaunchError
from forge.runtime.worker import check_address


@pytest.mark.parametrize(
    "address",
    [
        "tcp://[::1:22222",
        "tcp://h:0",
        "tcp://h:-1",
        "tcp://h:1?x=2",
        "tcp://h:1#part",
        "tcp://user:word@h:1",
        "tcp://a b:1",
        "TLS:h:1",
    ],
)
def test_what_only_looks_like_an_address_is_refused(address: str) -> None:
    with pytest.raises(LaunchError) as caught:
        check_address(address)
    error = caught.value
    assert (error.path, error.value) == ("forge worker --address", address)
    assert error.rule == "tcp://HOST:PORT or tls://HOST:PORT"
    assert error.repair


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""
CHILD = """
import os, sys, threading
from forge.runtime.rank_main import exit_with
threading.Thread(target=exit_with, args=(os.getppid(),), daemon=True).start()
print("light" if not {"monarch", "torch"} & set(sys.modules) else "heavy", flush=True)
threading.Event().wait()
"""


def test_a_rank_ends_as_soon_as_its_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid, weight = parent.stdout.readline().split()
    child = os.pidfd_open(int(pid))
    try:
        assert select.select([child], [], [], 0)[0] == []
        parent.kill()
        parent.wait()
        assert select.select([child], [], [], 600)[0] == [child]
        assert weight == "light"
    finally:
        if not select.select([child], [], [], 0)[0]:
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
        parent.stdin.close()
        parent.stdout.close()


def test_a_rank_whose_parent_is_already_gone_ends_at_once() -> None:
    program = "import sys; from forge.runtime.rank_main import exit_with; exit_with(int(sys.argv[1]))"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ended = subprocess.run([sys.executable, "-c", program, str(gone.pid)], timeout=600, check=False)
    assert ended.returncode == 1
