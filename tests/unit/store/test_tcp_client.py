"""Segments over TCP, on loopback."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forge.runtime.dispatch  # noqa: F401 - brings Monarch, whose own descriptors are to be there before the first test
from forge.errors import RemoteError, StoreError, StoreKeyError
from forge.runtime import framing, sockets
from forge.store.transports import batches, tcp_server
from forge.store.transports.tcp_client import DataClient
from forge.store.transports.tcp_server import DataServer
from memory_segments import MemorySegments

SECRET = b"0123456789abcdef0123456789abcdef"
LIMIT_S = 600
PATTERN = random.Random(7).randbytes(3 << 20)

PROGRAM = """
import os, signal, sys
sys.path.insert(0, {here!r})
from memory_segments import MemorySegments
from forge.store.transports.tcp_client import DataClient
from forge.store.transports.tcp_server import DataServer
SECRET = {secret!r}
"""
DIES_WHILE_SERVING = """
def die(name, count):
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)

segments = MemorySegments(die)
segments.make("weights", 64 << 20)
print(DataServer(SECRET, segments=segments, on_ask=print).address, flush=True)
sys.stdin.read()
"""
STOPS_ANSWERING = """
def stop(name, count):
    if count == 2:
        os.kill(os.getpid(), signal.SIGSTOP)

segments = MemorySegments(stop)
segments.make("weights", 64 << 20)
print(DataServer(SECRET, segments=segments, on_ask=print).address, flush=True)
sys.stdin.read()
"""
READS = """
client = DataClient(sys.argv[1], SECRET, num_streams=1, chunk_bytes=1 << 20)
client.read("large", [(0, memoryview(bytearray(64 << 20)))])
"""


def program(body: str, *words: str) -> subprocess.Popen[str]:
    text = PROGRAM.format(here=str(Path(__file__).parents[2] / "support"), secret=SECRET) + body
    command = [sys.executable, "-c", text, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("forge-data")]


def await_end_of_connections() -> None:
    for thread in own_threads():
        if thread.name == "forge-data":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def open_sockets_and_memory() -> set[str]:
    """What this process has open of the kinds that a transport opens. Listing them opens a descriptor itself."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {name for name in found if name.startswith(("socket:", "/memfd:"))}


@pytest.fixture(autouse=True)
def leaves_no_thread_and_no_descriptor() -> Iterator[None]:
    before = open_sockets_and_memory()
    yield
    assert own_threads() == []
    assert open_sockets_and_memory() <= before


class Site:
    """A server with its segments and a client, both in this process."""

    def __init__(self, on_open: Callable[[str, int], None] | None = None) -> None:
        self.segments = MemorySegments(on_open)
        self.segments.add("weights", PATTERN)
        self.server = DataServer(SECRET, segments=self.segments, on_ask=answer)
        self._clients: list[DataClient] = []
        self.client = self.connect(chunk_bytes=1 << 16)

    def connect(self, **keywords: Any) -> DataClient:
        client = DataClient(self.server.address, SECRET, **keywords)
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close()
        assert not any(self.segments.pins.values()), "every pin was released"
        self.segments.close()


class NotImportable(Exception):
    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


def answer(name: str, payload: Any) -> Any:
    match name:
        case "double":
            return payload * 2
        case "missing file":
            raise FileNotFoundError(payload)
        case "odd":
            raise NotImportable(reason="cannot be unpickled")
        case "no value":
            return threading.Lock()
    raise StoreKeyError(f"no volume {payload!r}", path=payload)


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


def fetch(client: DataClient, ranges: list[tuple[int, int]], name: str = "weights") -> list[bytes]:
    targets = [bytearray(size) for _, size in ranges]
    client.read(name, [(start, memoryview(target)) for (start, _), target in zip(ranges, targets, strict=True)])
    return [bytes(target) for target in targets]


def expected(ranges: list[tuple[int, int]]) -> list[bytes]:
    return [PATTERN[start : start + size] for start, size in ranges]


