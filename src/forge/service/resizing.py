"""Change the number of a service's replicas while it runs.

Which indices come and go is decided by pure functions. `Resizer` carries it out on the control loop, one request after
another. A replica that leaves is *drained*: every process that holds a handle lets no new call go to it, and reports to
the owner when its own calls there have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from forge.errors import ResizeError, ServiceStopped
from forge.runtime.option_checks import bad_option, check_count, check_seconds
from forge.service.records import Health

if TYPE_CHECKING:
    from forge.service.supervisor import Replica, Supervisor

_log = logging.getLogger("forge.service")

SessionRule = Literal["move", "wait"]
"""Of a replica that leaves: its sessions choose another one, or it waits for their end."""
_LEAVE_FIRST: Final[tuple[Health, ...]] = ("given_up", "restarting", "starting", "healthy")


def indices_to_add(present: Collection[int], count: int) -> tuple[int, ...]:
    """Return the indices of `count` new replicas: the lowest ones that are free."""
    free = (index for index in range(len(present) + count) if index not in present)
    return tuple(sorted(free)[:count])


def indices_to_remove(present: Mapping[int, Health], count: int) -> tuple[int, ...]:
    """Return which replicas leave: dropped ones, then those that are not healthy, then those with the highest index."""
    order = sorted(present, key=lambda index: (_LEAVE_FIRST.index(present[index]), -index))
    return tuple(order[:count])


def check_resize(num_replicas: object, sessions: object, drain_timeout_s: object) -> None:
    """Refuse arguments of `resize` that are out of range."""
    check_count("num_replicas", num_replicas, where="resize")
    check_seconds("drain_timeout_s", drain_timeout_s, optional=True, where="resize")
    if sessions not in get_args(SessionRule):
        raise bad_option("sessions", sessions, "`move` or `wait`", "leave it out for `move`", where="resize")


@dataclass(frozen=True, slots=True)
class Drained:
    """A process reports that none of its calls are at this generation of a replica."""

    index: int
    generation: int


class Resizer:
    """Adds and removes the replicas of one supervisor. Everything here runs on the control loop."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._turn = asyncio.Lock()
        self._current: asyncio.Task[None] | None = None
        self._drained: set[tuple[int, Drained]] = set()
        self._news = asyncio.Event()
        self._generations: dict[int, int] = {}
        """The last generations of replicas that left: whoever gets their index continues to count."""

    async def resize(self, num_replicas: int, *, sessions: SessionRule, drain_timeout_s: float | None) -> None:
        """Start or end replicas until there are `num_replicas`. Dropped replicas are replaced."""
        async with self._turn:
            dropped = [each.index for each in self._supervisor.replicas if each.health == "given_up"]
            await self._run(self._end_all(dropped, sessions="move", drain_timeout_s=0.0))
            present = {each.index: each.health for each in self._supervisor.replicas}
            if num_replicas > len(present):
                await self._run(self._grow(indices_to_add(present, num_replicas - len(present)), num_replicas))
            else:
                leaving = indices_to_remove(present, len(present) - num_replicas)
                await self._run(self._end_all(leaving, sessions=sessions, drain_timeout_s=drain_timeout_s))

    async def move(self, indices: Collection[int], *, drain_timeout_s: float | None) -> None:
        """Replace replicas by new ones in other places: start those, then let the old ones leave.

        Raise `ResizeError` if a new one could not be started; the old ones then stay.
        """
        async with self._turn:
            present = [each.index for each in self._supervisor.replicas]
            leaving = [index for index in indices if index in present]
            added = indices_to_add(present, len(leaving))
            try:
                await self._run(self._grow(added, len(present)))
            except ResizeError as error:
                await self._run(self._end_all(added, sessions="move", drain_timeout_s=drain_timeout_s))
                error.num_replicas = len(present)
                raise
            await self._run(self._end_all(leaving, sessions="move", drain_timeout_s=drain_timeout_s))

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run one part, which the end of the service cancels."""
        name = self._supervisor.table.name
        if self._supervisor.is_stopping:
            work.close()
            raise ServiceStopped(f"service {name} was shut down", path=name)
        self._current = asyncio.ensure_future(work)
        try:
            await asyncio.shield(self._current)
        except asyncio.CancelledError:
            if not self._supervisor.is_stopping:
                raise
            raise ServiceStopped(f"service {name} was shut down while it was resized", path=name) from None
        finally:
            self._current = None

    async def stop(self) -> None:
        """Cancel what is under way, as the service ends."""
        if self._current is not None:
            self._current.cancel()
            await asyncio.wait({self._current})

    # ---- More

    async def _grow(self, indices: Collection[int], num_wanted: int) -> None:
        from forge.service.supervisor import Replica

        supervisor = self._supervisor
        generations = {index: self._generations.get(index, -1) for index in indices}
        added = [Replica(index, generation=last, has_joined=True) for index, last in generations.items()]
        supervisor.replicas.extend(added)
        supervisor.replicas.sort(key=lambda each: each.index)
        for replica in added:
            supervisor.publish(replica)
        outcomes = await asyncio.gather(*(supervisor.join(each) for each in added), return_exceptions=True)
        failed = [(each, error) for each, error in zip(added, outcomes, strict=True) if error is not None]
        for replica, _ in failed:
            self._forget(replica)
        if failed:
            replica, error = failed[0]
            name, now = supervisor.table.name, len(supervisor.replicas)
            raise ResizeError(
                f"service {name}: {len(failed)} of {len(added)} new replicas could not be started; "
                f"replica {replica.index}: {type(error).__name__}: {error}",
                num_replicas=now,
                path=f"{name}.resize(num_replicas=)",
                value=num_wanted,
                rule=f"every new replica starts; the service now has {now}",
                repair="read the failure above, fix its cause, or ask for fewer replicas",
            ) from error

    # ---- Fewer

    async def _end_all(self, indices: Collection[int], *, sessions: SessionRule, drain_timeout_s: float | None) -> None:
        leaving = [each for each in self._supervisor.replicas if each.index in indices]
        for replica in leaving:
            replica.is_leaving, replica.keeps_sessions = True, sessions == "wait"
        await asyncio.gather(*(self._end(replica, drain_timeout_s) for replica in leaving))

    async def _end(self, replica: Replica, drain_timeout_s: float | None) -> None:
        """Drain a replica if it serves, then end its processes."""
        if replica.supervision is not None:
            replica.supervision.cancel()
            await asyncio.wait({replica.supervision})
        if replica.health == "healthy":
            replica.health = "draining"
            self._supervisor.publish(replica)
            await self._drain(replica, drain_timeout_s)
        for task in list(replica.tasks):
            task.cancel()
        self._forget(replica)
        if replica.group is not None:
            await replica.group.stop()

    async def _drain(self, replica: Replica, drain_timeout_s: float | None) -> None:
        assert replica.died is not None
        idle = asyncio.ensure_future(self._wait_idle(replica, frozenset(self._supervisor.subscribers)))
        either: set[asyncio.Future[Any]] = {idle, replica.died}
        try:
            done, _ = await asyncio.wait(either, timeout=drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()
        if not done:
            _log.warning(
                "service %s: replica %d still has calls after %g s, and ends with them",
                self._supervisor.table.name,
                replica.index,
                drain_timeout_s,
            )

    async def _wait_idle(self, replica: Replica, subscribers: Collection[int]) -> None:
        """Wait until no process has calls at a replica. A process that is gone is not waited for."""
        await self._supervisor.table.wait_drained(replica.index)
        drained = Drained(replica.index, replica.generation)
        while any(
            each in self._supervisor.subscribers and (each, drained) not in self._drained for each in subscribers
        ):
            self._news.clear()
            await self._news.wait()
        self._drained -= {(each, drained) for each in subscribers}

    def note_drained(self, subscriber: int, drained: Drained) -> None:
        """Take note of another process's report."""
        self._drained.add((subscriber, drained))
        self.look_again()

    def look_again(self) -> None:
        """Let drains that wait look at the reports and the subscribers again."""
        self._news.set()

    def _forget(self, replica: Replica) -> None:
        replica.health = "removed"
        self._generations[replica.index] = replica.generation
        self._supervisor.replicas.remove(replica)
        self._supervisor.publish(replica)
