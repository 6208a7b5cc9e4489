"""Versions of weights: published by every rank of a trainer, fetched by any number of readers, whole or not at all."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from typing import Any, Literal

import torch
from torch import Tensor

from forge.errors import StoreError
from forge.runtime.rendezvous import host_id
from forge.store.client import StoreClient, client, in_thread, start
from forge.store.execution import target_tensors
from forge.store.reader import Fetched, Reader, Verify, check_verify
from forge.store.records import Acquire, Begin, Lease, SegmentRecord, VersionInfo, pinned_name
from forge.store.writer import Published, Staged, Writer, check_dtype, ranks_of


def check_whole_number(path: str, value: object, *, least: int) -> None:
    """Raise unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise StoreError(
            f"{path} is not valid", path=path, value=value, rule=f"a whole number >= {least}", repair=f"give {least}"
        )


_log = logging.getLogger("forge.store")
KIND = "weights"


class Publication:
    """A version on its way. It began when `publish` was called; nothing has to be awaited for it to go on.

    `await publication.snapshot()` returns when the weights have been copied and may change again. `await publication`
    returns when the version is complete, that is when readers can see it.
    """

    def __init__(self, snapshot: Future[float], done: Future[Published]) -> None:
        self._snapshot, self._done = snapshot, done
        self._is_seen = False

    def __await__(self) -> Generator[Any, None, Published]:
        return self._wait().__await__()

    async def _wait(self) -> Published:
        self._is_seen = True
        return await asyncio.shield(asyncio.wrap_future(self._done))

    async def snapshot(self) -> float:
        """Wait until the weights may be changed; return how long taking the snapshot took, in seconds."""
        self._is_seen = True
        return await asyncio.shield(asyncio.wrap_future(self._snapshot))

    def snapshot_blocking(self, timeout_s: float | None = None) -> float:
        """Do what `snapshot` does, where no event loop runs."""
        self._is_seen = True
        return self._snapshot.result(timeout_s)

    def result(self, timeout_s: float | None = None) -> Published:
        """Block until the version is complete."""
        self._is_seen = True
        return self._done.result(timeout_s)

    @property
    def is_complete(self) -> bool:
        return self._done.done() and self._done.exception() is None

    def __del__(self) -> None:
        if not self._is_seen:  # it may fail later still
            self._done.add_done_callback(_log_failure)


def _log_failure(done: Future[Published]) -> None:
    if (error := done.exception()) is not None:
        _log.error("a publication that was not awaited failed: %s", error)


class Pin:
    """A version that stays readable: see `Weights.pin`."""

    def __init__(self, name: str, lease: Lease, here: StoreClient) -> None:
        self._lease, self._client = lease, here
        self.name = pinned_name(name, lease.version.number)
        """Under which `Weights` can read it."""

    def __repr__(self) -> str:
        return f"Pin({self.name!r})"

    @property
    def version(self) -> int:
        return self._lease.version.number

    @property
    def digest(self) -> str:
        """Of the whole version, as its publisher got it."""
        return self._lease.version.digest

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return sum(part.segment.size for part in self._lease.version.parts)

    @property
    def is_lasting(self) -> bool:
        """Whether it is whole in one segment in host memory of this process, or on a storage volume: then it outlives a
        publisher in another process, takes no memory of a device, and readers on this host can view it."""
        parts = self._lease.version.parts
        return len(parts) == 1 and _outlives(parts[0].segment)

    def release(self) -> None:
        """End the pin. The version goes with its last pin and its last reader. Doing so twice is harmless."""
        self._client.release(self._lease.id)


def _outlives(segment: SegmentRecord) -> bool:
    own = (os.getpid(), host_id())
    return segment.inline is not None or any(
        holder.volume or (holder.transport == "shm" and (holder.pid, holder.host) == own) for holder in segment.holders
    )


