"""Frames: one format, whatever carries it."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from forge.runtime import framing
from forge.runtime.sockets import ConnectionFailure


def test_frames_are_found_however_the_stream_is_cut():
    chance = random.Random(7)
    sizes = [0, 1, 5, 70_000, 3, 65_519, 65_520, 300_000, 2]
    wanted = [(2, i, chance.randbytes(size)) for i, size in enumerate(sizes)]
    stream = b"".join(b"".join(framing.pack(*frame)) for frame in wanted)
    for most in (1, 16, 17, 18, 1000, 65_536, len(stream)):
        reader, found, rest = framing.FrameReader(), [], memoryview(stream)
        while rest:
            buffer = reader.buffer()
            count = min(len(buffer), len(rest), chance.randint(1, most))
            buffer[:count], rest = rest[:count], rest[count:]
            found += [(kind, number, bytes(body)) for kind, number, body in reader.advance(count)]
        assert found == wanted


@pytest.mark.parametrize("how", ["reader", "socket"])
def test_an_impossible_length_is_refused_before_memory_is_allocated(how):
    head = framing.HEADER.pack(framing.MAX_BODY + 1, 2, 1)
    reader, (ours, theirs) = framing.FrameReader(), socket.socketpair()
    reader.buffer()[: len(head)] = head
    with ours, theirs:
        ours.sendall(head)
        with pytest.raises(ConnectionFailure, match="breaks the protocol"):
            reader.advance(len(head)) if how == "reader" else framing.receive(theirs)


def test_frames_of_blocking_sockets_and_of_asyncio_are_the_same():
    body = random.Random(3).randbytes(300_000)

    async def talk() -> list[tuple[int, int, bytes]]:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        with theirs:
            sending = asyncio.to_thread(framing.send, theirs, 7, 1 << 40, memoryview(body)[:5], b"", body[5:])
            first, _ = await asyncio.gather(framing.read(reader), sending)
            writer.writelines(framing.pack(9, 4, body))
            second = await asyncio.to_thread(framing.receive, theirs)
            writer.close()
            assert await asyncio.to_thread(framing.receive, theirs) is None
        assert second is not None
        return [first, second]

    assert asyncio.run(talk()) == [(7, 1 << 40, body), (9, 4, body)]
