"""Servers of other projects as supervised processes.

A `ServerPool` keeps a number of equal servers running on free ports of this machine. An episode borrows the one with
the fewest users. A server that dies is started again, with growing pauses; one that stops answering is killed first.
All of them end with the process that owns the pool, even where that is killed. A pool belongs to an event loop:
`pool_of` returns the same one for the same specification.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp

from forge.envs.check_leaks import SHARED_TASK
from forge.envs.external.venvs import python_of
from forge.envs.limits import Fault
from forge.errors import LaunchError

_log = logging.getLogger("forge.envs")
T = TypeVar("T")

LOG_BYTES: Final = 1 << 20
"""What is kept of a server's output."""
GRACE_S: Final = 2.0
"""How long a server may take to end after it is terminated; then it is killed."""
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
"""Bounds of the pause before a server that died is started again."""
MAX_FAILED_STARTS: Final = 3
"""Starts in a row without success after which waiting episodes are told."""
PROBE_S: Final = 15.0
"""How often a running server is asked for its health, and how long it may take to answer."""
MAX_FAILED_PROBES: Final = 2
_SHOWN: Final = 2000
_GUARD: Final = Path(__file__).with_name("server_guard.py")
_KEPT_VARIABLES: Final = (
    *("PATH", "HOME", "USER", "LANG", "LANGUAGE", "LC_ALL", "TZ", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HUB_OFFLINE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How a server is started.

    Attributes:
        command: its command line. `{port}` stands for the port, `{python}` for the Python of `requirements`.
        requirements: what pip installs into a venv of its own; without any, `{python}` is ours.
        instances: how many processes.
        health: the path that answers with status 200 when the server is ready; empty if a connection is enough.
        folders: where its Python finds modules, in addition to its venv.
        env: environment variables. Of ours, it gets only harmless ones such as PATH and HOME: no credentials.
        cwd: its working directory; None for ours.
        max_users: how many episodes may use one process at a time; None for any number. Where it is 1, a server that
            crashes or hangs takes no other episode with it.
        start_limit_s: how long it may take to become ready.
    """

    command: tuple[str, ...]
    requirements: tuple[str, ...] = ()
    instances: int = 1
    health: str = "/health"
    folders: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    max_users: int | None = None
    start_limit_s: float = 120.0


@dataclass(eq=False, slots=True)
class Server:
    """One server of a pool.

    Attributes:
        number: which of the pool, for messages.
        log: where the end of its output is.
        url: where it answers, such as `http://127.0.0.1:40123`; empty while it does not.
        num_users: episodes that use it.
        num_starts: how often it was started.
        was_ready: whether it has been ready since its last start.
        is_retired: whether another one has taken its place: it ends when its last user has gone.
        doubted: set when a user lost its connection: it must answer before it gets another.
    """

    number: int
    log: Path
    url: str = ""
    num_users: int = 0
    num_starts: int = 0
    was_ready: bool = False
    is_retired: bool = False
    doubted: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def output(self) -> str:
        """Return the end of what it wrote."""
        parts = []
        for path in (Path(f"{self.log}.1"), self.log):
            with contextlib.suppress(FileNotFoundError):  # the guard renames one to the other
                parts.append(path.read_bytes())
        return b"".join(parts)[-_SHOWN:].decode("utf-8", "replace").strip()


class ServerPool:
    """Keeps the servers of a specification running. Use it on one event loop; get it from `pool_of`."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.servers: list[Server] = []
        self._retired: set[Server] = set()
        self._changed = asyncio.Event()
        self._num_failed_starts = 0
        self._was_ready = False
        self._opening: asyncio.Task[None] | None = None
        self._python = sys.executable
        self._num_made = 0

    @contextlib.asynccontextmanager
    async def borrow(self, limit_s: float | None = None) -> AsyncIterator[Server]:
        """Use the server with the fewest users until the block ends. Waits for one where none is ready or free.

        Raises `Fault` of the kind `server` where none becomes ready, or free within `limit_s`, and `LaunchError` where
        none ever was ready.
        """
        server = await self._least_loaded(limit_s)
        server.num_users += 1
        try:
            yield server
        finally:
            server.num_users -= 1
            if server.is_retired and not server.num_users:
                _cancel(server.task)
            self._tell()

    def doubt(self, server: Server) -> None:
        """Give a server no further users until it has answered again: one of them lost its connection."""
        server.url = ""
        server.doubted.set()

    def retire(self, server: Server) -> None:
        """Replace a server that may be stuck. It goes on until its last user has gone."""
        if server.is_retired or server not in self.servers:
            return
        _log.warning("server %d of %s is replaced: a session of it is stuck", server.number, self.spec.command[0])
        server.is_retired = True
        self.servers.remove(server)
        self._retired.add(server)
        self._add()
        if not server.num_users:
            _cancel(server.task)

    async def close(self) -> None:
        """End all servers and wait until they have gone."""
        opening, self._opening = self._opening, None
        every = [*self.servers, *self._retired]
        tasks = [task for task in (opening, *(each.task for each in every)) if task is not None]
        self.servers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tell()

    async def _least_loaded(self, limit_s: float | None) -> Server:
        await self._open()
        loop, most = asyncio.get_running_loop(), self.spec.max_users
        was_any_ready, since = False, loop.time()
        while True:
            ready = [each for each in self.servers if each.url]
            free = [each for each in ready if most is None or each.num_users < most]
            if free:
                return min(free, key=lambda each: each.num_users)
            if not ready and self._num_failed_starts >= MAX_FAILED_STARTS:
                raise self._problem(f"failed to start {self._num_failed_starts} times in a row")
            if bool(ready) is not was_any_ready:  # each wait has a limit of its own
                was_any_ready, since = bool(ready), loop.time()
            bound = limit_s if ready else self.spec.start_limit_s
            try:
                async with asyncio.timeout(None if bound is None else since + bound - loop.time()):
                    await self._changed.wait()
            except TimeoutError:
                raise self._problem(f"was not {'free' if ready else 'ready'} within {bound:g} s") from None

    async def _open(self) -> None:
        """Install what is needed and start the servers, once for all who ask."""
        if self._opening is None:
            self._opening = shared_task(self._start_all(), "open")
        try:
            await asyncio.shield(self._opening)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._opening = None  # the next one tries again
            raise

    async def _start_all(self) -> None:
        if self.spec.requirements:
            self._python = str(await asyncio.to_thread(python_of, self.spec.requirements))
        for _ in range(self.spec.instances):
            self._add()

    def _add(self) -> None:
        server = Server(self._num_made, Path(tempfile.mkdtemp(prefix="forge-server-")) / "output")
        self._num_made += 1
        self.servers.append(server)
        server.task = shared_task(self._keep(server), f"server {server.number}")

    async def _keep(self, server: Server) -> None:
        """Run a server, again whenever it ends, until this is cancelled."""
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                try:
                    await self._run(server)
                except OSError as error:  # no process, no memory, no such folder
                    self._num_failed_starts += 1
                    _log.warning("a server cannot be started: %s", error)
                    self._tell()
                if server.was_ready:
                    pause_s = FIRST_PAUSE_S
                _log.warning("a server ended and is started again in %g s: %s", pause_s, server.output()[-500:])
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._retired.discard(server)
            shutil.rmtree(server.log.parent, ignore_errors=True)

    async def _run(self, server: Server) -> None:
        """Run a server once, to its end."""
        port = _free_port()
        words = [each.replace("{port}", str(port)).replace("{python}", self._python) for each in self.spec.command]
        server.num_starts += 1
        server.was_ready = False
        process = await asyncio.create_subprocess_exec(
            *guard_command(server.log, words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=foreign_environment(self.spec.folders, dict(self.spec.env)),
            cwd=self.spec.cwd,
            start_new_session=True,
        )
        ended = shared_task(process.wait(), "end")
        watched = shared_task(self._watch(server, f"http://127.0.0.1:{port}"), "watch")
        try:
            await asyncio.wait((ended, watched), return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.url = ""
            watched.cancel()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)  # the guard ends the server
            await process.wait()  # not `ended`: the end of a loop cancels all tasks
            await asyncio.gather(ended, watched, return_exceptions=True)
            if not server.was_ready:
                self._num_failed_starts += 1
            self._tell()

    async def _watch(self, server: Server, url: str) -> None:
        """Wait until a server is ready, then probe it. Returns when it must be killed."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_S)) as http:
            await self._watch_over(server, url, http)

    async def _watch_over(self, server: Server, url: str, http: aiohttp.ClientSession) -> None:
        try:
            async with asyncio.timeout(self.spec.start_limit_s):
                pause_s = 0.05
                while not await self._answers(url, http):
                    await asyncio.sleep(pause_s)
                    pause_s = min(1.3 * pause_s, 0.5)
        except TimeoutError:
            return
        server.was_ready = self._was_ready = True
        self._num_failed_starts = num_failed = 0
        while num_failed < MAX_FAILED_PROBES:
            if not num_failed and not server.url:
                server.url = url
                self._tell()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    await server.doubted.wait()
            server.doubted.clear()
            num_failed = 0 if await self._answers(url, http) else num_failed + 1

    async def _answers(self, url: str, http: aiohttp.ClientSession) -> bool:
        try:
            if self.spec.health:
                async with http.get(url + self.spec.health) as response:
                    return response.status == 200
            host, _, port = url.removeprefix("http://").partition(":")
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), PROBE_S)
            writer.close()
            await writer.wait_closed()
        except (OSError, aiohttp.ClientError, TimeoutError):
            return False
        return True

    def _problem(self, what: str) -> Fault | LaunchError:
        output = "\n".join(each.output() for each in self.servers[:1])
        message = f"the server {' '.join(self.spec.command)} {what}. The end of its output:\n{output or '(nothing)'}"
        if self._was_ready:
            return Fault(message, kind="server")
        return LaunchError(
            message,
            path="server",
            value=" ".join(self.spec.command),
            rule=f"a command that serves {self.spec.health or 'connections'} on the port it is given",
            repair="correct the command or its requirements",
        )

    def _tell(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[ServerSpec, ServerPool]] = weakref.WeakKeyDictionary()


def pool_of(spec: ServerSpec) -> ServerPool:
    """Return the pool of a specification on this event loop. Its servers start when one is borrowed."""
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    if spec not in pools:
        pools[spec] = ServerPool(spec)
    return pools[spec]


async def close_servers() -> None:
    """End all servers of this event loop. They end with the loop and with the process, too."""
    pools = _pools.pop(asyncio.get_running_loop(), {})
    await asyncio.gather(*(pool.close() for pool in pools.values()))


def guard_command(log: Path, command: Sequence[str], *, keeps_stdout: bool = False) -> list[str]:
    """Return the command line that runs a foreign program under a guard, which ends it with this process.

    Its output goes to `log`, within bounds; with `keeps_stdout`, only what it writes to stderr.
    """
    guard = (sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), str(log), str(LOG_BYTES), f"{GRACE_S}")
    return [*guard, *(("--keep-stdout",) if keeps_stdout else ()), *command]


def foreign_environment(folders: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a foreign program: harmless ones of ours, and what is given."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    path = {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **path, **env}


_users: Counter[str] = Counter()
"""Episodes of this process on each URL."""


@contextlib.contextmanager
def least_used(urls: Sequence[str]) -> Iterator[str]:
    """Choose the server with the fewest episodes of this process among those that run elsewhere."""
    url = min((each.rstrip("/") for each in urls), key=lambda each: _users[each])
    _users[url] += 1
    try:
        yield url
    finally:
        _users[url] -= 1


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def shared_task(body: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task that belongs to no episode: it has a context of its own, and may outlive the one that started it."""
    return asyncio.get_running_loop().create_task(body, name=SHARED_TASK + name, context=contextvars.Context())


def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
