"""Programs whose agent talks to the episode's endpoint with OpenAI's client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import openai

from forge.envs.endpoint import Endpoint
from forge.envs.episode import EpisodeProgram, EpisodeRun, episode, run_episode
from scripted_policy import ScriptedPolicy, state_of

LIMIT_S = 120
CALL = '<tool_call>{"name": "double", "arguments": {"x": %d}}</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "double",
            "description": "Double a number.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]


def client_of(endpoint: Endpoint) -> AbstractAsyncContextManager[openai.AsyncOpenAI]:
    """The official client. It takes no proxy from the environment, tries nothing twice and loads no certificates."""
    return openai.AsyncOpenAI(
        base_url=endpoint.base_url,
        api_key=endpoint.api_key,
        max_retries=0,
        timeout=LIMIT_S,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=False),
    )


def program_of(
    talk: Callable[[openai.AsyncOpenAI, Endpoint], Awaitable[float | None]],
    *,
    allow: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    **declared: Any,
) -> EpisodeProgram:
    """An episode whose agent is `talk(client, endpoint)`."""

    @episode(**declared)
    async def program(task: Any, agent: Any) -> float | None:
        async with agent.endpoint(allow=allow, ignore=ignore) as endpoint, client_of(endpoint) as client:
            return await talk(client, endpoint)

    return program


def run(program: EpisodeProgram, policy: ScriptedPolicy, **changes: Any) -> EpisodeRun:
    """Run one episode on an event loop of its own."""

    async def limited() -> EpisodeRun:
        async with asyncio.timeout(LIMIT_S):
            return await run_episode(program, state_of(policy, **changes))

    return asyncio.run(limited())
