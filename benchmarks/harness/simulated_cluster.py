"""Hosts and replicas without processes, behind a network and a controller whose costs are given.

Placement, health, routing and calls are the library's own code. What is simulated is below it: messages take time, and
each takes CPU time of the one controller, which works on one message at a time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forge import ForgeActor, endpoint
from forge.errors import ActorFailure
from forge.runtime.endpoints import specs_of
from forge.runtime.group import GroupSpec
from forge.runtime.hosts import AgentWatch, Host, HostFacts, HostTimings
from forge.runtime.membership import Membership
from forge.runtime.pending_calls import PendingCalls
from forge.runtime.replies import OK, reply_channel
from forge.runtime.serialization import encode
from forge.service.calls import CallPath
from forge.service.options import ServiceOptions
from forge.service.routing import least_loaded
from forge.service.routing_table import RoutingTable
from forge.service.supervisor import Supervisor

START_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured with real processes, in seconds.

    Attributes:
        latency_s: from a process to another one, one way.
        call_cpu_s: CPU time of the controller for one call, without the search for a replica.
        table_cpu_s: CPU time of that search.
        heartbeat_cpu_s: CPU time of the controller for one heartbeat.
    """

    latency_s: float
    call_cpu_s: float
    table_cpu_s: float
    heartbeat_cpu_s: float


class Network:
    """Delivers messages on the loop's clock, and charges the controller for them."""

    def __init__(self, costs: Costs, service_s: float) -> None:
        self.costs, self.service_s = costs, service_s
        self._loop = asyncio.get_running_loop()
        self.busy_s = 0.0
        self.num_calls = self.num_heartbeats = 0

    def charge(self, cpu_s: float) -> None:
        """Let the controller work: time passes, and all that its loop has to do comes later, its timers too."""
        self._loop.spend(cpu_s)  # type: ignore[attr-defined]
        self.busy_s += cpu_s

    def exchange(self, cpu_s: float, work_s: float, deliver: Callable[[], None]) -> None:
        """Send a message, let the other side work, and deliver its answer."""
        self.charge(cpu_s / 2)
        self._loop.call_later(self.costs.latency_s + work_s + self.costs.latency_s, self._receive, cpu_s / 2, deliver)

    def _receive(self, cpu_s: float, deliver: Callable[[], None]) -> None:
        self.charge(cpu_s)
        deliver()


class _Verb:
    def __init__(self, send: Callable[..., None]) -> None:
        self.broadcast = send


class SimulatedReplica:
    """What callers and the supervisor use of an actor."""

    def __init__(self, network: Network, host: Host) -> None:
        self.network, self.host, self.num_served = network, host, 0
        self._forge_connect, self._forge_cancel = _Verb(lambda *args: None), _Verb(lambda *args: None)
        self._forge_invoke, self._forge_ping = _Verb(self._invoke), _Verb(self._ping)

    def _invoke(self, caller: int, call_id: int, name: str, payload: bytes) -> None:
        network = self.network
        network.num_calls += 1
        cpu_s = network.costs.call_cpu_s + network.costs.table_cpu_s
        network.exchange(cpu_s, network.service_s, lambda: self._answer(call_id))

    def _ping(self, caller: int, call_id: int) -> None:
        self.network.num_heartbeats += 1
        self.network.exchange(self.network.costs.heartbeat_cpu_s, 0.0, lambda: self._answer(call_id))

    def _answer(self, call_id: int) -> None:
        awaiting = reply_channel()._calls.get(call_id)
        if awaiting is not None and not self.host.is_cut_off:  # type: ignore[attr-defined]
            self.num_served += 1
            awaiting.take(0, OK, encode(self.num_served))


class SimulatedGroup:
    """A group of one rank. It dies with its host."""

    _pids = itertools.count(1)

    def __init__(self, network: Network, host: Host) -> None:
        self.hosts, self.calls, self.released = (host,), PendingCalls(), asyncio.Event()
        self.actor = SimulatedReplica(network, host)
        pid = next(self._pids)
        self.pids = ((host, pid),)
        self._on_death: list[Callable[[str], None]] = []
        host.num_groups += 1
        host.watch._exits[pid] = [lambda: self.fail(f"host {host.name} was lost")]  # type: ignore[attr-defined]

    @property
    def is_alive(self) -> bool:
        return self.calls.failure is None

    def on_death(self, callback: Callable[[str], None]) -> None:
        self._on_death.append(callback)

    def fail(self, reason: str) -> None:
        if self.is_alive:
            self.calls.fail(ActorFailure(reason))
            self.released.set()
            for callback in self._on_death:
                callback(reason)


class SimulatedWatch(AgentWatch):
    """The heartbeat of a host, whose agent answers through the simulated network."""

    def __init__(self, host: Host, network: Network, timings: HostTimings) -> None:
        self._host, self._timings, self._network = host, timings, network
        self._exits: dict[int, list[Callable[[], None]]] = {}
        self._lost, self._heard, self._is_closed = asyncio.Event(), asyncio.Event(), False
        self._reports: Any = asyncio.Queue()
        self._reports.recv = self._reports.get
        self._agent = type("Agent", (), {"ping": _Verb(self._ping)})()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]

    def _ping(self) -> None:
        self._network.num_heartbeats += 1
        self._network.exchange(self._network.costs.heartbeat_cpu_s, 0.0, self._answer)

    def _answer(self) -> None:
        if not self._host.is_cut_off:  # type: ignore[attr-defined]
            self._reports.put_nowait(None)


class Worker(ForgeActor):
    """The actor of the simulated service."""

    @endpoint(retry=True)
    async def generate(self) -> int:
        return 0


class SimulatedSupervisor(Supervisor):
    """Starts groups that have no processes."""

    def __init__(self, options: ServiceOptions, table: RoutingTable, network: Network, hosts: Membership) -> None:
        super().__init__(GroupSpec(Worker, (), {}, label=table.name), options, table)
        self._network, self._hosts = network, hosts

    async def start_group(self, spec: GroupSpec) -> Any:
        group = SimulatedGroup(self._network, self._hosts.pick(1, spec=spec)[0])
        await asyncio.sleep(START_S)
        return group


class Cluster:
    """A service on simulated hosts."""

    def __init__(self, costs: Costs, *, num_hosts: int, num_replicas: int, limit: int, service_s: float) -> None:
        self.network = Network(costs, service_s)
        timings, names = HostTimings(), [f"host{number}" for number in range(num_hosts)]
        self.hosts = [Host(name, None, address="", facts=HostFacts(name, 16, (), 0)) for name in names]
        for host in self.hosts:
            host.is_cut_off = False  # type: ignore[attr-defined]
            host.watch = SimulatedWatch(host, self.network, timings)
        options = ServiceOptions(num_replicas=num_replicas, max_concurrency=limit, max_queue=None)
        self.table = RoutingTable("worker", router=least_loaded, limit=limit, max_queue=None)
        self.path = CallPath(self.table, max_retries=options.max_retries, timeout_s=None)
        self.supervisor = SimulatedSupervisor(options, self.table, self.network, Membership(self.hosts))
        self.spec = specs_of(Worker)["generate"]

    async def start(self) -> None:
        """Start every replica, and watch them as a service does."""
        await asyncio.gather(*(self.supervisor._start(replica) for replica in self.supervisor.replicas))
        for replica in self.supervisor.replicas:
            self.supervisor.watch(replica)
