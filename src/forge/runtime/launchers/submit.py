"""What the launchers that submit a job share: the scheduler's commands, and what is checked before they are used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from forge.errors import LaunchError
from forge.runtime.jobs import is_loopback

COMMAND_S = 60.0
"""How long one command of a scheduler may take."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended. `code` is negative when a signal ended it."""

    code: int
    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        """What the command said about its failure."""
        return self.stderr.strip() or self.stdout.strip() or f"exit code {self.code}"


def require_program(name: str, *, kind: str) -> str:
    """Return the path of a scheduler's command, or an error that says where to find it."""
    found = shutil.which(name)
    if found is None:
        raise LaunchError(
            f"the launcher `{kind}` needs the command `{name}`", path="PATH", value=os.environ.get("PATH", ""),
            rule=f"`{name}` is on PATH",
            repair=f"run the controller where `{name}` works (docs/guides/hosts.md), or choose another launcher.kind",
        )  # fmt: skip
    return found


async def run_command(
    arguments: Sequence[str],
    *,
    stdin: str = "",
    timeout_s: float = COMMAND_S,
    on_line: Callable[[str], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a command to its end; a caller that is cancelled ends it. `on_line` sees each line of its output at once."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *arguments, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env=env
    )
    seen: list[str] = []

    async def read_out() -> None:
        assert process.stdout is not None
        async for raw in process.stdout:
            line = raw.decode(errors="replace")
            seen.append(line)
            if on_line is not None:
                on_line(line.rstrip("\n"))

    async def talk() -> str:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(stdin.encode())
        process.stdin.close()
        _, error = await asyncio.gather(read_out(), process.stderr.read())
        await process.wait()
        return error.decode(errors="replace")

    try:
        errors = await asyncio.wait_for(talk(), timeout_s)
    except TimeoutError:
        return Outcome(-signal.SIGKILL, "".join(seen), _too_late(arguments, timeout_s))
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return Outcome(process.returncode or 0, "".join(seen), errors)


async def run_regardless(arguments: Sequence[str], *, timeout_s: float = COMMAND_S) -> Outcome:
    """Run a command that must not be stopped: neither by a cancelled caller nor by the Ctrl-C that ends this program.

    It is started before this function first waits, in a session of its own, and the interpreter does not exit before
    it has ended.
    """
    process = _start(arguments)

    def finish() -> Outcome:
        try:
            out, error = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Outcome(-signal.SIGKILL, "", _too_late(arguments, timeout_s))
        return Outcome(process.returncode, out, error)

    return await asyncio.to_thread(finish)


def _start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def _too_late(arguments: Sequence[str], timeout_s: float) -> str:
    return f"`{arguments[0]}` did not answer within {timeout_s:g} s"


def is_this_host(name: str) -> bool:
    """Return whether `name` is a name of the machine that this runs on."""
    own = socket.gethostname()
    return is_loopback(name) or name in (own, own.split(".")[0], socket.getfqdn())


def check_bind(bind: str, *, kind: str) -> None:
    """Refuse a controller that workers elsewhere could not answer."""
    if not is_loopback(bind):
        return
    raise LaunchError(
        f"workers on other hosts cannot reach a controller at {bind}", path="launcher.bind", value=bind,
        rule=f"with launcher.kind={kind}, an address of the controller's machine that the workers can reach",
        repair=f"launcher.bind={socket.gethostname()}, or its address on the cluster's private network",
    )  # fmt: skip


async def is_listening(address: str, *, timeout_s: float = 5.0) -> bool:
    """Return whether something accepts connections at a worker's address."""
    parts = urlsplit(address)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, parts.port), timeout_s)
    except OSError:  # a TimeoutError is one
        return False
    writer.close()
    return True
