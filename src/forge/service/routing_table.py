"""The routing table: which replicas there are, as one calling process sees them.

Every process that calls a service has one. The owner's keeps itself up to date; one in another process is sent each
change. Choosing a replica, holding its slot and queueing for one all happen here, without a message to anybody. Calls
may come from several event loops: a lock guards the few lines that choose.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from forge.errors import ActorFailure, Overloaded, ServiceStopped
from forge.observe.gauges import add_gauges
from forge.runtime.pending_calls import PendingCalls
from forge.service.records import Request
from forge.service.routing import BUILT_IN, check_choice, least_loaded
from forge.service.slot_index import SlotIndex
from forge.service.targets import Entry, Target
from forge.service.waiting import Waiter, wake

_MAX_GAUGES: Final = 64


class RoutingTable:
    """The replicas that can be called, their slots, the queue for them, and the sessions."""

    def __init__(self, name: str, *, router: Callable[..., Any], limit: int | None, max_queue: int | None) -> None:
        self.name = name
        self.entries: dict[int, Entry] = {}
        self.targets: dict[int, Target] = {}
        self.num_rejected = 0
        self._router, self._limit, self._max_queue = router, limit, max_queue
        self._is_built_in = router in BUILT_IN.values()
        self._live: dict[int, Target] = {}
        self._order = SlotIndex(self._key, self._is_free, self._live.values)
        self._session_order: SlotIndex | None = None
        self._waiting: deque[Waiter] = deque()
        self._watching: list[tuple[asyncio.Future[None], asyncio.AbstractEventLoop]] = []
        self._pins: dict[str, int | None] = {}
        self._num_pinned: Counter[int] = Counter()
        self._held_back: set[int] = set()
        self._draining: set[int] = set()
        self._used = 0
        self._guard = threading.Lock()
        add_gauges(self, RoutingTable._gauges)

    def _gauges(self) -> dict[str, float]:
        """Return the calls of this process that wait for a replica, and those in flight; by replica unless there are
        very many."""
        targets = list(self.targets.values())
        if len(targets) > _MAX_GAUGES:
            open_now = {f"calls/{self.name}": float(sum(target.in_flight for target in targets))}
        else:
            open_now = {f"calls/{self.name}[{target.index}]": float(target.in_flight) for target in targets}
        return open_now | {f"queue/{self.name}": float(self.num_waiting)}

    # ---- changes, from the owner

    def update(self, entry: Entry, calls: PendingCalls | None = None) -> None:
        """Take note of a replica's new state; who waits for a replica looks again."""
        with self._guard:
            if entry.health == "removed":
                self.entries.pop(entry.index, None)
                self._unpin_all(entry.index)
            else:
                self.entries[entry.index] = entry
            target = self.targets.get(entry.index)
            is_callable = entry.health in ("healthy", "draining")
            if target is not None and (not is_callable or entry.generation != target.entry.generation):
                what = {"stopped": "was shut down", "removed": "was removed"}.get(entry.health, "was lost")
                reason = f": {entry.failure}" if entry.failure and entry.health != "stopped" else ""
                target.calls.fail(ActorFailure(f"replica {entry.index} of {self.name} {what}{reason}", path=self.name))
            is_new = target is None or target.entry.generation != entry.generation
            # in a process that had lost sight of the owner, a replica can come back as it was
            is_back = calls is None and target is not None and target.calls.failure is not None
            if entry.health == "healthy" and (is_new or is_back):
                fresh = Target(entry, calls if calls is not None else PendingCalls())
                if target is not None:
                    fresh.last_used = target.last_used
                    fresh.num_ok, fresh.num_errors, fresh.num_lost = target.num_ok, target.num_errors, target.num_lost
                self.targets[entry.index] = fresh
            self._draining.discard(entry.index)
            if entry.health == "healthy":
                self._live[entry.index] = self.targets[entry.index]
                self._note_slot(entry.index)
            else:
                self._live.pop(entry.index, None)
                if entry.health == "draining":
                    self._draining.add(entry.index)
            self._wake_all()

    def next_change(self) -> asyncio.Future[None]:
        """Done at the next change of any replica."""
        loop = asyncio.get_running_loop()
        change: asyncio.Future[None] = loop.create_future()
        with self._guard:
            self._watching.append((change, loop))
        return change

    def live(self) -> list[Target]:
        """Return the replicas that are healthy now."""
        return [target for _, target in sorted(self._live.items()) if target.calls.failure is None]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # ---- calls to all replicas, and replicas that leave

    def hold_live(self) -> list[Target]:
        """Return the replicas that are healthy now, for calls to each of them; `let_go` follows. None of them counts as
        drained meanwhile."""
        with self._guard:
            targets = self.live()
            for target in targets:
                target.num_held += 1
            return targets

    def let_go(self, targets: Sequence[Target]) -> None:
        """End what `hold_live` began."""
        with self._guard:
            for target in targets:
                target.num_held -= 1
            self._note_drained()

    def is_drained(self, index: int) -> bool:
        """Return whether this process has no call at a replica, nor a session that the replica waits for."""
        with self._guard:
            target, entry = self.targets.get(index), self.entries.get(index)
            if target is None or entry is None:
                return True
            is_kept = entry.keeps_sessions and self._num_pinned[index] > 0
            return not (target.in_flight or target.num_held or is_kept)

    async def wait_drained(self, index: int) -> None:
        """Wait until a replica that gets no new calls is drained."""
        while True:
            change = self.next_change()
            if self.is_drained(index):
                return
            await change

    def _note_drained(self) -> None:
        if self._draining:
            self._wake_watching()

    # ---- sessions

    @property
    def num_sessions(self) -> int:
        return len(self._pins)

    def pin(self, session: str) -> None:
        with self._guard:
            self._pins.setdefault(session, None)

    def unpin(self, session: str) -> bool:
        with self._guard:
            was_known = session in self._pins
            if was_known:
                self._move(session, None)
                del self._pins[session]
            self._wake_next()  # its waiting calls may go anywhere now
            self._note_drained()
            return was_known

    def knows_session(self, session: str) -> bool:
        return session in self._pins

    def num_sessions_at(self, index: int) -> int:
        """Return how many sessions are pinned to a replica."""
        return self._num_pinned[index]

    def _unpin_all(self, index: int) -> None:
        """Let the sessions of a replica choose another one with their next call."""
        if self._num_pinned[index]:
            for session in [name for name, pinned in self._pins.items() if pinned == index]:
                self._move(session, None)

    def _move(self, session: str, index: int | None) -> None:
        """Pin a session to a replica, or to none."""
        before = self._pins[session]
        if before != index:
            self._pins[session] = index
            if before is not None:
                self._num_pinned[before] -= 1
                self._note_slot(before)
            if index is not None:
                self._num_pinned[index] += 1
                self._note_slot(index)

    # ---- slots

    @contextmanager
    def held_back(self, index: int) -> Iterator[None]:
        """Let no new calls go to a replica, as long as others can take them."""
        with self._guard:
            self._held_back.add(index)
        try:
            yield
        finally:
            with self._guard:
                self._held_back.discard(index)
                self._note_slot(index)
                self._wake_next()

    def try_acquire(self, request: Request) -> Target | None:
        """Return a replica with a free slot, now held; None if there is none or others have waited longer."""
        with self._guard:
            return self._take_in_turn(request)

    def _take_in_turn(self, request: Request) -> Target | None:
        """As `_take`, unless a call that has waited longer can have a slot: it has been woken and takes it next."""
        if self._waiting and (
            not self._has_slot_for(request.session)
            or any(self._has_slot_for(waiter.request.session) for waiter in self._waiting)
        ):
            return None
        return self._take(request)

    def _take(self, request: Request) -> Target | None:
        target = self._find(request.session) if self._is_built_in else self._ask_router(request)
        if target is None:
            return None
        self._used += 1
        target.last_used = self._used
        target.in_flight += 1
        if request.session in self._pins:  # not one that has been terminated meanwhile
            self._move(request.session, target.index)
        self._note_slot(target.index)
        return target

    def _ask_router(self, request: Request) -> Target | None:
        """Let the user's router choose among all replicas with a free slot."""
        candidates = self._candidates(request.session)
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        states = tuple(target.state(self._num_pinned[target.index]) for target in candidates)
        return self.targets[check_choice(self._router(states, request), states, self._router)]

    def _has_slot_for(self, session: str | None) -> bool:
        return (self._find(session) if self._is_built_in else self._candidates(session)) not in (None, [])

    def _candidates(self, session: str | None) -> Sequence[Target]:
        """Return all replicas with a free slot for a call, by index."""
        home = self._home(session)
        if home is not None:
            return [home] if self._has_slot(home) else []
        live = self.live()
        if self._held_back:
            live = [target for target in live if target.index not in self._held_back] or live
        return [target for target in live if self._has_slot(target)]

    def _find(self, session: str | None) -> Target | None:
        """Return what the built-in router would choose among `_candidates`, without looking at each of them."""
        home = self._home(session)
        if home is not None:
            return home if self._has_slot(home) else None
        if session in self._pins:
            # Its later calls will come here too. Between two of them nothing is in flight that would show it.
            if self._session_order is None:
                self._session_order = SlotIndex(self._session_key, self._is_free, self._live.values)
            found = self._session_order.first()
        else:
            found = self._order.first()
        if found is None and self._held_back and not self._has_others():
            key = self._session_key if session in self._pins else self._key
            found = min(self._candidates(session), key=key, default=None)
        return found

    def _home(self, session: str | None) -> Target | None:
        """Return the replica that a call must go to, or wait for: the one of its session, while it can be called."""
        pinned = None if session is None else self._pins.get(session)
        if pinned is None:
            return None
        if pinned in self._draining:
            target = self.targets[pinned] if self.entries[pinned].keeps_sessions else None
        else:
            target = self._live.get(pinned)
            if pinned in self._held_back and self._has_others():
                return None
        # A death reaches the pending calls a moment before it reaches the table.
        return None if target is None or target.calls.failure is not None else target

    def _has_others(self) -> bool:
        """Return whether a replica is up that is not held back."""
        held = self._held_back
        return any(index not in held and target.calls.failure is None for index, target in self._live.items())

    def _has_slot(self, target: Target) -> bool:
        return self._limit is None or target.in_flight < self._limit

    def _is_free(self, target: Target) -> bool:
        """Return whether a call that is not bound to a replica may go to this one."""
        return (
            self._live.get(target.index) is target
            and target.calls.failure is None
            and target.index not in self._held_back
            and self._has_slot(target)
        )

    def _key(self, target: Target) -> tuple[int, ...]:
        """Return what the router compares: the replica with the smallest is chosen."""
        if self._router is least_loaded:
            return (target.in_flight, target.last_used, target.index)
        return (target.last_used, target.index)

    def _session_key(self, target: Target) -> tuple[int, ...]:
        return (self._num_pinned[target.index], *self._key(target))

    def _note_slot(self, index: int) -> None:
        """Bring the order of free replicas up to date, after a change of one of them."""
        target = self._live.get(index)
        if target is None or not self._is_built_in:
            return
        self._order.note(target)
        if self._session_order is not None:
            self._session_order.note(target)

    async def acquire(self, request: Request) -> Target:
        """Wait for a slot. Raises `Overloaded` when the queue is full and `ServiceStopped` when none will ever come."""
        loop = asyncio.get_running_loop()
        with self._guard:
            target = self._take_in_turn(request)
            if target is not None:
                return target
            self._check_hope()
            if self._live and request.attempt == 0 and self._is_queue_full():
                self.num_rejected += 1
                raise self._overloaded()
            waiter = Waiter(loop.create_future(), loop, request)
            self._waiting.append(waiter)
        try:
            while True:
                await waiter.ready
                with self._guard:
                    target = self._take(request)
                    if target is not None:
                        return target
                    self._check_hope()
                    waiter.ready = loop.create_future()  # it keeps its place
        finally:
            self._leave(waiter)

    def _is_queue_full(self) -> bool:
        return self._max_queue is not None and len(self._waiting) >= self._max_queue

    def _leave(self, waiter: Waiter) -> None:
        with self._guard:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            self._wake_next()  # a slot that this waiter was woken for and did not take is the next one's

    def release(self, target: Target) -> None:
        with self._guard:
            target.in_flight -= 1
            self._note_slot(target.index)
            if self._waiting:
                self._wake_next()
            self._note_drained()

    def _wake_next(self) -> None:
        """Wake the first waiter that could be served now. Others are woken in turn as it leaves the queue."""
        for waiter in self._waiting:
            if self._has_slot_for(waiter.request.session):
                wake(waiter.ready, waiter.loop)
                return

    def _wake_all(self) -> None:
        for waiter in self._waiting:
            wake(waiter.ready, waiter.loop)
        self._wake_watching()

    def _wake_watching(self) -> None:
        for change, loop in self._watching:
            wake(change, loop)
        self._watching.clear()

    def _check_hope(self) -> None:
        """Raise if no replica is up and none will be."""
        if self._live:
            return
        states = [entry.health for entry in self.entries.values()]
        if states and all(state == "stopped" for state in states):
            raise ServiceStopped(f"service {self.name} was shut down", path=self.name)
        if states and all(state in ("given_up", "stopped") for state in states):
            reasons = {entry.index: entry.failure for entry in self.entries.values()}
            raise ServiceStopped(
                f"service {self.name} has no replica left: all were dropped",
                path=self.name,
                value=reasons,
                rule="a replica is dropped after max_restarts failed restarts in a row",
                repair="read the failure above, fix its cause, and start the service again",
            )

    def _overloaded(self) -> Overloaded:
        return Overloaded(
            f"service {self.name}: {len(self._waiting)} calls already wait for a slot",
            path="options(max_queue=)",
            value=self._max_queue,
            rule="no more calls wait than max_queue",
            repair="send fewer calls at a time, or raise max_queue, max_concurrency or num_replicas",
        )
