"""Hosts: where processes can be started, and how their deaths become known.

A `Host` is a machine (or one worker process that stands for it). Deaths are pushed, not polled: on the controller's own
machine a pidfd is watched in the control loop; on another one a small `HostAgent` process does that and sends word. The
agent also answers a heartbeat, so that the loss of a whole host is seen in seconds, and ends everything it watches when
the controller has been silent for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from forge.errors import LaunchError
from forge.observe.logs.log_file import read_end
from forge.runtime.backend import Actor, Channel, Port, monarch_actor, this_host
from forge.runtime.forking import ForkPoint
from forge.runtime.placement import GpuPool, ThreadLedger, count_cpus, count_gpus, visible_gpus
from forge.runtime.process_watch import LocalWatch, ProcessWatch, end_marked, find_ranks, free_port
from forge.runtime.start_turns import StartTurns

if TYPE_CHECKING:
    from forge.config import LauncherConfig

_log = logging.getLogger("forge.runtime")

HANDOVER_S = 5.0
"""How long a controller waits for a worker whose last run has just ended."""
_ANSWER_S: Final = 5.0
_PRELOAD_S: Final = 120.0
"""How long a host may take to import what its ranks need."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host says about itself."""

    hostname: str
    num_cpus: int
    gpus: tuple[str, ...]
    pid: int
    """The process that answers for the host; its ranks end with it."""


def local_facts() -> HostFacts:
    return HostFacts(socket.gethostname(), count_cpus(), visible_gpus(os.environ, count_gpus()), os.getpid())


async def is_released(name: str, wait_s: float = HANDOVER_S) -> bool:
    """Return whether the process that has claimed a host ends within a moment, as after a run that has just ended."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.setblocking(False)
        try:
            async with asyncio.timeout(wait_s):
                await loop.sock_connect(waiting, name)
                await loop.sock_recv(waiting, 1)  # nothing is ever sent: it ends with the other process
        except TimeoutError:
            return False
        except OSError:
            return True
    return True


@dataclass(frozen=True, slots=True)
class HostTimings:
    """How soon the loss of a host, or of the controller, is believed: the keys of `launcher` with these names."""

    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 5.0
    lease_s: float = 8.0
    attach_timeout_s: float = 60.0

    @classmethod
    def of(cls, config: LauncherConfig) -> Self:
        """Return the timings that a configuration asks for."""
        return cls(config.heartbeat_s, config.heartbeat_timeout_s, config.lease_s, config.attach_timeout_s)

    @property
    def answer_s(self) -> float:
        """How long an answer of a host may take that is not one to a heartbeat."""
        return max(_ANSWER_S, self.heartbeat_timeout_s)


class HostAgent(Actor):  # type: ignore[misc]
    """Runs in a process of its own on a remote host: facts, deaths, kills, and a lease on the controller's life."""

    def __init__(self, lease_s: float) -> None:
        self._watch = LocalWatch()
        self._pids: set[int] = set()
        self._lease_s = lease_s
        self._last_heard = time.monotonic()
        self._guard: asyncio.Task[None] | None = None
        self._port: Any = None
        self._claim = socket.socket(socket.AF_UNIX)

    @monarch_actor.endpoint
    async def describe(self) -> HostFacts | None:
        """Return what this host has; None if another controller uses it."""
        name = f"\0forge-host-{os.getppid()}"
        held_s = max(HANDOVER_S, self._lease_s)
        if not (self._claims(name) or (await is_released(name, held_s) and self._claims(name))):
            return None
        self._last_heard = time.monotonic()  # the wait may have taken the whole lease
        self._guard = asyncio.create_task(self._end_when_abandoned())
        return local_facts()

    def _claims(self, name: str) -> bool:
        """Take the host, for as long as this process lives."""
        try:
            self._claim.bind(name)
        except OSError:
            return False
        self._claim.listen()
        return True

    async def _end_when_abandoned(self) -> None:
        while (left := self._last_heard + self._lease_s - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left)
        # The worker process is the parent of every rank here, and each rank ends with its parent.
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(1)

    @monarch_actor.endpoint
    async def connect(self, port: Port) -> None:
        """Note where reports of deaths, and the answers to heartbeats, go."""
        port.return_undeliverable = False
        self._port = port

    @monarch_actor.endpoint(explicit_response_port=True)
    async def ping(self, port: Port) -> None:
        self._last_heard = time.monotonic()
        self._port.send(None)

    @monarch_actor.endpoint
    async def watch(self, pid: int) -> None:
        self._pids.add(pid)

        def ended() -> None:
            self._pids.discard(pid)
            self._port.send(pid)

        await self._watch.watch(pid, ended)

    @monarch_actor.endpoint
    async def kill(self, pids: Sequence[int]) -> None:
        await self._watch.kill(pids)

    @monarch_actor.endpoint
    async def find(self, group: str) -> dict[int, int]:
        return find_ranks(group)

    @monarch_actor.endpoint
    async def end(self, group: str) -> None:
        end_marked(group)

    @monarch_actor.endpoint
    async def free_port(self) -> int:
        return free_port()

    @monarch_actor.endpoint
    async def read_end(self, path: str, num_lines: int) -> list[str]:
        return read_end(path, num_lines=num_lines)

    @monarch_actor.concurrent_endpoint  # imports take long: heartbeats are answered meanwhile
    async def fork_point(self, variables: dict[str, str], preload: tuple[str, ...]) -> ForkPoint | None:
        return await self._watch.fork_point(variables, preload)

    def _handle_undeliverable_message(self, message: object) -> bool:
        return True


