"""Peers that do not know the secret gain nothing at a data server of the tensor store, and disrupt nothing."""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Iterator

import pytest

from forge.runtime import framing, sockets
from forge.store.transports.tcp_client import DataClient
from forge.store.transports.tcp_server import ASK, MAX_WAITING, READ, WRITE, DataServer, pack_table
from fuzzing import inputs, num_descriptors, resident_bytes, send_and_leave, silent_connections
from memory_segments import MemorySegments

SECRET = b"0123456789abcdef0123456789abcdef"
PATTERN = random.Random(7).randbytes(4096)
NUM_OVER_SOCKETS = 1500


def answer_to(hello: bytes) -> bytes:
    theirs, ours = hello[len(sockets._NAME) :], bytes(32)
    return sockets._NAME + ours + sockets._proof(SECRET, b"dials", theirs, ours)


def frame(kind: int, number: int, body: bytes) -> bytes:
    return framing.pack_header(kind, number, len(body)) + body


TABLE = pack_table("weights", [(0, memoryview(PATTERN))])
OLD_ANSWER = answer_to(sockets.ServerHandshake(SECRET).hello)
VALID = [
    OLD_ANSWER + frame(READ, len(TABLE), TABLE),
    OLD_ANSWER + frame(WRITE, len(TABLE), TABLE + bytes(len(PATTERN))),
    OLD_ANSWER + frame(ASK, 0, TABLE),
    framing.pack_header(WRITE, len(TABLE), framing.MAX_BODY) + TABLE + bytes(100),
]


class Site:
    def __init__(self) -> None:
        self.segments, self.asked = MemorySegments(), []
        self.segments.add("weights", PATTERN)
        self.server = DataServer(SECRET, segments=self.segments, on_ask=self._asked)
        self.place = ("127.0.0.1", int(self.server.address.rpartition(":")[2]))

    def _asked(self, name: str, payload: object) -> None:
        self.asked.append((name, payload))

    def check_service(self) -> None:
        client = DataClient(self.server.address, SECRET, num_streams=1)
        target = bytearray(len(PATTERN))
        client.read("weights", [(0, memoryview(target))])
        assert target == PATTERN
        client.close()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.server.close()


def test_no_input_is_accepted_by_the_handshake() -> None:
    before, num_before = resident_bytes(), num_descriptors()
    for number, data in enumerate(inputs(11, VALID)):
        ours, theirs = socket.socketpair()
        if number % 4 == 0:  # a right length, a wrong proof
            data = OLD_ANSWER[:-1] + bytes([data[-1] if data else 0]) + data
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(sockets.ConnectionFailure):
            sockets.accept(theirs, SECRET, timeout_s=600)
        assert theirs.fileno() == -1
        said = ours.recv(4096)
        ours.close()
        assert len(said) == sockets.HELLO_SIZE, data
    assert resident_bytes() - before < 32 << 20
    assert num_descriptors() == num_before


def test_a_flood_of_connections_disrupts_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.check_service()
    before, num_before = resident_bytes(), num_descriptors()
    silent = silent_connections(site.place, 3 * MAX_WAITING)
    site.check_service()
    with caplog.at_level(logging.WARNING, logger="forge.store"):
        for number, data in enumerate(inputs(12, VALID, NUM_OVER_SOCKETS)):
            assert len(send_and_leave(site.place, data)) <= sockets.HELLO_SIZE
            if number % 300 == 0:
                site.check_service()
    assert len(caplog.records) <= 5, "a flood fills the log"
    assert SECRET.decode() not in caplog.text
    site.check_service()
    assert resident_bytes() - before < 64 << 20
    for sock in silent:
        sock.close()
    assert num_descriptors() <= num_before + 4 * MAX_WAITING
    assert site.asked == []
    target = bytearray(len(PATTERN))
    client = DataClient(site.server.address, SECRET)
    client.read("weights", [(0, memoryview(target))])
    client.close()
    assert target == PATTERN, "a stranger wrote into a segment"


def test_a_recorded_handshake_is_worthless(site: Site) -> None:
    first, again = silent_connections(site.place, 2)
    recorded = answer_to(first.recv(sockets.HELLO_SIZE, socket.MSG_WAITALL))
    first.sendall(recorded)
    assert len(first.recv(sockets.WELCOME_SIZE, socket.MSG_WAITALL)) == sockets.WELCOME_SIZE, "it is a right one"
    again.recv(sockets.HELLO_SIZE, socket.MSG_WAITALL)
    again.sendall(recorded)
    assert again.recv(1) == b""
    for sock in (first, again):
        sock.close()
