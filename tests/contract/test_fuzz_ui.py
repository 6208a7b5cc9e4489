"""Clients without the token gain nothing at `forge ui`, and disrupt nothing."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import ClientSession, web
from multidict import CIMultiDict, MultiDict
from yarl import URL

from forge.envs.chat_api.errors import RequestError
from forge.loops.run_control import listening
from forge.runtime.accepting import MAX_WAITING
from forge.ui.access import Access
from forge.ui.server import UiOptions, UiServer, serve_ui
from fuzzing import inputs, num_descriptors, resident_bytes, send_and_leave, silent_connections
from run_folders import make_grpo_run

NUM_HOSTS = 30_000
NUM_OVER_SOCKETS = 1500
PATHS = (
    *("/", "/run/x", "/compare", "/api/runs", "/api/run", "/api/metrics", "/api/events", "/api/config", "/assets/x.js"),
    *("/api/compare", "/api/compare/config", "/api/timeline", "/api/timeline/span", "/api/trace", "/api/profile"),
    *("/api/control", "/api/rollouts", "/api/rollouts/sample", "/api/rollouts/group"),
)
NUM_COMMANDS = 1500


def run_at_once(work: Any) -> web.StreamResponse | RequestError:
    """Run a coroutine that waits for nothing; return its answer, or the error that it raised."""
    try:
        work.send(None)
    except StopIteration as ended:
        answer: web.StreamResponse = ended.value
        return answer
    except RequestError as error:
        return error
    raise AssertionError("it waits for something")


async def never(request: web.Request) -> web.StreamResponse:
    raise AssertionError("a request without the token reached its handler")


def request(path: str, *, headers: Mapping[str, str], cookies: Mapping[str, str], query: Mapping[str, str]) -> Any:
    """Return what the check looks at of a request."""
    return SimpleNamespace(
        method="GET",
        path=path,
        headers=CIMultiDict({"Host": "localhost", "Accept": "text/html", **headers}),
        cookies=cookies,
        query=MultiDict(query),
        rel_url=URL(path),
        secure=False,
        protocol=None,
    )


def test_no_secret_but_the_right_one_is_accepted() -> None:
    access = Access(port=1)
    ticket, session = access.new_ticket(), access._session
    secrets = {access.token, ticket, session}
    before = resident_bytes()
    for number, data in enumerate(inputs(31, [secret.encode() for secret in secrets])):
        given = data.decode("latin-1")
        if given.strip() in secrets:
            continue
        made = request(
            PATHS[number % len(PATHS)],
            headers={"Authorization": f"Bearer {given}"},
            cookies={access.cookie: given},
            query={("token", "ticket")[number % 2]: given},
        )
        answer = run_at_once(access.check(made, never))
        assert answer.status == 401, given
        if isinstance(answer, web.Response):
            assert "Set-Cookie" not in answer.headers
            assert not any(secret in (answer.text or "") for secret in secrets)
        else:
            assert isinstance(answer, RequestError)
            assert not any(secret in answer.message for secret in secrets)
    assert resident_bytes() - before < 32 << 20
    entered = run_at_once(access.check(request("/", headers={}, cookies={}, query={"ticket": ticket}), never))
    assert entered.status == 200  # no wrong one has used it up


def is_own(host: str) -> bool:
    """Whether a host is one that no stranger's DNS answers for, by other means than the server's."""
    name = host.lower()
    if name.startswith("["):
        name, bracket, rest = name[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            return False
    else:
        name = name.partition(":")[0].rstrip(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True


def test_no_host_but_its_own_is_accepted() -> None:
    access = Access(port=1)
    valid = (b"localhost:8000", b"127.0.0.1:80", b"[::1]:8080", b"a.localhost", b"evil.example", b"10.0.0.7")
    accepted = 0
    for data in inputs(32, valid, NUM_HOSTS):
        host = data.decode("latin-1")
        made = request("/api/runs", headers={"Host": host, "Authorization": "Bearer x"}, cookies={}, query={})
        answer = run_at_once(access.check(made, never))
        assert isinstance(answer, RequestError)
        assert answer.status in (401, 421)
        if answer.status == 401:
            accepted += 1
            assert is_own(host), host
    assert 100 < accepted < NUM_HOSTS // 2


_STOP = b'{"run": "run", "command": "stop"}'
STOP = b"Content-Length: %d\r\n\r\n%s" % (len(_STOP), _STOP)
ORIGIN = b"Origin: http://localhost\r\n"


def raw_requests(token: str) -> list[bytes]:
    """Requests that would be accepted if their token were `token`."""
    auth = f"Authorization: Bearer {token}\r\nCookie: forge_ui_1={token}\r\n".encode()
    host, json = b"Host: localhost\r\n", b"Content-Type: application/json\r\n"
    return [
        b"GET /?token=" + token.encode() + b" HTTP/1.1\r\n" + host + b"\r\n",
        b"GET /api/run?run=run HTTP/1.1\r\n" + host + auth + b"\r\n",
        b"GET /api/events?run=run HTTP/1.1\r\n" + host + auth + b"\r\n",
        b"GET /api/rollouts?run=run&q=e HTTP/1.1\r\n" + host + auth + b"\r\n",
        b"POST /api/runs HTTP/1.1\r\n" + host + auth + b"Content-Length: 1073741824\r\n\r\n{}",
        b"POST /api/runs HTTP/1.1\r\n" + host + auth + b"Transfer-Encoding: chunked\r\n\r\n40000000\r\n{}",
        *(b"POST /api/control HTTP/1.1\r\n" + host + origin + auth + json + STOP for origin in (b"", ORIGIN)),
        b"GET /api/trace?run=run HTTP/1.1\r\n" + host + auth + b"\r\n",
    ]


@contextmanager
def server(folder: Path, asked: list[Mapping[str, Any]] | None = None) -> Iterator[UiServer]:
    """A server with control on another thread, and a run that notes what it is asked for."""
    loop, started, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[UiServer] = []

    async def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if asked is not None:
            asked.append(request)
        return {}

    async def serve() -> None:
        async with listening(folder / "run", answer), serve_ui(UiOptions(folder, control=True)) as ui:
            found.append(ui)
            started.set()
            await ended.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(600)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(600)
        assert not thread.is_alive()


async def status_of(url: str, token: str) -> int:
    async with ClientSession() as http, http.get(url, headers={"Authorization": f"Bearer {token}"}) as response:
        await response.read()
        return response.status


def test_a_flood_disrupts_it_in_nothing(tmp_path: Path) -> None:
    make_grpo_run(tmp_path / "run", num_steps=3)
    asked: list[Mapping[str, Any]] = []
    with server(tmp_path, asked) as ui:
        url, place = f"{ui.base_url}/api/run?run=run", ("127.0.0.1", ui.port)
        assert asyncio.run(status_of(url, ui.token)) == 200
        before, num_before = resident_bytes(), num_descriptors()
        silent = silent_connections(place, 2 * MAX_WAITING)
        assert asyncio.run(status_of(url, ui.token)) == 200
        wrong = raw_requests(ui.token[:-1] + "?")
        for number, data in enumerate([*wrong, *inputs(33, wrong, NUM_OVER_SOCKETS)]):
            said = send_and_leave(place, data)
            assert not said.startswith(b"HTTP/1.1 2"), data
            assert ui.token.encode() not in said
            if number % 300 == 0:
                assert asyncio.run(status_of(url, ui.token)) == 200
        assert ui.num_waiting <= MAX_WAITING
        for sock in silent:
            sock.close()
        assert asyncio.run(status_of(url, ui.token)) == 200
        assert asyncio.run(status_of(url, "other")) == 401
        assert resident_bytes() - before < 64 << 20
        assert num_descriptors() <= num_before + 2 * MAX_WAITING
    assert asked == [], "a command without the token has reached the run"


def is_command(request: Mapping[str, Any]) -> bool:
    """Whether a run may hear this, by other means than the server's."""
    if request.get("command") not in ("set", "save", "evaluate", "profile", "stop"):
        return False
    if request["command"] != "set":
        return set(request) == {"command"}
    values = request["values"]
    kinds = all(value is None or isinstance(value, str | int | float) for value in values.values())
    return (
        set(request) == {"command", "values", "by"} and request["by"] == "forge ui" and kinds and 0 < len(values) < 17
    )


def test_with_the_token_nothing_but_commands_reaches_a_run(tmp_path: Path) -> None:
    make_grpo_run(tmp_path / "run", num_steps=3)
    asked: list[Mapping[str, Any]] = []
    valid = (
        b'{"run": "run", "command": "set", "values": {"training.learning_rate": 1e-5, "a": null, "b": "x"}}',
        b'{"run": "run", "command": "stop"}',
        b'{"run": "run", "command": "profile", "values": {"a": [1]}, "by": "me"}',
    )

    async def send(ui: UiServer) -> set[int]:
        headers = {"Authorization": f"Bearer {ui.token}", "Content-Type": "application/json"}
        statuses = set()
        async with ClientSession(headers=headers) as http:
            for data in [*valid, *inputs(34, valid, NUM_COMMANDS)]:
                async with http.post(f"{ui.base_url}/api/control", data=data) as response:
                    statuses.add(response.status)
                    assert "error" in await response.json() or response.status == 200
        return statuses

    with server(tmp_path, asked) as ui:
        statuses = asyncio.run(send(ui))
    assert statuses <= {200, 400, 404, 413}
    assert len(asked) >= len(valid)
    assert all(map(is_command, asked))
