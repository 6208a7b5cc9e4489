"""Segments over Monarch's RDMA buffers, where the machine has the hardware.

Monarch reads a registered buffer whole or not at all, so a segment is registered as a row of chunks, once, and stays
registered while it lives. A chunk that is wanted whole goes straight into the reader's memory; one that is wanted in
part is read beside it and the part copied. Reading much less than a chunk therefore moves a whole one.

Everything here needs a Monarch actor: buffers belong to an actor's process and are read in the name of one. Make the
objects in an endpoint (or in a thread that carries its context); they may be used from any thread afterwards.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from forge.errors import StoreError
from forge.store.transports import Range, as_bytes, out_of_bounds

FORCE: Final = "FORGE_RDMA"
"""Environment: `force` uses RDMA buffers without the hardware, over Monarch's own fallback; `off` never uses them."""
CHUNK_BYTES: Final = 4 << 20
STALL_S: Final = 20
"""A chunk that takes longer is lost. Monarch does not say so earlier when the holder's process has died."""
_IN_FLIGHT: Final = 8

T = TypeVar("T")


def available() -> bool:
    """Return whether RDMA is to be used on this machine: it has the hardware, or the environment forces it."""
    choice = os.environ.get(FORCE, "")
    if choice not in ("", "force", "off"):
        raise StoreError(
            f"{FORCE} has a value that means nothing",
            path=FORCE,
            value=choice,
            rule="force, off, or not set",
            repair=f"unset {FORCE}: RDMA is then used where the machine has it",
        )
    if choice:
        return choice == "force"
    try:
        from monarch.rdma import is_ibverbs_available
    except ImportError:
        return False

    return bool(is_ibverbs_available())


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where a registered segment is. Small, and can be pickled to any actor of the run."""

    name: str
    size: int
    chunk_bytes: int
    buffers: tuple[Any, ...]
    """Monarch's RDMABuffer for each chunk, in order."""

    def chunk_size(self, number: int) -> int:
        return min(self.chunk_bytes, self.size - number * self.chunk_bytes)


class RdmaHolder:
    """Registers segments of this process for others to read."""

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._actor = _Actor()
        self._chunk_bytes = chunk_bytes
        self._held: dict[str, Descriptor] = {}
        self._lock = threading.Lock()

    def register(self, name: str, memory: memoryview) -> Descriptor:
        """Make a segment's memory readable. A second call for the same name gives the same descriptor.

        The memory must stay mapped until `release`; Monarch may keep it alive for a moment longer.
        """
        with self._lock:
            if name not in self._held:
                flat = [view for _, view in as_bytes(name, [(0, memory)], writable=True)]
                self._held[name] = self._actor.run(lambda: self._describe(name, flat))
            return self._held[name]

    def release(self, name: str) -> None:
        """Take a segment back: reads of it fail from here on. An unknown name is none to take back."""
        with self._lock:
            held = self._held.pop(name, None)
        if held is not None:
            self._actor.run(lambda: _drop(held))

    def close(self) -> None:
        """Release everything. May be called twice."""
        for name in list(self._held):
            self.release(name)
        self._actor.close()

    def _describe(self, name: str, flat: Sequence[memoryview]) -> Descriptor:
        from monarch.rdma import RDMABuffer

        size, step = sum(len(view) for view in flat), self._chunk_bytes
        buffers = [RDMABuffer(view[start : start + step]) for view in flat for start in range(0, len(view), step)]
        return Descriptor(name, size, step, tuple(buffers))


