"""Commands for runs from the page: only where `forge ui --control` allows them, and for runs of this machine and user.

They go to the run as those of `forge control` do, over the socket in its folder. The run carries them out between two
steps; until then the page's request waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from forge.envs.chat_api.errors import RequestError, parameter_error
from forge.errors import MISSING, ConfigError
from forge.loops.run_control import SOCKET_NAME, RunRefused, ask_run_soon
from forge.ui.parameters import HUB, as_json, run_folder, unknown_run
from forge.ui.strict_json import to_json

COMMANDS: Final = ("set", "save", "evaluate", "profile", "stop")
MAX_WAITING: Final = 16
"""Commands that may wait for the end of a step at the same time."""
MAX_ASKING: Final = 64
"""Requests for the status of a run that may wait for its answer at the same time."""
ANSWER_LIMIT_S: Final = 30.0
"""How long a run may take to say where it is."""
_MAX_KEYS: Final = 16
_BY: Final = "forge ui"

WAITING: Final[web.AppKey[set[object]]] = web.AppKey("waiting", set)
ASKING: Final[web.AppKey[set[object]]] = web.AppKey("asking", set)


def add_control(app: web.Application) -> None:
    """Add the addresses."""
    app[WAITING], app[ASKING] = set(), set()
    app.router.add_get("/api/control", _show)
    app.router.add_post("/api/control", _command)


def can_control(app: web.Application) -> bool:
    """Return whether the server has these addresses."""
    return WAITING in app


async def _show(request: web.Request) -> web.Response:
    """Say where a run is, and what can be changed; or why nothing can."""
    folder = run_folder(request)
    if (why := _why_not(folder)) is not None:
        return as_json({"isActive": False, "why": why})
    full = f"{MAX_ASKING} requests for the status of runs wait already: ask again later."
    try:
        with _one_of(request.app[ASKING], MAX_ASKING, full, code="too_many_requests"):
            status = await asyncio.wait_for(ask_run_soon(folder, {"command": "show"}), ANSWER_LIMIT_S)
    except (ConfigError, RunRefused) as error:
        return as_json({"isActive": False, "why": error.message})
    except TimeoutError:
        return as_json({"isActive": False, "why": f"it has not answered for {ANSWER_LIMIT_S:g} s"})
    return as_json({"isActive": True, "why": "", **_without_ok(status)})


async def _command(request: web.Request) -> web.Response:
    """Send a command to a run, and return what it answers."""
    asked = await _asked(request)
    folder = request.app[HUB].runs.folder(asked["run"])
    if folder is None:
        raise unknown_run(asked["run"])
    if (why := _why_not(folder)) is not None:
        raise RequestError(f"This run takes no commands: {why}.", status=409, code="not_active", param="run")
    command = {name: value for name, value in asked.items() if name != "run"}
    full = f"{MAX_WAITING} commands wait for the end of a step already."
    try:
        with _one_of(request.app[WAITING], MAX_WAITING, full, code="too_many_commands"):
            reply = await ask_run_soon(folder, command)
    except (ConfigError, RunRefused) as error:
        return _refusal(error)
    return as_json(_without_ok(reply))


@contextlib.contextmanager
def _one_of(waiting: set[object], limit: int, full: str, *, code: str) -> Iterator[None]:
    """Count the request among those that wait, inside the block. Raise `RequestError` where it is one too many."""
    if len(waiting) >= limit:
        raise RequestError(full, status=503, kind="server_error", code=code)
    key = object()
    waiting.add(key)
    try:
        yield
    finally:
        waiting.discard(key)


async def _asked(request: web.Request) -> dict[str, Any]:
    """Return the command of a request. A form of another site cannot send this type of content."""
    if request.content_type != "application/json":
        raise RequestError("The request must be JSON: Content-Type: application/json.", status=415, code="not_json")
    try:
        found = json.loads(await request.text())
    except (ValueError, RecursionError, LookupError):  # the last of a charset that there is not
        raise RequestError("The request is not valid JSON.", code="not_json") from None
    if not isinstance(found, dict) or not isinstance(found.get("run"), str):
        raise parameter_error("run", "must be the name of a run")
    if found.get("command") not in COMMANDS:
        raise parameter_error("command", f"must be one of {', '.join(COMMANDS)}")
    asked = {"run": found["run"], "command": found["command"]}
    if asked["command"] != "set":
        return asked
    values = found.get("values")
    if not isinstance(values, dict) or not 1 <= len(values) <= _MAX_KEYS or not all(map(_is_plain, values.values())):
        raise parameter_error("values", f"must have 1 to {_MAX_KEYS} keys, each with a finite number, a text or null")
    return {**asked, "values": values, "by": _BY}


def _without_ok(reply: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in reply.items() if name != "ok"}


def _is_plain(value: object) -> bool:
    is_number = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return value is None or isinstance(value, str) or is_number


def _why_not(folder: Path) -> str | None:
    """Return why a run cannot be controlled from here, as far as its folder tells; None if it may be."""
    try:
        facts = os.lstat(folder / SOCKET_NAME)
    except OSError:
        return "it is not active, or not on this machine"
    if not stat.S_ISSOCK(facts.st_mode):
        return f"{SOCKET_NAME} is not its socket"
    return None if facts.st_uid == os.getuid() else "it belongs to another user"


def _refusal(error: ConfigError | RunRefused) -> web.Response:
    fields: Mapping[str, Any] = {name: getattr(error, name) for name in ("message", "path", "rule", "repair")}
    value = {} if error.value is MISSING else {"value": error.value}
    name = getattr(error, "type_name", "") or type(error).__name__
    body = {"error": {**fields, **value, "code": "refused", "type": name, "text": str(error)}}
    return web.Response(text=to_json(body), status=409, content_type="application/json")
