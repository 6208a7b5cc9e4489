"""Tools of MCP servers: the real package over stdio and HTTP, and servers that do not keep to the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web

import forge
from external_envs import Unavailable, venv_or_unavailable
from forge import Agent, Task
from forge.config import EpisodeLimits
from forge.envs.check_leaks import OpenResources, resources_after
from forge.envs.external.mcp import mcp_tools
from forge.envs.external.processes import close_servers, pool_of
from forge.envs.limits import Fault
from forge.errors import OptionError
from forge.testing import play
from mcp_envs import HTTP, REQUIREMENTS, STDIO, call, plain_server

Drive = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def real() -> None:
    try:
        venv_or_unavailable(REQUIREMENTS)
    except Unavailable as reason:
        pytest.skip(str(reason))


@forge.episode
async def talk(task: Task, agent: Agent, **args: Any) -> float:
    async with mcp_tools(**args) as tools:
        await agent.run_tools(task.messages, tools=tools)
        return 1.0


ANSWERS = [
    call("add", a=2, b=3) + call("divide", a=1, b=0) + call("add", a="two", b=3),
    call("paint", colour="blue") + call("trouble", kind="long") + call("environment", name="HF_TOKEN"),
    "Done.",
]


def check(run: Any) -> None:
    five, divided, wrong = (message["content"] for message in run.turns[1].messages)
    assert five == "5"
    assert divided.startswith("Error: divide failed: McpToolError: ")
    assert "division by zero" in divided
    assert wrong.startswith('Error: bad arguments of add: a: expected integer, got "two"')
    picture, long, secret = (message["content"] for message in run.turns[2].messages)
    assert picture == "[image image/png]"
    assert "[… the text has 60000 characters; its middle is left out …]" in long
    assert len(long) < 400
    assert secret == "(unset)"
    assert dict(run.counts.tool_errors) == {"raised": 1, "bad_arguments": 1}


def test_a_real_server_on_stdio(drive: Drive, real: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    check(drive(play(talk, ANSWERS, limits=EpisodeLimits(tool_timeout_s=240), args={**STDIO, "max_chars": 300})))


def test_a_real_server_on_http(drive: Drive, real: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")

    async def scenario() -> None:
        async with pool_of(HTTP).borrow() as server:
            url = f"{server.url}/mcp"
            limits = {"start_timeout_s": 240.0, "call_timeout_s": 240.0}
            check(await play(talk, ANSWERS, args={"url": url, "max_chars": 300, **limits}))
            async with mcp_tools(url=url, only=["add"], prefix="sums_") as tools:
                assert [each.name for each in tools] == ["sums_add"]
                assert tools[0].description == "Add two numbers."
                assert await tools[0].run({"a": 1, "b": 2}) == "3"
            with pytest.raises(OptionError, match="subtract") as caught:
                async with mcp_tools(url=url, only=["subtract"]):
                    pass
            assert "divide" in str(caught.value)
        await close_servers()
        with pytest.raises(Fault) as fault:
            async with mcp_tools(url=url):
                pass
        assert fault.value.kind == "mcp_unreachable"

    drive(scenario())


async def talk_to(kind: str, **args: Any) -> str:
    async with mcp_tools(command=plain_server(kind), **args) as tools:
        return await tools[-1].run({"kind": kind})


def test_messages_that_nobody_asked_for_are_answered_or_skipped(drive: Drive) -> None:
    assert drive(talk_to("prints")) == "fine"


def test_tools_come_in_pages_with_names_that_we_accept(drive: Drive) -> None:
    async def scenario() -> None:
        async with mcp_tools(command=plain_server("pages")) as tools:
            assert [each.name for each in tools] == ["trouble", "second_one"]
            assert await tools[1].run({}) == '{"page": 2}'

    drive(scenario())


@pytest.mark.parametrize(
    ("kind", "fault", "words"),
    [
        ("bad_tool", "schema", "tools.inputSchema: it is missing"),
        ("bad_result", "schema", "result.content: expected array"),
        ("no_content", "schema", "it has no content"),
        ("floods", "schema", "sends messages without being asked"),
        ("refuses", "error", "no tools here"),
        ("exits", "lost", "this server cannot start"),
    ],
)
def test_a_server_that_breaks_the_rules_is_a_fault(drive: Drive, kind: str, fault: str, words: str) -> None:
    async def scenario() -> list[tuple[str, str]]:
        before = OpenResources.now()
        with pytest.raises(Fault) as caught:
            await talk_to(kind)
        assert caught.value.kind == f"mcp_{fault}"
        assert words in str(caught.value)
        return (await resources_after(before, grace_s=60.0)).since(before)

    assert drive(scenario()) == []


def test_a_refused_call_is_read_by_the_policy(drive: Drive) -> None:
    run = drive(play(talk, [call("trouble"), "Done."], args={"command": plain_server("error")}))
    assert run.turns[1].messages[0]["content"] == "Error: trouble failed: McpToolError: bad call"


def test_a_slow_call_is_a_fault_or_text(drive: Drive) -> None:
    answers = [call("trouble", kind="hang"), "Done."]
    args = {"command": plain_server("fine"), "call_timeout_s": 1.0}
    with pytest.raises(Fault) as caught:
        drive(play(talk, answers, args=args))
    assert caught.value.kind == "mcp_timeout"
    run = drive(play(talk, answers, args={**args, "timeout_is_fault": False}))
    assert run.turns[1].messages[0]["content"] == "Error: trouble took longer than 1 s."


def test_options_are_checked() -> None:
    async def use(**args: Any) -> None:
        async with mcp_tools(**args):
            pass

    for args in ({}, {"command": ["a"], "url": "http://b"}, {"url": "http://b", "speed": 1}):
        with pytest.raises(OptionError):
            asyncio.run(use(**args))


def test_http_servers_that_break_the_rules_are_faults(drive: Drive) -> None:
    """Each path answers `initialize` and `tools/list` in its own way."""
    tools = {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}

    async def answer(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        number, kind = asked.get("id"), request.match_info["kind"]
        if number is None or "method" not in asked:
            return web.Response(status=202)
        reply = {"jsonrpc": "2.0", "id": number, "result": tools if asked["method"] == "tools/list" else {}}
        if asked["method"] == "initialize":
            reply["result"] = {"protocolVersion": "2025-06-18"}
            return web.json_response(reply, headers={"Mcp-Session-Id": "s1"})
        if asked["method"] == "tools/list":
            assert request.headers["MCP-Protocol-Version"] == "2025-06-18"
            assert request.headers["Mcp-Session-Id"] == "s1"
            return web.json_response(reply)
        if kind == "forgets":
            return web.json_response({"jsonrpc": "2.0", "id": None, "error": {}}, status=404)
        if kind == "fails":
            return web.Response(status=500, text="broken")
        if kind == "html":
            return web.Response(text="<html>")
        if kind == "bad_call":
            failed = {"jsonrpc": "2.0", "id": number, "error": {"code": -32602, "message": "bad call"}}
            return web.json_response(failed, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'event: message\r\ndata: {"method": "notifications/progress"}\r\n\r\n')
        await response.write(b'data: {"id": 77, "method": "ping"}\n\n: comment\n\n')
        if kind == "stream":
            reply["result"] = {"content": [{"type": "text", "text": "from a stream"}]}
            await response.write(b"data: " + str(reply).replace("'", '"').encode() + b"\n\n")
        if kind == "floods":
            await response.write(b"data: " + b"na " * 2_000_000)
        await response.write_eof()
        return response

    async def forget(request: web.Request) -> web.Response:
        return web.Response()

    async def outcome(url: str) -> str:
        try:
            async with mcp_tools(url=url) as found:
                return await found[0].run({})
        except Fault as fault:
            return fault.kind
        except Exception as error:  # noqa: BLE001 - what the policy would read
            return str(error)

    async def scenario() -> dict[str, str]:
        app = web.Application()
        app.router.add_post("/{kind}", answer)
        app.router.add_delete("/{kind}", forget)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        kinds = ("forgets", "fails", "html", "bad_call", "stream", "ends", "floods")
        try:
            return {kind: await outcome(f"{url}/{kind}") for kind in kinds}
        finally:
            await runner.cleanup()

    assert drive(scenario()) == {
        "forgets": "mcp_lost",
        "fails": "mcp_http",
        "html": "mcp_schema",
        "bad_call": "bad call",
        "stream": "from a stream",
        "ends": "mcp_schema",
        "floods": "mcp_too_large",
    }
