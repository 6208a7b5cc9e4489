"""Actors that stream, and one that reads streams in a process of its own. Every rank process imports this module."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from actors import TaskFailed
from forge import ForgeActor, endpoint
from forge.runtime import streams


class Streamer(ForgeActor):
    """Yields what a test tells it to, and remembers which of its generators have ended."""

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.num_yielded = 0

    def gate(self, key: str) -> asyncio.Event:
        return self.gates.setdefault(key, asyncio.Event())

    @endpoint(concurrent=True)
    async def open(self, key: str) -> None:
        self.gate(key).set()

    @endpoint(concurrent=True)
    async def passed(self, key: str) -> int:
        """Answer when the gate `key` is open: one `closed KEY` opens when the generator `KEY` has ended."""
        await self.gate(key).wait()
        return os.getpid()

    @endpoint(concurrent=True)
    async def count_yielded(self) -> int:
        return self.num_yielded

    @endpoint(concurrent=True)
    async def kept(self) -> tuple[int, int]:
        """How many streams this actor knows, and how many calls beside this one."""
        dispatcher = self._forge_dispatcher()
        return len(dispatcher._windows), len(dispatcher._by_call) - 1

    @endpoint
    async def count(self, num_items: int, *, fail_at: int | None = None) -> AsyncIterator[int]:
        """Numbers, as fast as they are let through, without ever waiting by itself."""
        self.num_yielded = 0
        for number in range(num_items):
            if number == fail_at:
                raise TaskFailed(number)
            self.num_yielded += 1
            yield number

    @endpoint
    async def step(self, key: str, num_items: int = 2) -> AsyncIterator[int]:
        """The pid at once; then the rest, each when the gate `key` is open."""
        try:
            yield os.getpid()
            for number in range(1, num_items):
                await self.gate(key).wait()
                yield number
        finally:
            self.gate(f"closed {key}").set()

    @endpoint
    async def insist(self, key: str) -> AsyncIterator[int]:
        """Goes on when it is cancelled."""
        try:
            yield 0
            try:
                await self.gate(key).wait()
            except asyncio.CancelledError:
                self.gate(f"swallowed {key}").set()
            while True:
                yield 1
        finally:
            self.gate(f"closed {key}").set()

    @endpoint
    async def yield_oddly(self) -> AsyncIterator[Any]:
        try:
            yield "first"
            yield threading.Lock()
        finally:
            self.gate("closed oddly").set()

    @endpoint
    async def by_rank(self, num_items: list[int]) -> AsyncIterator[tuple[int, int]]:
        """So many items on each rank; a negative number fails on the first item."""
        rank = int(os.environ["RANK"])
        if num_items[rank] < 0:
            raise TaskFailed(rank)
        for number in range(num_items[rank]):
            yield rank, number
        self.gate("ended").set()

    @endpoint(retry=True)
    async def die_first(self, folder: str, *, num_before: int) -> AsyncIterator[int]:
        """In the first process: so many items and then no more, or its death; in the next one it yields its pid."""
        try:
            Path(folder, "dead").touch(exist_ok=False)
        except FileExistsError:
            yield os.getpid()
            return
        for _ in range(num_before):
            yield os.getpid()
        if num_before:
            await self.gate("never").wait()
        os.kill(os.getpid(), signal.SIGKILL)


class Impatient(Streamer):
    """Asks a reader that does not read for a sign of life after a moment."""

    @endpoint
    async def setup(self) -> None:
        assert streams.HEARTBEAT_S > 4, "it has another name or value now"
        streams.HEARTBEAT_S = 4.0


class Reader(ForgeActor):
    """Reads streams of a service or an actor from a process of its own."""

    def __init__(self, source: Any) -> None:
        self.source = source

    @endpoint
    async def read_all(self, num_items: int) -> list[int]:
        return [item async for item in self.source.count.stream(num_items)]

    @endpoint(concurrent=True)
    async def read_step(self, key: str) -> AsyncIterator[int]:
        """Pass a stream on."""
        async for item in self.source.step.stream(key):
            yield item

    @endpoint
    async def read_one(self) -> int:
        """Take one item and hold the rest."""
        self.held = self.source.count.stream(1000)
        return await anext(self.held)  # type: ignore[no-any-return]

    @endpoint
    async def read_rest(self) -> int:
        return len([item async for item in self.held])
