"""Commands from the page: only with --control, only for runs of this machine and user, and only from the page."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forge.errors import ConfigError, OptionError
from forge.loops.run_control import SOCKET_NAME, listening
from forge.ui.control_routes import MAX_WAITING
from forge.ui.server import UiOptions, serve_ui
from run_folders import write_metrics
from ui_serving import Client, ui_client

Answer = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
STATUS = {"step": 3, "max_steps": None, "waits_for": [], "settings": {}, "planned": [], "commands": {}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write_metrics(folder, 2)
    return folder


def with_ui(
    run: Path, body: Callable[[Client], Awaitable[None]], *, answer: Answer | None = None, **options: Any
) -> None:
    async def nobody(request: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**STATUS}

    async def inside() -> None:
        async with ui_client(run.parent, **{"control": True, **options}) as client, listening(run, answer or nobody):
            await body(client)

    asyncio.run(inside())


@asynccontextmanager
async def sent(client: Client, body: Any, headers: Mapping[str, str] | None = None) -> AsyncIterator[Any]:
    """The answer to a command, as the page sends it unless `headers` say otherwise."""
    own = {"Authorization": f"Bearer {client.ui.token}", "Content-Type": "application/json", **(headers or {})}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"{client.ui.base_url}/api/control"
    async with client.http.post(url, data=data, headers={k: v for k, v in own.items() if v}) as answer:
        yield answer


def test_a_command_reaches_the_run_with_who_asked_and_is_answered(run: Path) -> None:
    asked: list[Mapping[str, Any]] = []

    async def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.append(request)
        return {"from_step": 4, "changes": []}

    async def body(client: Client) -> None:
        command = {"run": "run", "command": "set", "values": {"a.b": 1e-5, "c": None, "d": "x"}, "by": "me", "more": 1}
        async with sent(client, command) as found:
            assert (found.status, await found.json()) == (200, {"from_step": 4, "changes": []})
        async with sent(client, {"run": "run", "command": "save", "values": {"a": 1}}) as found:
            assert found.status == 200

    with_ui(run, body, answer=answer)
    assert asked == [
        {"command": "set", "values": {"a.b": 1e-5, "c": None, "d": "x"}, "by": "forge ui"}, {"command": "save"},
    ]  # fmt: skip


def test_what_a_run_refuses_is_told_in_full(run: Path) -> None:
    async def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        raise OptionError("the run refuses this value", path="a.b", value=-1, rule="greater than 0", repair="raise it")

    async def body(client: Client) -> None:
        async with sent(client, {"run": "run", "command": "set", "values": {"a.b": -1}}) as found:
            assert found.status == 409
            error = (await found.json())["error"]
        assert {name: error[name] for name in ("message", "path", "value", "rule", "repair", "type")} == {
            "message": "the run refuses this value", "path": "a.b", "value": -1, "rule": "greater than 0",
            "repair": "raise it", "type": "OptionError",
        }  # fmt: skip

    with_ui(run, body, answer=answer)


def test_without_control_nothing_can_be_posted(run: Path) -> None:
    async def body(client: Client) -> None:
        async with sent(client, {"run": "run", "command": "stop"}) as found:
            assert found.status == 404
        async with client.raw("/api/control", run="run") as found:
            assert found.status == 404
        assert (await client.get("/api/run", run="run"))["canControl"] is False
        for path in ("/", "/api/runs", "/api/run", "/api/metrics", "/api/config", "/api/compare", "/api/timeline"):
            headers = {"Authorization": f"Bearer {client.ui.token}"}
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                async with client.http.request(method, f"{client.ui.base_url}{path}", headers=headers) as found:
                    assert found.status in (404, 405)

    with_ui(run, body, control=False)


def test_a_status_says_why_a_run_takes_no_commands(run: Path) -> None:
    async def body(client: Client) -> None:
        assert await client.get("/api/control", run="run") == {"isActive": True, "why": "", **STATUS}
        (run / SOCKET_NAME).unlink()
        found = await client.get("/api/control", run="run")
        assert (found["isActive"], found["why"]) == (False, "it is not active, or not on this machine")
        async with sent(client, {"run": "run", "command": "stop"}) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (409, "not_active")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:  # of a run that was killed
            dead.bind(str(run / SOCKET_NAME))
        found = await client.get("/api/control", run="run")
        assert (found["isActive"], found["why"]) == (False, "the run is not active")

    with_ui(run, body)


def test_only_a_socket_of_this_user_is_asked(run: Path, tmp_path: Path) -> None:
    """Neither a link to another program's socket, nor one that belongs to another user."""
    asked: list[object] = []

    async def other(request: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.append(request)
        return {}

    async def body(client: Client) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (run / SOCKET_NAME).unlink()
        async with listening(elsewhere, other):
            (run / SOCKET_NAME).symlink_to(elsewhere / SOCKET_NAME)
            async with sent(client, {"run": "run", "command": "stop"}) as refused:
                assert refused.status == 409
            (run / SOCKET_NAME).unlink()
            if os.geteuid() == 0:
                os.link(elsewhere / SOCKET_NAME, run / SOCKET_NAME)
                os.chown(run / SOCKET_NAME, 12345, -1)
                found = await client.get("/api/control", run="run")
                assert found["why"] == "it belongs to another user"
                async with sent(client, {"run": "run", "command": "stop"}) as refused:
                    assert refused.status == 409
                os.chown(elsewhere / SOCKET_NAME, 0, -1)
                (run / SOCKET_NAME).unlink()

    with_ui(run, body)
    assert asked == []


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"{", 400, "JSON"), (b"[" * 30_000, 400, "JSON"), ([], 400, "run"), ({"command": "stop"}, 400, "run"),
        ({"run": 3, "command": "stop"}, 400, "run"), ({"run": "run"}, 400, "command"),
        ({"run": "run", "command": "scale"}, 400, "command"), ({"run": "run", "command": ["stop"]}, 400, "command"),
        ({"run": "run", "command": "set"}, 400, "values"),
        ({"run": "run", "command": "set", "values": {}}, 400, "values"),
        ({"run": "run", "command": "set", "values": {"a": [1]}}, 400, "values"),
        (b'{"run": "run", "command": "set", "values": {"a": NaN}}', 400, "values"),
        ({"run": "run", "command": "set", "values": {"a": 10**400}}, 400, "values"),
        ({"run": "run", "command": "set", "values": {str(n): n for n in range(17)}}, 400, "values"),
        ({"run": "../run", "command": "stop"}, 404, "run"), (b'{"run": "' + b"x" * 70_000 + b'"}', 413, "large"),
    ],
)  # fmt: skip
def test_what_is_no_command_reaches_no_run(run: Path, body: Any, status: int, named: str) -> None:
    async def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        raise AssertionError("it has reached the run")

    async def ask(client: Client) -> None:
        async with sent(client, body) as found:
            assert found.status == status
            assert named in json.dumps(await found.json())

    with_ui(run, ask, answer=answer)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "own"}, 200), ({}, 403), ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403),
        ({"Origin": "own", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "own", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://evil.example", "Authorization": "Bearer wrong"}, 403),
        ({"Origin": "own", "Content-Type": "text/plain"}, 415),
        ({"Origin": "own", "Content-Type": "application/json; charset=no-such"}, 400),
        ({"Origin": "own", "Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Origin": "own", "Content-Type": "multipart/form-data"}, 415),
    ],
)  # fmt: skip
def test_only_the_page_itself_can_send_commands_with_the_cookie(
    run: Path, headers: dict[str, str], status: int
) -> None:
    async def body(client: Client) -> None:
        cookie = f"{client.ui._access.cookie}={client.ui._access._session}"
        own = {**headers, "Cookie": cookie}
        if own.get("Origin") == "own":
            own["Origin"] = client.ui.base_url
        async with sent(client, {"run": "run", "command": "stop"}, {"Authorization": "", **own}) as found:
            assert found.status == status

    with_ui(run, body)


