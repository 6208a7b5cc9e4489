"""The addresses of the server: the page, its files, and the data that it asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiohttp import web

from forge.envs.chat_api.errors import json_errors
from forge.ui import pages
from forge.ui.access import Access, add_headers
from forge.ui.compare_routes import add_compare
from forge.ui.config_view import view_config
from forge.ui.control_routes import add_control, can_control
from forge.ui.decimation import Span, encode_table
from forge.ui.hub import Hub
from forge.ui.news import add_news
from forge.ui.parameters import HUB, as_json, live_run, number, one_of, run_folder, unknown_run, whole
from forge.ui.rollouts.routes import add_rollouts
from forge.ui.strict_json import to_json
from forge.ui.timeline_routes import add_timeline

MAX_POINTS: Final = 3_000
_MAX_BODY: Final = 1 << 16
_CACHED: Final = {"Cache-Control": "private, max-age=31536000, immutable"}
PARTS: Final[tuple[Callable[[web.Application], None], ...]] = (add_news, add_compare, add_timeline)
"""What adds the addresses of other files."""


def make_app(hub: Hub, access: Access, *, control: bool = False) -> web.Application:
    """Return the application. Only with `control` it has addresses that change anything."""
    app = web.Application(middlewares=[json_errors("this server"), access.check], client_max_size=_MAX_BODY)
    app[HUB] = hub
    app.on_response_prepare.append(add_headers)
    for path in ("/", "/run/{run:.*}", "/compare"):
        app.router.add_get(path, _page)
    app.router.add_get("/assets/{name}", _asset)
    app.router.add_get("/api/runs", _runs)
    app.router.add_get("/api/run", _run)
    app.router.add_get("/api/config", _config)
    app.router.add_get("/api/metrics", _metrics)
    for part in (*PARTS, *((add_control,) if control else ())):
        part(app)
    add_rollouts(app, hub, live_run, whole)
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
    hub = request.app[HUB]
    return web.Response(text=await hub.call(hub.list_since(0).text), content_type="application/json")


async def _run(request: web.Request) -> web.Response:
    hub, run = request.app[HUB], await live_run(request)
    summary = await hub.call(hub.runs.refresh, request.query["run"])
    if summary is None:
        raise unknown_run(request.query["run"])
    facts = {"canControl": can_control(request.app)}
    text = await hub.call(lambda: to_json({**run.describe(summary), **facts}))
    return web.Response(text=text, content_type="application/json")


async def _config(request: web.Request) -> web.Response:
    hub = request.app[HUB]
    folder = run_folder(request, "run")
    other = run_folder(request, "against") if request.query.get("against") else None
    return as_json(await hub.call(view_config, folder, other))


async def _metrics(request: web.Request) -> web.Response:
    hub, run = request.app[HUB], await live_run(request)
    first, last = number(request, "first"), number(request, "last")
    points = whole(request, "points", default=600, low=2, high=MAX_POINTS)
    has_more = whole(request, "more", default=0, high=1) == 1
    of = one_of(request, "of", ("metrics", "system"))

    def work() -> str:
        followed = run if of == "metrics" else run.system
        rows, table, is_partial = followed.rows(), followed.table_id, followed.is_partial
        names = None if has_more or of == "system" else run.main_names()
        facts = {"table": table, "isPartial": is_partial, "progress": round(followed.progress, 3)}
        return encode_table(rows, Span(first, last, points, names), **facts)

    return web.Response(text=await hub.call(work), content_type="application/json")
