"""The addresses of the server: the page, its files, and the data that it asks for."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from forge.envs.chat_api.errors import RequestError, json_errors, parameter_error
from forge.ui import pages
from forge.ui.access import Access, add_headers
from forge.ui.config_view import view_config
from forge.ui.decimation import Span, encode_table
from forge.ui.hub import Hub
from forge.ui.live_run import LiveRun
from forge.ui.rollouts.routes import add_rollouts
from forge.ui.run_summary import RunSummary
from forge.ui.strict_json import to_json

MAX_STREAMS: Final = 64
"""Pages that may be open at the same time."""
MAX_POINTS: Final = 3_000
_MAX_ROWS: Final = 1_000
"""Rows that are sent to a page as they come; a page that has missed more asks for the whole table."""
_QUIET_S: Final = 15.0
"""How often a page without news hears that the server is there."""
_MAX_BODY: Final = 1 << 16
_CACHED: Final = {"Cache-Control": "private, max-age=31536000, immutable"}

HUB: Final[web.AppKey[Hub]] = web.AppKey("hub", Hub)
STREAMS: Final[web.AppKey[set[object]]] = web.AppKey("streams", set)


def make_app(hub: Hub, access: Access) -> web.Application:
    """Return the application."""
    app = web.Application(middlewares=[json_errors("this server"), access.check], client_max_size=_MAX_BODY)
    app[HUB] = hub
    app[STREAMS] = set()
    app.on_response_prepare.append(add_headers)
    for path in ("/", "/run/{run:.+}", "/compare"):
        app.router.add_get(path, _page)
    app.router.add_get("/assets/{name}", _asset)
    app.router.add_get("/api/runs", _runs)
    app.router.add_get("/api/run", _run)
    app.router.add_get("/api/config", _config)
    app.router.add_get("/api/metrics", _metrics)
    app.router.add_get("/api/events", _events)
    add_rollouts(app, hub, _live, _whole)
    return app


async def _page(request: web.Request) -> web.Response:
    return web.Response(text=pages.page(), content_type="text/html", charset="utf-8")


async def _asset(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name == f"{pages.digest(pages.program())}.js":
        return web.Response(text=pages.program(), content_type="text/javascript", charset="utf-8", headers=_CACHED)
    if name == f"{pages.digest(pages.style())}.css":
        return web.Response(text=pages.style(), content_type="text/css", charset="utf-8", headers=_CACHED)
    raise web.HTTPNotFound


# ---- Data ------------------------------------------------------------------------------------------------------------


async def _runs(request: web.Request) -> web.Response:
    return _json(_list(request.app[HUB], 0))


def _list(hub: Hub, version: int) -> dict[str, Any]:
    changed, gone = hub.summaries_since(version)
    return {
        "version": hub.list_version,
        "root": str(hub.runs.root),
        "isComplete": hub.runs.is_complete,
        "isCut": hub.runs.is_cut,
        "runs": [summary.plain() for summary in changed.values()],
        "gone": gone,
    }


async def _run(request: web.Request) -> web.Response:
    hub, run = request.app[HUB], await _live(request)
    summary = await hub.call(hub.runs.refresh, request.query["run"])
    if summary is None:
        raise _unknown_run(request.query["run"])
    return web.Response(text=await hub.call(lambda: to_json(run.describe(summary))), content_type="application/json")


async def _config(request: web.Request) -> web.Response:
    hub = request.app[HUB]
    folder = _folder(request, "run")
    other = _folder(request, "against") if request.query.get("against") else None
    return _json(await hub.call(view_config, folder, other))


async def _metrics(request: web.Request) -> web.Response:
    hub, run = request.app[HUB], await _live(request)
    first, last = _number(request, "first"), _number(request, "last")
    points = _whole(request, "points", default=600, low=2, high=MAX_POINTS)
    has_more = _whole(request, "more", default=0, high=1) == 1

    def work() -> str:
        rows, table, is_partial = run.rows(), run.table_id, run.is_partial
        names = None if has_more else run.main_names()
        facts = {"table": table, "isPartial": is_partial, "progress": round(run.progress, 3)}
        return encode_table(rows, Span(first, last, points, names), **facts)

    return web.Response(text=await hub.call(work), content_type="application/json")


async def _live(request: web.Request) -> LiveRun:
    name = request.query.get("run", "")
    run = await request.app[HUB].live(name)
    if run is None:
        raise _unknown_run(name)
    return run


def _folder(request: web.Request, parameter: str) -> Path:
    name = request.query.get(parameter, "")
    folder = request.app[HUB].runs.folder(name)
    if folder is None:
        raise _unknown_run(name)
    return folder


def _unknown_run(name: str) -> RequestError:
    return RequestError(f"There is no run {name[:200]!r} here.", status=404, code="unknown_run", param="run")


# ---- News ------------------------------------------------------------------------------------------------------------


async def _events(request: web.Request) -> web.StreamResponse:
    """Send what changes, as server-sent events, until the page is closed.

    `list` has runs whose line has changed, `run` what is new of the run that the page shows, and `rows` its new rows.
    """
    hub, streams = request.app[HUB], request.app[STREAMS]
    run_id = request.query.get("run")
    if run_id is not None and hub.runs.folder(run_id) is None:
        raise _unknown_run(run_id)
    if len(streams) >= MAX_STREAMS:
        text = f"{MAX_STREAMS} pages are open: close one."
        raise RequestError(text, status=503, kind="server_error", code="too_many_pages")
    news = _News(hub, run_id, after=_number(request, "after"), table=_whole(request, "table", default=-2, low=-2))
    news.version = _whole(request, "version", default=0)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    key = object()
    streams.add(key)
    try:
        await response.prepare(request)
        async with hub.page(run_id):
            while True:
                change = hub.change
                texts = await news.take()
                await response.write("".join(texts).encode() if texts else b": here\n\n")
                try:
                    await asyncio.wait_for(change.wait(), _QUIET_S)
                except TimeoutError:
                    continue
    except ConnectionError:
        return response
    finally:
        streams.discard(key)


class _News:
    """What one page has not heard yet."""

    def __init__(self, hub: Hub, run_id: str | None, *, after: float | None, table: int) -> None:
        self.version, self._has_list = 0, False
        self._hub, self._run_id = hub, run_id
        self._after, self._table = after, table
        self._run_version = -1
        self._summary: RunSummary | None = None

    async def take(self) -> list[str]:
        """Return the events since the last call."""
        hub = self._hub
        events = []
        found = _list(hub, self.version)
        if found["version"] != self.version or not self._has_list:
            self.version, self._has_list = found["version"], True
            events.append(_event("list", to_json(found)))
        run = None if self._run_id is None else await hub.live(self._run_id)
        summary = None if self._run_id is None else hub.runs.summaries.get(self._run_id)
        if run is not None and summary is not None and (run.version, summary) != (self._run_version, self._summary):
            self._run_version, self._summary = run.version, summary
            status = await hub.call(run.status, summary)
            events.append(_event("run", to_json(status)))
            events += await self._rows(run)
        return events

    async def _rows(self, run: LiveRun) -> list[str]:
        """Return new rows for a page that has the rows before them. One with other rows asks for the table again."""
        rows = run.rows()
        if self._after is None or run.is_partial or self._table != run.table_id or not len(rows):
            return []
        start, end = rows.between(self._after, None)
        self._after = float(rows.steps[-1])
        if end - start > _MAX_ROWS:
            self._table = -2
            return []
        span = Span(first=float(rows.steps[start]), points=_MAX_ROWS + 1)
        return [_event("rows", await self._hub.call(lambda: encode_table(rows, span, table=self._table)))]


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


# ---- Parameters ------------------------------------------------------------------------------------------------------


def _json(value: object) -> web.Response:
    return web.Response(text=to_json(value), content_type="application/json")


def _number(request: web.Request, name: str) -> float | None:
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


def _whole(request: web.Request, name: str, *, default: int, low: int = 0, high: int = 1 << 53) -> int:
    value = _number(request, name)
    if value is None:
        return default
    if value != int(value) or not low <= value <= high:
        raise parameter_error(name, f"must be a whole number from {low} to {high}")
    return int(value)
