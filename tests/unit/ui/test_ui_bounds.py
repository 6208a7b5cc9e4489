"""What clients cannot use up: the places of pages, the server's memory, and the time of others."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from certificates import make_certificates
from forge.envs.chat_api.send_limit import _waiting_and_taken
from forge.errors import DataError
from forge.loops.run_control import listening
from forge.observe.league_table import LEAGUE_TABLE, MAX_BYTES, read_league
from forge.observe.report import read_run
from forge.ui.control_routes import ANSWER_LIMIT_S, MAX_ASKING
from forge.ui.hub import Hub
from forge.ui.live_run import LiveRun
from forge.ui.news import MAX_STREAMS
from forge.ui.run_summary import RunSummary, SummaryReader
from run_folders import write_metrics
from stepped_clock import run_stepped, skip
from ui_serving import Client, ui_client

NUM_RUNS = 1_050
"""More than one event of the list has."""
LIMIT_S = 30.0
HANG_S = 120
LINE = '{"step": 1, "time": 1.0, "values": {"train/loss": 1.0}}\n'
TAGS = json.dumps({"run": {"tags": ["t" * 100] * 5}})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose list is larger than what sockets hold that `small_buffers` has made."""
    root = tmp_path_factory.mktemp("runs")
    for number in range(NUM_RUNS):
        folder = root / f"run{number:04d}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(LINE)
        (folder / "config.yaml").write_text(TAGS)
    return root


@asynccontextmanager
async def listed(runs: Path, **options: Any) -> AsyncIterator[Client]:
    """A server that knows all runs, whose sockets hold little that was not taken."""
    async with ui_client(runs, **options) as client:
        for listener in client.ui._listener._sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 13)
        async with client.http.get(f"{client.ui.base_url}/api/events", headers=client._headers, ssl=False):
            await until(lambda: client.ui.hub.list_since(0).is_complete)
        await until(lambda: not connections(client))
        yield client


def connections(client: Client) -> list[Any]:
    server = client.ui._listener._runner.server
    assert server is not None
    return list(server.connections)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing tells what the other end has done
        await asyncio.sleep(0.005)