SPANS = st.tuples(st.integers(0, len(PATTERN)), st.integers(0, 300_000)).map(
    lambda pair: (pair[0], min(pair[1], len(PATTERN) - pair[0]))
)


@pytest.mark.parametrize("num_streams", [1, 2, 4])
def test_random_ranges_are_exact(site: Site, num_streams: int) -> None:
    chunks = {size: site.connect(num_streams=num_streams, chunk_bytes=size) for size in (1, 5000, 1 << 20)}

    @settings(max_examples=40, deadline=None)
    @given(ranges=st.lists(SPANS, max_size=20), chunk=st.sampled_from([5000, 1 << 20]))
    def check(ranges: list[tuple[int, int]], chunk: int) -> None:
        assert fetch(chunks[chunk], ranges) == expected(ranges)

    check()
    assert fetch(chunks[1], [(7, 1500)]) == expected([(7, 1500)])


@given(sizes=st.lists(st.integers(1, 50), max_size=30), batch_bytes=st.integers(1, 40), batch_ranges=st.integers(1, 5))
def test_batches_cover_the_ranges_in_order(sizes: list[int], batch_bytes: int, batch_ranges: int) -> None:
    whole = memoryview(bytes(range(256)) * 6)
    ranges = [(1000 * number, whole[number : number + size]) for number, size in enumerate(sizes)]
    made = list(batches(ranges, batch_bytes=batch_bytes, batch_ranges=batch_ranges))
    assert all(0 < sum(len(view) for _, view in batch) <= batch_bytes for batch in made)
    assert all(len(batch) <= batch_ranges for batch in made)
    flat = [(offset + i, view[i]) for batch in made for offset, view in batch for i in range(len(view))]
    assert flat == [(offset + i, view[i]) for offset, view in ranges for i in range(len(view))]


def test_many_small_ranges_in_few_requests() -> None:
    opened: list[int] = []
    site = Site(lambda name, count: opened.append(count))
    order = random.Random(3)
    ranges = [(order.randrange(len(PATTERN) - 64), order.randrange(1, 64)) for _ in range(5000)]
    assert fetch(site.connect(num_streams=1), ranges) == expected(ranges)
    assert len(opened) == 5000 // tcp_server.MAX_RANGES
    site.close()


def test_small_and_large_ranges_together(site: Site) -> None:
    ranges = [(5, 3), (0, len(PATTERN)), (len(PATTERN) - 1, 1), (1 << 20, 1 << 20), (17, 1)]
    assert fetch(site.client, ranges) == expected(ranges)


def test_empty_ranges_need_no_server(site: Site) -> None:
    site.server.close()
    assert fetch(site.client, []) == []
    assert fetch(site.client, [(5, 0), (1 << 40, 0)]) == [b"", b""]
    site.client.write("weights", [(0, memoryview(b""))])


def test_targets_of_any_item_size_and_shape_are_filled_as_bytes(site: Site) -> None:
    target = memoryview(bytearray(96)).cast("I", (4, 6))
    site.client.read("weights", [(10, target)])
    assert target.tobytes() == PATTERN[10:106]


@pytest.mark.parametrize("target", [memoryview(b"fixed"), memoryview(bytearray(8))[::2], bytearray(4)])
def test_memory_that_cannot_be_filled_is_refused(site: Site, target: Any) -> None:
    with pytest.raises(StoreError, match="cannot be used") as caught:
        site.client.read("weights", [(3, target)])
    assert (caught.value.path, caught.value.value) == ("weights[3:]", target)
    assert "writable memoryview" in str(caught.value.rule)


