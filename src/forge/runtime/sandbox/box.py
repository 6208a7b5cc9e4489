"""Long-lived sandboxes: a shell, a Python kernel and a work folder that stay until the sandbox is closed."""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import json
import os
import posixpath
import shutil
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

from forge.errors import LaunchError, OptionError
from forge.runtime.sandbox import launching
from forge.runtime.sandbox.box_records import (
    CommandResult,
    Content,
    FailureKind,
    Files,
    ProgramResult,
    PythonResult,
    SandboxError,
    Snapshot,
    as_bytes,
    as_snapshot,
    check_command,
    command_result,
    program_result,
    python_result,
)
from forge.runtime.sandbox.frames import SIZES, Unpacker, pack
from forge.runtime.sandbox.network import MARK
from forge.runtime.sandbox.records import SandboxLimits
from forge.runtime.sandbox.runner import SETUP_S, LaunchedSandbox

_MOST_STARTING: Final = 4 * (os.cpu_count() or 1)
"""The most sandboxes of an event loop that start at once: more would only start more slowly."""

_LATE_S: Final = 5.0
_starting: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

Answer = tuple[dict[str, Any], bytes]


class Box:
    """A sandbox that stays open. Use it as an asynchronous context manager, in one event loop.

    What runs in it comes back as a result, whatever it does. `SandboxError` is raised when the sandbox itself fails,
    and `OSError` for files that cannot be read or written. Calls of `bash` run one after the other, and so do calls of
    `python`.
    """

    def __init__(
        self,
        sandbox: LaunchedSandbox,
        *,
        limits: SandboxLimits | None = None,
        readable: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        """`readable` are further paths that programs can read, `environ` further environment variables. With a `port`,
        programs can connect to it on 127.0.0.1, and `listener` is where their connections arrive."""
        self.limits = limits or SandboxLimits()
        self._sandbox = sandbox
        self._shell = _find_bash()
        plan = sandbox.box_plan(
            shell=self._shell, limits=self.limits, readable=readable, environ=environ or {}, port=port
        )
        self.work: str = plan["work"]
        self.listener: socket.socket | None = None
        self._plan = plan
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._failure: SandboxError | None = None
        self._is_open = False
        self._closing: asyncio.Task[None] | None = None
        self._heard_at = 0.0
        self._crash: str | None = None
        self._report = bytearray()
        self._writer: asyncio.StreamWriter | None = None
        self._receiving: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Box({self._sandbox.isolation}, {'open' if self._is_open else 'closed'})"

    @property
    def is_open(self) -> bool:
        """Whether it was started and not closed yet."""
        return self._is_open

    # ---- start and end -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if loop not in _starting:
            _starting[loop] = asyncio.Semaphore(_MOST_STARTING)
        async with _starting[loop]:
            await self._start(loop)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            control, theirs = socket.socketpair()
        except OSError as error:
            raise SandboxError(f"a sandbox cannot be started: {error}", kind="sandbox_start") from error
        try:
            self._events, their_events = socket.socketpair()
            with their_events:
                self._server = launching.launch(self._plan, theirs, their_events)
        except OSError as error:
            control.close()
            raise SandboxError(f"a sandbox cannot be started: {error}", kind="sandbox_start") from error
        except SandboxError:
            control.close()
            self._events.close()
            raise
        finally:
            theirs.close()
        self._is_open = True
        self._ended = loop.create_future()
        self._events.setblocking(False)
        loop.add_reader(self._events.fileno(), self._read_events)
        self._timer = loop.call_later(self.limits.open_s, self._expire)
        try:
            if self._plan["box"]["port"] is not None:
                self.listener = await self._receive_listener(loop, control)
            self._reader, self._writer = await asyncio.open_connection(sock=control)
            ready = self._waiting[0] = loop.create_future()
            self._receiving = asyncio.create_task(self._receive())
            await self._answer(0, ready, SETUP_S)
        except BaseException:
            if self._writer is None:
                control.close()
            await self.close()
            raise

    async def close(self) -> None:
        """Kill everything in the sandbox and remove its files. Nothing is left when this returns."""
        if not self._is_open:
            return
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._timer.cancel()
        self._hang_up()
        if self.listener is not None:
            self.listener.close()
        if self._writer is not None:
            self._writer.close()
        try:
            async with asyncio.timeout(SETUP_S):
                await asyncio.shield(self._ended)
        except TimeoutError:
            self._failure = SandboxError("the launcher of a sandbox does not end", kind="sandbox_hung")
        finally:
            self._is_open = False
            asyncio.get_running_loop().remove_reader(self._events.fileno())
            self._events.close()
            if self._receiving is not None:
                self._receiving.cancel()
                await asyncio.wait([self._receiving])
            self._fail(SandboxError("the sandbox was closed", kind="sandbox_died"))
            launching.release(self._server)
        if self._failure is not None and self._failure.kind == "sandbox_hung":
            raise self._failure

    def _hang_up(self) -> None:
        """Tell the launcher to kill everything."""
        try:
            self._events.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EPIPE):
                raise

    def _expire(self) -> None:
        limit_s = self.limits.open_s
        self._fail(SandboxError(f"the sandbox was open for longer than {limit_s:g} s", kind="sandbox_open_time"))
        self._hang_up()

    def _read_events(self) -> None:
        try:
            data = self._events.recv(65536)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self._report += data
        if not data:
            asyncio.get_running_loop().remove_reader(self._events.fileno())
            if not self._ended.done():
                self._ended.set_result(None)

    async def _receive_listener(self, loop: asyncio.AbstractEventLoop, control: socket.socket) -> socket.socket:
        """Return the socket on which programs of the sandbox connect, made in the sandbox's own network."""
        control.setblocking(False)
        readable = asyncio.Event()
        loop.add_reader(control.fileno(), readable.set)
        try:
            async with asyncio.timeout(SETUP_S):
                await readable.wait()
        except TimeoutError:
            raise SandboxError(f"a sandbox does not start within {SETUP_S:g} s", kind="sandbox_hung") from None
        finally:
            loop.remove_reader(control.fileno())
        data, received, _, _ = socket.recv_fds(control, len(MARK), 1, socket.MSG_CMSG_CLOEXEC)
        if received:
            listener = socket.socket(fileno=received[0])
            listener.setblocking(False)
            return listener
        if data:  # a message that says why it crashed
            messages = Unpacker().feed(data + await loop.sock_recv(control, 1 << 16))
            self._crash = messages[0][0].get("crash") if messages else None
        await asyncio.wait([self._ended], timeout=SETUP_S)
        self._waiting[0] = loop.create_future()  # it has not started
        raise self._died()

    # ---- messages ----------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Pass answers to the calls that wait for them, until the connection ends."""
        try:
            while True:
                sizes = await self._reader.readexactly(SIZES.size)
                num_header, num_payload = SIZES.unpack(sizes)
                header = json.loads(await self._reader.readexactly(num_header))
                payload = await self._reader.readexactly(num_payload)
                self._heard_at = asyncio.get_running_loop().time()
                self._crash = header.get("crash")
                waiting = self._waiting.pop(header["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result((header, payload))
        except (EOFError, ConnectionError):
            await asyncio.wait([self._ended], timeout=SETUP_S)
            self._fail(self._died())

    def _died(self) -> SandboxError:
        events = [json.loads(line) for line in bytes(self._report).splitlines() if line.endswith(b"}")]
        last: dict[str, Any] = events[-1] if events else {}
        kind: FailureKind = "sandbox_start" if 0 in self._waiting else "sandbox_died"
        reason = (
            self._crash
            or last.get("reason")
            or ("its launcher died" if last.get("event") != "ended" else "its processes ended")
        )
        what = "could not be started" if kind == "sandbox_start" else "died"
        return SandboxError(f"a sandbox {what}: {reason}", kind=kind, repair="see `forge doctor` for what works here")

    def _fail(self, error: SandboxError) -> None:
        if self._failure is None:
            self._failure = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._failure)
                future.exception()  # seen: whoever waited may be gone
        self._waiting.clear()

    async def _ask(self, header: Mapping[str, Any], payload: bytes = b"", *, timeout_s: float = 0.0) -> Answer:
        """Send a request and wait for its answer."""
        writer = self._writer
        if not self._is_open or self._closing is not None or writer is None:
            raise OptionError(
                "the sandbox is not open",
                path="sandbox",
                value=repr(self),
                rule="use it inside `async with`",
                repair="move the call inside the block, or open another sandbox",
            )
        if self._failure is not None:
            raise self._failure
        number = next(self._ids)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        writer.writelines([pack({**header, "id": number}, num_payload=len(payload)), payload])
        try:
            answer, data = await self._answer(number, future, timeout_s + SETUP_S)
        except asyncio.CancelledError:
            if not writer.is_closing():
                writer.write(pack({"op": "cancel", "id": number}))
            raise
        if "failure" in answer:
            raise SandboxError(f"a sandbox's {header['op']} {answer['failure']}", kind="sandbox_start")
        if "errno" in answer:
            place = header.get("path") or next(iter(header.get("command", ())), self.work)
            raise OSError(answer["errno"], answer["error"], answer["path"] or place)
        return answer, data

    async def _answer(self, number: int, future: asyncio.Future[Answer], patience_s: float) -> Answer:
        """Wait for an answer. While calls are pending the sandbox answers one at least every `patience_s`."""
        loop = asyncio.get_running_loop()
        if len(self._waiting) == 1:
            self._heard_at = loop.time()
        is_late = False
        try:
            while not future.done():
                left_s = self._heard_at + patience_s - loop.time()
                if left_s <= 0 and is_late:
                    self._fail(SandboxError(f"a sandbox does not answer for {patience_s:g} s", kind="sandbox_hung"))
                    break
                is_late = left_s <= 0  # an answer may have arrived while something else kept the event loop
                await asyncio.wait([future], timeout=_LATE_S if is_late else left_s)
            return future.result()
        finally:
            self._waiting.pop(number, None)

    # ---- what it is for ----------------------------------------------------------------------------------------------

    async def bash(self, command: str, *, timeout_s: float | None = None) -> CommandResult:
        """Run a command in the sandbox's shell, whose folder and variables stay from call to call.

        After `timeout_s`, at most `wall_s` of the limits, the shell is killed with everything in the sandbox but the
        Python kernel. The next command gets a new shell, with the folder and the exported variables that there were
        before. The same happens when the command ends or kills the shell.
        """
        if self._shell is None:
            raise LaunchError(
                "this machine has no bash for sandboxes",
                path="sandbox.bash",
                rule="bash in /usr/bin or /bin",
                repair="install bash, or use sandbox.python",
            )
        if "\0" in command:
            return CommandResult("bash: a command cannot contain a NUL byte", 2)
        limit_s = self._limited(timeout_s)
        data = command.encode("utf-8", "replace")
        answer, output = await self._ask({"op": "bash", "timeout_s": limit_s}, data, timeout_s=self.limits.wall_s)
        return command_result(answer, output, timeout_s=limit_s)

    async def python(self, code: str, *, timeout_s: float | None = None) -> PythonResult:
        """Run code in the sandbox's Python process, whose variables stay from call to call.

        After `timeout_s`, at most `wall_s` of the limits, it gets a `KeyboardInterrupt` and keeps its variables. If it
        continues all the same it is killed, with everything in the sandbox but the shell.
        """
        limit_s = self._limited(timeout_s)
        data = code.encode("utf-8", "replace")
        answer, output = await self._ask({"op": "python", "timeout_s": limit_s}, data, timeout_s=self.limits.wall_s)
        return python_result(answer, output, timeout_s=limit_s)

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: Content = b"",
        environ: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ProgramResult:
        """Run a command in a process of its own, in the work folder, and return how it ended.

        When it ends, or after `timeout_s`, at most `wall_s` of the limits, everything in the sandbox is killed but the
        shell and the Python kernel. `OSError` if there is no such command.
        """
        limit_s = self._limited(timeout_s)
        words, variables = list(command), dict(environ or {})
        check_command(words, variables)
        header = {"op": "run", "timeout_s": limit_s, "command": words, "environment": variables}
        answer, output = await self._ask(header, as_bytes(stdin), timeout_s=self.limits.wall_s)
        return program_result(answer, output)

    async def read_file(self, path: str) -> bytes:
        """Return what is in a file of the work folder."""
        return (await self._ask({"op": "read", "path": self._relative(path)}))[1]

    async def write_file(self, path: str, content: Content) -> None:
        """Write a file of the work folder, with the folders above it."""
        data = as_bytes(content)
        if len(data) > self.limits.file_bytes:
            raise OSError(errno.EFBIG, f"larger than {self.limits.file_bytes} bytes", path)
        await self._ask({"op": "write", "path": self._relative(path)}, data)

    async def put(self, files: Mapping[str, Content] | Snapshot) -> None:
        """Write files into the work folder, or all of a snapshot."""
        snapshot = as_snapshot(files)
        entries = [(self._relative(path), *rest) for path, *rest in snapshot.entries]
        await self._ask({"op": "put", "entries": entries}, snapshot.data)

    async def files(self) -> Files:
        """Return the files of the work folder."""
        return (await self.snapshot()).files()

    async def snapshot(self) -> Snapshot:
        """Return the work folder as it is now. Processes and variables are not part of it."""
        answer, data = await self._ask({"op": "collect"})
        entries = tuple((path, kind, mode, size) for path, kind, mode, size in answer["entries"])
        return Snapshot(entries, data, dict(answer["left_out"]))

    def _limited(self, timeout_s: float | None) -> float:
        if timeout_s is not None and not timeout_s > 0:
            raise OptionError(
                "the time limit of a call is not positive",
                path="timeout_s",
                value=timeout_s,
                rule="a number of seconds above 0",
                repair="leave it out for wall_s of the limits",
            )
        return self.limits.wall_s if timeout_s is None else min(timeout_s, self.limits.wall_s)

    def _relative(self, path: str) -> str:
        """Return a path below the work folder."""
        whole = posixpath.normpath(posixpath.join(self.work, path))
        if whole != self.work and not whole.startswith(self.work + "/"):
            raise PermissionError(errno.EACCES, f"outside the work folder {self.work}", path)
        return posixpath.relpath(whole, self.work)


@functools.cache
def _find_bash() -> str | None:
    return shutil.which("bash", path="/usr/bin:/bin")