def ask(client: Client, path: str, tls: ssl.SSLContext | None = None) -> socket.socket:
    """A client of its own that has asked, and reads nothing by itself."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    sock.settimeout(HANG_S)
    sock.connect(("127.0.0.1", client.ui.port))
    own = sock if tls is None else tls.wrap_socket(sock)
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {client.ui.token}\r\n\r\n"
    own.sendall(head.encode())
    return own


def is_stuck(connection: Any) -> bool:
    """Whether more was sent than the systems of both ends hold."""
    transport = connection.transport
    if transport is None:
        return False
    return int(_waiting_and_taken(transport.get_extra_info("socket"))[0]) > 1 << 12


async def pass_limits_until(condition: Callable[[], bool]) -> None:
    """Let time pass in which the server looks once, again and again. `ui_client` ends this after 600 seconds."""
    while not condition():
        skip(LIMIT_S + 1)
        await asyncio.sleep(0.02)


def test_streams_that_nobody_reads_are_closed_and_leave_their_places_to_others(runs: Path) -> None:
    async def body() -> None:
        async with listed(runs) as client:
            silent = [ask(client, "/api/events") for _ in range(MAX_STREAMS)]
            await until(lambda: sum(map(is_stuck, connections(client))) == MAX_STREAMS)
            async with client.raw("/api/events") as refused:
                assert (refused.status, (await refused.json())["error"]["code"]) == (503, "too_many_pages")
            skip(LIMIT_S - 5)
            await asyncio.sleep(0.01)
            assert len((await client.get("/api/runs"))["runs"]) == NUM_RUNS
            async with client.raw("/api/events") as refused:
                assert refused.status == 503
            await pass_limits_until(lambda: not any(map(is_stuck, connections(client))))
            async with client.events() as following:
                assert (await following("list"))["runs"]
            for sock in silent:
                sock.close()

    run_stepped(body())


@pytest.mark.parametrize(("path", "has_tls"), [("/api/runs", False), ("/api/runs", True), ("/api/events", True)])
def test_answers_that_nobody_takes_end_with_their_connection(
    runs: Path, tmp_path: Path, path: str, has_tls: bool
) -> None:
    options: dict[str, Any] = {}
    tls = None
    if has_tls:
        make_certificates(tmp_path, {"ui": "IP:127.0.0.1"})
        options = {"tls_cert": tmp_path / "ui.crt", "tls_key": tmp_path / "ui.key"}
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE

    async def body() -> None:
        async with listed(runs, **options) as client:
            sock = await asyncio.to_thread(ask, client, path, tls)
            await until(lambda: any(map(is_stuck, connections(client))))
            await pass_limits_until(lambda: not connections(client))
            sock.close()

    run_stepped(body())


def test_a_client_that_reads_slowly_gets_all_of_it(runs: Path) -> None:
    async def body() -> None:
        async with listed(runs) as client:
            sock = ask(client, "/api/runs")
            await until(lambda: any(map(is_stuck, connections(client))))
            (connection,) = connections(client)
            own = connection.transport.get_extra_info("socket")
            data = b""
            for _ in range(8):  # minutes: twelve times the limit
                before = _waiting_and_taken(own)[1]
                while _waiting_and_taken(own)[1] == before:
                    data += await asyncio.to_thread(sock.recv, 1 << 12)
                skip(LIMIT_S + 1)
                await asyncio.sleep(0.01)
                assert is_stuck(connection)
            head, _, rest = data.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            while len(rest) < length:
                rest += await asyncio.to_thread(sock.recv, 1 << 16)
            assert len(json.loads(rest)["runs"]) == NUM_RUNS
            sock.close()

    run_stepped(body())


def test_a_long_list_comes_in_parts_and_a_page_that_lost_its_connection_gets_the_rest(runs: Path) -> None:
    async def body() -> None:
        async with listed(runs) as client:
            async with client.events() as following:
                first = await following("list")
                assert (len(first["runs"]), first["isComplete"]) == (1_000, False)
                second = await following("list")
            assert (len(second["runs"]), second["isComplete"]) == (NUM_RUNS - 1_000, True)
            assert len({run["id"] for part in (first, second) for run in part["runs"]}) == NUM_RUNS
            async with client.events(version=first["version"]) as following:
                assert await following("list") == second
            async with client.events(version=second["version"] + 10**6) as following:  # of another server
                assert await following("list") == first

    asyncio.run(body())


def test_a_run_that_changes_while_the_list_is_sent_comes_again(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        write_metrics(tmp_path / name, 1)

    async def body() -> None:
        hub = Hub(tmp_path)
        hub.runs.scan()
        names = [summary.id for summary in hub.runs.summarise()]
        for name in names:
            hub._note(name)
        part = hub.list_since(0, limit=2)
        assert ([run.id for run in part.runs], part.version, part.has_more) == (names[:2], 2, True)
        hub._note(names[0])
        part = hub.list_since(part.version, limit=2)
        assert ([run.id for run in part.runs], part.version, part.has_more) == ([names[2], names[0]], 4, False)
        (tmp_path / names[1] / "metrics.jsonl").unlink()
        hub.runs.scan()
        hub._note(names[1])
        part = hub.list_since(part.version)
        assert (list(part.runs), list(part.gone), part.version) == ([], [names[1]], 5)
        await hub.close()

    asyncio.run(body())


@pytest.mark.parametrize("path", ["/api/runs", "/api/events"])
def test_other_requests_are_answered_while_the_list_is_made(tmp_path: Path, path: str) -> None:
    (tmp_path / "run").mkdir()
    write_metrics(tmp_path / "run", 1)
    is_making, release = threading.Event(), threading.Event()

    class Held(RunSummary):
        """A line of the list that takes as long as the test likes."""

        def plain(self) -> dict[str, Any]:
            is_making.set()
            assert release.wait(HANG_S), "nothing else was answered"
            return super().plain()

    class Reader(SummaryReader):
        def read(self) -> RunSummary:
            return Held("run", "held")

    async def body() -> None:
        async with ui_client(tmp_path) as client:
            client.ui.hub.runs._readers["run"] = Reader(tmp_path / "run", "run")
            async with client.raw("/api/events") as opened:  # the list is read while a page is open
                asking = opened if path == "/api/events" else None
                await until(lambda: client.ui.hub.runs.summary("run") is not None)
                answer = asyncio.create_task(client.get("/api/runs")) if asking is None else None
                assert await asyncio.to_thread(is_making.wait, HANG_S)
                assert len((await client.get("/api/metrics", run="run"))["steps"]) == 1
                assert not release.is_set()
                release.set()
                if answer is not None:
                    assert [run["name"] for run in (await answer)["runs"]] == ["held"]

    try:
        asyncio.run(body())
    finally:
        release.set()


Answer = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


def with_run(tmp_path: Path, answer: Answer, body: Callable[[Client], Awaitable[None]]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_metrics(folder, 1)

    async def inside() -> None:
        async with listening(folder, answer), ui_client(tmp_path, control=True) as client:
            await body(client)

    run_stepped(inside())


def test_requests_that_wait_for_the_status_of_a_run_are_bounded(tmp_path: Path) -> None:
    release, heard = asyncio.Event(), []

    async def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        heard.append(request)
        await release.wait()
        return {"step": 3}

    async def body(client: Client) -> None:
        asking = [asyncio.create_task(client.get("/api/control", run="run")) for _ in range(MAX_ASKING)]
        await until(lambda: len(heard) == MAX_ASKING)
        async with client.raw("/api/control", run="run") as refused:
            assert refused.status == 503
            error = (await refused.json())["error"]
        assert (error["code"], error["type"]) == ("too_many_requests", "server_error")
        assert error["message"] == "64 requests for the status of runs wait already: ask again later."
        asking.pop().cancel()  # a page that is closed
        release.set()
        assert {each["step"] for each in await asyncio.gather(*asking)} == {3}
        assert (await client.get("/api/control", run="run"))["isActive"] is True

    with_run(tmp_path, answer, body)


def test_a_run_that_does_not_answer_is_not_waited_for_without_end(tmp_path: Path) -> None:
    heard, release = asyncio.Event(), asyncio.Event()

    async def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        heard.set()
        await release.wait()
        return {}

    async def body(client: Client) -> None:
        asking = asyncio.create_task(client.get("/api/control", run="run"))
        await heard.wait()
        skip(ANSWER_LIMIT_S + 1)
        assert await asking == {"isActive": False, "why": "it has not answered for 30 s"}
        release.set()

    with_run(tmp_path, answer, body)


def test_a_league_table_is_read_up_to_its_bound(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1)
    path, table = tmp_path / LEAGUE_TABLE, {"step": 1, "rating": 1.0, "members": []}
    path.write_text(json.dumps(table).ljust(MAX_BYTES))
    summary = SummaryReader(tmp_path, "run").read()
    described = LiveRun(tmp_path).describe(summary)
    assert (described["league"], described["notes"]) == (table, [])
    path.write_text(json.dumps(table).ljust(MAX_BYTES + 1))
    described = LiveRun(tmp_path).describe(summary)
    note = "league.json could not be read: a file that a run wrote: it has more than 1 MiB."
    assert (described["league"], described["notes"]) == ({}, [note])
    assert note in read_run(tmp_path, max_samples=0).notes
    with pytest.raises(DataError) as refused:
        read_league(tmp_path)
    assert refused.value.path == str(path)
    assert str(refused.value.rule).endswith("it has more than 1 MiB")
    assert "delete it" in str(refused.value.repair)
