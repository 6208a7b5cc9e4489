"""Gymnasium for tests: the real package in a venv of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import foreign_packages
from external_envs import Integration, Script, venv_or_unavailable
from forge import Task
from forge.envs.environment import load_program
from forge.envs.episode import EpisodeProgram
from forge.envs.external.processes import close_servers

REQUIREMENTS = foreign_packages.GYMNASIUM
APPS = Path(__file__).with_name("hosted_apps")
PATHS = ("left", "down", "right", "up")
COMMON: dict[str, Any] = {
    "requirements": REQUIREMENTS,
    "folders": (str(APPS),),
    "start_limit_s": 300.0,
    "step_timeout_s": 240.0,
}
LAKE: dict[str, Any] = {
    **COMMON,
    "id": "FrozenLake-v1",
    "make": {"is_slippery": False},
    "actions": PATHS,
    "observe": "render",
}
TROUBLED: dict[str, Any] = {"id": "troubled_gym:Troubled-v0", "make": {}, "actions": (), "observe": None}


async def _open() -> EpisodeProgram:
    await asyncio.to_thread(venv_or_unavailable, REQUIREMENTS)
    return load_program("gymnasium", LAKE)


def _trouble(word: str, kind: str, **args: Any) -> Script:
    return Script(("hello", word), fault=f"gymnasium_{kind}", args={**TROUBLED, **args})


GYMNASIUM = Integration(
    "gymnasium",
    open=_open,
    task=Task("lake:1", ({"role": "user", "content": "Go to the goal G. H are holes."},)),
    good=Script(("down", "1", "Right.", "2", "down", "right"), reward=1.0),
    bad=Script(("down", "jump", "right"), reward=0.0),
    troubles={
        "crash": _trouble("crash", "lost"),
        "hang": _trouble("hang", "timeout", step_timeout_s=5.0),
        "flood": _trouble("flood", "too_large"),
        "violation": _trouble("violation", "schema"),
    },
    close=close_servers,
)
