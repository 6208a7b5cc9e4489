"""The library's side of a run: start the launcher, feed the program, read what it writes, and hold its pipe open."""

from __future__ import annotations

import functools
import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import forge
from forge import _amx
from forge.errors import LaunchError, OptionError
from forge.runtime.sandbox.launcher import remove
from forge.runtime.sandbox.records import Isolation, KilledFor, Limits, Outcome, SandboxLimits

SETUP_S: Final = 60.0
"""How long a launcher may take to start a program, and to end everything: generous, for machines that are busy."""

_HOME: Final = "SANDBOX_LIBRARY"
_FIND: Final = f"import os, sys; sys.path.append(os.environ.pop({_HOME!r})); "
_START: Final = "from forge.runtime.sandbox.launcher import main; main()"
_ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class LaunchedSandbox:
    """A `Sandbox` whose programs are started by a launcher process each."""

    def __init__(self, isolation: Isolation, plan: dict[str, Any], *, python: str) -> None:
        self.isolation: Isolation = isolation
        self._plan, self._python = plan, python

    def __repr__(self) -> str:
        return f"Sandbox({self.isolation})"

    def run(self, program: str, *, stdin: str = "", limits: Limits | None = None) -> Outcome:
        """See `Sandbox.run`."""
        chosen = limits or Limits()
        folder = self._folder()
        try:
            run = Run(self.plan(program, folder=folder, limits=chosen), stdin.encode("utf-8", "replace"), limits=chosen)
            return run.to_its_end()
        finally:
            if self.isolation == "process":
                remove(folder)  # only where the launcher was killed

    def plan(self, program: str, *, folder: str, limits: Limits) -> dict[str, Any]:
        """Return the plan for the launcher."""
        return {
            **self._plan,
            "isolation": self.isolation,
            "program": program.encode("utf-8", "replace").decode(),
            "folder": folder,
            "folder_bytes": limits.folder_bytes,
            "command": [self._python, "-s", "-B", os.path.join(folder, "main.py")],
            "environment": {**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            "limits": _as_plain_numbers(limits),
        }

    def box_plan(
        self,
        *,
        shell: str | None,
        limits: SandboxLimits,
        readable: Sequence[str] = (),
        environ: Mapping[str, str] = MappingProxyType({}),
        port: int | None = None,
    ) -> dict[str, Any]:
        """Return the plan for the launcher of a long-lived sandbox. See `forge.runtime.sandbox.box.Box`."""
        if port is not None and self.isolation == "process":
            raise OptionError(
                "a sandbox without a boundary cannot have a network of its own",
                path="sandbox(isolation=)",
                value=self.isolation,
                rule="bubblewrap or namespaces, for a sandbox whose programs reach an endpoint",
                repair="see `forge doctor`; without a boundary, start the program yourself with endpoint.environ",
            )
        paths = [os.path.abspath(path) for path in readable]
        check_readable(paths)
        folder = self._folder()
        work = "/sandbox" if self.isolation != "process" else os.path.join(folder, "sandbox")
        path = f"{os.path.dirname(self._python)}:{_ENVIRONMENT['PATH']}"
        plan = self.plan("", folder=folder, limits=limits)
        if paths:
            plan["readable"] = _without_nested([*plan["readable"], *paths])
            plan["files"] = None if plan["files"] is None else [*plan["files"], *paths]
        return {
            **plan,
            "work": work,
            "environment": {**_ENVIRONMENT, "PATH": path, "HOME": work, "TMPDIR": folder, **environ},
            "box": {
                "shell": shell,
                "kernel": _kernel(),
                "output_bytes": limits.output_bytes,
                "most_bytes": limits.folder_bytes,
                "port": port,
            },
        }

    def _folder(self) -> str:
        """Return the folder of a run: /tmp of its own, or one that the launcher makes and removes."""
        if self.isolation != "process":
            return "/tmp"
        return os.path.join(tempfile.gettempdir(), f"forge-sandbox-{secrets.token_hex(8)}")


def check_readable(paths: Sequence[str]) -> None:
    """Refuse paths that a sandbox cannot show to its programs."""
    for path in paths:
        own = any(path == each or path.startswith(f"{each}/") for each in ("/proc", "/dev", "/sys", "/sandbox"))
        if own or path in ("/", "/tmp") or not os.path.exists(path):
            raise OptionError(
                "a sandbox cannot show this path to its programs",
                path="sandbox(readable=)",
                value=path,
                rule="a file or folder that exists, other than /, /tmp and what lies in /proc, /dev, /sys and /sandbox",
                repair="name the folder of the program, such as its virtual environment",
            )


def _without_nested(paths: Sequence[str]) -> list[str]:
    """Return paths without those that lie below another one, which shows them already."""
    links = {path for path in paths if os.path.islink(path)}
    found: list[str] = []
    for path in dict.fromkeys(paths):
        above = [each for each in paths if each not in links and each != path and path.startswith(f"{each}/")]
        if not above:
            found.append(path)
    return found


@functools.cache
def _kernel() -> str:
    return Path(__file__).with_name("kernel.py").read_text(encoding="utf-8")


def _as_plain_numbers(limits: Limits) -> dict[str, int]:
    numbers = asdict(limits)
    return {
        "cpu_s": math.ceil(numbers["cpu_s"]),
        "memory": numbers["memory_bytes"],
        "file_size": numbers["file_bytes"],
        "open_files": numbers["open_files"],
        "processes": numbers["processes"],
    }


def bare_interpreter(source: str, *descriptors: int) -> dict[str, Any]:
    """Return the command and the environment of an interpreter that finds the library, and inherits descriptors.

    A sandbox can see the command of its first process, so that names nothing but what is visible there anyway.
    """
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return {
        "args": [python, "-I", "-S", "-B", "-c", _FIND + source, *map(str, descriptors)],
        "env": {_HOME: str(Path(forge.__file__).parents[1]), _amx.VARIABLE: os.environ.get(_amx.VARIABLE, "")},
        "cwd": "/",
        "pass_fds": descriptors,
        "start_new_session": True,
    }


class Run:
    """One program, from start to end."""

    def __init__(self, plan: dict[str, Any], stdin: bytes, *, limits: Limits) -> None:
        self._limits, self._input = limits, memoryview(stdin)
        self._texts = {"stdout": bytearray(), "stderr": bytearray(), "events": bytearray()}
        self._killed_for: KilledFor | None = None
        self._started_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._open: set[str] = set()
        self._start(plan)

    def _start(self, plan: dict[str, Any]) -> None:
        written = os.memfd_create("plan")
        os.write(written, json.dumps(plan).encode())
        os.lseek(written, 0, os.SEEK_SET)
        alive, self._alive = os.pipe()
        events, events_in = os.pipe()
        pipe = subprocess.PIPE
        try:
            self._launcher = subprocess.Popen(
                stdin=pipe, stdout=pipe, stderr=pipe, **bare_interpreter(_START, written, events_in, alive)
            )
        except OSError as error:
            os.close(self._alive)
            os.close(events)
            raise LaunchError(f"a sandbox's launcher could not be started: {error}", path=sys.executable) from error
        finally:
            for descriptor in (written, alive, events_in):
                os.close(descriptor)
        assert self._launcher.stdin is not None
        self._events = open(events, "rb", buffering=0)  # noqa: SIM115 - closed with the run
        for name, source in (("stdout", self._launcher.stdout), ("stderr", self._launcher.stderr)):
            self._watch(source, name)
        self._watch(self._events, "events")
        os.set_blocking(self._launcher.stdin.fileno(), False)
        self._selector.register(self._launcher.stdin, selectors.EVENT_WRITE, "stdin")

    def _watch(self, source: Any, name: str) -> None:
        os.set_blocking(source.fileno(), False)
        self._selector.register(source, selectors.EVENT_READ, name)
        self._open.add(name)

    def to_its_end(self) -> Outcome:
        """Read and write until the launcher has gone, whatever happens here meanwhile."""
        try:
            self._talk()
        finally:
            self._let_go()
            self._finish()
        return self._outcome(time.monotonic())

    def _talk(self) -> None:
        begun = time.monotonic()
        while self._open:
            until = begun + SETUP_S if self._started_at is None else self._started_at + self._limits.wall_s
            if self._killed_for is not None:
                until = self._killed_at + SETUP_S
            for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
                self._feed() if key.data == "stdin" else self._read(key)
            if time.monotonic() < until or not self._open:
                continue
            if self._started_at is None or self._killed_for is not None:
                return  # the launcher hangs; `_finish` kills it
            self._kill("time")

    def _feed(self) -> None:
        pipe = self._launcher.stdin
        assert pipe is not None
        try:
            sent = os.write(pipe.fileno(), self._input[:65536]) if self._input else 0
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program reads no further
            sent = len(self._input)
        self._input = self._input[sent:]
        if not self._input:
            self._selector.unregister(pipe)
            pipe.close()

    def _read(self, key: selectors.SelectorKey) -> None:
        name: str = key.data
        data = os.read(key.fd, 65536)
        if not data:
            self._selector.unregister(key.fileobj)
            self._open.discard(name)
            return
        text = self._texts[name]
        text += data
        if name == "events":
            if self._started_at is None and b'"started"' in text:
                self._started_at = time.monotonic()
        elif len(text) > self._limits.output_bytes:
            del text[self._limits.output_bytes :]
            self._kill("output")

    def _kill(self, reason: KilledFor) -> None:
        if self._killed_for is None:
            self._killed_for, self._killed_at = reason, time.monotonic()
            self._let_go()

    def _let_go(self) -> None:
        """Close the pipe: the launcher then kills everything."""
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1

    def _finish(self) -> None:
        try:
            self._launcher.wait(SETUP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()
        self._selector.close()
        for pipe in (self._launcher.stdin, self._launcher.stdout, self._launcher.stderr, self._events):
            if pipe is not None:
                pipe.close()

    def _outcome(self, now: float) -> Outcome:
        events = [json.loads(line) for line in self._texts["events"].splitlines()]
        stdout, stderr = (self._texts[name].decode("utf-8", "replace") for name in ("stdout", "stderr"))
        last: dict[str, Any] = events[-1] if events else {"event": "none"}
        if last["event"] != "ended" or self._started_at is None:
            raise LaunchError(
                f"the sandbox could not run the program: {last.get('reason') or stderr.strip() or 'no word came'}",
                path="sandbox",
                repair="see `forge doctor` for the isolation that this machine has",
            )
        code = os.waitstatus_to_exitcode(last["status"])
        over = code == -signal.SIGXCPU or (code == -signal.SIGKILL and last["cpu_s"] >= self._limits.cpu_s)
        if self._killed_for is None and over:
            self._killed_for = "cpu"
        return Outcome(stdout, stderr, code, self._killed_for == "time", self._killed_for, now - self._started_at)
