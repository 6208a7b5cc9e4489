"""An environment of MCP tools on OpenEnv's own framework: a box with a number in it."""

from __future__ import annotations

from typing import Any

import without_gradio  # noqa: F401 - before OpenEnv
from fastmcp import FastMCP
from openenv.core.env_server import Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class ToolBox(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tool_box")
        self._number = 0

        @server.tool
        def add(amount: int) -> str:
            """Add to the number in the box."""
            self._number += amount
            return f"The number is {self._number}."

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Observation:
        self._number = 0
        return Observation(reward=0.0)

    async def step_async(self, action: Any, timeout_s: float | None = None, **options: Any) -> Observation:
        seen = await super().step_async(action, timeout_s=timeout_s, **options)
        if isinstance(action, CallToolAction):
            seen.reward, seen.done = float(self._number == 5), self._number == 5
        return seen

    def _step_impl(self, action: Any, timeout_s: float | None = None, **options: Any) -> Observation:
        raise ValueError(f"unknown action {action}")

    @property
    def state(self) -> State:
        return State()


app = create_app(ToolBox, CallToolAction, CallToolObservation, max_concurrent_envs=8)
