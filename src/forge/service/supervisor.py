"""The supervisor: starts a service's replicas, detects when one is dead or hung, and restarts it.

It lives in the process that started the service, on the control loop. One task supervises each replica: wait for the
group's death, publish the loss, start a new generation with back-off, publish it, and so on until it is given up or the
service stops. Changes are published as `Entry` records to this process's routing table and to every other process that
holds a handle: such a process subscribes once, through its owner's `SubscriptionServer`, and then gets every change and
a regular tick.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

from forge.errors import ServiceStopped
from forge.observe.clock import monotonic_s
from forge.observe.fault_records import record_fault
from forge.runtime.backend import Channel
from forge.runtime.group import GroupSpec, RankGroup
from forge.runtime.hosts import Host
from forge.runtime.lifetime import runtime
from forge.runtime.replies import read_answers, reply_channel
from forge.service.options import ServiceOptions
from forge.service.records import Health
from forge.service.resizing import Drained, Resizer
from forge.service.routing_table import RoutingTable
from forge.service.targets import Entry

_log = logging.getLogger("forge.service")

RENEW_AFTER = 20
"""A subscriber asks again after so many ticks."""

MAX_HEARTBEATS_PER_S: Final = 1000
"""How many heartbeats a service asks for at most. Each takes CPU time of the controller, whatever the replicas do."""


def heartbeat_pause_s(heartbeat_s: float, num_replicas: int) -> float:
    """Return how long a replica is left alone between two heartbeats: longer where many replicas share the rate."""
    return max(heartbeat_s, num_replicas / MAX_HEARTBEATS_PER_S)


class Notice(enum.Enum):
    """What a subscriber learns besides changes of replicas."""

    TICK = "the owner is alive, and nothing has changed"
    GONE = "the owner does not have this service, or no longer"
    SILENCE = "the owner was not heard for too long; it may come back"


Message = Entry | tuple[Entry, ...] | Notice
"""A change of one replica; the whole table, which comes first; or a notice."""


class Replica:
    """The supervisor's record of one replica over all its generations."""

    def __init__(self, index: int, *, generation: int = -1, has_joined: bool = False) -> None:
        self.index = index
        self.generation = generation
        self.has_joined = has_joined
        """Whether it was added to a service that was running."""
        self.is_leaving = False
        self.keeps_sessions = False
        self.supervision: asyncio.Task[None] | None = None
        self.num_starts = 0
        self.health: Health = "starting"
        self.failure: str | None = None
        self.group: RankGroup | None = None
        self.died: asyncio.Future[str] | None = None
        self.up_since = 0.0
        self.num_ok_before = 0
        self.num_served = 0
        self.tasks: set[asyncio.Task[None]] = set()

    def entry(self) -> Entry:
        group, is_callable = self.group, self.health in ("healthy", "draining")
        return Entry(
            index=self.index,
            generation=self.generation,
            health=self.health,
            actor=group.actor if group is not None and is_callable else None,
            host=", ".join(host.name for host in group.hosts) if group is not None else "",
            num_ranks=len(group.pids) if group is not None else 0,
            restarts=max(self.num_starts - 1, 0),
            pids=tuple(pid for _, pid in group.pids) if group is not None and is_callable else (),
            failure=self.failure,
            keeps_sessions=self.keeps_sessions,
        )


