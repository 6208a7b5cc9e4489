"""TextArena for tests: the real package in a venv of its own."""

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

REQUIREMENTS = foreign_packages.TEXTARENA
APPS = Path(__file__).with_name("hosted_apps")
COMMON: dict[str, Any] = {
    "requirements": REQUIREMENTS,
    "folders": (str(APPS),),
    "start_limit_s": 300.0,
    "step_timeout_s": 240.0,
}
"""The import of TextArena takes a second on an idle core, and ten where the disk is cold."""


async def _open() -> EpisodeProgram:
    await asyncio.to_thread(venv_or_unavailable, REQUIREMENTS)
    return load_program("textarena", {**COMMON, "id": "GuessTheNumber-v0"})


def _trouble(word: str, kind: str, **args: Any) -> Script:
    return Script(("hello", word), fault=f"textarena_{kind}", args={"id": "troubled_arena:Troubled-v0", **args})


TEXTARENA = Integration(
    "textarena",
    open=_open,
    task=Task("number:1", ({"role": "user", "content": "Play."},), metadata={"seed": 3}),  # the number is 8
    good=Script(("[5]", "I say [8]"), reward=1.0),
    bad=Script(("twenty", "twenty again"), reward=0.0),  # the second move that is not one ends the game
    troubles={
        "crash": _trouble("crash", "lost"),
        "hang": _trouble("hang", "timeout", step_timeout_s=5.0),
        "flood": _trouble("flood", "too_large"),
        "violation": _trouble("violation", "schema"),
    },
    close=close_servers,
)
