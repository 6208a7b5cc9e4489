"""The programs of a long-lived sandbox, as its first process sees them: the shell and the Python kernel, which stay,
and commands that run once.

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

    def __init__(self, header: Mapping[str, Any], data: bytes) -> None:
        self.id: int = header["id"]
        self.timeout_s: float = header["timeout_s"]
        self.header, self.data = header, data
        self.began = self.deadline = 0.0
        self.is_interrupted = False


class Program:
    """A process that answers calls: the shell or the kernel, which stay, or a command."""

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

    def changes(self) -> dict[str, Any]:
        """Return what its plan has in place of the sandbox's."""
        return {}

    def preamble(self) -> bytes:
        """Return what it reads first."""
        return b""

    def request(self, call: Call) -> bytes:
        """Return what asks it to answer a call."""
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
            plan = {**self._plan, **self.changes(), "command": self.command()}
            confine.become_program(plan, folder=self._plan["folder"])
        except BaseException as error:  # noqa: BLE001 - whatever it is, this process ends here
            reason = getattr(error, "strerror", None) or str(error)
            os.write(failing, f"{getattr(error, 'errno', None) or errno.EIO} {reason}".encode()[:4096])
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
        self._drain(self.output, self.spool)

    def _drain(self, descriptor: int, spool: Spool) -> None:
        for _ in range(17):  # a pipe holds 64 KiB, and an endless writer must not hold us
            try:
                data = os.read(descriptor, 65536)
            except BlockingIOError:
                return
            if not data:
                self.at_end.add(descriptor)
                return
            spool.add(data)

    def feed(self) -> None:
        """Write what the process has not been sent yet, as far as there is room."""
        while self.unsent:
            try:
                sent = os.write(self.requests, self.unsent[:65536])
            except BlockingIOError:
                return
            except BrokenPipeError:
                sent = len(self.unsent)
            self.unsent = self.unsent[sent:]

    def take_records(self) -> None:
        """Read what the process reports."""
        while len(self.record) <= RECORD_BYTES:
            try:
                data = os.read(self.records, 65536)
            except BlockingIOError:
                return
            if not data:
                self.at_end.add(self.records)
                return
            self.record += data

    def take_output(self) -> tuple[dict[str, Any], bytes]:
        """Return the output of a call, with what describes it."""
        head, tail, left_out = self.spool.take()
        return {"num_head": len(head), "left_out": left_out}, head + tail


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

    def request(self, call: Call) -> bytes:
        records = self.numbers[1]
        text = _quoted(call.data.decode("utf-8", "replace"))
        line = (
            f"__forge_return {self._last_status}; eval {text} </dev/null {records}>&-; "
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

    def request(self, call: Call) -> bytes:
        return json.dumps(call.data.decode("utf-8", "replace")).encode("ascii") + b"\0"

    def read_record(self, fields: list[bytes]) -> dict[str, Any]:
        found = json.loads(fields[0], parse_int=str, parse_float=str)  # no numbers: large ones take long to read
        if not isinstance(found, dict):
            raise ValueError("not a record")
        return {
            name: None if found.get(name) is None else str(found[name])[:RECORD_BYTES] for name in ("value", "error")
        }


class Command(Program):
    """A command that runs once, with input and two outputs of its own. Its errors take the place of the records."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        super().__init__(plan)
        self._errors = Spool(plan["box"]["output_bytes"])

    @property
    def _call(self) -> Call:
        assert self.current is not None
        return self.current

    def command(self) -> list[str]:
        first, *rest = self._call.header["command"]
        path = self._environment().get("PATH", "")
        return [_find(first, path, start=self._plan["work"]), *rest]

    def changes(self) -> dict[str, Any]:
        return {"environment": self._environment(), "start": self._plan["work"]}

    def _environment(self) -> dict[str, str]:
        return {**self._plan["environment"], **self._call.header["environment"]}

    def place(self, requests: int, records: int, output: int) -> None:
        for number, source in ((0, requests), (1, output), (2, records)):
            os.dup2(source, number)

    def request(self, call: Call) -> bytes:
        return call.data

    def feed(self) -> None:
        super().feed()
        if not self.unsent and self.requests >= 0:
            os.close(self.requests)  # the end of its input
            self.requests = -1

    def take_records(self) -> None:
        if self.records not in self.at_end:
            self._drain(self.records, self._errors)

    def drain(self) -> None:
        super().drain()
        self.take_records()

    def take_output(self) -> tuple[dict[str, Any], bytes]:
        described, output = super().take_output()
        head, tail, left_out = self._errors.take()
        errors = {"num_head": len(head), "left_out": left_out}
        return {**described, "num_output": len(output), "errors": errors}, output + head + tail


def _find(name: str, path: str, *, start: str) -> str:
    """Return where a command is: a path, or a name in one of the folders of `path`."""
    if "/" in name:
        return os.path.join(start, name)
    for folder in path.split(":"):
        if os.access(os.path.join(folder, name), os.X_OK):
            return os.path.join(folder, name)
    raise FileNotFoundError(errno.ENOENT, f"{name} is not in {path}")


def _quoted(text: str) -> str:
    """Return a text as one word of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"