def test_commands_that_wait_are_bounded_and_the_run_carries_out_what_it_has_heard(run: Path) -> None:
    release, are_all_here = asyncio.Event(), asyncio.Event()
    heard: list[object] = []
    carried_out: list[object] = []

    async def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        heard.append(request)
        if len(heard) == MAX_WAITING:
            are_all_here.set()
        await release.wait()
        carried_out.append(request)
        return {}

    async def body(client: Client) -> None:
        async def save() -> int:
            async with sent(client, {"run": "run", "command": "save"}) as found:
                return int(found.status)

        waiting = [asyncio.create_task(save()) for _ in range(MAX_WAITING)]
        await are_all_here.wait()
        assert await save() == 503
        waiting.pop().cancel()  # a page that is closed
        release.set()
        assert await asyncio.gather(*waiting) == [200] * (MAX_WAITING - 1)
        assert await save() == 200

    with_ui(run, body, answer=answer)
    assert len(carried_out) == MAX_WAITING + 1


def test_a_server_with_control_ends_while_commands_wait(run: Path) -> None:
    heard, is_over = asyncio.Event(), asyncio.Event()

    async def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        heard.set()
        await is_over.wait()
        return {}

    async def inside() -> None:
        async with listening(run, answer):
            async with ui_client(run.parent, control=True) as client:

                async def save() -> None:
                    async with sent(client, {"run": "run", "command": "save"}):
                        pass

                task = asyncio.create_task(save())
                await heard.wait()
            await asyncio.gather(task, return_exceptions=True)
            is_over.set()

    asyncio.run(asyncio.wait_for(inside(), 600))


def test_control_is_not_offered_in_the_clear_to_other_machines(tmp_path: Path) -> None:
    async def inside() -> None:
        async with serve_ui(UiOptions(tmp_path, host="0.0.0.0", insecure=True, control=True)):
            raise AssertionError("it serves")

    with pytest.raises(ConfigError) as raised:
        asyncio.run(inside())
    assert (raised.value.path, raised.value.value) == ("--control", "0.0.0.0")
    assert "ssh -L" in str(raised.value.repair)