class Supervisor:
    """Starts and restarts the replicas of one service. Everything here runs on the control loop."""

    def __init__(self, spec: GroupSpec, options: ServiceOptions, table: RoutingTable) -> None:
        self.spec, self.options, self.table = spec, options, table
        self.replicas = [Replica(index) for index in range(options.num_replicas)]
        self.resizer = Resizer(self)
        self._subscribers: dict[int, tuple[Any, float]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start every replica; if one cannot start, raise its error. The caller stops what did start."""
        await runtime().open()
        starts = [asyncio.create_task(self._start(replica)) for replica in self.replicas]
        self._tasks = starts
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for task in starts:
                task.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        if self._stopping is not None:
            raise ServiceStopped(f"service {self.table.name} was shut down while it started", path=self.table.name)
        for replica in self.replicas:
            self.watch(replica)
        self._tasks = [asyncio.create_task(self._tick())]
        self._tasks[0].add_done_callback(self._report_failure)
        runtime().membership.on_join(self._revive)

    def watch(self, replica: Replica) -> None:
        """Restart a replica whenever it is lost, from now on."""
        replica.supervision = asyncio.create_task(self._supervise(replica))
        replica.supervision.add_done_callback(self._report_failure)

    async def join(self, replica: Replica) -> None:
        """Start a replica that was added to the running service. It gets calls as soon as it is set up."""
        await self._start(replica)
        self.watch(replica)

    def _revive(self, host: Host) -> None:
        """Start the replicas again that were dropped: now that a host has joined, there may be room for them."""
        dropped = any(each.health == "given_up" for each in self.replicas)
        if dropped and self.options.max_restarts > 0 and not self.is_stopping:
            _log.info("service %s: dropped replicas are started again, as host %s joined", self.table.name, host.name)
            reviving = self.resizer.resize(len(self.replicas), sessions="move", drain_timeout_s=None)
            task = asyncio.create_task(reviving)
            self._tasks.append(task)
            task.add_done_callback(self._report_failure)

    @property
    def is_stopping(self) -> bool:
        return self._stopping is not None

    @property
    def subscribers(self) -> Collection[int]:
        """Other processes that hold a handle."""
        return self._subscribers.keys()

    def _report_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("the supervisor of service %s failed", self.table.name, exc_info=error)

    async def _start(self, replica: Replica) -> None:
        replica.generation += 1
        spec = replace(
            self.spec,
            label=f"{self.table.name}[{replica.index}]",
            env={
                "FORGE_REPLICA": str(replica.index),
                "FORGE_REPLICA_GENERATION": str(replica.generation),
                "FORGE_REPLICA_JOINED": str(int(replica.has_joined)),
                **self.spec.env,
            },
        )
        group = replica.group = await self.start_group(spec)
        died = replica.died = asyncio.get_running_loop().create_future()
        target = self.table.targets.get(replica.index)
        replica.num_ok_before = target.num_ok if target is not None else 0
        replica.num_served, replica.up_since, replica.health = 0, monotonic_s(), "healthy"
        replica.num_starts += 1
        self.publish(replica)

        def note_death(reason: str) -> None:
            if not died.done():
                replica.health, replica.failure = "removed" if replica.is_leaving else "restarting", reason
                self.publish(replica)
                died.set_result(reason)

        group.on_death(note_death)
        if group.calls.failure is not None:  # it died between its setup and here
            note_death(group.calls.failure.message)
        beat = asyncio.create_task(self._beat(replica, group))
        replica.tasks.add(beat)
        beat.add_done_callback(replica.tasks.discard)

    async def start_group(self, spec: GroupSpec) -> RankGroup:
        """Choose hosts for the processes of one replica, and start them."""
        group = RankGroup(spec, runtime().membership.pick(self.options.hosts or 1, spec=spec))
        await group.start()
        return group

    def publish(self, replica: Replica) -> None:
        """Send the state of a replica to every process that holds a handle."""
        entry = replica.entry()
        self.table.update(entry, replica.group.calls if replica.group is not None else None)
        for port, _ in self._subscribers.values():
            port.send(entry)

    def subscribe(self, subscriber: int, port: Any) -> None:
        """Send the table to another process that holds a handle, and from now on every change.

        A subscriber that does not ask again from time to time is forgotten.
        """
        if subscriber not in self._subscribers:
            port.send(tuple(replica.entry() for replica in self.replicas))
        self._subscribers[subscriber] = (port, monotonic_s())

    async def _tick(self) -> None:
        """Tell subscribers that their owner is alive, so that silence means that it is not."""
        while True:
            await asyncio.sleep(self.options.heartbeat_s)
            limit_s = 3 * RENEW_AFTER * self.options.heartbeat_s
            for subscriber, (port, asked) in list(self._subscribers.items()):
                if monotonic_s() - asked > limit_s:
                    del self._subscribers[subscriber]
                    self.resizer.look_again()
                else:
                    port.send(Notice.TICK)

    async def _beat(self, replica: Replica, group: RankGroup) -> None:
        """Ask for a heartbeat over and over; fail a group that gives none in time."""
        limit, channel = self.options.heartbeat_timeout_s, reply_channel()
        group.actor._forge_connect.broadcast(channel.caller, channel.port)
        while True:
            await asyncio.sleep(heartbeat_pause_s(self.options.heartbeat_s, len(self.replicas)))
            if not group.is_alive:
                return
            call_id, reply = channel.open(len(group.pids))
            try:
                group.actor._forge_ping.broadcast(channel.caller, call_id)
                for _ in range(2):  # in halves: after a stall of this very loop the answer still gets its chance
                    await asyncio.wait({reply}, timeout=limit / 2)
                if not reply.done():
                    group.fail(f"no heartbeat for {limit} s (its event loop is blocked, or the process is stopped)")
                    return
                replica.num_served = max(replica.num_served, *read_answers(reply.result()))
            finally:
                channel.close(call_id)

    async def _supervise(self, replica: Replica) -> None:
        tries = 0
        while True:
            assert replica.died is not None
            await asyncio.shield(replica.died)  # who ends the supervision may still wait for the death
            if self._has_served(replica):
                tries = 0
            group = replica.group
            while True:
                if tries >= self.options.max_restarts:
                    self._give_up(replica, tries)
                    return
                _log.warning(
                    "service %s: replica %d was lost (%s); restart %d of at most %d in a row",
                    self.table.name,
                    replica.index,
                    replica.failure,
                    tries + 1,
                    self.options.max_restarts,
                )
                label = f"{self.table.name}[{replica.index}]"
                record_fault("replica", f"was lost and is started again: {replica.failure}", where=label)
                await self._back_off(tries)
                tries += 1
                if group is not None:
                    await group.released.wait()
                try:
                    await self._start(replica)
                except Exception as error:  # noqa: BLE001 - counted as a try
                    replica.failure = f"{type(error).__name__}: {error}"
                    continue
                _log.info("service %s: replica %d is back", self.table.name, replica.index)
                break

    async def _back_off(self, tries: int) -> None:
        if tries > 0:
            await self.sleep(min(self.options.restart_backoff_s * 2 ** (tries - 1), self.options.max_backoff_s))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _has_served(self, replica: Replica) -> bool:
        target = self.table.targets.get(replica.index)
        num_ok = (target.num_ok if target is not None else 0) - replica.num_ok_before
        was_up_s = monotonic_s() - replica.up_since
        return replica.num_served > 0 or num_ok > 0 or was_up_s >= self.options.stable_s

    def _give_up(self, replica: Replica, tries: int) -> None:
        replica.health = "given_up"
        if self.options.max_restarts == 0:  # what started it may know how to replace it
            _log.warning("service %s: replica %d was lost: %s", self.table.name, replica.index, replica.failure)
        else:
            _log.error(
                "service %s: replica %d is dropped after %d failed restarts in a row; last failure: %s",
                self.table.name,
                replica.index,
                tries,
                replica.failure,
            )
            label = f"{self.table.name}[{replica.index}]"
            record_fault("replica", f"is dropped after {tries} failed restarts: {replica.failure}", where=label)
        self.publish(replica)

    async def stop(self) -> None:
        """Stop every replica, once; calls that wait raise `ServiceStopped`."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if runtime().is_open:
            runtime().membership.forget_listener(self._revive)
        await self.resizer.stop()
        tasks = [*self._tasks, *(task for replica in self.replicas for task in replica.tasks)]
        tasks += [replica.supervision for replica in self.replicas if replica.supervision is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self.replicas:
            replica.health = "stopped"
            self.publish(replica)
        groups = [replica.group for replica in self.replicas if replica.group is not None]
        outcomes = await asyncio.gather(*(group.stop() for group in groups), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                _log.error("service %s: a replica did not stop cleanly", self.table.name, exc_info=outcome)


class SubscriptionServer:
    """Where other processes subscribe to the services that this one owns: one port for each process.

    Lives on the control loop. A service that has ended is answered too, so that no subscriber waits for it.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.port, self._requests = Channel.open()
        self.services: dict[str, Supervisor] = {}
        """By the services' unique ids."""
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            uid, subscriber, port = await self._requests.recv()
            supervisor = self.services.get(uid)
            if isinstance(port, Drained):
                if supervisor is not None:
                    supervisor.resizer.note_drained(subscriber, port)
                continue
            port.return_undeliverable = False
            if supervisor is None:
                port.send(Notice.GONE)
            else:
                supervisor.subscribe(subscriber, port)


_subscriptions: SubscriptionServer | None = None


def subscriptions() -> SubscriptionServer:
    """Return this process's subscription server. Called on the control loop."""
    global _subscriptions
    if _subscriptions is None or _subscriptions.pid != os.getpid():
        _subscriptions = SubscriptionServer()
    return _subscriptions