class Weights:
    """The versions of one set of weights, such as `Weights("policy")`. Make one in every process that needs it.

    Args:
        name: what they are called; all processes of the run that use this name mean the same weights.
        keep: for how many versions there is memory. The oldest makes room when a new one is written, unless somebody
            is reading it; one complete version is always left, so that 1 needs the memory of 2 while it publishes (and
            allocates it anew every time, which is slower).
        dtype: publish floating-point tensors in this dtype; the conversion happens in the copy.
        rank, world_size: which of how many publishing ranks this process is. By default as in `torch.distributed`, or
            else as the actor's rank among its processes.
        verify: how `fetch` checks what it got: `cheap`, `full` or `off`.
        on: where a publisher keeps the data until it is fetched: `host` (shared memory), `cuda` (the publisher's GPU),
            or `auto` (on the GPU where the weights are; in shared memory where the run has other hosts or storage
            volumes).
    """

    def __init__(
        self,
        name: str,
        *,
        keep: int = 2,
        dtype: torch.dtype | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        verify: Verify = "cheap",
        on: Literal["auto", "host", "cuda"] = "auto",
    ) -> None:
        _check_name(name)
        check_whole_number("Weights(keep=)", keep, least=1)
        is_number = all(type(number) is int for number in (rank, world_size))
        if (rank, world_size) != (None, None) and not (is_number and 0 <= rank < world_size):  # type: ignore[operator]
            raise StoreError(
                "rank and world_size do not say which of how many ranks this is",
                path="Weights(rank=, world_size=)",
                value=(rank, world_size),
                rule="whole numbers, 0 <= rank < world_size, or neither of them",
                repair="Weights(name, rank=0, world_size=1)",
            )
        check_dtype("Weights(dtype=)", dtype)
        check_verify("Weights(verify=)", verify)
        if on not in ("auto", "host", "cuda"):
            raise StoreError(
                "there is no such place for weights",
                path="Weights(on=)",
                value=on,
                rule="auto, host or cuda",
                repair='on="auto"',
            )
        self.name, self.keep, self.dtype, self.verify, self.on = name, keep, dtype, verify, on
        self._rank, self._world_size = rank, world_size
        self._writer: Writer | None = None
        self._reader: Reader | None = None

    def __repr__(self) -> str:
        return f"Weights({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.name, self.keep, self.dtype, self.verify, self.on, self._rank, self._world_size))

    # writing

    def publish(self, state_dict: Mapping[str, Tensor], *, version: int, timeout_s: float | None = None) -> Publication:
        """Publish this rank's part of a version. Every rank calls it, with the same version.

        Tensors may be plain or DTensors; what several ranks hold is stored once, and taken to be equal. A rank may have
        names that others have not, as a stage of a pipeline does.

        The snapshot is taken in the background, beginning now: wait for `snapshot()` before the weights change, and for
        the publication itself before telling anybody of the version. Readers see it when every rank's part is there,
        and never before; if a rank dies on the way the others' publications raise, and readers keep the version they
        had. `timeout_s` bounds the wait for the other ranks to begin.
        """
        check_whole_number("publish(version=)", version, least=0)
        tensors = _named_tensors(self.name, state_dict)
        rank, world_size = ranks_of(self._rank, self._world_size)
        writer = self._writer_here()
        request = Begin(self.name, KIND, version, rank, world_size, keep=self.keep, timeout_s=timeout_s)
        taken: Future[float] = Future()
        done: Future[Published] = Future()
        for outcome in (taken, done):
            outcome.set_running_or_notify_cancel()
        ready = writer.record_stream(tensors)

        def snapshot() -> None:
            began = time.perf_counter()
            try:
                staged = writer.stage(request, tensors, dtype=self.dtype, ready=ready)
            except BaseException as error:  # noqa: BLE001 - it is the publication's outcome
                taken.set_exception(error)
                done.set_exception(error)
                return
            took_s = time.perf_counter() - began
            taken.set_result(took_s)
            if staged.is_soon_done:
                finish(staged, took_s)
            else:
                start(writer.commits, finish, staged, took_s)

        def finish(staged: Staged, took_s: float) -> None:
            try:
                done.set_result(writer.commit(staged, snapshot_s=took_s))
            except BaseException as error:  # noqa: BLE001 - it is the publication's outcome
                done.set_exception(error)

        start(writer.snapshots, snapshot)
        return Publication(taken, done)

    def _writer_here(self) -> Writer:
        here = client()
        if self._writer is None or self._writer.client is not here:
            self._writer = Writer(here, on=self.on)
        return self._writer

    # reading

    async def fetch(
        self,
        into: Mapping[str, Any] | torch.nn.Module | None = None,
        *,
        version: int | Literal["latest"] = "latest",
        verify: Verify | None = None,
        strict: bool = True,
        cast: bool = False,
        wait_s: float = 0.0,
    ) -> Fetched:
        """Get a version, whole.

        With `into`, a dict from names to tensors, DTensors or `At` objects, exactly their part of each tensor is copied
        there. Without, the result's `tensors` are views of the shared memory where a tensor lies there in one piece on
        this host, and new tensors otherwise; the version stays as it is for as long as any of them lives.

        Args:
            into: the memory to fill, or a module, whose state dict is filled. Until `fetch` returns it may hold
                anything; whatever goes wrong raises.
            version: a number, or the newest.
            verify: overrides the `verify` of these weights.
            strict: raise `WeightMismatch` if a published tensor is not in `into`. A tensor in `into` that was not
                published raises in any case.
            cast: allow `into` to have other dtypes than the published ones.
            wait_s: how long to wait for the version to appear.
        """
        checked = check_verify("fetch(verify=)", self.verify if verify is None else verify)
        request = self._request_for(version)
        here = client()
        lease = await here.acquire(request, wait_s=wait_s)
        try:
            return await in_thread(self._read, here, lambda: lease, into, checked, strict, cast)
        except BaseException:
            here.release(lease.id)  # again, or because reading had not begun
            raise

    def fetch_blocking(
        self,
        into: Mapping[str, Any] | torch.nn.Module | None = None,
        *,
        version: int | Literal["latest"] = "latest",
        verify: Verify | None = None,
        strict: bool = True,
        cast: bool = False,
        wait_s: float = 0.0,
    ) -> Fetched:
        """Do what `fetch` does, for programs without an event loop, such as the workers of an inference engine."""
        checked = check_verify("fetch(verify=)", self.verify if verify is None else verify)
        here = client()
        pending = here.request_lease(self._request_for(version), wait_s=wait_s)
        try:
            return self._read(here, pending.lease, into, checked, strict, cast)
        except BaseException:
            pending.release()
            raise

    def _request_for(self, version: int | Literal["latest"]) -> Acquire:
        if version == "latest":
            return Acquire(self.name, KIND, None)
        if not isinstance(version, int):
            raise StoreError(
                "there is no such version",
                path="fetch(version=)",
                value=version,
                rule='a whole number >= 0, or "latest"',
                repair='version="latest", or leave it out',
            )
        check_whole_number("fetch(version=)", version, least=0)
        return Acquire(self.name, KIND, version)

    def _read(
        self,
        here: StoreClient,
        lease: Callable[[], Lease],
        into: Mapping[str, Any] | torch.nn.Module | None,
        verify: Verify,
        strict: bool,
        cast: bool,
    ) -> Fetched:
        """Read a version whose lease comes when it is asked for; until then there is time to look at `into`."""
        if isinstance(into, torch.nn.Module):
            into = into.state_dict()
        if self._reader is None or self._reader.client is not here:
            self._reader = Reader(here, is_shared=True)
        if into is None:
            return self._reader.views(lease(), verify=verify)
        targets = target_tensors(into) if isinstance(into, Mapping) else None
        return self._reader.fill(lease(), into, verify=verify, strict=strict, cast=cast, targets=targets)

    async def wait(self, *, at_least: int = 0, timeout_s: float | None = None) -> int:
        """Wait until a version of at least this number can be fetched; return the newest number."""
        check_whole_number("wait(at_least=)", at_least, least=0)
        waiting = client().line.call_async("wait", ((KIND, self.name), at_least))
        try:
            return int(await asyncio.wait_for(waiting, timeout_s))
        except TimeoutError:
            known = [info.number for info in await self.versions()]
            raise StoreError(
                f"no version {at_least} or newer of {self.name!r} came in time",
                path=f"Weights({self.name!r}).wait(at_least={at_least})",
                value=f"{timeout_s} s",
                rule=f"published versions: {known}",
                repair="wait longer, and see that every trainer rank publishes",
            ) from None

    async def versions(self) -> list[VersionInfo]:
        """Return the versions that can be fetched now, oldest first."""
        found: list[VersionInfo] = await client().line.call_async("versions", (KIND, self.name))
        return found

    async def pin(self, version: int) -> Pin:
        """Pin a published version: until the pin is released, or this process ends, it stays readable as
        `Weights(pinned_name(name, version))`, whatever `keep`, `retire` and `rewind` do to the weights of this name.

        Nothing is copied: the pinned version is the memory that was published. Several pins of one version are
        independent of each other. Raises `StoreKeyError` if the version is not published (any more).
        """
        check_whole_number("pin(version)", version, least=0)
        return await self._pin(version)

    async def pin_copy(self, state_dict: Mapping[str, Tensor], *, version: int, digest: str | None = None) -> Pin:
        """Publish a copy of a version under its pinned name, in host memory of this process, and pin that.

        The number may be that of any version, published or not: the live weights are not concerned. Where a version
        with this `digest` is pinned under the name already, that one is pinned once more, and nothing is copied.
        """
        copy = Weights(pinned_name(self.name, version), keep=1, on="host", rank=0, world_size=1)
        if digest is None or digest not in {info.digest for info in await copy.versions() if info.num_pins}:
            await copy.publish(state_dict, version=version)
        return await self._pin(version, is_copy=True)

    async def _pin(self, version: int, *, is_copy: bool = False) -> Pin:
        here = client()
        pending = here.request_pin((KIND, self.name), version, is_copy=is_copy)
        try:
            lease = await asyncio.shield(asyncio.wrap_future(pending))
        except asyncio.CancelledError:
            here.release_when_answered(pending)
            raise
        return Pin(self.name, lease, here)

    async def pinned(self) -> list[VersionInfo]:
        """Return the pinned versions, oldest first, with their bytes and how many pins each has."""
        found: list[VersionInfo] = await client().line.call_async("pinned", (KIND, self.name))
        return found

    async def retire(self, *, keep: int = 1) -> list[int]:
        """Retire all but the newest `keep` versions; return their numbers. A version that is being read stays
        until its readers let it go, but nobody new gets it."""
        check_whole_number("retire(keep=)", keep, least=0)
        retired: list[int] = await client().line.call_async("retire", ((KIND, self.name), keep))
        return retired

    async def rewind(self, *, to: int) -> list[int]:
        """Take back every version after `to`, so that a trainer that went back to a checkpoint can publish those
        numbers again. The numbers that went."""
        check_whole_number("rewind(to=)", to, least=-1)
        retired: list[int] = await client().line.call_async("rewind", ((KIND, self.name), to))
        return retired


