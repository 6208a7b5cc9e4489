"""The first process of a long-lived sandbox: it runs the shell, the Python kernel and commands, and handles files.

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

from forge.runtime.sandbox import confine, network
from forge.runtime.sandbox.frames import Unpacker, pack, send_all
from forge.runtime.sandbox.guest_files import WorkFolder, describe
from forge.runtime.sandbox.guest_programs import RECORD_BYTES, Call, Command, Kernel, Program, Shell

_CONTROL = 0
_INTERRUPT_S = 2.0
"""How long a kernel may take to obey an interrupt before it is killed."""

_KILL_S = 10.0
_MOST_NEW = 50
_NOT_A_COMMAND = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.E2BIG)


class Guest:
    """Answers the library's requests until it closes the connection."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        box = plan["box"]
        self._plan = plan
        self._folder = WorkFolder(plan["work"], uid=plan["uid"], most_bytes=box["most_bytes"])
        self._programs: dict[str, Program] = {"bash": Shell(plan), "python": Kernel(plan), "run": Command(plan)}
        self._unpacker = Unpacker()
        self._wake, wake = os.pipe()
        for descriptor in (self._wake, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Serve until the library closes the connection, or it or the launcher is gone."""
        if confine.has_tcp(self._plan):
            network.hand_over_listener(_CONTROL, self._plan["box"]["port"])
        self._send({"id": 0})
        while True:
            poll = select.poll()
            readers: dict[int, Callable[[], None]] = {}
            self._watch(poll, readers)
            deadlines = [each.current.deadline for each in self._programs.values() if each.current is not None]
            wait_ms = max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None
            for descriptor, _ in poll.poll(wait_ms):
                if descriptor == self._plan["report"]:
                    return
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
        poll.register(self._plan["report"], 0)  # errors are reported all the same
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

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _handle(self, header: Mapping[str, Any], payload: bytes) -> None:
        operation = header["op"]
        if operation in self._programs:
            self._programs[operation].calls.append(Call(header, payload))
        elif operation == "cancel":
            self._cancel(header["id"])
        else:
            try:
                answer, data = self._use_files(operation, header, payload)
            except (OSError, ValueError) as error:
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

    # ---- programs ----------------------------------------------------------------------------------------------------

    def _advance(self, name: str, program: Program) -> None:
        """Start the next call, or look whether the current one is over."""
        while program.current is None and program.calls:
            program.current = call = program.calls.popleft()
            call.began = time.monotonic()
            call.deadline = call.began + call.timeout_s
            self._begin(name, program, call)
        if program.pid is None:
            return
        program.feed()
        program.take_records()
        if program.current is not None and program.record.count(0) >= program.num_fields:
            self._finish_with_record(name, program)
        elif program.status is not None:
            self._ended(name, program)
        elif len(program.record) > RECORD_BYTES or (program.current is None and program.record):
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
                reason = error.strerror or str(error)
                is_missing = name == "run" and error.errno in _NOT_A_COMMAND
                found = describe(error) if is_missing else {"failure": f"cannot start: {reason}"}
                self._finish(program, **found)
                return
        program.unsent += program.request(call)

    def _start(self, name: str, program: Program) -> None:
        """Start a program. Where what runs already keeps it from starting, end that first: what is in the background,
        then the other programs as well."""
        for keep in (self._others(name), frozenset[int]()):
            for folder in (self._plan["folder"], self._plan["work"]):
                self._folder.unlock(folder)
            try:
                program.start()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                    raise
                self._kill_all(keep=keep)
            else:
                return
        program.start()

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
        if name == "run":  # nothing that a command left running goes on
            self._kill_all(keep=self._others(name))
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
        """End a program with everything in the sandbox but the other ones."""
        self._kill_all(keep=self._others(name))
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
        described, output = program.take_output()
        answer = {"timed_out": call.is_interrupted, "lost": program.lost, "seconds": time.monotonic() - call.began}
        program.lost = None
        self._send({"id": call.id, **answer, **found, **described}, output)

    def _others(self, name: str) -> frozenset[int]:
        """Return the processes of the other programs."""
        return frozenset(each.pid for own, each in self._programs.items() if own != name and each.pid is not None)

    # ---- processes ---------------------------------------------------------------------------------------------------

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

    def _kill_all(self, *, keep: frozenset[int]) -> None:
        """Kill every process of the sandbox but some. If they multiply faster than that, kill those as well."""
        until = time.monotonic() + _KILL_S
        killed: set[int] = set()
        num_new = 0  # rounds that found processes which were not there before: a slow machine is not a fork bomb
        while True:
            self._reap()
            others = [pid for pid in _descendants() if pid not in keep]
            num_new += not killed.issuperset(others)
            killed.update(others)
            if not keep or num_new == _MOST_NEW or not os.path.exists("/proc/self/stat"):
                self._kill_at_once()
            for pid in others:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if not others or time.monotonic() > until:
                self._reap()
                return
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
    """Become the first process of a sandbox. The connection to the library is standard input. Never returns.

    `report` of the plan is a pipe that the launcher reads: without a reader, the launcher is dead.
    """
    os.set_inheritable(plan["report"], False)
    os.closerange(3, plan["report"])
    os.closerange(plan["report"] + 1, 65536)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    confine.prctl(confine.PR_SET_DUMPABLE, 0)
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    if plan["isolation"] != "process":
        confine.prctl(confine.PR_SET_NO_NEW_PRIVS, 1)
        confine.filter_calls(has_tcp=confine.has_tcp(plan))
    try:
        Guest(plan).serve()
    except BaseException as error:  # noqa: BLE001 - the library has to know why the sandbox ends
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_name}, line {place.tb_lineno}" if place is not None else "?"
        send_all(_CONTROL, pack({"id": -1, "crash": f"{type(error).__name__}: {error} ({where})"}))
    finally:
        os._exit(0)


def serve_in_bubblewrap() -> None:
    """Serve with the plan that is the first argument, in folders that still belong to root."""
    plan = json.loads(sys.argv[1])
    if plan["uid"] is not None:
        for folder in (plan["folder"], plan["work"]):
            os.chown(folder, plan["uid"], plan["uid"])
    serve(plan)
