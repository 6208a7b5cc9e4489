"""The first process of a long-lived sandbox: it runs the shell and the Python kernel, and reads and writes files.

It is code of ours that answers to the library alone. Behind a boundary it is process 1 of the sandbox, which no signal
from inside ends; what the policy starts has another user, or at least no way to trace it. What comes from the shell and
the kernel is bounded and never trusted: whatever cannot be read counts as the end of the program that wrote it.

It imports the standard library alone: it also travels as text into a sandbox in which the library does not exist.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from forge.runtime.sandbox import confine
from forge.runtime.sandbox.frames import Spool, Unpacker, pack, send_all
from forge.runtime.sandbox.guest_files import WorkFolder, describe

_CONTROL = 0
_INTERRUPT_S = 2.0
"""How long a kernel may take to obey an interrupt before it is killed."""

_KILL_S = 10.0
_RECORD_BYTES = 4 * 1024 * 1024
_STATE_BYTES = 96 * 1024
"""The most of a shell's exported variables that a new shell receives: they travel as an argument."""


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
        """Start the process, confined."""
        requests, self.requests = os.pipe()
        self.records, records = os.pipe()
        self.output, output = os.pipe()
        failed, failing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                self.place(requests, records, output)
                confine.become_program({**self._plan, "command": self.command()}, folder=self._plan["folder"])
            except BaseException as error:  # whatever it is, this process ends here
                os.write(failing, f"{getattr(error, 'errno', None) or errno.EIO} {error}".encode()[:4096])
            finally:
                os._exit(127)
        for descriptor in (requests, records, output, failing):
            os.close(descriptor)
        for descriptor in (self.requests, self.records, self.output):
            os.set_blocking(descriptor, False)
        with open(failed, encoding="utf-8", errors="replace") as file:
            reason = file.read()
        self.status, self.unsent = None, self.preamble()
        if reason:
            self.close()
            number, _, text = reason.partition(" ")
            raise OSError(int(number), text)

    def place(self, requests: int, records: int, output: int) -> None:
        """Give the pipes the numbers under which the process finds them."""
        empty = os.open("/dev/null", os.O_RDONLY)
        for number, source in zip((*self.numbers, 0, 1, 2), (requests, records, empty, output, output)):
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
        for number, source in zip((self.numbers[1], 0, 1, 2), (records, requests, output, output)):
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
        return [self._plan["command"][0], "-s", "-B", "-u", "-c", box["kernel"], *words]

    def request(self, text: str) -> bytes:
        return json.dumps(text.encode("utf-8", "replace").decode()).encode("ascii") + b"\0"

    def read_record(self, fields: list[bytes]) -> dict[str, Any]:
        found = json.loads(fields[0])
        if not isinstance(found, dict):
            raise ValueError("not a record")
        return {
            name: None if found.get(name) is None else str(found[name])[:_RECORD_BYTES] for name in ("value", "error")
        }


