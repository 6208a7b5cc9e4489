"""RDMA buffers between two actors. Without the hardware they run over Monarch's own fallback, which is forced here."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from forge.errors import StoreError
from forge.store.transports import rdma
from rdma_actors import Holds, Reads, pattern

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SIZE = 1_000_003
CHUNK = 1 << 16
FORCED = {rdma.FORCE: "force"}


async def pair():
    return await asyncio.gather(
        Holds.options(env=FORCED).as_actor(SIZE, CHUNK), Reads.options(env=FORCED).as_actor()
    )  # fmt: skip


def expected(spans: list[tuple[int, int]]) -> list[bytes]:
    data = pattern(SIZE)
    return [data[start : start + size] for start, size in spans]


def test_ranges_arrive_exactly(drive):
    order = random.Random(2)
    spans = [(order.randrange(SIZE), order.choice([0, 1, 100, CHUNK, 3 * CHUNK, SIZE])) for _ in range(40)]
    spans = [(start, min(size, SIZE - start)) for start, size in spans]
    spans += [(0, SIZE), (CHUNK, CHUNK), (CHUNK - 1, 2), (SIZE - 1, 1), (0, 0)]

    async def body():
        holder, reader = await pair()
        source = await holder.register.call_one("weights")
        assert (source.name, source.size, len(source.buffers)) == ("weights", SIZE, -(-SIZE // CHUNK))
        assert await reader.read.call_one(source, spans) == expected(spans)
        for how in ("loop", "bare thread"):
            assert await reader.read.call_one(source, spans[-5:], how) == expected(spans[-5:])
        assert await reader.read.call_one(source, []) == []
        empty = await holder.register_empty.call_one("empty")
        assert await reader.read.call_one(empty, [(0, 0)]) == [b""]

    drive(body())


def test_a_registration_lasts_and_shows_what_is_in_memory_now(drive):
    async def body():
        holder, reader = await pair()
        first = await holder.register.call_one("weights")
        again = await holder.register.call_one("weights")
        assert [repr(one._buffer) for one in first.buffers] == [repr(one._buffer) for one in again.buffers]
        await holder.change.call_one(CHUNK + 5, b"changed")
        assert await reader.read.call_one(first, [(CHUNK + 5, 7)]) == [b"changed"]
        await holder.release.call_one("weights")
        await holder.release.call_one("weights")
        with pytest.raises(StoreError, match="segment 'weights' could not be read over RDMA") as caught:
            await reader.read.call_one(first, [(0, SIZE)])
        assert str(caught.value.path).endswith("/weights")
        fresh = await holder.register.call_one("weights")
        assert await reader.read.call_one(fresh, [(9, 20)]) == expected([(9, 20)])
        await holder.close.call_one()
        with pytest.raises(StoreError, match="could not be read"):
            await reader.read.call_one(fresh, [(0, 10)])
        with pytest.raises(StoreError, match="was closed"):
            await holder.register.call_one("weights")

    drive(body())


def test_what_the_reader_got_wrong(drive):
    async def body():
        holder, reader = await pair()
        source = await holder.register.call_one("weights")
        for start, size in [(SIZE, 1), (SIZE - 1, 2), (-1, 1)]:
            with pytest.raises(StoreError, match="outside of segment 'weights'") as caught:
                await reader.read.call_one(source, [(0, 10), (start, size)])
            assert caught.value.value == {"offset": start, "nbytes": size}
        with pytest.raises(StoreError, match="cannot be used"):
            await reader.read_into_constant.call_one(source)
        await reader.close.call_one()
        with pytest.raises(StoreError, match="was closed"):
            await reader.read.call_one(source, [(0, 10)])

    drive(body())


def test_a_holder_that_was_killed_is_named(drive):
    async def body():
        holder, reader = await pair()
        source = await holder.register.call_one("weights")
        assert await reader.read.call_one(source, [(0, 10)]) == expected([(0, 10)])
        os.kill(holder.pids[0], signal.SIGKILL)
        with pytest.raises(StoreError, match="segment 'weights' could not be read over RDMA") as caught:
            await reader.read.call_one(source, [(0, SIZE)])
        assert "holds" in str(caught.value.path), "the actor that held it"
        assert "0 of 16 chunks had arrived" in str(caught.value)

    drive(body())


def test_where_and_with_what_it_can_be_made(drive):
    async def body():
        reader, plain = await asyncio.gather(
            Reads.options(env=FORCED).as_actor(), Holds.options(env=FORCED).as_actor(1, 1)
        )
        await reader.make.call_one("holder", {}, "here")
        for what in ("holder", "reader"):
            with pytest.raises(StoreError, match="need a Monarch actor") as caught:
                await reader.make.call_one(what, {}, "bare thread")
            assert "endpoint" in str(caught.value.rule)
        await plain.close.call_one()

    drive(body())


def test_outside_of_an_actor_it_is_refused(monkeypatch):
    monkeypatch.setenv(rdma.FORCE, "force")
    for cls in (rdma.RdmaHolder, rdma.RdmaReader):
        with pytest.raises(StoreError, match="need a Monarch actor") as caught:
            cls()
        assert caught.value.path == f"process {os.getpid()}"


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv(rdma.FORCE, "force")
    assert rdma.available()
    monkeypatch.setenv(rdma.FORCE, "off")
    assert not rdma.available()
    with pytest.raises(StoreError, match="this machine has no RDMA") as caught:
        rdma.RdmaReader()
    assert caught.value.value == "off"
    monkeypatch.setenv(rdma.FORCE, "yes")
    with pytest.raises(StoreError, match="means nothing") as caught:
        rdma.available()
    assert (caught.value.path, caught.value.value) == (rdma.FORCE, "yes")
    monkeypatch.delenv(rdma.FORCE)
    assert rdma.available() == os.path.isdir("/sys/class/infiniband")
