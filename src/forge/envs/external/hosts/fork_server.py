"""Runs each episode of a foreign environment in a process of its own, forked from one that has imported everything.

A program of its own, without imports beyond the standard library: `python fork_server.py PORT HOST_FILE`. The file has
a function `prepare()`, which imports what takes long, and a class `Host`. For each connection on the port a process is
forked, which makes a `Host` and answers requests, one line of JSON each: `{"method": "step", "args": {…}}` is answered
by `{"result": …}` or `{"error": "…"}`. The first line must be the token in `FORGE_HOST_TOKEN`: nothing is forked, and
no more than that line is read, before it has come. When the other side
closes the connection, the process is killed, whatever it does; when the process ends, the connection closes. What it
has started is killed too, even in sessions of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hmac
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

TOKEN_VARIABLE = "FORGE_HOST_TOKEN"
_BACKLOG = 1024
_EPISODE_VARIABLE = "HOSTED_EPISODE"
"""In an episode's process and all that it starts: the pid of the former."""
_PR_SET_CHILD_SUBREAPER = 36
TOKEN_LIMIT_S = 10.0
"""How long a connection may take to send the token."""
GRACE_S = 1.0
MAX_WAITING = 128
"""Connections that have not sent the token: one more ends the oldest, once that is older than `GRACE_S`."""


class Refused(Exception):
    """What a host raises where the options are wrong, so that no attempt can succeed."""


class ForkServer:
    """Accepts connections and forks a process for each."""

    def __init__(self, module: Any, port: int) -> None:
        self._module = module
        self._listening = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        self._listening.setblocking(False)
        self._waiting: dict[int, socket.socket] = {}
        self._token = os.environ[TOKEN_VARIABLE].encode() + b"\n"
        self._unproved: dict[int, tuple[float, bytes]] = {}  # since when, and what has come of the token
        self._is_listening = True
        self._pids: dict[int, int] = {}
        self._poll = select.poll()
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Serve until this process is ended."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what episodes leave behind becomes a child
        self._poll.register(self._listening, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        while True:
            for handle, _ in self._poll.poll(self._expire()):
                if handle == self._listening.fileno():
                    self._accept()
                elif handle == self._wake_read:
                    os.read(self._wake_read, 4096)
                    self._reap()
                elif handle in self._pids:  # the other side has closed it
                    self._poll.unregister(handle)
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._pids[handle], signal.SIGKILL)
                elif handle in self._unproved:
                    self._prove(handle)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, _ = self._listening.accept()
            connection.setblocking(False)
            self._waiting[connection.fileno()] = connection
            self._unproved[connection.fileno()] = (time.monotonic(), b"")
            self._poll.register(connection, select.POLLIN | select.POLLRDHUP)

    def _expire(self) -> float | None:
        """End connections that took too long to send the token. Return the milliseconds until the next one has."""
        now = time.monotonic()
        is_full = len(self._unproved) >= MAX_WAITING
        limit_s = GRACE_S if is_full else TOKEN_LIMIT_S
        for handle, (since, _) in list(self._unproved.items()):
            if since + limit_s > now:
                break
            self._forget(handle)
            if is_full:
                break
        is_full = len(self._unproved) >= MAX_WAITING
        if is_full == self._is_listening:  # accept only where there is room
            self._is_listening = not is_full
            self._poll.modify(self._listening, 0 if is_full else select.POLLIN)
        if not self._unproved:
            return None
        since, _ = next(iter(self._unproved.values()))
        return max(1.0, (since + (GRACE_S if is_full else TOKEN_LIMIT_S) - now) * 1000)

    def _prove(self, handle: int) -> None:
        """Read the token, as far as it has come, and not a byte more. One without any was a probe."""
        connection, (since, had) = self._waiting[handle], self._unproved[handle]
        try:
            part = connection.recv(len(self._token) - len(had))
        except BlockingIOError:
            return
        except ConnectionError:
            part = b""
        given = had + part
        if part and len(given) < len(self._token):
            self._unproved[handle] = (since, given)
        elif part and hmac.compare_digest(given, self._token):
            self._start(handle)
        else:
            self._forget(handle)

    def _start(self, handle: int) -> None:
        """Fork the process of a connection that has sent the token."""
        connection = self._waiting[handle]
        del self._unproved[handle]
        connection.setblocking(True)
        pid = os.fork()
        if pid == 0:
            self._run(connection)
        with contextlib.suppress(OSError):  # it did so itself already
            os.setpgid(pid, pid)
        self._pids[handle] = pid
        self._poll.modify(connection, select.POLLRDHUP)

    def _run(self, connection: socket.socket) -> None:
        """Serve one connection in the new process, which ends here."""
        status = 1
        try:
            os.setpgid(0, 0)
            os.environ[_EPISODE_VARIABLE] = str(os.getpid())
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._listening.close()
            for each in self._waiting.values():
                if each is not connection:
                    each.close()
            answer_all(self._module.Host, connection)
            status = 0
        except BaseException as error:  # noqa: BLE001 - this is the child: it must not return
            os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        finally:
            os._exit(status)

    def _reap(self) -> None:
        """Collect processes that have ended, and kill what ended episodes have left behind."""
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                for handle in [each for each, known in self._pids.items() if known == pid]:
                    del self._pids[handle]
                    self._forget(handle)
        running = set(self._pids.values())
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = {int(pid) for pid in file.read().split()}
        for pid in children - running:
            if _episode_of(pid) not in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _forget(self, handle: int) -> None:
        connection = self._waiting.pop(handle)
        self._unproved.pop(handle, None)
        with contextlib.suppress(KeyError):  # it was unregistered when the other side closed it
            self._poll.unregister(handle)
        with contextlib.suppress(OSError):  # the other side has closed it already
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def _episode_of(pid: int) -> int | None:
    """Return the process of the episode that a process belongs to; None where it does not say."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/environ", "rb") as file:
        for entry in file.read().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == _EPISODE_VARIABLE.encode():
                return int(value)
    return None


def answer_all(make: Any, connection: socket.socket) -> None:
    """Answer the requests of a connection until it is closed."""
    with connection.makefile("rwb") as lines:
        host = make()
        for line in lines:
            request = json.loads(line)
            try:
                reply = {"result": getattr(host, request["method"])(**request["args"])}
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a foreign environment raises is its answer
                is_refused = type(error).__name__ == Refused.__name__
                text = str(error) if is_refused else f"{type(error).__name__}: {error}"
                reply = {"error": text[:4000], "is_refused": is_refused}
            lines.write(json.dumps(reply).encode() + b"\n")
            lines.flush()


def load(path: str) -> Any:
    """Return the module of a file."""
    spec = importlib.util.spec_from_file_location("forge_host", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["forge_host"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    port, path = int(sys.argv[1]), sys.argv[2]
    sys.path.pop(0)  # the folder of this file: its names are not modules here
    module = load(path)
    module.prepare()
    gc.collect()
    gc.freeze()  # what is imported stays shared between the processes
    ForkServer(module, port).serve()


if __name__ == "__main__":
    main()