@pytest.mark.parametrize(("offset", "size"), [(len(PATTERN), 1), (len(PATTERN) - 1, 2), (1 << 62, 1), (-1, 1)])
def test_a_range_outside_of_the_segment_is_the_readers_error(site: Site, offset: int, size: int) -> None:
    for call in (site.client.read, site.client.write):
        with pytest.raises(StoreError, match="outside of segment 'weights'") as caught:
            call("weights", [(0, memoryview(bytearray(10))), (offset, memoryview(bytearray(size)))])
        assert caught.value.value == {"offset": offset, "nbytes": size}
        assert "offset >= 0" in str(caught.value.rule)
    assert site.segments.content("weights")[10:] == PATTERN[10:]
    assert fetch(site.client, [(100, 50)]) == expected([(100, 50)])


def test_an_unknown_segment_is_a_key_error_and_the_connections_go_on(site: Site) -> None:
    fetch(site.client, [(0, len(PATTERN))])
    connections = set(own_threads())
    for call in (site.client.read, site.client.write):
        with pytest.raises(StoreKeyError, match="no segment 'gone'") as caught:
            call("gone", [(0, memoryview(bytearray(1 << 20)))])
        assert caught.value.path == "gone"
    assert fetch(site.client, [(0, len(PATTERN))]) == [PATTERN]
    assert set(own_threads()) >= connections, "the same connections served it"


def test_a_segment_shorter_than_its_source_says_does_not_kill_the_server(site: Site) -> None:
    site.segments.truncate("weights", 4096)
    with pytest.raises(StoreError, match="shorter than its"):
        fetch(site.client, [(1 << 20, 1 << 20)])
    assert site.client.ask("double", 4) == 8


def test_a_push_arrives_whole(site: Site) -> None:
    name = site.segments.create(len(PATTERN))
    assert site.segments.content(name) == bytes(len(PATTERN))
    view = memoryview(PATTERN)
    cuts = [0, 1, 5000, 5001, 1 << 20, len(PATTERN)]
    site.client.write(name, [(start, view[start:end]) for start, end in itertools.pairwise(cuts)])
    assert site.segments.content(name) == PATTERN
    site.client.write(name, [(10, memoryview(b"xyz"))])
    assert site.segments.content(name)[:14] == PATTERN[:10] + b"xyz" + PATTERN[13:14]


def test_questions_and_what_they_raise(site: Site) -> None:
    assert site.client.ask("double", [1, "two"]) == [1, "two", 1, "two"]
    with pytest.raises(StoreKeyError, match="no volume 'v7'") as caught:
        site.client.ask("volume", "v7")
    assert "in answer" in "".join(caught.value.__notes__), "the remote traceback comes along"
    with pytest.raises(FileNotFoundError, match="there"):
        site.client.ask("missing file", "there")
    with pytest.raises(RemoteError, match="NotImportable"):
        site.client.ask("odd", None)
    with pytest.raises(TypeError, match="lock"):
        site.client.ask("no value", None)
    assert site.client.ask("double", 3) == 6
    with site.server._lock:
        assert len(site.server._connections) == 1, "all on one connection"


def test_clients_and_threads_at_once(site: Site) -> None:
    order = random.Random(5)
    clients = [site.client, site.connect(num_streams=1), site.connect(num_streams=4, chunk_bytes=100_000)]
    work = [[(order.randrange(1 << 20), order.randrange(1 << 20)) for _ in range(5)] for _ in range(24)]
    with ThreadPoolExecutor(6) as pool:
        results = [pool.submit(fetch, clients[n % 3], ranges) for n, ranges in enumerate(work)]
        assert [result.result() for result in results] == [expected(ranges) for ranges in work]
    assert len(site.server._connections) <= 2 + 1 + 4


def test_a_stranger_gets_nothing_and_disturbs_nobody(site: Site) -> None:
    stranger = DataClient(site.server.address, b"another secret of the same size!")
    with pytest.raises(StoreError, match="could not open the connection") as caught:
        fetch(stranger, [(0, 10)])
    assert caught.value.path == site.server.address
    stranger.close()
    assert fetch(site.client, [(0, 10)]) == expected([(0, 10)])


