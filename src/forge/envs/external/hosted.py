"""Environments of other projects that are Python objects: each episode has a process of its own in their Python.

A fork server imports the project once, under the supervision of a `ServerPool`, and forks a process for each episode.
So an environment that crashes, hangs, prints without end or leaks affects its own episode only, and starts in
milliseconds. Whatever goes wrong on that side is a `Fault`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from forge.config.base import ConfigModel
from forge.envs.external.hosts.fork_server import TOKEN_VARIABLE
from forge.envs.external.processes import Server, ServerSpec, pool_of
from forge.envs.limits import Fault
from forge.errors import OptionError

_HOSTS: Final = Path(__file__).with_name("hosts")
_TOKEN: Final = secrets.token_hex(16)
"""Lets this process, and no other user of the machine, talk to its hosts."""
_CONNECT_S: Final = 15.0


class HostOptions(ConfigModel):
    """Arguments of every integration whose environments run in a process for each episode."""

    requirements: tuple[str, ...] = Field(
        default=(), description="What pip installs into a venv of its own, once per machine; without any, ours is used."
    )
    folders: tuple[str, ...] = Field(default=(), description="Where modules of yours are found there.")
    env: Mapping[str, str] = Field(default_factory=dict, description="Environment variables.")
    start_limit_s: float = Field(default=120.0, gt=0, description="Seconds until the project must be imported.")
    step_timeout_s: float = Field(default=60.0, gt=0, description="Seconds that a reset or a step may take.")
    max_message_bytes: int = Field(default=4 << 20, ge=1024, description="A longer reply is a fault.")
    max_chars: int = Field(default=32_768, ge=64, description="Longer observations lose their middle.")


@dataclass(frozen=True, slots=True)
class HostKind:
    """Which project runs in the processes.

    Attributes:
        name: what kinds of faults begin with, and the file in `hosts`: `gymnasium` is `gymnasium_host.py`.
        module: what the project is imported as.
        extra: our extra that installs it beside us; None where it cannot be.
    """

    name: str
    module: str
    extra: str | None = None

    def spec(self, options: HostOptions) -> ServerSpec:
        """Return how the fork server is started."""
        folders = options.folders
        if not options.requirements:
            self._check_installed()
            folders = (*folders, *(place or os.getcwd() for place in sys.path))
        env = {**options.env, "PYTHONHASHSEED": "0", TOKEN_VARIABLE: _TOKEN}
        return ServerSpec(
            command=("{python}", str(_HOSTS / "fork_server.py"), "{port}", str(_HOSTS / f"{self.name}_host.py")),
            requirements=options.requirements,
            health="",
            folders=folders,
            env=tuple(sorted(env.items())),
            start_limit_s=options.start_limit_s,
        )

    def _check_installed(self) -> None:
        if importlib.util.find_spec(self.module) is None:
            own = f'give requirements: ["{self.module}"]'
            raise OptionError(
                f"the package {self.module} is not installed",
                path="episode.args.requirements",
                value=(),
                rule=f"{self.module} is installed here, or requirements name it for a venv of its own",
                repair=own if self.extra is None else f"pip install 'torchforge[{self.extra}]', or {own}",
            )


class HostedProcess:
    """The process of one episode."""

    def __init__(self, kind: HostKind, options: HostOptions) -> None:
        self.kind, self.options = kind, options
        self._stack = contextlib.AsyncExitStack()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._server: Server | None = None

    async def start(self) -> None:
        """Start the process."""
        pool = pool_of(self.kind.spec(self.options))
        self._server = server = await self._stack.enter_async_context(pool.borrow())
        host, _, port = server.url.removeprefix("http://").partition(":")
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(host, int(port), limit=self.options.max_message_bytes)
        except (OSError, TimeoutError) as error:
            pool.doubt(server)
            raise self.fault(f"cannot be reached: {type(error).__name__}: {error}", "unreachable") from error
        self._streams = reader, writer
        writer.write(f"{_TOKEN}\n".encode())

    async def ask(self, method: str, *, limit_s: float | None = None, **args: Any) -> Any:
        """Call a method of the host and return what it returns. All that can go wrong is a `Fault`, except that options
        which the host refuses raise `OptionError`."""
        assert self._streams is not None, "start first"
        reader, writer = self._streams
        limit_s = self.options.step_timeout_s if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s):
                writer.write(json.dumps({"method": method, "args": args}).encode() + b"\n")
                await writer.drain()
                line = await reader.readline()
        except TimeoutError:
            raise self.fault(f"took longer than {limit_s:g} s for {method}", "timeout") from None
        except ConnectionError:
            line = b""
        except ValueError:
            most = self.options.max_message_bytes
            raise self.fault(f"sent more than {most} bytes for {method}", "too_large") from None
        if not line:
            output = "" if self._server is None else self._server.output()[-500:]
            raise self.fault(f"ended during {method}. The end of all output of {self.kind.name}:\n{output}", "lost")
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict) or not ("result" in reply or "error" in reply):
            raise self.violation("expected a result", line)
        if "error" not in reply:
            return reply["result"]
        if reply.get("is_refused"):
            raise OptionError(
                f"{self.kind.name} refuses: {reply['error']}",
                path="episode.args",
                value=args,
                rule="arguments that the environment accepts",
                repair="correct episode.args, or the task",
            )
        raise self.fault(f"failed in {method}: {reply['error']}", "error")

    async def close(self) -> None:
        """End the process. May be called more than once."""
        streams, self._streams = self._streams, None
        try:
            if streams is not None:
                streams[1].close()
                with contextlib.suppress(ConnectionError):
                    await streams[1].wait_closed()
        finally:
            await self._stack.aclose()

    def fault(self, what: str, kind: str) -> Fault:
        """Return a fault of this process."""
        return Fault(f"the environment's process ({self.kind.name}) {what}", kind=f"{self.kind.name}_{kind}")

    def violation(self, problem: str, value: object) -> Fault:
        """Return the fault for a reply that is not as it must be."""
        return self.fault(f"violates its schema: {problem}. It sent {str(value)[:200]}", "schema")

    def text_in(self, reply: Any, key: str) -> str:
        """Return a text of a reply."""
        found = reply.get(key) if isinstance(reply, dict) else None
        if not isinstance(found, str):
            raise self.violation(f"{key}: expected text", reply)
        return found

    def flag_in(self, reply: Any, key: str) -> bool:
        """Return a yes or no of a reply."""
        found = reply.get(key) if isinstance(reply, dict) else None
        if not isinstance(found, bool):
            raise self.violation(f"{key}: expected true or false", reply)
        return found

    def number_in(self, reply: Any, key: str) -> float:
        """Return a finite number of a reply."""
        found = reply.get(key) if isinstance(reply, dict) else None
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise self.violation(f"{key}: expected a finite number", reply)
        return float(found)
