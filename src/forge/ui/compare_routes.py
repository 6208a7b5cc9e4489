"""The addresses of the page that compares runs."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from forge.envs.chat_api.errors import parameter_error
from forge.ui.compare_view import ComparedRun, compare_configs, compare_runs
from forge.ui.news import MAX_RUNS
from forge.ui.parameters import HUB, as_json, live_run
from forge.ui.strict_json import to_json

_CONFIG: Final = "/api/compare/config"


def add_compare(app: web.Application) -> None:
    """Add the addresses."""
    app.router.add_get("/api/compare", _compare)
    app.router.add_get(_CONFIG, _configs)


async def _compare(request: web.Request) -> web.Response:
    """Describe the runs that are here; `missing` has the others."""
    hub = request.app[HUB]
    names = _names(request)
    found, missing = [], []
    for name in names:
        summary = None if hub.runs.folder(name) is None else await hub.call(hub.runs.refresh, name)
        if summary is None:
            missing.append(name)
        else:
            found.append(ComparedRun(await live_run(request, name), summary))
    return web.Response(
        text=await hub.call(lambda: to_json({**compare_runs(found), "missing": missing})),
        content_type="application/json",
    )


async def _configs(request: web.Request) -> web.Response:
    hub = request.app[HUB]
    folders = [(await live_run(request, name)).folder for name in _names(request)]
    return as_json(await hub.call(compare_configs, folders))


def _names(request: web.Request) -> list[str]:
    names = list(dict.fromkeys(request.query.getall("run", [])))
    if not 1 <= len(names) <= MAX_RUNS:
        raise parameter_error("run", f"must be given once for each run, {MAX_RUNS} at most")
    return names
