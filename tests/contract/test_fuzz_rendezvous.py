"""Peers that do not know the secret gain nothing at the rendezvous server, and disrupt nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from forge.runtime import framing, sockets
from forge.runtime.control import ControlLoop
from forge.runtime.rendezvous import Connection, ConnectionFailure, RendezvousServer
from forge.runtime.rendezvous_client import JOIN
from forge.runtime.rendezvous_server import _Connection
from forge.runtime.serialization import encode
from fuzzing import NUM_INPUTS, damaged, inputs, num_descriptors, resident_bytes, send_and_leave, silent_connections
from registries import TestRegistry

SECRET = secrets.token_bytes(32)
NUM_OVER_SOCKETS = 1000
JOINED = b"".join(bytes(each) for each in framing.pack(JOIN, 1, encode(("test", 1, "here"))))
HUGE = framing.HEADER.pack(framing.MAX_BODY, JOIN, 1)


def answer_to(hello: bytes, secret: bytes = SECRET) -> bytes:
    """The right answer to a challenge."""
    theirs, ours = hello[len(sockets._NAME) :], bytes(32)
    return sockets._NAME + ours + sockets._proof(secret, b"dials", theirs, ours)


class Site:
    """A server on an event loop of its own."""

    def __init__(self) -> None:
        self.control = ControlLoop("test-fuzz-rendezvous")
        self.registry = TestRegistry()
        self.server = RendezvousServer(SECRET, run_id="abc123", openers={"test": lambda: self.registry})
        self.run(self._open())
        unix, tcp = self.server.addresses
        self.places: list[str | tuple[str, int]] = ["\0" + unix[6:], ("127.0.0.1", int(tcp.rpartition(":")[2]))]

    async def _open(self) -> None:
        await self.server.open()
        await self.server.open_tcp("127.0.0.1")

    def run(self, work: Any) -> Any:
        return self.control.start(work).result(600)

    def check_service(self) -> None:
        for address in self.server.addresses:
            line = Connection.open([address], SECRET, registry="test", host="here")
            assert line.call("echo", 1) == 1
            line.close()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.run(site.server.close())
    site.control.stop()


class Wire(asyncio.Transport):
    """A transport that notes what is written."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__({"socket": sock})
        self.written, self.is_aborted = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


async def feed(site: Site, ends: tuple[socket.socket, socket.socket]) -> list[bytes]:
    """Feed inputs to connections of the server; return those that were answered."""
    accepted, old_answer = [], answer_to(sockets.ServerHandshake(SECRET).hello)
    acceptor = site.server._listeners[0][0]
    for number, data in enumerate(inputs(1, [old_answer + JOINED, old_answer, HUGE + old_answer])):
        connection, wire = _Connection(site.server, acceptor), Wire(ends[0])
        connection.connection_made(wire)
        hello = wire.written
        if number % 4 == 0:  # the right answer to this challenge, with one bit changed
            at = len(sockets._NAME) + number % (sockets.RESPONSE_SIZE - len(sockets._NAME))
            right = bytearray(answer_to(hello))
            right[at] ^= 1
            data = bytes(right) + JOINED
        left = memoryview(data)
        while len(left) and not wire.is_aborted:
            room = connection.get_buffer(-1)
            taken = min(len(room), len(left))
            room[:taken], left = left[:taken], left[taken:]
            connection.buffer_updated(taken)
        if wire.written != hello or (len(data) >= sockets.RESPONSE_SIZE) != wire.is_aborted:
            accepted.append(data)
        connection.connection_lost(None)
    return accepted


def num_joined(site: Site) -> int:
    """Return how many peers have reached the registry. When they have left again, the server notes later."""
    return sum(word == "joined" for word, *_ in site.registry.log)


def test_no_input_is_accepted_by_the_parser(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.check_service()
    ends = socket.socketpair()
    before, num_before = resident_bytes(), num_joined(site)
    with caplog.at_level(logging.WARNING, logger="forge.runtime"):
        assert site.run(feed(site, ends)) == []
    assert resident_bytes() - before < 64 << 20
    assert num_joined(site) == num_before, "a stranger reached the registry"
    assert NUM_INPUTS // 4 < site.server.refusals.num_refused <= NUM_INPUTS
    assert len(caplog.records) <= 6, "a flood fills the log"
    assert SECRET.hex() not in caplog.text
    assert not site.server.connections
    site.check_service()
    for end in ends:
        end.close()


def test_a_recorded_handshake_is_worthless(site: Site) -> None:
    for place in site.places:
        first, again = silent_connections(place, 2)
        recorded = answer_to(first.recv(sockets.HELLO_SIZE, socket.MSG_WAITALL))
        first.sendall(recorded)
        assert len(first.recv(sockets.WELCOME_SIZE, socket.MSG_WAITALL)) == sockets.WELCOME_SIZE, "it is a right one"
        again.recv(sockets.HELLO_SIZE, socket.MSG_WAITALL)
        again.sendall(recorded)
        assert again.recv(1) == b""
        for sock in (first, again):
            sock.close()


def test_a_flood_of_connections_disrupts_nothing(site: Site) -> None:
    site.check_service()
    num_before, before = num_descriptors(), resident_bytes()
    old_answer = answer_to(sockets.ServerHandshake(SECRET).hello)
    frames = [old_answer + JOINED, HUGE + bytes(200)]
    for place in site.places:
        silent = silent_connections(place, 300)  # more than may wait
        site.check_service()
        for number, data in enumerate(inputs(2, frames, NUM_OVER_SOCKETS)):
            assert len(send_and_leave(place, data)) <= sockets.HELLO_SIZE
            if number % 250 == 0:
                site.check_service()
        for sock in silent:
            sock.close()
    site.check_service()
    assert resident_bytes() - before < 64 << 20
    assert num_descriptors() <= num_before + 2 * 128


def test_the_client_refuses_a_server_without_the_secret() -> None:
    """The other direction: what answers at the address of a dead run learns nothing and is not believed."""
    rng_inputs = inputs(3, [sockets.ServerHandshake(b"other" * 8).hello + bytes(32)], 500)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        for data in rng_inputs:
            with pytest.raises(ConnectionFailure) as caught:
                _connect_to(listener, address, data)
            assert SECRET.hex() not in str(caught.value)


def _connect_to(listener: socket.socket, address: str, data: bytes) -> None:
    def answer() -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):  # the client may leave at any time
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # the client leaves while there is more to read
                while sock.recv(4096):
                    continue

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        sockets.connect(address, SECRET, timeout_s=600).close()
    finally:
        thread.join(600)


def test_the_inputs_are_the_same_each_time() -> None:
    assert list(inputs(1, [b"abcdefgh"], 50)) == list(inputs(1, [b"abcdefgh"], 50))
    assert damaged(random.Random(1), b"abc") != b"abc"
