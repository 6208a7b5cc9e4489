"""A server that speaks OpenEnv's protocol as a test tells it to, in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

TEXT_ACTION: Mapping[str, Any] = {
    "type": "object",
    "properties": {"message": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["message"],
    "additionalProperties": False,
}
OBSERVATION: Mapping[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "metadata": {"type": "object"}, "done": {}, "reward": {}},
    "required": ["text", "done"],
    "additionalProperties": False,
}

Reply = Mapping[str, Any] | str | bytes | None
"""What a message gets: an object, a raw text, bytes, or nothing at all."""


def seen(text: str, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    """Return an observation as the server sends it."""
    return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}}


def error(code: str, message: str = "no") -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message}}


@dataclass
class FakeServer:
    """Answers each message by `reply(message)`; `RuntimeError` in it closes the connection.

    Attributes:
        received: all messages, in order.
        num_open: connections that are open.
        num_refused: connections that still find no free session.
        pinged: set when the client has sent three pings.
    """

    reply: Callable[[dict[str, Any]], Reply]
    action: Mapping[str, Any] = field(default_factory=lambda: TEXT_ACTION)
    schema: Any = None
    received: list[dict[str, Any]] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    num_refused: int = 0
    num_pings: int = 0
    num_schemas: int = 0
    pinged: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        self.num_connections += 1
        if self.num_refused:
            self.num_refused -= 1
            await socket.send_json(error("CAPACITY_REACHED", "full"))
            return socket
        self.num_open += 1
        try:
            async for message in socket:
                if message.type is WSMsgType.PING:
                    self.num_pings += 1
                    await socket.pong(message.data)
                    if self.num_pings == 3:
                        self.pinged.set()
                elif message.type is WSMsgType.TEXT:
                    given = json.loads(message.data)
                    self.received.append(given)
                    if given["type"] == "close":
                        break
                    await self._send(socket, self.reply(given))
        except RuntimeError:
            await socket.close(code=1011)
        finally:
            self.num_open -= 1
        return socket

    async def _send(self, socket: web.WebSocketResponse, reply: Reply) -> None:
        if isinstance(reply, bytes):
            await socket.send_bytes(reply)
        elif reply is not None:
            await socket.send_str(reply if isinstance(reply, str) else json.dumps(reply))

    async def tell_schema(self, request: web.Request) -> web.Response:
        self.num_schemas += 1
        return web.json_response(self.schema or {"action": self.action, "observation": OBSERVATION, "state": {}})

    def types(self) -> list[str]:
        return [message["type"] for message in self.received]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeServer]:
        """Serve on a free port until the block ends."""
        app = web.Application()
        app.add_routes([web.get("/ws", self.socket), web.get("/schema", self.tell_schema)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()
