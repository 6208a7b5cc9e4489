"""OpenEnv for tests: the real package in a venv of its own, and servers on it.

The wheel has one environment, an echo: the template of `openenv init`. The game and the box of tools are our own, on
its server framework.
"""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import foreign_packages
from external_envs import TROUBLES, Integration, Script, venv_or_unavailable
from forge import Task
from forge.envs.environment import load_program
from forge.envs.episode import EpisodeProgram
from forge.envs.external.processes import close_servers

REQUIREMENTS = foreign_packages.OPENENV
APPS = Path(__file__).with_name("openenv_apps")
START_S = 300.0
"""The import of OpenEnv takes four seconds on an idle core."""


def openenv_python() -> Path:
    """Return the Python with OpenEnv. Raises `Unavailable` where it cannot be installed."""
    return venv_or_unavailable(REQUIREMENTS)


def make_echo(folder: Path) -> Path:
    """Make the echo environment of OpenEnv's template, as `openenv init echo_env` does, and return its folder."""
    (package,) = openenv_python().parents[1].glob("lib/python*/site-packages/openenv")
    names = {"__ENV_CLASS_NAME__": "Echo", "__ENV_NAME__": "echo_env", "__ENV_TITLE_NAME__": "Echo Env"}
    made = folder / "echo_env"
    for source in sorted((package / "cli/templates/openenv_env").rglob("*.py")):
        place, text = str(source.relative_to(package / "cli/templates/openenv_env")), source.read_text()
        for old, new in names.items():
            place, text = place.replace(old, new), text.replace(old, new)
        (made / place).parent.mkdir(parents=True, exist_ok=True)
        (made / place).write_text(text)
    return folder


def server(app: str, *folders: Path, **changes: Any) -> dict[str, Any]:
    """Return the argument `server` for an app of this folder."""
    return {
        "app": f"{app}:app",
        "requirements": REQUIREMENTS,
        "folders": tuple(map(str, (APPS, *folders))),
        "start_limit_s": START_S,
        **changes,
    }


def act(**arguments: Any) -> str:
    """Return an answer that takes an action, in the format of Hermes."""
    return f"<tool_call>{json.dumps({'name': 'act', 'arguments': arguments})}</tool_call>"


async def _open_game() -> EpisodeProgram:
    await asyncio.to_thread(openenv_python)
    one_each = server("guessing_game", instances=2, max_sessions=1)
    return load_program("openenv", {"server": one_each, "step_timeout_s": 240.0})


GAME = Integration(
    "openenv-game",
    open=_open_game,
    task=Task("guess:1", ({"role": "user", "content": "Play."},), metadata={"reset": {"secret": 5}}),
    good=Script((act(guess=3), act(guess=5, comment="surely")), reward=1.0),
    bad=Script((act(guess=1), act(guess=2), act(guess=3)), reward=-1.0),
    troubles={
        "crash": Script((act(guess=1), act(guess=2, comment="crash")), fault="openenv_lost"),
        "hang": Script(
            (act(guess=1), act(guess=2, comment="hang")), fault="openenv_timeout", args={"step_timeout_s": 5.0}
        ),
        "flood": Script((act(guess=1), act(guess=2, comment="flood")), fault="openenv_too_large"),
        "violation": Script((act(guess=1), act(guess=2, comment="violation")), fault="openenv_schema"),
    },
    close=close_servers,
)


@functools.cache
def _echo_folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="openenv-echo-")
    make_echo(Path(folder.name))
    return folder


async def _open_echo() -> EpisodeProgram:
    await asyncio.to_thread(openenv_python)
    as_it_is = {**server("echo_env.server.app"), "folders": (_echo_folder().name,)}  # one session at a time
    return load_program("openenv", {"server": as_it_is, "max_steps": 2, "step_timeout_s": 240.0})


_HARMLESS = "the echo environment has no way to do this; the game has"
ECHO = Integration(
    "openenv-echo",
    open=_open_echo,
    task=Task("echo:1", ({"role": "user", "content": "Say something long."},)),
    good=Script(("Hello, echo!", "Hm"), reward=1.2),  # a tenth for each letter, at most 1 for each answer
    bad=Script(("a", "bc"), reward=0.3),
    troubles=dict.fromkeys(TROUBLES, _HARMLESS),
    close=close_servers,
)

OPENENV = [ECHO, GAME]