class Guest:
    """Answers the library's requests until it closes the connection."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        box = plan["box"]
        self._plan = plan
        self._folder = WorkFolder(plan["work"], uid=plan["uid"], most_bytes=box["most_bytes"])
        self._programs: dict[str, Program] = {"bash": Shell(plan), "python": Kernel(plan)}
        self._unpacker = Unpacker()
        self._wake, wake = os.pipe()
        for descriptor in (self._wake, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Serve until the library closes the connection or is gone."""
        self._send({"id": 0})
        while True:
            poll = select.poll()
            readers: dict[int, Callable[[], None]] = {}
            self._watch(poll, readers)
            deadlines = [each.current.deadline for each in self._programs.values() if each.current is not None]
            wait_ms = max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None
            for descriptor, _ in poll.poll(wait_ms):
                if descriptor == _CONTROL:
                    data = os.read(_CONTROL, 1 << 20)
                    if not data:
                        return
                    for header, payload in self._unpacker.feed(data):
                        self._handle(header, payload)
                elif descriptor in readers:
                    readers[descriptor]()
            self._reap()
            for name, program in self._programs.items():
                self._advance(name, program)

    def _watch(self, poll: select.poll, readers: dict[int, Callable[[], None]]) -> None:
        poll.register(_CONTROL, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        readers[self._wake] = lambda: _discard(self._wake)
        for program in self._programs.values():
            if program.pid is None:
                continue
            for descriptor, read in ((program.output, program.drain), (program.records, lambda: None)):
                if descriptor not in program.at_end:
                    poll.register(descriptor, select.POLLIN)
                    readers[descriptor] = read
            if program.unsent:
                poll.register(program.requests, select.POLLOUT)

    # ---- requests -----------------------------------------------------------------------------------------------------

    def _handle(self, header: Mapping[str, Any], payload: bytes) -> None:
        operation = header["op"]
        if operation in self._programs:
            self._programs[operation].calls.append(Call(header, payload.decode("utf-8", "replace")))
        elif operation == "cancel":
            self._cancel(header["id"])
        else:
            try:
                answer, data = self._use_files(operation, header, payload)
            except OSError as error:
                answer, data = describe(error), b""
            self._send({"id": header["id"], **answer}, data)

    def _use_files(self, operation: str, header: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        if operation == "read":
            return {}, self._folder.read(header["path"], most_bytes=self._plan["box"]["most_bytes"])
        if operation == "write":
            self._folder.write(header["path"], payload)
        elif operation == "put":
            self._folder.put(header["entries"], payload)
        elif operation == "collect":
            entries, left_out, data = self._folder.collect()
            return {"entries": entries, "left_out": left_out}, data
        return {}, b""

    def _cancel(self, number: int) -> None:
        """Treat a call as one whose time is over; forget it if it has not begun."""
        for program in self._programs.values():
            if program.current is not None and program.current.id == number:
                program.current.deadline = time.monotonic()
            program.calls = deque(call for call in program.calls if call.id != number)

    def _send(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        send_all(_CONTROL, pack(header, num_payload=len(payload)))
        send_all(_CONTROL, payload)

    # ---- programs -----------------------------------------------------------------------------------------------------

    def _advance(self, name: str, program: Program) -> None:
        """Start the next call, or look whether the current one is over."""
        while program.current is None and program.calls:
            program.current = call = program.calls.popleft()
            call.began = time.monotonic()
            call.deadline = call.began + call.timeout_s
            self._begin(name, program, call)
        if program.pid is None:
            return
        self._feed(program)
        self._read_records(program)
        if program.current is not None and program.record.count(0) >= program.num_fields:
            self._finish_with_record(name, program)
        elif program.status is not None:
            self._ended(name, program)
        elif len(program.record) > _RECORD_BYTES or (program.current is None and program.record):
            self._kill(name, program)
        elif program.current is not None and time.monotonic() >= program.current.deadline:
            self._out_of_time(name, program, program.current)
        if program.current is None and program.calls:
            self._advance(name, program)

    def _begin(self, name: str, program: Program, call: Call) -> None:
        if program.pid is None:
            try:
                self._start(name, program)
            except OSError as error:
                self._finish(program, failure=f"cannot start: {error.strerror or error}")
                return
        program.unsent += program.request(call.text)

    def _start(self, name: str, program: Program) -> None:
        """Start a program. Where what runs in the background leaves no room for another process, end that first."""
        try:
            program.start()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                raise
            self._kill_all(keep=self._other(name).pid)
            program.start()

    def _feed(self, program: Program) -> None:
        while program.unsent:
            try:
                sent = os.write(program.requests, program.unsent[:65536])
            except BlockingIOError:
                return
            except BrokenPipeError:
                sent = len(program.unsent)
            program.unsent = program.unsent[sent:]

    def _read_records(self, program: Program) -> None:
        while len(program.record) <= _RECORD_BYTES:
            try:
                data = os.read(program.records, 65536)
            except BlockingIOError:
                return
            if not data:
                program.at_end.add(program.records)
                return
            program.record += data

    def _finish_with_record(self, name: str, program: Program) -> None:
        *fields, rest = bytes(program.record).split(b"\0", program.num_fields)
        program.record[:] = rest
        try:
            found = program.read_record(fields)
        except (ValueError, RecursionError):
            self._kill(name, program)
            return
        program.drain()
        self._finish(program, **found)

    def _ended(self, name: str, program: Program) -> None:
        """Say how a program ended, now or with the next call."""
        assert program.status is not None
        code = os.waitstatus_to_exitcode(program.status)
        program.drain()
        program.close()
        if program.current is None:
            program.lost = _how(code)
        else:
            self._finish(program, exit_code=code, ended=_how(code))

    def _out_of_time(self, name: str, program: Program, call: Call) -> None:
        if name == "python" and not call.is_interrupted and program.pid is not None:
            call.is_interrupted, call.deadline = True, time.monotonic() + _INTERRUPT_S
            os.kill(program.pid, signal.SIGINT)
            return
        call.is_interrupted = True
        self._kill(name, program)

    def _kill(self, name: str, program: Program) -> None:
        """End a program with everything in the sandbox but the other one."""
        self._kill_all(keep=self._other(name).pid)
        program.drain()
        program.close()
        if program.current is None:
            program.lost = "killed"
        else:
            self._finish(program, ended="killed")

    def _finish(self, program: Program, **found: Any) -> None:
        call = program.current
        assert call is not None
        program.current = None
        head, tail, left_out = program.spool.take()
        answer = {"timed_out": call.is_interrupted, "lost": program.lost, "seconds": time.monotonic() - call.began}
        program.lost = None
        self._send({"id": call.id, **answer, **found, "num_head": len(head), "left_out": left_out}, head + tail)

    def _other(self, name: str) -> Program:
        return self._programs["python" if name == "bash" else "bash"]

    # ---- processes ----------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Collect what ended. Orphans are our children."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for program in self._programs.values():
                if program.pid == pid:
                    program.status = status

    def _kill_all(self, *, keep: int | None) -> None:
        """Kill every process of the sandbox but one. If they multiply faster than that, kill the one as well."""
        until = time.monotonic() + _KILL_S
        num_rounds = 0
        while True:
            self._reap()
            others = [pid for pid in _descendants() if pid != keep]
            if keep is None or num_rounds == 50 or not os.path.exists("/proc/self/stat"):
                self._kill_at_once()
            for pid in others:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if not others or time.monotonic() > until:
                self._reap()
                return
            num_rounds += 1
            time.sleep(0.001)  # until the kernel has ended them

    def _kill_at_once(self) -> None:
        """Kill all at one moment, so that nothing that forks fast enough escapes."""
        if os.getpid() == 1:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return
        elif self._plan["uid"] is not None:
            confine.kill_user(self._plan["uid"])


def _quoted(text: str) -> str:
    """Return a text as one word of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exited with {code}"


def _discard(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            continue
    except BlockingIOError:
        return


def _descendants() -> list[int]:
    """Return the processes below this one that have not ended."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                words = file.read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words[0] not in ("Z", "X") or int(words[17]) > 1:  # the first thread may have ended before the others
            parents[int(name)] = int(words[1])
    own = os.getpid()
    found = []
    for pid in parents:
        above: int | None = pid
        while above is not None and above != own:
            above = parents.get(above)
        if above == own and pid != own:
            found.append(pid)
    return found


def serve(plan: Mapping[str, Any]) -> None:
    """Become the first process of a sandbox. The connection to the library is standard input. Never returns."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    confine.prctl(confine.PR_SET_DUMPABLE, 0)
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    if plan["isolation"] != "process":
        confine.prctl(confine.PR_SET_NO_NEW_PRIVS, 1)
        confine.filter_calls()
    Guest(plan).serve()
    os._exit(0)


def serve_in_bubblewrap() -> None:
    """Serve with the plan that is the first argument, in folders that still belong to root."""
    plan = json.loads(sys.argv[1])
    os.closerange(3, 65536)
    if plan["uid"] is not None:
        for folder in (plan["folder"], plan["work"]):
            os.chown(folder, plan["uid"], plan["uid"])
    serve(plan)
