"""verifiers for tests: the real package in a venv of its own, with an environment of ours."""

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

REQUIREMENTS = foreign_packages.VERIFIERS
APPS = Path(__file__).with_name("hosted_apps")
COMMON: dict[str, Any] = {
    "requirements": REQUIREMENTS,
    "folders": (str(APPS),),
    "start_limit_s": 600.0,
    "config": {"taskset": {"id": "counting_taskset"}, "agent": {"runtime": {"type": "subprocess"}}},
}
"""The import of verifiers takes two seconds on an idle core, and twenty where the disk is cold."""


async def _open() -> EpisodeProgram:
    await asyncio.to_thread(venv_or_unavailable, REQUIREMENTS)
    return load_program("verifiers", COMMON)


def _trouble(word: str, kind: str, **args: Any) -> Script:
    return Script(("one", word), fault=f"verifiers_{kind}", args=args)


VERIFIERS = Integration(
    "verifiers",
    open=_open,
    task=Task("count:1", metadata={"index": 0}),
    good=Script(("one", "two", "three"), reward=3.0),
    bad=Script(("one", "three"), reward=1.0),
    troubles={
        "crash": _trouble("crash", "lost"),
        "hang": _trouble("hang", "timeout", episode_timeout_s=8.0),
        "flood": _trouble("flood", "error"),
        "violation": _trouble("violation", "schema"),
    },
    close=close_servers,
)