def request(kind: int, ranges: list[tuple[int, int]], num_bytes: int = 0) -> bytes:
    table = pickle.dumps(("w", ranges))
    return framing.HEADER.pack(len(table) + num_bytes, kind, len(table)) + table


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (framing.HEADER.pack(0, 9, 0), "a kind that does not exist"),
        (request(tcp_server.READ, [(0, 1)] * (tcp_server.MAX_RANGES + 1)), "too many ranges"),
        (framing.HEADER.pack(1 << 22, tcp_server.READ, 1 << 22), "too large a table"),
        (framing.HEADER.pack(1 << 50, tcp_server.ASK, 0), "too large a question"),
        (request(tcp_server.READ, [(0, 1 << 50)]), "too large a read"),
        (request(tcp_server.WRITE, [(0, 6)], num_bytes=5), "a body of another size"),
    ],
)
def test_a_request_against_the_protocol_is_answered_and_the_connection_closed(
    site: Site, head: bytes, reason: str
) -> None:
    with sockets.connect(site.server.address, SECRET) as sock:
        sock.sendall(head)
        answer = framing.receive(sock)
        assert answer is not None, reason
        assert answer[0] == tcp_server.ERROR, reason
        assert b"breaks the protocol" in answer[2]
        sock.shutdown(socket.SHUT_WR)
        assert framing.receive(sock) is None
    assert fetch(site.client, [(0, 10)]) == expected([(0, 10)])


def test_a_server_killed_in_the_middle_of_a_read_is_named() -> None:
    with program(DIES_WHILE_SERVING) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        client = DataClient(address, SECRET, num_streams=2, chunk_bytes=1 << 20)
        with pytest.raises(StoreError, match="lost the connection") as caught:
            client.read("weights", [(0, memoryview(bytearray(64 << 20)))])
        assert caught.value.path == address
        assert address in str(caught.value)
        assert "reading segment 'weights'" in str(caught.value)
        assert f"of {64 << 20} bytes" in str(caught.value)
        assert server.wait(LIMIT_S) == -signal.SIGKILL
        with pytest.raises(StoreError, match="could not open the connection"):
            client.read("weights", [(0, memoryview(bytearray(10)))])
        client.close()


def test_a_server_that_stops_answering_is_given_up() -> None:
    with program(STOPS_ANSWERING) as server:
        assert server.stdout is not None
        client = DataClient(server.stdout.readline().strip(), SECRET, num_streams=1, stall_s=0.3)
        with pytest.raises(StoreError, match=r"nothing moved for 0\.3 s"):
            client.read("weights", [(0, memoryview(bytearray(64 << 20)))])
        client.close()
        server.kill()


def test_a_client_killed_in_the_middle_costs_the_server_nothing() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(name: str, count: int) -> None:
        if count == 3:
            reached.set()
            go_on.wait(LIMIT_S)

    site = Site(hold)
    site.segments.make("large", 64 << 20)
    with program(READS, site.server.address) as reader:
        assert reached.wait(LIMIT_S)
        reader.kill()
        assert reader.wait(LIMIT_S) == -signal.SIGKILL
    go_on.set()
    await_end_of_connections()
    assert len(site.server._connections) == 0
    assert not any(site.segments.pins.values())
    assert fetch(site.client, [(0, 100)]) == expected([(0, 100)])
    site.close()


def test_a_broken_connection_raises_once_and_is_dialled_again(site: Site) -> None:
    fetch(site.client, [(0, len(PATTERN))])
    broken = [thread for thread in own_threads() if thread.name == "forge-data"]
    assert len(broken) == 2
    with site.server._lock:  # the newest connection serves already, and may not be listed yet
        handles = list(site.server._connections.values())
    for handle in handles:
        handle.shutdown(socket.SHUT_RDWR)
    await_end_of_connections()
    with pytest.raises(StoreError, match="lost the connection"):
        fetch(site.client, [(0, 10)])
    assert fetch(site.client, [(0, len(PATTERN))]) == [PATTERN]
    assert fetch(site.client, [(0, len(PATTERN))]) == [PATTERN]


