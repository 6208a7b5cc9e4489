"""MCP for tests: servers made with the real package, in a venv of its own, and a plain one that starts at once."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import foreign_packages
import forge
from external_envs import Integration, Script, venv_or_unavailable
from forge import Agent, Task
from forge.envs.episode import EpisodeProgram
from forge.envs.external.mcp import mcp_tools
from forge.envs.external.processes import ServerSpec, close_servers, pool_of

REQUIREMENTS = foreign_packages.MCP
APPS = Path(__file__).with_name("hosted_apps")
COMMAND = ("{python}", str(APPS / "mcp_server.py"))
STDIO: dict[str, Any] = {
    "command": COMMAND,
    "requirements": REQUIREMENTS,
    "start_timeout_s": 300.0,
    "call_timeout_s": 240.0,
}
HTTP = ServerSpec((*COMMAND, "{port}"), REQUIREMENTS, health="", start_limit_s=300.0)


def plain_server(kind: str) -> tuple[str, ...]:
    return (sys.executable, str(APPS / "plain_mcp_server.py"), kind)


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@forge.episode
async def calculate(task: Task, agent: Agent, **args: Any) -> float:
    async with mcp_tools(**args) as tools:
        turn = await agent.run_tools(task.messages, tools=tools)
        return float(turn.text == task.answer)


@forge.episode
async def calculate_over_http(task: Task, agent: Agent, **args: Any) -> float:
    async with pool_of(HTTP).borrow() as server, mcp_tools(url=f"{server.url}/mcp", **args) as tools:
        turn = await agent.run_tools(task.messages, tools=tools)
        return float(turn.text == task.answer)


async def _open_stdio() -> EpisodeProgram:
    return calculate.with_args({"command": plain_server("fine"), "start_timeout_s": 300.0, "call_timeout_s": 240.0})


async def _open_http() -> EpisodeProgram:
    await asyncio.to_thread(venv_or_unavailable, REQUIREMENTS)
    return calculate_over_http.with_args({"start_timeout_s": 300.0, "call_timeout_s": 240.0})


def _trouble(word: str, kind: str, **args: Any) -> Script:
    return Script((call("add", a=1, b=2), call("trouble", kind=word)), fault=f"mcp_{kind}", args=args)


_TASK = Task("sum:1", ({"role": "user", "content": "What is 2 + 3?"},), answer="5")
_GOOD = Script((call("add", a=2, b=3), "5"), reward=1.0)
_BAD = Script((call("add", a="two", b=3), call("divide", a=1, b=0), "6"), reward=0.0)
_BROKEN = Script(
    (call("trouble"), "5"),
    fault="mcp_schema",
    args={"command": plain_server("bad_result")},
)

MCP = [
    Integration(
        "mcp-stdio",
        open=_open_stdio,
        task=_TASK,
        good=_GOOD,
        bad=_BAD,
        troubles={
            "crash": _trouble("crash", "lost"),
            "hang": _trouble("hang", "timeout", call_timeout_s=5.0),
            "flood": _trouble("flood", "too_large"),
            "violation": _BROKEN,
        },
    ),
    Integration(
        "mcp-http",
        open=_open_http,
        task=_TASK,
        good=_GOOD,
        bad=_BAD,
        troubles={
            "crash": "a server at a URL is shared: its crash ends all episodes that use it",
            "hang": _trouble("hang", "timeout", call_timeout_s=5.0),
            "flood": _trouble("flood", "too_large"),
            "violation": "the package's own server does not violate the protocol; see test_mcp_tools",
        },
        close=close_servers,
    ),
]
