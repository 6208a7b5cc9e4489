"""The store as one process sees it: its connection to the registry, its own segments, and those of others."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from forge.errors import StoreError
from forge.runtime.rendezvous import Connection, ConnectionFailure, connect, host_id, run_id
from forge.store.data_plane import DataPlane, on_host
from forge.store.records import Acquire, Holder, Layout, Lease, SegmentRecord, labelled_memory, memory_label
from forge.store.relay_copies import Wanted
from forge.store.segments import Segment, SegmentPool, open_segment
from forge.store.transports.cuda import DeviceSegment, OpenedSegments

P = ParamSpec("P")
T = TypeVar("T")

TRANSPORTS = "FORGE_STORE_WAYS"
"""Which transports a reader of this process may take, best first, with commas. Unset: all of them."""
ALL_TRANSPORTS = ("cuda", "shm", "rdma", "tcp")


class StoreClient:
    """One for each process and run; `client()` gives it. Every method may be called from any thread, and blocks."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.line: Connection = connect("store")
        self.host = host_id()
        self.session = int(self.line.call("hello", None))
        self.segments = SegmentPool(run_id())
        self.device_segments: dict[str, DeviceSegment] = {}
        self.opened_device = OpenedSegments()
        self._opened: dict[str, Segment] = {}
        self._layouts: dict[tuple[str, str], dict[str, Layout]] = {}
        self._guard = threading.RLock()
        self._to_release: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._releaser: threading.Thread | None = None
        self.data_plane = DataPlane(self)
        self.line.on_push(self._pushed)
        self.line.on_close(self.close)

    def _pushed(self, message: tuple[str, str]) -> None:
        what, segment = message
        if what == "drop":
            self.drop(segment)

    def drop(self, segment: str) -> None:
        """Let go of a segment, own or opened."""
        with self._guard:
            self._opened.pop(segment, None)
            self._opened.pop(on_host(segment), None)
            if labelled_memory(segment) is not None:
                for name in [name for name in self._opened if name.startswith(f"{segment}/")]:
                    del self._opened[name]
            device = self.device_segments.pop(segment, None)
        self.opened_device.drop(segment)
        if device is not None:
            device.close()
        if not self.data_plane.drop(segment):
            self.segments.drop(segment)

    def close(self) -> None:
        """Let go of everything; what others have mapped stays with them."""
        self.data_plane.close()
        self.segments.close()
        with self._guard:
            self._opened.clear()
            device_segments, self.device_segments = self.device_segments, {}
        self.opened_device.close()
        for segment in device_segments.values():
            segment.close()
        self._to_release.put(None)

    # versions

    async def acquire(self, request: Acquire, *, wait_s: float = 0.0) -> Lease:
        """Lease a version; `layouts` of the answer has all that it needs."""
        pending = self.request_lease(request, wait_s=wait_s)
        try:
            await asyncio.shield(asyncio.wrap_future(pending.answer))
        except asyncio.CancelledError:
            pending.release()
            raise
        return pending.lease()

    def request_lease(self, request: Acquire, *, wait_s: float = 0.0) -> PendingLease:
        """Request a lease, to be waited for later."""
        with self._guard:
            known = self._layouts.get((request.kind, request.key), {})
        answer = self.line.request("acquire", (replace(request, known=frozenset(known)), wait_s))
        return PendingLease(self, request, known, answer)

    def request_pin(self, key: tuple[str, str], version: int, *, is_copy: bool = False) -> Future[Lease]:
        """Request a pin, to be waited for later."""
        return self.line.request("pin", (key, version, is_copy))

    def release_when_answered(self, answer: Future[Lease]) -> None:
        """Release a lease that was requested: at once, or when it comes."""

        def came(answer: Future[Lease]) -> None:
            if answer.exception() is None:
                self.release_soon(answer.result().id)

        answer.add_done_callback(came)

    def with_layouts(self, request: Acquire, lease: Lease, known: dict[str, Layout]) -> Lease:
        """Complete a lease with the layouts that were known, and remember those of this key for the next one."""
        key = (request.kind, request.key)
        with self._guard:
            self._layouts.pop(key, None)
            used = {part.layout for part in lease.version.parts}
            layouts = {name: lease.layouts.get(name) or known[name] for name in used}
            self._layouts[key] = layouts
            if len(self._layouts) > 256:  # values that are read once and never again
                del self._layouts[next(iter(self._layouts))]
        return replace(lease, layouts=layouts)

    def release(self, lease: int) -> None:
        """Let a version go. Waits for nothing, and does nothing when the run has ended."""
        if self.line.is_open:
            with contextlib.suppress(ConnectionFailure):  # it has just ended
                self.line.notify("release", lease)

    def release_soon(self, lease: int) -> None:
        """Release a lease from anywhere: also from a finalizer, which may interrupt a thread that holds the line."""
        if self.pid != os.getpid():
            return  # the lease is the parent's, and so may be whoever held the lock at the fork
        with self._guard:
            if self._releaser is None:
                self._releaser = threading.Thread(target=self._release_queued, name="forge-leases", daemon=True)
                self._releaser.start()
        self._to_release.put(lease)

    def _release_queued(self) -> None:
        while self.line.is_open and (lease := self._to_release.get()) is not None:
            self.release(lease)

    # segments

    def holder(self, transport: str, segment: str, **how: Any) -> Holder:
        """Return the record of a segment that this process gives out."""
        return Holder(transport, self.host, self.pid, self.session, segment=segment, **how)

    def transports(self) -> tuple[str, ...]:
        """Return the transports that readers here may take, best first."""
        chosen = tuple(name for name in os.environ.get(TRANSPORTS, "").split(",") if name) or ALL_TRANSPORTS
        unknown = [name for name in chosen if name not in ALL_TRANSPORTS]
        if unknown:
            raise StoreError(
                f"{TRANSPORTS} names an unknown transport",
                path=TRANSPORTS,
                value=unknown,
                rule=f"some of {','.join(ALL_TRANSPORTS)}",
                repair=f"unset {TRANSPORTS}",
            )
        return chosen

    def open_device(self, holder: Holder, record: SegmentRecord) -> Tensor:
        """Return the device memory of a process on this host. StoreError if it cannot be reached."""
        own = self.device_segments.get(holder.segment)
        return own.memory if own is not None else self.opened_device.open(holder, record)

    def open(self, holder: Holder, record: SegmentRecord, *, is_private: bool = False) -> Segment:
        """Map a segment that a process on this host holds. OSError if it cannot be had from there."""
        if not is_private:
            own = self.segments.get(holder.segment)
            if own is not None:
                return own
            with self._guard:
                known = self._opened.get(holder.segment)
            if known is not None and known.size >= record.size:
                return known
        segment = open_segment(holder.segment, pid=holder.pid, fd=holder.fd, size=record.size, is_private=is_private)
        if not is_private:
            with self._guard:
                self._opened[holder.segment] = segment
        return segment

    def open_relayed(self, wanted: Wanted, size: int, *, is_private: bool = False) -> Segment:
        """Map what the relay of this host holds of a part. OSError if the relay has ended."""
        own = self.segments.get(wanted.segment)
        if own is not None and not is_private:
            return own
        label = f"{memory_label(wanted.memory)}/{wanted.rank}"
        with self._guard:
            known = self._opened.get(label)
        if known is not None and known.name == wanted.segment and known.size >= size and not is_private:
            return known
        segment = open_segment(wanted.segment, pid=wanted.pid, fd=wanted.fd, size=size, is_private=is_private)
        if not is_private:
            with self._guard:
                self._opened[label] = segment
        return segment