class AgentWatch:
    """Watches processes of another host through its `HostAgent`."""

    def __init__(self, host: Host, agent: Any, procs: Any, timings: HostTimings) -> None:
        self._host, self._agent, self._procs, self._timings = host, agent, procs, timings
        self._exits: dict[int, list[Callable[[], None]]] = {}
        self._lost = asyncio.Event()
        self._is_closed = False
        self._port, self._reports = Channel.open()
        self._heard = asyncio.Event()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]

    async def connect(self) -> None:
        """Tell the agent where to report, before anything else."""
        await self._ask(self._agent.connect.call_one(self._port))

    async def _ask(self, reply: Any, *, timeout_s: float | None = None) -> Any:
        """Return the agent's answer; a host that is lost, or does not answer in time, is a `LaunchError`."""
        answer, limit_s = reply.as_asyncio(), timeout_s or self._timings.answer_s
        lost = asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait({answer, lost}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and answer.exception() is None:
                return answer.result()
        finally:
            lost.cancel()
            answer.cancel()
        raise LaunchError(
            f"host {self._host.name} {'was lost' if self._lost.is_set() else 'does not answer'}", path=self._host.name
        )

    async def _receive(self) -> None:
        while True:
            pid = await self._reports.recv()
            self._heard.set()
            if pid is not None:
                self._ended(pid)

    def _ended(self, pid: int) -> None:
        for on_exit in self._exits.pop(pid, []):
            on_exit()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._timings.heartbeat_s)
            self._heard.clear()
            self._agent.ping.broadcast()
            for _ in range(2):  # in halves: after a stall of this very loop the answer still gets its chance
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._heard.wait(), self._timings.heartbeat_timeout_s / 2)
            if not self._heard.is_set():
                break
        _log.warning("host %s does not answer its heartbeat and is treated as lost", self._host.name)
        self._lost.set()
        self._host.is_lost = True
        for pid in list(self._exits):
            self._ended(pid)

    async def watch(self, pid: int, on_exit: Callable[[], None]) -> None:
        self._exits.setdefault(pid, []).append(on_exit)
        await self._ask(self._agent.watch.call_one(pid))

    async def kill(self, pids: Sequence[int]) -> None:
        await self._ask(self._agent.kill.call_one(list(pids)))

    async def find(self, group: str) -> dict[int, int]:
        found: dict[int, int] = await self._ask(self._agent.find.call_one(group))
        return found

    async def end(self, group: str) -> None:
        await self._ask(self._agent.end.call_one(group))

    async def free_port(self) -> int:
        return int(await self._ask(self._agent.free_port.call_one()))

    async def read_end(self, path: str, num_lines: int) -> list[str]:
        return list(await self._ask(self._agent.read_end.call_one(path, num_lines)))

    async def fork_point(self, variables: Mapping[str, str], preload: Sequence[str]) -> ForkPoint | None:
        asked = self._agent.fork_point.call_one(dict(variables), tuple(preload))
        point: ForkPoint | None = await self._ask(asked, timeout_s=_PRELOAD_S)
        return point

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._lost.is_set():
            await asyncio.wait_for(self._procs.stop(), self._timings.answer_s)


class Host:
    """A machine on which processes can be started, with its GPUs and threads."""

    def __init__(self, name: str, mesh: Any, *, address: str, facts: HostFacts) -> None:
        self.name, self.mesh, self.address, self.facts = name, mesh, address, facts
        self.gpus = GpuPool(name, facts.gpus)
        self.threads = ThreadLedger(name, facts.num_cpus)
        self.start_turns = StartTurns(max(4, 2 * facts.num_cpus))
        self.is_lost = False
        self.is_leaving = False
        self.num_groups = 0
        self.watch: ProcessWatch = LocalWatch()

    def __repr__(self) -> str:
        return f"Host({self.name!r}, {self.state})"

    @property
    def state(self) -> Literal["ready", "leaving", "lost"]:
        return "lost" if self.is_lost else "leaving" if self.is_leaving else "ready"

    @property
    def is_usable(self) -> bool:
        """Whether processes may be started on it."""
        return self.state == "ready"

    @property
    def is_local(self) -> bool:
        return isinstance(self.watch, LocalWatch)


def local_host() -> Host:
    """Return the controller's own machine."""
    return Host("local", this_host(), address="127.0.0.1", facts=local_facts())


def joint_mesh(hosts: Sequence[Host]) -> Any:
    """Return one Monarch host mesh over several hosts, for a group of ranks that spans them."""
    if len(hosts) == 1:
        return hosts[0].mesh
    return monarch_actor.attach_to_workers(ca="trust_all_connections", workers=[host.name for host in hosts])
