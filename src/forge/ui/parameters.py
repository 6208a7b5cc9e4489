"""What the handlers of the server share: the parameters of a request, the run that it names, and JSON answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aiohttp import web

from forge.envs.chat_api.errors import RequestError, parameter_error
from forge.ui.hub import Hub
from forge.ui.live_run import LiveRun
from forge.ui.strict_json import to_json

HUB: Final[web.AppKey[Hub]] = web.AppKey("hub", Hub)


def as_json(value: object) -> web.Response:
    """Return a value as an answer."""
    return web.Response(text=to_json(value), content_type="application/json")


async def live_run(request: web.Request, name: str | None = None) -> LiveRun:
    """Return the run that the parameter `run` names, or the one of this name, with the first of its metrics read."""
    name = request.query.get("run", "") if name is None else name
    run = await request.app[HUB].live(name)
    if run is None:
        raise unknown_run(name)
    return run


def run_folder(request: web.Request, parameter: str = "run") -> Path:
    """Return the folder of the run that a parameter names."""
    name = request.query.get(parameter, "")
    folder = request.app[HUB].runs.folder(name)
    if folder is None:
        raise unknown_run(name)
    return folder


def unknown_run(name: str) -> RequestError:
    """Return the error for a run that is not in the list."""
    return RequestError(f"There is no run {name[:200]!r} here.", status=404, code="unknown_run", param="run")


def number(request: web.Request, name: str) -> float | None:
    """Return a parameter that is a finite number; None where it is not given."""
    text = request.query.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise parameter_error(name, "must be a number")
    return value


def whole(request: web.Request, name: str, *, default: int, low: int = 0, high: int = 1 << 53) -> int:
    """Return a parameter that is a whole number."""
    value = number(request, name)
    if value is None:
        return default
    if value != int(value) or not low <= value <= high:
        raise parameter_error(name, f"must be a whole number from {low} to {high}")
    return int(value)


def one_of(request: web.Request, name: str, allowed: Sequence[str]) -> str:
    """Return a parameter that is one of some words; the first one where it is not given."""
    value = request.query.get(name, allowed[0])
    if value not in allowed:
        raise parameter_error(name, f"must be one of {', '.join(allowed)}")
    return value