def test_one_broken_stream_ends_the_read_though_another_still_waits() -> None:
    reached, go_on = threading.Semaphore(0), threading.Event()

    def hold(name: str, count: int) -> None:
        reached.release()
        go_on.wait(LIMIT_S)

    site = Site(hold)
    client = site.connect(num_streams=2, stall_s=1000)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(fetch, client, [(0, len(PATTERN))])
        assert reached.acquire(timeout=LIMIT_S)
        assert reached.acquire(timeout=LIMIT_S)
        next(iter(site.server._connections.values())).shutdown(socket.SHUT_RDWR)
        error = reading.exception(LIMIT_S / 2)
        go_on.set()
    assert f"with 0 of {len(PATTERN)} bytes done" in str(error)
    site.close()


def test_closing_the_server_ends_a_read_in_progress() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(name: str, count: int) -> None:
        reached.set()
        go_on.wait(LIMIT_S)

    site = Site(hold)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(fetch, site.client, [(0, len(PATTERN))])
        assert reached.wait(LIMIT_S)
        closing = threading.Thread(target=site.server.close)
        closing.start()
        with pytest.raises(StoreError, match="lost the connection"):
            reading.result(LIMIT_S)
        go_on.set()
        closing.join(LIMIT_S)
    site.close()


def test_closing_the_client_ends_a_read_in_progress() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(name: str, count: int) -> None:
        reached.set()
        go_on.wait(LIMIT_S)

    site = Site(hold)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(fetch, site.client, [(0, len(PATTERN))])
        assert reached.wait(LIMIT_S)
        site.client.close()
        with pytest.raises(StoreError, match="lost the connection"):
            reading.result(LIMIT_S)
    go_on.set()
    with pytest.raises(StoreError, match="was closed") as caught:
        fetch(site.client, [(0, 1)])
    assert caught.value.path == site.server.address
    site.close()


def test_close_with_silent_and_idle_connections_leaves_nothing(site: Site) -> None:
    silent = socket.create_connection(("127.0.0.1", int(site.server.address.rsplit(":", 1)[1])))
    assert silent.recv(1), "it is being greeted, and says nothing"
    fetch(site.client, [(0, len(PATTERN))])
    site.server.close()
    assert own_threads() == [thread for thread in own_threads() if thread.name.startswith("forge-data-client")]
    assert len(site.server._connections) == 0
    site.server.close()
    silent.close()


def test_connections_are_bounded_and_room_is_found_again() -> None:
    segments = MemorySegments()
    segments.add("weights", PATTERN)
    server = DataServer(SECRET, segments=segments, on_ask=answer, max_connections=2)
    first, second = (DataClient(server.address, SECRET, num_streams=size) for size in (2, 1))
    assert fetch(first, [(0, len(PATTERN))]) == [PATTERN]
    with pytest.raises(StoreError, match="could not open the connection"):
        fetch(second, [(0, 10)])
    first.close()
    await_end_of_connections()
    assert fetch(second, [(0, 10)]) == expected([(0, 10)])
    second.close()
    server.close()
    segments.close()


def test_bytes_travel_encrypted_where_certificates_are_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=store", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    for part, file in {"CERT": "cert.pem", "KEY": "key.pem", "CA": "cert.pem"}.items():
        monkeypatch.setenv(f"HYPERACTOR_TLS_{part}", str(tmp_path / file))
    site = Site()
    ranges = [(0, len(PATTERN)), (9, 1), *((50 * n, 40) for n in range(300))]
    assert fetch(site.client, ranges) == expected(ranges)
    name = site.segments.create(len(PATTERN))
    site.client.write(name, [(0, memoryview(PATTERN))])
    assert site.segments.content(name) == PATTERN
    with pytest.raises(StoreKeyError):
        fetch(site.client, [(0, 1)], name="gone")
    assert site.client.ask("double", 21) == 42
    site.close()
