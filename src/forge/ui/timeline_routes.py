"""The addresses of the timeline: parts of a run's trace, the trace as a file, and the profiles of its steps."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

from aiohttp import web

from forge.envs.chat_api.errors import RequestError, parameter_error
from forge.ui.hub import Hub
from forge.ui.parameters import HUB, as_json, live_run, number, run_folder, unknown_run, whole
from forge.ui.run_files import fingerprint, open_file
from forge.ui.strict_json import to_json
from forge.ui.trace_files import PROFILES, TRACE, list_profiles
from forge.ui.trace_view import Window, header_events, read_arguments, view_window

MAX_DOWNLOADS: Final = 4
_CHUNK: Final = 1 << 20

DOWNLOADS: Final[web.AppKey[set[object]]] = web.AppKey("downloads", set)


def add_timeline(app: web.Application) -> None:
    """Add the addresses."""
    app[DOWNLOADS] = set()
    app.router.add_get("/api/timeline", _timeline)
    app.router.add_get("/api/timeline/span", _span)
    app.router.add_get("/api/trace", _trace)
    app.router.add_get("/api/profile", _profile)


async def _timeline(request: web.Request) -> web.Response:
    hub, run = request.app[HUB], await live_run(request)
    start, end = number(request, "start"), number(request, "end")
    points = whole(request, "points", default=1_000, low=32, high=4_000)

    def work() -> str:
        index = run.trace
        with index.guard:
            index.advance()
            first = 0.0 if start is None else start
            last = index.end_us / 1e6 if end is None else end
            window = Window(first, max(first + 1e-9, last), points)
            return to_json(view_window(index, window, run.rows()))

    if start is not None and end is not None and not start < end:
        raise parameter_error("end", "must be more than `start`")
    return web.Response(text=await hub.call(work), content_type="application/json")


async def _span(request: web.Request) -> web.Response:
    hub, run = request.app[HUB], await live_run(request)
    offset = whole(request, "offset", default=0)
    found = await hub.call(lambda: read_arguments(run.trace, offset))
    if found is None:
        raise RequestError("There is no span at this place of the trace.", status=404, code="no_span", param="offset")
    return as_json(found)


# ---- Files


async def _trace(request: web.Request) -> web.StreamResponse:
    """Send the trace as a file, or a part of it."""
    run = await live_run(request)
    start, end = number(request, "start"), number(request, "end")
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", request.query["run"]).strip("-")[-80:] or "run"
    if start is None and end is None:
        return await _send(request, _file(run.folder / TRACE), f"{name}-trace.json")
    if start is None or end is None or not start < end:
        raise parameter_error("end", "must be more than `start`; both or neither")

    def pieces() -> Iterator[bytes]:
        run.trace.advance()
        yield header_events(run.trace)
        yield from filter(None, run.trace.lines_between(start * 1e6, end * 1e6))  # nothing would end what is sent
        yield b"\n]\n"

    return await _send(request, pieces(), f"{name}-trace-{start:.0f}-{end:.0f}s.json")


async def _profile(request: web.Request) -> web.StreamResponse:
    folder, name = run_folder(request), request.query.get("name", "")
    if name not in {each["name"] for each in list_profiles(folder)}:
        raise RequestError(f"There is no profile {name[:200]!r}.", status=404, code="unknown_profile", param="name")
    return await _send(request, _file(folder / PROFILES / name), name)


def _file(path: Path) -> Iterator[bytes]:
    """Yield what a file has when it is opened."""
    found = fingerprint(path)
    if found is None:
        raise unknown_run(path.name)
    with open_file(path) as file:
        left = found.size
        while left > 0 and (data := file.read(min(_CHUNK, left))):
            left -= len(data)
            yield data


async def _send(request: web.Request, pieces: Iterator[bytes], name: str) -> web.StreamResponse:
    downloads, hub = request.app[DOWNLOADS], request.app[HUB]
    if len(downloads) >= MAX_DOWNLOADS:
        text = f"{MAX_DOWNLOADS} files are being sent: wait for one of them."
        raise RequestError(text, status=503, kind="server_error", code="too_many_downloads")
    key = object()
    downloads.add(key)
    try:
        first = await hub.call(next, pieces, b"")
        kind = "application/gzip" if name.endswith(".gz") else "application/json"
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Type": kind}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        async for data in _all(hub, first, pieces):
            await response.write(data)
        await response.write_eof()
        return response
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise
        raise RequestError("The file cannot be read.", status=404, code="no_file") from None
    finally:
        downloads.discard(key)


async def _all(hub: Hub, first: bytes, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    data = first
    while data:
        yield data
        data = await hub.call(next, pieces, b"")