@dataclass(frozen=True, slots=True)
class PendingLease:
    """A lease that was requested."""

    client: StoreClient
    request: Acquire
    known: dict[str, Layout]
    """The layouts that the registry need not send; kept here, for the client may forget them."""
    answer: Future[Lease]

    def lease(self) -> Lease:
        """Wait for the lease. Its `layouts` has all that the version needs."""
        return self.client.with_layouts(self.request, self.answer.result(), self.known)

    def release(self) -> None:
        """Release the lease: at once, or when it comes."""
        self.client.release_when_answered(self.answer)


_client: StoreClient | None = None
_guard = threading.Lock()


def _after_fork() -> None:
    """Give a forked child threads of its own; those of its parent did not come with it."""
    global _guard
    _guard = threading.Lock()
    _threads.cache_clear()


os.register_at_fork(after_in_child=_after_fork)


def client() -> StoreClient:
    """Return this process's client; a new one after a fork, and when a new run has begun."""
    global _client
    with _guard:
        if _client is None or _client.pid != os.getpid() or not _client.line.is_open:
            _client = StoreClient()
        return _client


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return a large pool: a caller must not wait for the fetches of others."""
    return ThreadPoolExecutor(64, thread_name_prefix="forge-store")


def start(pool: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run a blocking call on a thread, in the caller's context."""
    context = contextvars.copy_context()
    return pool.submit(context.run, functools.partial(call, *args, **kwargs))


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Await a blocking call. A caller that is cancelled waits for its end: the call may be writing into its memory."""
    return await until_done(start(_threads(), call, *args, **kwargs))


async def until_done(call: Future[T], *, hurry: Callable[[], None] | None = None) -> T:
    """Await a call that runs on a thread. A caller that is cancelled, however often, waits for its end; `hurry` makes
    that come soon."""
    running = asyncio.wrap_future(call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if hurry is not None:
            hurry()
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({running})
        if not running.cancelled():
            running.exception()
        raise
