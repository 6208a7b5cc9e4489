"""The first process of a host in a test network. Started by `networks`, in namespaces of its own.

usage: network_init.py HOSTNAME HOSTS, the second as the text of /etc/hosts

It is process 1 of its PID namespace. The kernel kills every process of the namespace when it ends, and it ends when its
standard input is closed: by the test, or by the kernel if the test's process dies.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys


def main(hostname: str, hosts: str) -> None:
    """Prepare the host, print `ready`, and reap orphans until standard input ends."""
    socket.sethostname(hostname)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    with open("/dev/shm/hosts", "w", encoding="utf-8") as file:
        file.write(hosts)
    subprocess.run(["mount", "--bind", "/dev/shm/hosts", "/etc/hosts"], check=True)
    os.unlink("/dev/shm/hosts")  # the mount holds it
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _reap()
        if 0 in readable and not os.read(0, 4096):
            return


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
