"""The rendezvous server and its lines, over real sockets; other processes where their deaths matter."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest

import registries
from forge.errors import CallTimeout, RemoteError
from forge.runtime import framing, rendezvous, sockets
from forge.runtime.control import ControlLoop
from forge.runtime.rendezvous import Connection, ConnectionFailure, RendezvousServer
from forge.runtime.rendezvous_client import JOIN, REPLY, REQUEST
from registries import NoAnswer, NotPicklable, TestRegistry, Unreadable

SECRET = secrets.token_bytes(32)
SUPPORT = Path(__file__).parents[2] / "support"


class Site:
    """A rendezvous server with one registry, on an event loop of its own."""

    def __init__(self) -> None:
        self.control = ControlLoop("test-rendezvous")
        self.registry = TestRegistry()
        self.server = RendezvousServer(
            SECRET, run_id="abc123", openers={"test": lambda: self.registry, "absent": "no.module"}
        )
        self.control.start(self._open()).result(60)
        self.lines: list[Connection] = []

    async def _open(self) -> None:
        await self.server.open()
        await self.server.open_tcp("127.0.0.1")

    def line(self, *, number: int = 0, registry: str = "test", host: str = "here") -> Connection:
        self.lines.append(Connection.open([self.server.addresses[number]], SECRET, registry=registry, host=host))
        return self.lines[-1]

    def close(self) -> None:
        self.control.start(self.server.close()).result(60)

    def bare(self, number: int = 0) -> socket.socket:
        """A connection that knows the address and nothing else."""
        sock = socket.socket(socket.AF_UNIX if number == 0 else socket.AF_INET)
        sock.settimeout(60)
        place = self.server.addresses[number]
        sock.connect("\0" + place[6:] if number == 0 else ("127.0.0.1", int(place.rpartition(":")[2])))
        return sock


@pytest.fixture
def site() -> Iterator[Site]:
    before = set(threading.enumerate())
    site = Site()
    yield site
    site.close()
    for line in site.lines:
        line.close()
        assert not line.is_open
    site.control.stop()
    left = [
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith(("forge-rendezvous", "test-rendezvous"))
    ]
    for thread in left:  # it may be in its last steps
        thread.join(600)
    assert [thread.name for thread in left if thread.is_alive()] == []


@pytest.fixture(params=[0, 1], ids=["unix", "tcp"])
def line(site: Site, request: pytest.FixtureRequest) -> Connection:
    return site.line(number=request.param)


def test_an_answer_comes_back(line):
    assert line.call("echo", {"a": [1, 2.5, b"x"]}) == {"a": [1, 2.5, b"x"]}
    assert line.request("echo").result(60) is None
    assert line.call("who") == (1, os.getpid(), "here")
    assert line.run_id == "abc123"
    assert line.is_open


def test_requests_can_be_awaited_on_any_loop(line):
    async def many() -> list[int]:
        return await asyncio.gather(*(line.call_async("echo", i) for i in range(200)))

    assert asyncio.run(many()) == list(range(200))
    assert asyncio.run(line.call_async("echo", 1)) == 1


def test_requests_and_tellings_begin_in_the_order_they_were_made(site, line):
    wanted = list(range(500))
    for i in wanted:
        if i % 2:
            line.notify("note", i)
        else:
            line.request("note", i)
    line.call("echo")
    assert [entry for entry in site.registry.log if isinstance(entry, int)] == wanted


def test_a_slow_answer_delays_no_other(site, line):
    slow = line.request("hold", "gate")
    assert line.call("echo", 1) == 1
    assert site.line().call("echo", 2) == 2
    assert not slow.done()
    line.call("open", "gate")
    assert slow.result(60) == "gate"


@pytest.mark.parametrize("number", [0, 1], ids=["unix", "tcp"])
def test_large_messages_go_both_ways_while_small_ones_pass(site, number):
    line, other = site.line(number=number), site.line(number=number)
    body = os.urandom(48 << 20)
    large = [line.request("echo", body) for _ in range(2)]
    num_small = 0
    while not all(future.done() for future in large):
        assert other.call("echo", num_small) == num_small
        num_small += 1
    assert [future.result(60) == body for future in large] == [True, True]
    assert num_small > 2, "the control loop was stalled"


def test_messages_of_every_length_around_the_borders_arrive(line):
    for size in (0, 1, 65536 - 200, 65536, 65536 + 200, framing.CHUNK, framing.CHUNK + 1, 3 * framing.CHUNK + 7):
        bodies = [bytes([i]) * size for i in range(3)]
        futures = [line.request("echo", body) for body in bodies]
        assert [future.result(60) for future in futures] == bodies


def test_what_is_too_large_for_a_line_is_refused_where_it_was_made(monkeypatch, site, line):
    monkeypatch.setattr(framing, "MAX_BODY", 1000)
    with pytest.raises(ConnectionFailure, match="too large") as caught:
        line.call("echo", b"x" * 2000)
    assert caught.value.rule == "at most 1000 bytes"
    assert caught.value.repair
    monkeypatch.undo()
    assert line.call("echo", 1) == 1


def test_what_the_desk_raises_is_raised_with_its_traceback(line):
    with pytest.raises(NoAnswer, match="no answer: 7") as caught:
        line.call("fail", 7)
    assert caught.value.code == 7
    assert "do_fail" in caught.value.remote_traceback
    assert any("Remote traceback" in note for note in caught.value.__notes__)
    with pytest.raises(AttributeError, match="do_nothing"):
        line.call("nothing")
    for how, name in (("exit", "SystemExit"), ("cancel", "CancelledError")):
        with pytest.raises(RemoteError) as caught:
            line.call("fail", how)
        assert caught.value.type_name.endswith(name)
    assert line.call("echo", 1) == 1


def test_what_cannot_travel_is_raised_to_the_requester_and_the_line_goes_on(site, line):
    with pytest.raises(TypeError, match="does not travel"):
        line.call("echo", NotPicklable())
    with pytest.raises(ValueError, match="cannot be read"):
        line.call("echo", Unreadable())
    with pytest.raises(TypeError, match="does not travel"):
        line.call("unencodable")
    with pytest.raises(ValueError, match="cannot be read"):
        line.call("unreadable")
    line.notify("note", Unreadable())
    line.notify("nothing")
    assert line.call("echo", 1) == 1


def test_cancelling_a_request_cancels_its_answer(site, line):
    future = line.request("hold", "a")
    site.registry.until(("hold", "a"))
    assert future.cancel()
    site.registry.until(("cancelled", "a"))
    with pytest.raises(CancelledError):
        future.result(60)

    async def give_up() -> None:
        task = asyncio.create_task(line.call_async("hold", "b"))
        await asyncio.to_thread(site.registry.until, ("hold", "b"))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    site.registry.until(("cancelled", "b"))
    with pytest.raises(CallTimeout, match="'hold' was not answered within"):
        line.call("hold", "c", timeout_s=0.05)
    assert line.call("echo", 1) == 1


def test_pushed_messages_arrive_in_order_even_those_before_anyone_listened(site, line):
    heard: list[int] = []
    done = threading.Event()

    def hear(body: int) -> None:
        heard.append(body)
        if body == 2:
            raise ValueError("a callback that fails")
        if body == 5:
            done.set()

    line.call("push", [0, 1, 2])
    line.on_push(hear)
    line.call("push", [3, 4])
    site.line().call("push_all", 5)
    assert done.wait(600)
    assert heard == [0, 1, 2, 3, 4, 5]


def test_a_callback_may_ask_but_not_wait(line):
    outcomes: list[BaseException] = []
    answered = threading.Event()

    def hear(body: int) -> None:
        try:
            line.call("echo", body)
        except ConnectionFailure as error:
            outcomes.append(error)
        line.request("echo", body).add_done_callback(lambda _: answered.set())

    line.on_push(hear)
    line.call("push", [1])
    assert answered.wait(600)
    assert "own thread" in str(outcomes[0])
    assert outcomes[0].repair


def test_closing_a_line_ends_its_session_and_what_it_waits_for(site, line):
    waiting = line.request("hold", "gate")
    site.registry.until(("hold", "gate"))
    line.close()
    site.registry.until(("left", os.getpid()))
    assert site.registry.log[-2:] == [("cancelled", "gate"), ("left", os.getpid())], "cancelled first"
    with pytest.raises(ConnectionFailure, match="this process closed the connection"):
        waiting.result(60)
    with pytest.raises(ConnectionFailure):
        line.request("echo")
    with pytest.raises(ConnectionFailure):
        line.notify("note")
    assert not line.is_open


def test_when_the_point_closes_last_words_are_heard_and_pending_requests_say_that_the_run_ended(site, line):
    waiting = [line.request("hold", "gate") for _ in range(10)]
    site.registry.until(("hold", "gate"), count=10)
    line.notify("note", "last words")
    site.close()
    for future in waiting:
        with pytest.raises(ConnectionFailure, match="the run has ended"):
            future.result(60)
    assert "last words" in site.registry.log
    assert site.registry.log[-2:] == [("left", os.getpid()), "closed"]
    assert site.registry.log.count(("left", os.getpid())) == 1
    with pytest.raises(ConnectionFailure, match="the run has ended"):
        line.call("echo")
    with pytest.raises(ConnectionFailure, match="cannot be reached") as caught:
        site.line()
    assert caught.value.repair


def test_a_desk_can_turn_a_process_away(site):
    with pytest.raises(NoAnswer, match="403"):
        site.line(host="unwelcome")
    assert site.line().call("num_sessions") == 1
    assert ("left", os.getpid()) not in site.registry.log


def test_a_desk_that_is_unknown_or_does_not_open_is_told(site):
    with pytest.raises(ConnectionFailure, match="no registry 'nothing'") as caught:
        site.line(registry="nothing")
    assert caught.value.rule == "one of ['absent', 'test']"
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            site.line(registry="absent")


def test_a_desk_is_imported_by_name_and_opened_once(site):
    site.server._openers = {"test": "registries"}
    before = len(registries.opened)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: site.line().call("echo"), range(8)))
    assert len(registries.opened) == before + 1


@pytest.mark.parametrize("number", [0, 1], ids=["unix", "tcp"])
def test_strangers_are_turned_away_and_nobody_else_notices(site, number, caplog):
    line = site.line(number=number)
    silent = [site.bare(number) for _ in range(20)]
    with pytest.raises(ConnectionFailure, match="cannot be reached"):
        Connection.open([site.server.addresses[number]], b"wrong", registry="test")
    with site.bare(number) as garbage:
        garbage.sendall(b"\xff" * 4096)
        assert ended(garbage), "hung up"
    assert line.call("num_sessions") == 1
    for sock in silent:
        sock.close()


def test_a_stranger_that_says_nothing_is_hung_up_on(site, monkeypatch):
    monkeypatch.setattr("forge.runtime.rendezvous_server.HANDSHAKE_S", 0.05)
    with site.bare() as sock:
        assert ended(sock)
    monkeypatch.undo()
    with sockets.connect(site.server.addresses[0], SECRET) as sock:  # it knows the secret, and does not join
        sock.settimeout(60)
        (connection,) = site.server.connections
        site.control.loop.call_soon_threadsafe(connection._join_timer._run)  # its time is up
        assert ended(sock)


@pytest.mark.parametrize(
    "words",
    [
        framing.HEADER.pack(1 << 62, JOIN, 1),
        framing.HEADER.pack(0, 99, 1),
        framing.HEADER.pack(0, REQUEST, 1),
        framing.HEADER.pack(0, REPLY, 1),
    ],
    ids=["huge length", "unknown kind", "request before join", "a kind of the root's"],
)
def test_a_member_that_breaks_the_rules_loses_its_line_alone(site, words):
    line = site.line()
    with sockets.connect(site.server.addresses[0], SECRET) as sock:
        sock.settimeout(60)
        sock.sendall(words)
        assert ended(sock)
    assert line.call("num_sessions") == 1


def ended(sock: socket.socket) -> bool:
    """Whether the other side hangs up, after whatever it still says."""
    try:
        while sock.recv(4096):
            continue
    except ConnectionResetError:
        return True
    return True


CLIENT = """
import os, sys
from forge.runtime.rendezvous import Connection
line = Connection.open([sys.argv[1]], bytes.fromhex(sys.argv[2]), registry="test")
line.notify("hold", "held")
line.call("note", ("ready", os.getpid()))
sys.stdin.read()
"""


def start_client(site: Site, number: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CLIENT, site.server.addresses[number], SECRET.hex()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    site.registry.until(("ready", process.pid))
    return process


@pytest.mark.parametrize("number", [0, 1], ids=["unix", "tcp"])
def test_the_death_of_a_process_ends_its_session_and_a_pause_does_not(site, number):
    process = start_client(site, number)
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        line = site.line()
        line.call("push_all", b"x" * (1 << 20))
        assert line.call("num_sessions") == 2
        assert ("left", process.pid) not in site.registry.log
    finally:
        process.kill()
        process.wait(600)
        process.stdin.close()
    site.registry.until(("left", process.pid))
    assert site.registry.log[-2:] == [("cancelled", "held"), ("left", process.pid)]
    assert line.call("num_sessions") == 1


def test_a_stopped_process_does_not_hold_up_the_end(site):
    process = start_client(site, 0)
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        site.line().call("push_all", b"x" * (8 << 20))
        site.close()
        assert site.registry.log[-1] == "closed"
        assert site.registry.log.count(("left", process.pid)) == 1
    finally:
        process.kill()
        process.wait(600)
        process.stdin.close()


def test_a_reader_that_never_reads_cannot_fill_the_roots_memory(site, monkeypatch):
    monkeypatch.setattr("forge.runtime.rendezvous_server._MAX_BACKLOG", 4 << 20)
    process = start_client(site, 0)
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        line = site.line()
        for _ in range(10):
            line.call("push_all", b"x" * (1 << 20))
        site.registry.until(("left", process.pid))
        assert line.call("num_sessions") == 1
    finally:
        process.kill()
        process.wait(600)
        process.stdin.close()


def test_two_hundred_clients_at_once(site):
    with ThreadPoolExecutor(32) as pool:
        opened = list(pool.map(lambda number: site.line(number=number % 2), range(200)))
        assert len({line.call("who")[0] for line in opened}) == 200
        futures = [line.request("echo", i) for i, line in enumerate(opened) for _ in range(10)]
        assert [future.result(60) for future in futures] == [i for i in range(200) for _ in range(10)]
        assert opened[0].call("num_sessions") == 200
        list(pool.map(Connection.close, opened[1:]))
    site.registry.until(("left", os.getpid()), count=199)
    assert opened[0].call("num_sessions") == 1


def test_lines_work_over_tls(tmp_path, monkeypatch):
    from test_sockets import make_certificates

    make_certificates(tmp_path)
    for name, file in zip(sockets.TLS_VARIABLES, ("host.crt", "host.key", "ca.crt"), strict=True):
        monkeypatch.setenv(name, str(tmp_path / file))
    site = Site()
    try:
        line = site.line(number=1)
        assert line._is_tls
        body = os.urandom(9 << 20)
        large = [line.request("echo", body) for _ in range(3)]  # both directions at once, from several threads
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda i: line.call("echo", i), range(400))) == list(range(400))
        assert [future.result(60) == body for future in large] == [True] * 3
        with site.bare(1) as plain:
            plain.sendall(b"x" * 200)
            assert ended(plain)
    finally:
        site.close()
        line.close()
        site.control.stop()


def test_a_forked_child_has_a_line_of_its_own_and_lets_go_of_the_parents(site):
    """The child stays while the parent's line closes: the session must end all the same."""
    line = site.line()
    address, (reader, writer) = site.server.addresses[0], os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.read(reader, 1)
            child = Connection.open([address], SECRET, registry="test")
            with contextlib.suppress(ConnectionFailure):
                line.call("echo")
                raise AssertionError("a line of the parent's")
            code = 0 if child.call("who")[1] == os.getpid() and not line.is_open else 2
        finally:
            os._exit(code)
    line.close()
    site.registry.until(("left", os.getpid()))
    os.write(writer, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(reader)
    os.close(writer)
    site.registry.until(("left", pid))


def test_the_host_is_that_of_the_machine_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.delenv(rendezvous.HOST, raising=False)
    mine = rendezvous.host_id()
    ask = [sys.executable, "-c", "from forge.runtime import rendezvous; print(rendezvous.host_id())"]
    assert subprocess.run(ask, capture_output=True, text=True, timeout=600, check=True).stdout.strip() == mine
    monkeypatch.setenv(rendezvous.HOST, "")
    assert rendezvous.host_id() == mine
    monkeypatch.setenv(rendezvous.HOST, "elsewhere")
    assert rendezvous.host_id() == "elsewhere"


def test_a_client_loads_neither_monarch_nor_torch():
    check = "import sys, forge.runtime.rendezvous; sys.exit(any(name in sys.modules for name in ('monarch', 'torch')))"
    assert subprocess.run([sys.executable, "-c", check], timeout=600, check=False).returncode == 0


def test_a_secret_that_is_none_is_told():
    environ = {**os.environ, rendezvous.RENDEZVOUS: "unix:@x", rendezvous.SECRET: "no hex"}
    done = subprocess.run(
        [sys.executable, "-c", "from forge.runtime import rendezvous; rendezvous.run_id()"],
        env=environ, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert "the run's secret cannot be read" in done.stderr
    assert "repair: unset FORGE_SECRET" in done.stderr
    assert "no hex" not in done.stderr
