"""The library's side of starting long-lived sandboxes: one server process forks a launcher for each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

from forge.runtime.sandbox.box_records import SandboxError
from forge.runtime.sandbox.runner import SETUP_S, bare_interpreter

_START: Final = "from forge.runtime.sandbox.launcher_server import main; main()"


class LauncherServer:
    """A process that forks launchers. It runs while this process has a sandbox open."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(SETUP_S)
        self.num_users = 0
        try:
            self._process = subprocess.Popen(
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                **bare_interpreter(_START, theirs.fileno()),
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    @property
    def is_usable(self) -> bool:
        """Whether it runs, and was started by this process rather than by one that forked it."""
        return self._pid == os.getpid() and self._process.poll() is None

    def launch(self, plan: Mapping[str, Any], control: socket.socket, events: socket.socket) -> None:
        """Start a launcher that serves the other ends of two connections."""
        socket.send_fds(self._socket, [json.dumps(plan).encode()], [control.fileno(), events.fileno()])

    def close(self) -> None:
        """End the process. The launchers that it forked continue."""
        self._socket.close()
        if self._pid != os.getpid():
            return
        try:
            self._process.wait(SETUP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_lock = threading.Lock()
_current: LauncherServer | None = None


def launch(plan: Mapping[str, Any], control: socket.socket, events: socket.socket) -> LauncherServer:
    """Start a launcher, and the server if there is none. `release` the server that comes back."""
    global _current
    with _lock:
        for is_last in (False, True):
            try:
                if _current is None or not _current.is_usable:
                    _current = LauncherServer()
                _current.launch(plan, control, events)
            except OSError as error:
                _current = None
                if is_last:
                    raise SandboxError(
                        f"a sandbox's launcher could not be started: {error} ({sys.executable})", kind="sandbox_start"
                    ) from error
                continue
            break
        assert _current is not None
        _current.num_users += 1
        return _current


def release(server: LauncherServer) -> None:
    """Give a server back. The last one ends it."""
    global _current
    with _lock:
        server.num_users -= 1
        if server.num_users > 0:
            return
        if _current is server:
            _current = None
    server.close()
