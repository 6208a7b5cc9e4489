"""The programs that stay in a long-lived sandbox: the shell and the Python kernel, as its first process sees them.

It imports the standard library alone: it also travels as text into a sandbox in which the library does not exist.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
from collections import deque
from collections.abc import Mapping
from typing import Any

from forge.runtime.sandbox import confine
from forge.runtime.sandbox.frames import Spool

RECORD_BYTES = 4 * 1024 * 1024
_START_MS = 10_000
_STATE_BYTES = 256 * 1024
"""The most of a shell's folder and exported variables that a new shell receives."""


class Call:
    """A request that a program is to answer."""

    def __init__(self, header: Mapping[str, Any], text: str) -> None:
        self.id: int = header["id"]
        self.timeout_s: float = header["timeout_s"]
        self.text = text
        self.began = self.deadline = 0.0
        self.is_interrupted = False


class Program:
    """A process that stays: the shell or the kernel."""

    num_fields = 1
    """The number of fields, each with a NUL byte after it, that a record has."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._plan = plan
        self.pid: int | None = None
        self.status: int | None = None
        self.calls: deque[Call] = deque()
        self.current: Call | None = None
        self.lost: str | None = None
        self.spool = Spool(plan["box"]["output_bytes"])
        self.record = bytearray()
        self.unsent = b""
        self.requests = self.records = self.output = -1
        self.at_end: set[int] = set()

    @property
    def numbers(self) -> tuple[int, int]:
        """The descriptors under which the process finds its requests and its records: high, out of its way."""
        most: int = self._plan["limits"]["open_files"]
        return most - 12, most - 11

    def command(self) -> list[str]:
        """Return the command that starts it."""
        raise NotImplementedError

    def preamble(self) -> bytes:
        """Return what it reads first."""
        return b""

    def request(self, text: str) -> bytes:
        """Return what asks it to run a text."""
        raise NotImplementedError

    def read_record(self, fields: list[bytes]) -> dict[str, Any]:
        """Return what a record says, or raise `ValueError`."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the process, confined. `OSError` if it does not become the program, EAGAIN if not in time."""
        requests, self.requests = os.pipe()
        self.records, records = os.pipe()
        self.output, output = os.pipe()
        failed, failing = os.pipe()
        self.status = None
        try:
            self.pid = os.fork()
            if self.pid == 0:
                self._become(requests, records, output, failing)
        except OSError:
            self.close()
            os.close(failed)
            raise
        finally:
            for descriptor in (requests, records, output, failing):
                os.close(descriptor)
        for descriptor in (self.requests, self.records, self.output):
            os.set_blocking(descriptor, False)
        self.unsent = self.preamble()
        try:
            self._check_started(failed)
        except OSError:
            os.kill(self.pid, signal.SIGKILL)
            self.close()
            raise
        finally:
            os.close(failed)

    def _become(self, requests: int, records: int, output: int, failing: int) -> None:
        """In the new process: become the program. Never returns."""
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.place(requests, records, output)
            confine.become_program({**self._plan, "command": self.command()}, folder=self._plan["folder"])
        except BaseException as error:  # noqa: BLE001 - whatever it is, this process ends here
            os.write(failing, f"{getattr(error, 'errno', None) or errno.EIO} {error}".encode()[:4096])
        finally:
            os._exit(127)

    def _check_started(self, failed: int) -> None:
        """Wait until the process has become the program, which closes the pipe. Others of its user may stop it."""
        poll = select.poll()
        poll.register(failed, select.POLLIN)
        if not poll.poll(_START_MS):
            raise OSError(errno.EAGAIN, "the process does not start")
        reason = os.read(failed, 4096).decode("utf-8", "replace")
        if reason:
            number, _, text = reason.partition(" ")
            raise OSError(int(number), text)

    def place(self, requests: int, records: int, output: int) -> None:
        """Give the pipes the numbers under which the process finds them."""
        empty = os.open("/dev/null", os.O_RDONLY)
        first, second = self.numbers
        for number, source in ((first, requests), (second, records), (0, empty), (1, output), (2, output)):
            os.dup2(source, number)

    def close(self) -> None:
        """Forget the process."""
        for descriptor in (self.requests, self.records, self.output):
            if descriptor >= 0:
                os.close(descriptor)
        self.requests = self.records = self.output = -1
        self.pid, self.unsent = None, b""
        self.at_end.clear()
        self.record.clear()

    def drain(self) -> None:
        """Take the output that is in the pipe now."""
        for _ in range(17):  # a pipe holds 64 KiB, and an endless writer must not hold us
            try:
                data = os.read(self.output, 65536)
            except BlockingIOError:
                return
            if not data:
                self.at_end.add(self.output)
                return
            self.spool.add(data)


class Shell(Program):
    """Bash, reading its script from a pipe. After each command it reports its folder and its exported variables."""

    num_fields = 3

    def __init__(self, plan: Mapping[str, Any]) -> None:
        super().__init__(plan)
        self._last_status = 0
        self._state = (plan["work"], "")

    def command(self) -> list[str]:
        return [self._plan["box"]["shell"], "--noprofile", "--norc", "-s"]

    def place(self, requests: int, records: int, output: int) -> None:
        for number, source in ((self.numbers[1], records), (0, requests), (1, output), (2, output)):
            os.dup2(source, number)

    def preamble(self) -> bytes:
        folder, exported = map(_quoted, self._state)
        work = _quoted(self._plan["work"])
        line = f"cd -- {folder} 2>/dev/null || cd -- {work}; eval {exported}; __forge_return() {{ return $1; }}\n"
        return line.encode("utf-8", "surrogateescape")

    def request(self, text: str) -> bytes:
        records = self.numbers[1]
        line = (
            f"__forge_return {self._last_status}; eval {_quoted(text)} </dev/null {records}>&-; "
            f"{{ builtin printf '%d\\0%s\\0' \"$?\" \"$PWD\"; builtin export -p; builtin printf '\\0'; }} >&{records}\n"
        )
        return line.encode("utf-8", "replace")

    def read_record(self, fields: list[bytes]) -> dict[str, Any]:
        if len(fields[0]) > 4:
            raise ValueError("not an exit code")
        status = int(fields[0])
        folder, exported = fields[1].decode("utf-8", "surrogateescape"), fields[2].decode("utf-8", "surrogateescape")
        if len(fields[1]) + len(fields[2]) <= _STATE_BYTES:
            self._state = (folder, exported)
        self._last_status = status & 0xFF
        return {"exit_code": status & 0xFF}


class Kernel(Program):
    """A Python process that runs one piece of code after another."""

    def command(self) -> list[str]:
        box = self._plan["box"]
        words = [*map(str, self.numbers), str(box["output_bytes"]), self._plan["work"]]
        start = "import sys; del sys.path[0]; exec(sys.argv.pop(1))"  # no file of the policy stands in for a module
        return [self._plan["command"][0], "-s", "-B", "-u", "-c", start, box["kernel"], *words]

    def request(self, text: str) -> bytes:
        return json.dumps(text.encode("utf-8", "replace").decode()).encode("ascii") + b"\0"

    def read_record(self, fields: list[bytes]) -> dict[str, Any]:
        found = json.loads(fields[0], parse_int=str, parse_float=str)  # no numbers: large ones take long to read
        if not isinstance(found, dict):
            raise ValueError("not a record")
        return {
            name: None if found.get(name) is None else str(found[name])[:RECORD_BYTES] for name in ("value", "error")
        }


def _quoted(text: str) -> str:
    """Return a text as one word of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"
