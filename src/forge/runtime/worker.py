"""`forge worker`: makes this machine a host that a controller elsewhere can attach to.

The worker proper is a child process that serves one controller. When it ends (released, crashed, or abandoned by its
controller) a fresh one takes its place on the same address, so that a machine can serve one run after another.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from forge.errors import LaunchError
from forge.runtime.exposure import check_exposure
from forge.runtime.sockets import check_tls

_log = logging.getLogger("forge.worker")
_QUICK_S = 2.0
_MAX_QUICK_DEATHS = 5
_NAME_POLL_S = 0.2


def check_address(address: str, *, path: str = "forge worker --address") -> str:
    """Return an address such as `tcp://127.0.0.1:22222`; anything else raises with the rule."""
    try:
        parts = urlsplit(address)
        # a colon, a port that is one, and nothing before, between or after them
        fits = parts.scheme in ("tcp", "tls") and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        fits = False
    if not fits or address != f"{parts.scheme}://{parts.netloc}" or "@" in address or len(address.split()) != 1:
        raise LaunchError(
            "this is not a worker's address",
            path=path,
            value=address,
            rule="tcp://HOST:PORT or tls://HOST:PORT",
            repair="write it like tcp://127.0.0.1:22222",
        )
    if parts.scheme == "tls":
        check_tls("a tls:// worker")
    return address


def check_free(address: str) -> None:
    """Raise unless this machine can listen at `address` now."""
    parts = urlsplit(address)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise LaunchError(
            f"this machine cannot listen there: {error.strerror or error}",
            path="forge worker --address",
            value=address,
            rule="an address of this machine, and a free port",
            repair="choose another port, or end the worker that listens there",
        ) from error


def wait_for_name(address: str, limit_s: float) -> None:
    """Wait until the name in an address is known. A pod's own name is so only a moment after the pod has started."""
    host, until = urlsplit(address).hostname, time.monotonic() + limit_s
    is_first = True
    while time.monotonic() < until:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror:
            if is_first:
                print(f"waiting until the name {host} is known", flush=True)
            is_first = False
            time.sleep(_NAME_POLL_S)


def check_reach(address: str) -> None:
    """Raise `InsecureBindError` for a plain address that other machines can reach."""
    parts = urlsplit(address)
    if parts.scheme != "tls":
        check_exposure(
            parts.hostname or "",
            what="this worker, which executes what it is sent,",
            path="forge worker --address",
            value=address,
            repair="use a tls:// address (docs/guides/security.md), or add --insecure on a network where you trust "
            "every machine and user",
        )


def serve(address: str, *, once: bool = False, insecure: bool = False, name_timeout_s: float = 0.0) -> int:
    """Keep a worker listening at `address` until SIGTERM or Ctrl-C. With `once`, end with the first run.

    `insecure` allows plain TCP on an address that other machines can reach. The name in the address must be known
    within `name_timeout_s`.
    """
    check_address(address)
    wait_for_name(address, name_timeout_s)
    if not insecure:
        check_reach(address)
    check_free(address)
    child: subprocess.Popen[bytes] | None = None
    stopping = threading.Event()

    def stop(signum: int, _frame: object) -> None:
        stopping.set()
        if child is not None:
            child.kill()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    quick_deaths = 0
    while not stopping.is_set():
        began = time.monotonic()
        child = subprocess.Popen([sys.executable, "-m", "forge.runtime.worker", address])
        if stopping.is_set():  # the signal came between the test and the start
            child.kill()
        print(f"forge worker: listening at {address} (process {child.pid})", flush=True)
        code = child.wait()
        if stopping.is_set() or once:
            break
        failed_at_once = code > 0 and time.monotonic() - began < _QUICK_S
        quick_deaths = quick_deaths + 1 if failed_at_once else 0
        if quick_deaths >= _MAX_QUICK_DEATHS:
            print(
                f"forge worker: stopped, because the worker at {address} exits at once (exit code {code})",
                file=sys.stderr,
            )
            return 1
        print(f"forge worker: the run ended (exit code {code}); a fresh worker takes over", flush=True)
    return 0


def main(arguments: Sequence[str]) -> None:
    """Serve one controller, in the child process, which dies with its parent."""
    from forge.runtime.rank_main import exit_with

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with, args=(os.getppid(),), daemon=True).start()
    from forge.runtime.backend import monarch_actor

    monarch_actor.run_worker_loop_forever(address=arguments[0], ca="trust_all_connections")


if __name__ == "__main__":
    main(sys.argv[1:])