def _rebuild(
    name: str, keep: int, dtype: Any, verify: Verify, on: Any, rank: int | None, world_size: int | None
) -> Weights:
    return Weights(name, keep=keep, dtype=dtype, rank=rank, world_size=world_size, verify=verify, on=on)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.strip():
        raise StoreError(
            "weights need a name",
            path="Weights(name)",
            value=name,
            rule="a non-empty string",
            repair='Weights("policy")',
        )


def _named_tensors(name: str, state_dict: object) -> dict[str, Tensor]:
    if isinstance(state_dict, torch.nn.Module):
        state_dict = state_dict.state_dict()
    if not isinstance(state_dict, Mapping) or not state_dict:
        raise StoreError(
            "there is nothing to publish",
            path=f"Weights({name!r}).publish(state_dict)",
            value=type(state_dict).__name__,
            rule="a dict from names to tensors, with at least one entry",
            repair="publish(model.state_dict(), version=...)",
        )
    for key, value in state_dict.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise StoreError(
                "a state dict holds tensors by name",
                path=f"Weights({name!r}).publish(state_dict[{key!r}])",
                value=type(value).__name__,
                rule="names are strings and values are tensors or DTensors",
                repair="leave out extra state, or put it with ts.put",
            )
    return dict(state_dict)
