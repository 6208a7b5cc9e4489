"""What a page hears without asking: changes of the list, and what is new of the runs that it shows."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Final

from aiohttp import web

from forge.envs.chat_api.errors import RequestError, parameter_error
from forge.ui.decimation import Span, encode_table
from forge.ui.hub import Hub
from forge.ui.live_run import LiveRun
from forge.ui.parameters import HUB, unknown_run, whole
from forge.ui.run_summary import RunSummary
from forge.ui.strict_json import to_json

MAX_STREAMS: Final = 64
"""Pages that may be open at the same time."""
MAX_RUNS: Final = 8
"""Runs that one page may follow."""
_MAX_ROWS: Final = 1_000
"""Rows that are sent to a page as they come; a page that has missed more asks for the whole table."""
_MAX_LISTED: Final = 1_000
"""Runs that one event has; the rest of a longer list follows in others."""
_QUIET_S: Final = 15.0
"""How often a page without news hears that the server is there."""
_NO_TABLE: Final = -2

STREAMS: Final[web.AppKey[set[object]]] = web.AppKey("streams", set)


def add_news(app: web.Application) -> None:
    """Add the address of the news."""
    app[STREAMS] = set()
    app.router.add_get("/api/events", _events)


async def _events(request: web.Request) -> web.StreamResponse:
    """Send what changes, as server-sent events, until the page is closed.

    `list` has runs whose line has changed, `run` what is new of a run that the page shows, and `rows` its new rows. The
    parameter `run` may be given several times, and with it `after` and `table`, which say what the page has.
    """
    hub, streams = request.app[HUB], request.app[STREAMS]
    followed = _followed(request)
    if len(streams) >= MAX_STREAMS:
        text = f"{MAX_STREAMS} pages are open: close one."
        raise RequestError(text, status=503, kind="server_error", code="too_many_pages")
    news = _News(hub, followed, version=whole(request, "version", default=0))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    key = object()
    streams.add(key)
    try:
        await response.prepare(request)
        async with contextlib.AsyncExitStack() as stack:
            for name in _ids(followed):
                await stack.enter_async_context(hub.page(name))
            while True:
                change = hub.change
                texts = await news.take()
                await response.write("".join(texts).encode() if texts else b": here\n\n")
                if news.has_more:
                    continue
                try:
                    await asyncio.wait_for(change.wait(), _QUIET_S)
                except TimeoutError:
                    continue
    except ConnectionError:
        return response
    finally:
        streams.discard(key)


class _Followed:
    """One run that a page shows: the rows that the page has, and what it has heard last."""

    def __init__(self, run_id: str, *, after: float | None, table: int) -> None:
        self.id, self._after, self._table = run_id, after, table
        self._heard: tuple[int, RunSummary] | None = None

    async def take(self, hub: Hub) -> list[str]:
        """Return the events since the last call."""
        run, summary = await hub.live(self.id), hub.runs.summary(self.id)
        if run is None or summary is None or (run.version, summary) == self._heard:
            return []
        has_rows = self._heard is None or self._heard[0] != run.version
        self._heard = run.version, summary
        status = await hub.call(run.status, summary)
        return [_event("run", to_json(status)), *(await self._rows(run, hub) if has_rows else ())]

    async def _rows(self, run: LiveRun, hub: Hub) -> list[str]:
        """Return new rows for a page that has the rows before them. One with other rows asks for the table again."""
        rows = run.rows()
        if self._after is None or run.is_partial or self._table != run.table_id or not len(rows):
            return []
        if self._after > rows.steps[-1]:  # it has nothing of these
            return []
        start, end = rows.between(self._after, None)
        self._after = float(rows.steps[-1])
        if end - start > _MAX_ROWS:
            self._table = _NO_TABLE
            return []
        span = Span(first=float(rows.steps[start]), points=_MAX_ROWS + 1)
        return [_event("rows", await hub.call(lambda: encode_table(rows, span, table=self._table, run=self.id)))]


class _News:
    """What one page has not heard yet."""

    def __init__(self, hub: Hub, followed: Sequence[_Followed], *, version: int) -> None:
        self._hub, self._followed, self._version, self._has_list = hub, followed, version, False
        self.has_more = False
        """Whether there is more of the list than the last call has returned."""

    async def take(self) -> list[str]:
        """Return the events since the last call. A long list comes in parts, one for each call."""
        events = []
        if self._hub.list_version != self._version or not self._has_list:
            part = self._hub.list_since(self._version, limit=_MAX_LISTED)
            self._version, self._has_list, self.has_more = part.version, True, part.has_more
            events.append(_event("list", await self._hub.call(part.text)))
        for run in self._followed:
            events += await run.take(self._hub)
        return events


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


def _followed(request: web.Request) -> list[_Followed]:
    names = request.query.getall("run", [])
    if len(names) > MAX_RUNS:
        raise parameter_error("run", f"must be given {MAX_RUNS} times at most")
    after, tables = _each(request, "after", len(names)), _each(request, "table", len(names))
    for name in names:
        if request.app[HUB].runs.folder(name) is None:
            raise unknown_run(name)
    return [
        _Followed(name, after=at, table=_NO_TABLE if table is None else int(table))
        for name, at, table in zip(names, after, tables, strict=True)
    ]


def _ids(followed: Sequence[_Followed]) -> list[str | None]:
    """Return the runs that a page shows; None for one that shows the list."""
    return [run.id for run in followed] or [None]


def _each(request: web.Request, parameter: str, count: int) -> list[float | None]:
    """Return a parameter for each of the runs: a number, or None where it is empty or not given."""
    texts = request.query.getall(parameter, [])
    if texts and len(texts) != count:
        raise parameter_error(parameter, "must be given once for each `run`, or not at all")
    return [_finite(text, parameter) for text in texts] or [None] * count


def _finite(text: str, parameter: str) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        value = math.inf
    if not text:
        return None
    if not math.isfinite(value) or (parameter == "table" and not -3 < value == int(value)):
        raise parameter_error(parameter, "must be a number" if parameter == "after" else "must be a whole number")
    return value