class RdmaReader:
    """Reads ranges of segments that an `RdmaHolder` of another process registered."""

    def __init__(self, *, stall_s: int = STALL_S) -> None:
        self._actor = _Actor()
        self._stall_s = stall_s
        self._closed = threading.Event()

    def read(self, source: Descriptor, ranges: Sequence[Range]) -> None:
        """Fill each target from its offset; on the same terms as `tcp.DataClient.read`."""
        flat = as_bytes(source.name, ranges, writable=True)
        for offset, target in flat:
            if offset + len(target) > source.size:
                raise out_of_bounds(source.name, offset, len(target), size=source.size)
        if flat:
            self._actor.run(lambda: self._fetch(source, _by_chunk(flat, source.chunk_bytes)))

    def close(self) -> None:
        """Close the reader. A read in progress raises after the operations that it has started. May be called twice."""
        self._closed.set()
        self._actor.close()

    def _fetch(self, source: Descriptor, wanted: dict[int, list[Range]]) -> None:
        """Read chunk by chunk, several in flight. Nothing is in flight any more when this returns or raises."""
        under_way: deque[_Operation] = deque()
        failure: Exception | None = None
        todo = iter(wanted.items())
        num_done = 0
        while True:
            while failure is None and len(under_way) < _IN_FLIGHT and (item := next(todo, None)) is not None:
                if self._closed.is_set():
                    failure = _closed(source)
                else:
                    under_way.append(_Operation(source, *item, stall_s=self._stall_s))
            if not under_way:
                break
            try:
                under_way.popleft().finish()
                num_done += 1
            except Exception as error:  # noqa: BLE001 - Monarch raises Exception itself
                failure = failure or _lost(source, error, f"{num_done} of {len(wanted)} chunks had arrived")
        if failure is not None:
            raise failure


class _Operation:
    """One chunk on its way: straight into its target where all of it is wanted, else into memory beside it."""

    def __init__(self, source: Descriptor, number: int, parts: list[Range], *, stall_s: int) -> None:
        size = source.chunk_size(number)
        is_whole = len(parts) == 1 and len(parts[0][1]) == size
        self._parts = [] if is_whole else parts
        self._chunk = parts[0][1] if is_whole else memoryview(bytearray(size))
        self._future = source.buffers[number].read_into(self._chunk, timeout=stall_s)

    def finish(self) -> None:
        self._future.get()
        for start, target in self._parts:
            target[:] = self._chunk[start : start + len(target)]


class _Actor:
    """Runs Monarch's calls in the name of the actor that made this, on a thread where they may block.

    Monarch finds the actor through a context variable. Where it finds none it would start a host of its own in this
    process, which no other host can reach: that is refused here. Its blocking calls must not run on an event loop.
    """

    def __init__(self) -> None:
        from monarch._src.actor.actor_mesh import _context

        if not available():
            raise StoreError(
                "this machine has no RDMA",
                path=FORCE,
                value=os.environ.get(FORCE),
                rule="a device for ibverbs",
                repair=f"use the tcp transport, or set {FORCE}=force to try RDMA buffers over Monarch's fallback",
            )
        found = _context.get(None)
        if found is None:
            raise StoreError(
                "RDMA buffers need a Monarch actor",
                path=f"process {os.getpid()}",
                rule="made inside an endpoint, or in a thread that carries an endpoint's context",
                repair="use the tcp transport here, or asyncio.to_thread instead of a bare thread",
            )
        self._context = contextvars.Context()
        self._context.run(_context.set, found)
        self._thread = ThreadPoolExecutor(1, "forge-rdma")

    def run(self, work: Callable[[], T]) -> T:
        try:
            doing = self._thread.submit(self._context.run, work)
        except RuntimeError as error:
            raise StoreError("this end of the RDMA transport was closed", path=f"process {os.getpid()}") from error
        return doing.result()

    def close(self) -> None:
        self._thread.shutdown()


def _by_chunk(ranges: Sequence[Range], chunk_bytes: int) -> dict[int, list[Range]]:
    """Return for each chunk that is touched where in it the parts begin and which memory they fill."""
    found: dict[int, list[Range]] = {}
    for offset, target in ranges:
        done = 0
        while done < len(target):
            number, start = divmod(offset + done, chunk_bytes)
            take = min(len(target) - done, chunk_bytes - start)
            found.setdefault(number, []).append((start, target[done : done + take]))
            done += take
    return found


def _drop(held: Descriptor) -> None:
    for going in [buffer.drop() for buffer in held.buffers]:
        going.get()


def _lost(source: Descriptor, error: Exception, progress: str) -> StoreError:
    owner = source.buffers[0].owner
    return StoreError(
        f"segment {source.name!r} could not be read over RDMA from {owner}, {progress}: {error}",
        path=f"{owner}/{source.name}",
        rule="the process that holds a segment lives, and keeps it registered, until it was read",
        repair="if its process has ended, take another replica or version",
    )


def _closed(source: Descriptor) -> StoreError:
    return StoreError(f"the RDMA reader was closed before segment {source.name!r} was read", path=source.name)
