"""Actors that the tests of RDMA buffers spawn."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import threading
from typing import Any

from forge import ForgeActor, endpoint
from forge.store.transports.rdma import Descriptor, RdmaHolder, RdmaReader


def pattern(size: int) -> bytes:
    return random.Random(11).randbytes(size)


class Holds(ForgeActor):
    """Has a segment in a memfd and registers it."""

    def __init__(self, size: int, chunk_bytes: int) -> None:
        self.size, self.chunk_bytes = size, chunk_bytes

    @endpoint
    async def setup(self) -> None:
        descriptor = os.memfd_create("held")
        os.ftruncate(descriptor, self.size)
        self.mapped = mmap.mmap(descriptor, self.size)
        os.close(descriptor)
        self.mapped[:] = pattern(self.size)
        self.holder = RdmaHolder(chunk_bytes=self.chunk_bytes)

    @endpoint
    async def register(self, name: str) -> Descriptor:
        return self.holder.register(name, memoryview(self.mapped))

    @endpoint
    async def register_empty(self, name: str) -> Descriptor:
        return self.holder.register(name, memoryview(bytearray()))

    @endpoint
    async def change(self, offset: int, data: bytes) -> None:
        self.mapped[offset : offset + len(data)] = data

    @endpoint
    async def release(self, name: str) -> None:
        self.holder.release(name)

    @endpoint
    async def close(self) -> None:
        self.holder.close()
        self.holder.close()


class Reads(ForgeActor):
    """Reads ranges in three ways: on its event loop, on a thread with its context, on a bare thread."""

    @endpoint
    async def setup(self) -> None:
        self.reader = RdmaReader(stall_s=8)

    @endpoint
    async def read(self, source: Descriptor, spans: list[tuple[int, int]], how: str = "thread") -> list[bytes]:
        targets = [bytearray(size) for _, size in spans]
        ranges = [(start, memoryview(target)) for (start, _), target in zip(spans, targets, strict=True)]
        if how == "loop":
            self.reader.read(source, ranges)
        elif how == "thread":
            await asyncio.to_thread(self.reader.read, source, ranges)
        else:
            thread = threading.Thread(target=self.reader.read, args=(source, ranges))
            thread.start()
            await asyncio.to_thread(thread.join)
        return [bytes(target) for target in targets]

    @endpoint
    async def read_into_constant(self, source: Descriptor) -> None:
        self.reader.read(source, [(0, memoryview(b"fixed"))])

    @endpoint
    async def close(self) -> None:
        self.reader.close()
        self.reader.close()

    @endpoint
    async def make(self, what: str, keywords: dict[str, Any], where: str) -> None:
        """Make a holder or a reader, here or on a bare thread, and close it."""
        cls = {"holder": RdmaHolder, "reader": RdmaReader}[what]
        if where == "here":
            cls(**keywords).close()
            return
        raised: list[Exception] = []

        def work() -> None:
            try:
                cls(**keywords).close()
            except Exception as error:  # noqa: BLE001 - raised below
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        await asyncio.to_thread(thread.join)
        if raised:
            raise raised[0]
