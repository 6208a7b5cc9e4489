"""A gymnasium environment that fails in all ways, and functions for others. It runs where gymnasium is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import gymnasium


class Troubled(gymnasium.Env):  # type: ignore[misc]
    """Repeats what it is told. Some words make it fail."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Text(1 << 25)
        self.action_space = gymnasium.spaces.Text(64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "Say something.", {}

    def step(self, action: str) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if action == "pid":
            return str(os.getpid()), 0.0, False, False, {}
        if action == "child":
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            return str(child.pid), 0.0, False, False, {}
        if action == "crash":
            os._exit(3)
        while action == "hang":
            pass
        if action == "raise":
            raise RuntimeError("the environment is broken")
        if action == "flood":
            sys.stdout.write("na " * 2_000_000)
            return "na " * 2_000_000, 0.0, False, False, {}
        reward = float("nan") if action == "violation" else 0.5
        return f"You said {action}.", reward, False, action == "stop", {}


gymnasium.register("Troubled-v0", Troubled, disable_env_checker=True, order_enforce=False)


def show_taxi(seen: Any, info: Any, env: Any) -> str:
    """Return the state of the taxi in words."""
    row, column, passenger, goal = env.unwrapped.decode(seen)
    places = ("red", "green", "yellow", "blue", "in the taxi")
    return f"taxi at {row},{column}; passenger: {places[passenger]}; to: {places[goal]}"


def read_taxi(text: str, env: Any) -> int:
    """Return the action of the first letter."""
    found = "snewpd".find(text.strip()[:1].lower())
    if not text.strip() or found < 0:
        raise ValueError("expected s, n, e, w, p or d")
    return found
