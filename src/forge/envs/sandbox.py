"""Sandboxes for episodes: long-lived, with a shell, a Python kernel and files, all usable as tools of an agent.

What the policy's code does (an error, a time-out, too much memory, output or processes, the end of its own shell) comes
back as text. What the infrastructure does is raised as `Fault`. Where the machine has no security boundary at all,
opening a sandbox raises `LaunchError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forge.envs.limits import Fault
from forge.envs.tools import Tool
from forge.runtime.sandbox import open_sandbox
from forge.runtime.sandbox.box import Box
from forge.runtime.sandbox.box_records import (
    CommandResult,
    Content,
    Files,
    ProgramResult,
    PythonResult,
    SandboxError,
    Snapshot,
    as_snapshot,
)
from forge.runtime.sandbox.network import PORT
from forge.runtime.sandbox.records import SandboxLimits

if TYPE_CHECKING:
    from forge.envs.endpoint import Endpoint
    from forge.envs.endpoint_listener import SandboxListener

__all__ = [
    "CommandResult",
    "Files",
    "ProgramResult",
    "PythonResult",
    "SandboxLimits",
    "SandboxTools",
    "Snapshot",
    "grade_in_fresh_sandbox",
    "sandbox",
]

BRIDGED_URL: Final = f"http://127.0.0.1:{PORT}/v1"
"""Where programs in a sandbox find the endpoint of their episode."""

AnyTool = TypeVar("AnyTool", bound=Tool)


class BashTool(Tool):
    """The shell of a sandbox. The policy gives the command alone; a program may also give a time limit."""

    def __call__(self, command: str, *, timeout_s: float | None = None) -> Awaitable[CommandResult]:
        """Run a command, see `forge.runtime.sandbox.box.Box.bash`."""
        found: Awaitable[CommandResult] = self.function(command, timeout_s)
        return found


class PythonTool(Tool):
    """The Python kernel of a sandbox. The policy gives the code alone; a program may also give a time limit."""

    def __call__(self, code: str, *, timeout_s: float | None = None) -> Awaitable[PythonResult]:
        """Run code, see `forge.runtime.sandbox.box.Box.python`."""
        found: Awaitable[PythonResult] = self.function(code, timeout_s)
        return found


class SandboxTools:
    """A long-lived sandbox of an episode, made by `sandbox`.

    Attributes:
        bash, python, write_file, read_file: tools for `agent.run_tools`, and coroutine functions for the program.
        limits: what the sandbox may use.
        work: the path of the work folder inside the sandbox.
    """

    def __init__(
        self,
        box: Box,
        reopen: Callable[[Snapshot], AbstractAsyncContextManager[SandboxTools]],
        bridge: SandboxListener | None = None,
    ) -> None:
        self._box, self._reopen, self._bridge = box, reopen, bridge
        self.limits, self.work = box.limits, box.work
        self.bash = self._bound(_BASH, self._run_bash)
        self.python = self._bound(_PYTHON, self._run_python)
        self.write_file = self._bound(_WRITE_FILE, self._write_file)
        self.read_file = self._bound(_READ_FILE, self._read_file)

    def __repr__(self) -> str:
        return f"SandboxTools({self._box!r})"

    def _bound(self, tool: AnyTool, function: Callable[..., Any]) -> AnyTool:
        """Return a tool of this sandbox. Calls of one tool wait for each other, and each has its own limit inside."""
        bound = copy.copy(tool)
        bound.function, bound.timeout_s = function, self.limits.open_s
        return bound

    async def _run_bash(self, command: str, timeout_s: float | None = None) -> CommandResult:
        with _faults():
            return await self._box.bash(command, timeout_s=timeout_s)

    async def _run_python(self, code: str, timeout_s: float | None = None) -> PythonResult:
        with _faults():
            return await self._box.python(code, timeout_s=timeout_s)

    async def _write_file(self, path: str, text: str) -> str:
        with _faults():
            await self._box.write_file(path, text)
        return f"Wrote {path}."

    async def _read_file(self, path: str) -> str:
        with _faults():
            return (await self._box.read_file(path)).decode("utf-8", "replace")

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: Content = "",
        environ: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ProgramResult:
        """Run a command in a process of its own, in the work folder, and return how it ended.

        When it ends, or after `timeout_s` (at most `limits.wall_s`), everything in the sandbox is killed but the shell
        and the Python kernel. `OSError` if there is no such command.

        Example:
            >>> result = await box.run(["python3", "agent.py"], stdin="What is 2 + 2?")
            >>> print(result.stdout, result.exit_code)
        """
        with _faults():
            result = await self._box.run(command, stdin=stdin, environ=environ, timeout_s=timeout_s)
        self.check_bridge()
        return result

    def check_bridge(self) -> None:
        """Raise `Fault` where programs of the sandbox could not reach the endpoint."""
        failure = None if self._bridge is None else self._bridge.failure
        if failure is not None:
            raise Fault(f"a sandbox cannot reach its endpoint: {failure}", kind="sandbox_bridge", path="sandbox")

    async def put(self, files: Mapping[str, Content] | Snapshot) -> None:
        """Write files into the work folder, or everything of a snapshot."""
        with _faults():
            await self._box.put(files)

    async def files(self) -> Files:
        """Return the files of the work folder: text where they are UTF-8, else bytes. Links, and what does not fit into
        `folder_bytes` or 10,000 files, are in `left_out`."""
        with _faults():
            return await self._box.files()

    async def snapshot(self) -> Snapshot:
        """Return a copy of the work folder, with modes and links. Processes, the shell's state and Python's variables
        are not part of it."""
        with _faults():
            return await self._box.snapshot()

    @contextlib.asynccontextmanager
    async def fork(self) -> AsyncIterator[SandboxTools]:
        """Open another sandbox with a copy of the work folder: `async with box.fork() as other`. It starts with a new
        shell and a new Python kernel: processes, shell state and Python variables are not copied."""
        async with self._reopen(await self.snapshot()) as other:
            yield other


@contextlib.asynccontextmanager
async def sandbox(
    *,
    files: Mapping[str, Content] | Snapshot | None = None,
    limits: SandboxLimits | None = None,
    isolation: str = "auto",
    python: str | None = None,
    readable: Sequence[str] = (),
    endpoint: Endpoint | None = None,
) -> AsyncIterator[SandboxTools]:
    """Open a sandbox for an episode: `async with forge.sandbox() as box`.

    It has no network and sees nothing of this machine but the interpreter and the system's folders. When the block
    ends, or this process does, everything in it is killed and its files are gone.

    With an `endpoint`, of `agent.endpoint()`, programs in the sandbox reach that endpoint and nothing else. They find
    it in the environment variables `OPENAI_BASE_URL` and `OPENAI_API_KEY`.

    Args:
        files: what is in its work folder at the start.
        limits: what it may use.
        isolation: see `forge.runtime.sandbox.open_sandbox`.
        python: the interpreter of its Python kernel, with its packages; None for this one's, without packages.
        readable: further files and folders of this machine that it can read, at the same paths.
        endpoint: the endpoint that its programs can reach.
    """
    backend, port = await _backend(isolation, python), None if endpoint is None else PORT
    environ = {} if endpoint is None else endpoint.environ_at(BRIDGED_URL)
    box = Box(backend, limits=limits, readable=readable, environ=environ, port=port)

    def reopen(snapshot: Snapshot) -> AbstractAsyncContextManager[SandboxTools]:
        return sandbox(
            files=snapshot, limits=limits, isolation=isolation, python=python, readable=readable, endpoint=endpoint
        )

    with _faults():
        await box.__aenter__()
    bridge = None
    try:
        if endpoint is not None and box.listener is not None:
            bridge = endpoint.accept(box.listener)
        with _faults():
            if files is not None:
                await box.put(files)
        opened = SandboxTools(box, reopen, bridge)
        yield opened
        opened.check_bridge()
    finally:
        try:
            if bridge is not None:
                await bridge.close()
        finally:
            with _faults():
                await box.close()


_backends: dict[tuple[str, str | None], Any] = {}
_lock = threading.Lock()


async def _backend(isolation: str, python: str | None) -> Any:
    """Return what starts sandboxes. The first time it is tried out, which blocks."""
    found = _backends.get((isolation, python))
    return found or await asyncio.to_thread(_find_backend, isolation, python)


def _find_backend(isolation: str, python: str | None) -> Any:
    with _lock:
        if (isolation, python) not in _backends:
            _backends[isolation, python] = open_sandbox(isolation, python=python)
        return _backends[isolation, python]


async def grade_in_fresh_sandbox(
    files: Mapping[str, Content],
    command: str,
    *,
    tests: Mapping[str, Content] | None = None,
    only: Sequence[str] | None = None,
    limits: SandboxLimits | None = None,
    isolation: str = "auto",
    python: str | None = None,
) -> CommandResult:
    """Run a command in a new sandbox with files of another one, and return how it ended.

    Nothing that the policy left running, and no file that it did not hand in, has an effect on it. Code of the policy
    that runs in the same process as the tests can still end that process with any exit code: demand a line that only
    the tests print, or run the policy's program as a process of its own.

    Args:
        files: what to grade, as `box.files()` gives it.
        command: the command to run, in the work folder.
        tests: files of the grader. They replace those of the policy, folders included.
        only: patterns such as `solution.py` or `src/*`; other files are not copied, so that none can stand in for a
            module or a configuration file of the grader. None for all.
        limits, isolation, python: as for `sandbox`; there is room for the files besides `folder_bytes`.
    """
    trusted = dict(tests or {})
    handed_in = {
        path: content
        for path, content in files.items()
        if (only is None or any(fnmatchcase(path, pattern) for pattern in only))
        and not any(_collide(path, other) for other in trusted)
    }
    chosen = {**handed_in, **trusted}
    needed = len(as_snapshot(chosen).data) + 4096 * len(chosen)
    bounds = limits or SandboxLimits()
    bounds = replace(bounds, folder_bytes=bounds.folder_bytes + needed)
    async with sandbox(files=chosen, limits=bounds, isolation=isolation, python=python) as box:
        return await box.bash(command)


def _collide(path: str, other: str) -> bool:
    """Return whether two paths cannot both be files, or are the same."""
    return path == other or path.startswith(other + "/") or other.startswith(path + "/")


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    """Turn failures of a sandbox into faults."""
    try:
        yield
    except SandboxError as error:
        raise Fault(error.message, kind=error.kind, path=error.path) from error


def _bash(command: str) -> None:
    """Run a command in a bash shell and return its output and exit code. Directory and variables are kept.

    Args:
        command: The command to run.
    """


def _python(code: str) -> None:
    """Run Python code and return its output, the value of its last expression, or its traceback. Variables are kept.

    Args:
        code: The code to run.
    """


def _write_file(path: str, text: str) -> None:
    """Write a text file, replacing what it holds. Missing directories are created.

    Args:
        path: The path of the file, relative to the working directory at the start.
        text: The content of the file.
    """


def _read_file(path: str) -> None:
    """Return the content of a text file.

    Args:
        path: The path of the file, relative to the working directory at the start.
    """


_BASH, _PYTHON = BashTool(_bash, name="bash"), PythonTool(_python, name="python")
_WRITE_FILE, _READ_FILE = Tool(_write_file, name="write_file"), Tool(_read_file, name="read_file")
"""The tools as the policy sees them; each sandbox binds its own."""
