"""What a rank and its children print, on its way to the rank's log file and to the controller's console.

The process that Monarch has started for a rank reads it from two pipes (`forge.runtime.rank_stub`): so the last words
of a rank that crashes are not lost, a rank that floods its log does not fill the disk, and none can draw into the
controller's terminal. Only the standard library is imported here, and nothing of `forge`.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

FILE = "FORGE_LOG_FILE"
NAME = "FORGE_LOG_NAME"
LIMIT = "FORGE_LOG_MAX_BYTES"
FORMAT = "FORGE_LOG_FORMAT"
CONSOLE = "FORGE_LOG_CONSOLE"
"""Names the socket of the controller that shows lines of output, in Linux's abstract namespace."""
CHUNK = 1 << 15
MAX_LINE = 8192
"""Longer lines are shown in parts."""
BURST, LINES_PER_S = 200, 50.0
"""How much output of one process a console gets: the rest is in its file."""


class Pump:
    """The output of one rank. `log_file` is the module `forge.observe.logs.log_file`."""

    def __init__(self, log_file: Any, environ: Mapping[str, str]) -> None:
        self.name = environ.get(NAME, "process")
        self._log_file, self._is_json = log_file, environ.get(FORMAT) == "json"
        self._file = log_file.BoundedFile(environ[FILE], max_bytes=int(environ.get(LIMIT, "0")))
        self._file.write(log_file.notice(self.name, "started", is_json=self._is_json))
        self._console = _Console(self.name, environ.get(CONSOLE, ""), path=environ[FILE])
        self._pieces: dict[int, bytes] = {}
        self.out, self._out_end = os.pipe()
        self.err, self._err_end = os.pipe()
        for fd in (self.out, self.err):
            os.set_blocking(fd, False)

    def take_streams(self) -> None:
        """Let this process, and what it starts from now on, print into the pipes."""
        self._console.keep_output()
        os.dup2(self._out_end, 1)
        os.dup2(self._err_end, 2)
        os.close(self._out_end)
        os.close(self._err_end)

    def leave_streams(self) -> None:
        """Print into the pipes no more, once the rank does."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        os.close(nothing)

    def wait(self, others: list[int]) -> list[int]:
        """Write what is printed until one of the other descriptors can be read; return those that can."""
        poll = select.poll()
        for fd in (self.out, self.err, *others):
            poll.register(fd, select.POLLIN)
        while True:
            if (blocked := self._console.blocked) >= 0:
                poll.register(blocked, select.POLLOUT)
            ready = [fd for fd, _ in poll.poll()]
            if blocked >= 0:
                poll.unregister(blocked)
                self._console.flush()
            for fd in ready:
                if fd in (self.out, self.err) and not self._read(fd):
                    poll.unregister(fd)
            found = [fd for fd in ready if fd in others]
            if found:
                return found

    def _read(self, fd: int) -> bool:
        """Write what has come; return False when nothing more can."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        if self._is_json or fd == self.out:
            self._split(fd, data)
        if not self._is_json:
            self._file.write(data)
        return True

    def _split(self, fd: int, data: bytes) -> None:
        *whole, rest = (self._pieces.get(fd, b"") + data).split(b"\n")
        if len(rest) > MAX_LINE:
            cut = len(rest) // MAX_LINE * MAX_LINE
            whole, rest = [*whole, rest[:cut]], rest[cut:]
        self._pieces[fd] = rest
        self._take(fd, [part for line in whole for part in _parts(line)])

    def _take(self, fd: int, lines: list[bytes]) -> None:
        if self._is_json:
            self._file.write(b"".join(self._log_file.as_record(line + b"\n", self.name) for line in lines))
        if fd == self.out:
            self._console.show(lines)

    def finish(self, how: str) -> None:
        """Write what is left to read, and how the rank ended."""
        for fd in (self.out, self.err):
            while select.select([fd], [], [], 0)[0] and self._read(fd):
                pass
            if self._pieces.get(fd):
                self._take(fd, [self._pieces.pop(fd)])
        self._console.close()
        self._file.write(self._log_file.notice(self.name, how, is_json=self._is_json))


def _parts(line: bytes) -> list[bytes]:
    return [line[start : start + MAX_LINE] for start in range(0, len(line) or 1, MAX_LINE)]


class _Console:
    """The controller's console. It gets so many lines at once, and then so many a second."""

    def __init__(self, name: str, address: str, *, path: str) -> None:
        self._name, self._path = name, path
        self._socket = _connect(address) if address else None
        self._output = -1
        self._allowed, self._at, self._num_hidden = float(BURST), time.monotonic(), 0
        self._waiting: list[str] = []

    def keep_output(self) -> None:
        """Keep this process's own output, for lines that no controller takes: that of a worker on another host."""
        if self._socket is None:
            self._output = os.dup(1)
            os.set_inheritable(self._output, False)

    @property
    def blocked(self) -> int:
        """The descriptor that takes what waits as soon as it can be written; -1 where nothing waits."""
        return self._socket.fileno() if self._waiting and self._socket is not None else -1

    def show(self, lines: list[bytes]) -> None:
        """Show lines that were printed together, as far as there is room for them."""
        now = time.monotonic()
        self._allowed = min(float(BURST), self._allowed + (now - self._at) * LINES_PER_S)
        self._at = now
        least = LINES_PER_S if self._num_hidden else 1  # after a flood a second's worth at once
        num_shown = int(self._allowed) if self._allowed >= least else 0
        if num_shown:
            self._note_hidden()
        shown = [line.decode("utf-8", "replace").rstrip("\r") for line in lines[:num_shown]]
        self._waiting += shown
        self._allowed -= len(shown)
        self._num_hidden += len(lines) - len(shown)
        self.flush()

    def close(self) -> None:
        """Show what waits, and how many lines were not shown."""
        self._note_hidden()
        self.flush()

    def _note_hidden(self) -> None:
        if self._num_hidden:
            self._waiting.append(f"... {self._num_hidden} more lines are in {self._path}")
            self._num_hidden = 0

    def flush(self) -> None:
        """Show what waits, if it is taken now. The file has every line."""
        try:
            if self._waiting and self._socket is not None:
                self._socket.send(json.dumps({"process": self._name, "output": self._waiting}).encode())
            elif self._waiting and self._output >= 0:
                os.write(self._output, "".join(f"[{self._name}] {line}\n" for line in self._waiting).encode())
        except BlockingIOError:
            return
        except OSError:  # what shows them has ended
            self._socket, self._output = None, -1
        self._waiting = []


def _connect(address: str) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.connect("\0" + address)
    except OSError:
        sock.close()
        return None
    return sock


def open_pump(log_file: Any, environ: Mapping[str, str]) -> Pump | None:
    """Return the pump of a rank whose log file the environment names; None where there is none, or it cannot be
    written: then the rank prints where this process does."""
    if not environ.get(FILE):
        return None
    try:
        return Pump(log_file, environ)
    except (OSError, ValueError) as error:
        print(f"forge: {environ[FILE]} cannot be written ({error}); {environ.get(NAME)} logs here", file=sys.stderr)
        return None
