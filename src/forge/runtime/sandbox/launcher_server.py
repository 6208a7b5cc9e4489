"""Forks the launchers of long-lived sandboxes: starting an interpreter for each would cost more than all the rest.

It imports the standard library alone, like the launchers that it forks. It ends when the library's process does.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys

from forge.runtime.sandbox import guest, launcher

_MOST_BYTES = 1 << 18
_imported_before_the_root_changes = guest


def main() -> None:
    """Fork a launcher for every message on the socket whose descriptor is the first argument."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing to collect: a launcher reports its end to the library
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
        if not message:
            os._exit(0)
        for descriptor in descriptors:  # they arrive inheritable, and nothing in a sandbox may inherit them
            os.set_inheritable(descriptor, False)
        control, events = descriptors
        try:
            if os.fork() == 0:
                connection.close()
                _be_launcher(message, control, events)
        except OSError as error:
            launcher.send_event(events, event="failed", reason=f"fork: {error.strerror}")
        os.close(control)
        os.close(events)


def _be_launcher(message: bytes, control: int, events: int) -> None:
    """Run a plan in the new process. The library's end of `events` is also what it holds open. Never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(control, 0)
        os.close(control)
        launcher.run_plan(json.loads(message), events, events)
    except BrokenPipeError:  # the library is gone
        os._exit(1)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the library has to know
        launcher.send_event(events, event="failed", reason=f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)
