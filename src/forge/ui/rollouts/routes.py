"""The addresses under which the page asks for rollouts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from forge.envs.chat_api.errors import RequestError, parameter_error
from forge.ui.hub import Hub
from forge.ui.live_run import LiveRun
from forge.ui.rollouts.query import SORTS, Filters, SampleName
from forge.ui.rollouts.view import Window
from forge.ui.strict_json import to_json

MAX_LIMIT: Final = 200
MAX_TOKENS: Final = 131_072
"""Tokens of a sample that a page can ask for."""
_TOKENS: Final = 8_192
_FEWEST: Final = 64

FindRun = Callable[[web.Request], Awaitable[LiveRun]]
Whole = Callable[..., int]


def add_rollouts(app: web.Application, hub: Hub, find_run: FindRun, whole: Whole) -> None:
    """Add the addresses. `find_run` returns the run that a request names, `whole` reads a whole number of its query."""

    async def answer(work: Callable[[], Any]) -> web.Response:
        return web.Response(text=await hub.call(lambda: to_json(work())), content_type="application/json")

    async def rollouts(request: web.Request) -> web.Response:
        run, filters = await find_run(request), Filters.of(request.query)
        sort = request.query.get("sort", "newest")
        if sort not in SORTS:
            raise parameter_error("sort", f"must be one of {', '.join(SORTS)}")
        at = request.query.get("at")
        window = Window(
            whole(request, "offset", default=0, high=1 << 31),
            whole(request, "limit", default=50, low=1, high=MAX_LIMIT),
            None if not at else SampleName.of(at, parameter="at"),
        )
        return await answer(lambda: run.rollouts.find(filters, sort, window))

    async def sample(request: web.Request) -> web.Response:
        run, name = await find_run(request), _name(request)
        limit = whole(request, "tokens", default=_TOKENS, low=_FEWEST, high=MAX_TOKENS)
        return await answer(lambda: _there(run.rollouts.sample(name, limit=limit, metric=run.metric_at)))

    async def group(request: web.Request) -> web.Response:
        run, name = await find_run(request), _name(request)
        return await answer(lambda: _there(run.rollouts.group(name, metric=run.metric_at)))

    app.router.add_get("/api/rollouts", rollouts)
    app.router.add_get("/api/rollouts/sample", sample)
    app.router.add_get("/api/rollouts/group", group)


def _name(request: web.Request) -> SampleName:
    return SampleName.of(request.query.get("name", ""), parameter="name")


def _there(found: dict[str, Any] | None) -> dict[str, Any]:
    if found is None:
        text = "This sample is not in the run's folder, or not any more."
        raise RequestError(text, status=404, code="unknown_sample", param="name")
    return found
