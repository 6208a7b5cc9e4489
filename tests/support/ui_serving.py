"""A UI server in the process of a test, and a client that has its token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from aiohttp import ClientResponse, ClientSession

from forge.ui.server import UiOptions, UiServer, serve_ui

LIMIT_S = 600
OFTEN_S = 0.02
"""How often files are looked at, so that a test need not wait."""


class Client:
    """Asks a server as a program with the token does."""

    def __init__(self, ui: UiServer, http: ClientSession) -> None:
        self.ui, self.http = ui, http
        self._headers = {"Authorization": f"Bearer {ui.token}"}

    async def get(self, path: str, **parameters: object) -> Any:
        """The JSON of an answer, which must be one."""
        async with self.raw(path, **parameters) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            return json.loads(text, parse_constant=_no_constant)

    def raw(self, path: str, **parameters: object) -> Any:
        query = {name: str(value) for name, value in parameters.items()}
        return self.http.get(f"{self.ui.base_url}{path}", params=query, headers=self._headers)

    def events(self, **parameters: object) -> AbstractAsyncContextManager[Callable[[str], Awaitable[Any]]]:
        """Yield a function that returns the next event of a name."""
        return self.events_of(urlencode(parameters))

    @asynccontextmanager
    async def events_of(self, query: str) -> AsyncIterator[Callable[[str], Awaitable[Any]]]:
        """The same for a query, in which a name may come several times."""
        async with self.raw(f"/api/events?{query}") as answer:
            assert answer.status == 200, await answer.text()

            async def following(name: str) -> Any:
                while True:
                    found, data = await _event(answer)
                    if found == name:
                        return data

            yield following


async def _event(answer: ClientResponse) -> tuple[str, Any]:
    name, data = "", ""
    while True:
        line = (await answer.content.readuntil(b"\n")).decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif not line and name:
            return name, json.loads(data, parse_constant=_no_constant)


def _no_constant(word: str) -> float:
    raise AssertionError(f"{word} is not JSON")


@asynccontextmanager
async def ui_client(runs_dir: Path, **options: Any) -> AsyncIterator[Client]:
    """A server for a folder, and a client."""
    async with (
        asyncio.timeout(LIMIT_S),
        serve_ui(UiOptions(runs_dir, **{"interval_s": OFTEN_S, **options})) as ui,
        ClientSession(read_bufsize=1 << 24) as http,
    ):
        yield Client(ui, http)
