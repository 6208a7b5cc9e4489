"""One HTTP server for the endpoints of all episodes in a process, on one port of the loopback address.

A key tells which episode a request belongs to. Keys are signed by the process: a key that was signed and is not in use
belongs to an endpoint that has closed, so nothing is kept about closed ones.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, Protocol

from aiohttp import web

from forge.envs.chat_api.errors import Connection, JsonErrorRunner, RequestError, json_errors
from forge.envs.chat_api.listening import HttpListener, admit, bind
from forge.envs.chat_api.requests import bearer_key, wrong_key
from forge.envs.endpoint_listener import SandboxListener

MODEL_NAME: Final = "policy"
"""The name under /v1/models. Requests may use any other."""

_MAX_BODY_MB: Final = 16
_SECRET: Final = secrets.token_bytes(32)
_HOST: Final = "127.0.0.1"


class ChatHandler(Protocol):
    """What answers the requests of one episode."""

    async def complete(self, request: web.Request, *, is_responses: bool = False) -> web.StreamResponse: ...


class EndpointServer:
    """Sends each request to the episode whose key it has."""

    def __init__(self, port: int, connect: Callable[[], web.RequestHandler]) -> None:
        self.base_url, self._connect = f"http://{_HOST}:{port}/v1", connect
        self._open: dict[str, ChatHandler] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, handler: ChatHandler) -> str:
        """Return a new key whose requests go to `handler`."""
        nonce = secrets.token_hex(16)
        key = f"sk-forge-{nonce}{_signature(nonce)}"
        self._open[key] = handler
        return key

    def close(self, key: str) -> None:
        """Answer requests with this key with 410 from now on."""
        self._open.pop(key, None)

    def accept(self, listener: socket.socket, key: str) -> SandboxListener:
        """Serve connections on a socket of a sandbox, for requests with this key alone."""
        return SandboxListener(listener, self._connect, key=key)

    def handler_of(self, request: web.Request) -> ChatHandler:
        """Return what answers a request, or raise the error for a wrong key or a closed endpoint."""
        key = bearer_key(request) or ""
        only = getattr(request.protocol, "only_key", None)
        if only is not None and key != only:  # from a sandbox, of which this is not the episode
            raise wrong_key()
        handler = self._open.get(key)
        if handler is not None:
            admit(request)
            return handler
        given = key.removeprefix("sk-forge-").encode("utf-8", "surrogateescape")
        nonce, signature = given[:32], given[32:]
        if key.startswith("sk-forge-") and hmac.compare_digest(signature, _signature(nonce.decode("latin-1")).encode()):
            raise closed_error()
        raise wrong_key()


def closed_error(reason: str = "The endpoint has closed: the episode does not use it any more.") -> RequestError:
    """Return the answer to a request for an endpoint that has closed."""
    return RequestError(reason, status=410, kind="endpoint_closed", code="endpoint_closed")


async def shared_server() -> EndpointServer:
    """Return the server of the running event loop, started when it is first asked for. It stops with the loop."""
    loop = asyncio.get_running_loop()
    for other in [each for each in _servers if each.is_closed()]:
        del _servers[other]
    if loop not in _servers:
        _servers[loop] = loop.create_task(_start(), context=contextvars.Context())  # it belongs to no episode
    starting = _servers[loop]
    try:
        server, _ = await asyncio.shield(starting)
    except Exception:
        if _servers.get(loop) is starting:
            del _servers[loop]  # the next one tries again
        raise
    return server


_Running = tuple[EndpointServer, AsyncGenerator[EndpointServer, None]]
_servers: dict[asyncio.AbstractEventLoop, asyncio.Future[_Running]] = {}


async def _start() -> _Running:
    running = _serve()
    return await anext(running), running


async def _serve() -> AsyncGenerator[EndpointServer, None]:
    """Yield a running server, once. The event loop closes generators that are still open when it ends."""
    app = web.Application(middlewares=[json_errors("the endpoint")], client_max_size=_MAX_BODY_MB * 2**20)
    # A client that goes away cancels its handler, which cancels the request in the engine.
    runner = JsonErrorRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    routes = _Routes()
    app.router.add_post("/v1/chat/completions", routes.chat)
    app.router.add_post("/v1/responses", routes.responses)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/v1/models/{name:.+}", routes.model)
    await runner.setup()
    try:
        assert runner.server is not None
        listener = HttpListener(runner, bind(_HOST, 0))
        try:
            routes.server = EndpointServer(listener.port, runner.server)
            yield routes.server
        finally:
            listener.close()
    finally:
        await runner.cleanup()
        _servers.pop(asyncio.get_running_loop(), None)


class _Routes:
    server: EndpointServer

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, is_responses=False)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, is_responses=True)

    async def _complete(self, request: web.Request, *, is_responses: bool) -> web.StreamResponse:
        handler, connection = self.server.handler_of(request), request.protocol
        if isinstance(connection, Connection):
            connection.is_idle = False
        try:
            return await handler.complete(request, is_responses=is_responses)
        finally:
            if isinstance(connection, Connection):
                connection.is_idle = True
                if connection.is_crowded is not None and connection.is_crowded():
                    connection.close()  # after this answer

    async def models(self, request: web.Request) -> web.StreamResponse:
        self.server.handler_of(request)
        return web.json_response({"object": "list", "data": [_model(MODEL_NAME)]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        self.server.handler_of(request)
        return web.json_response(_model(request.match_info["name"]))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "torchforge"}


def _signature(nonce: str) -> str:
    return hmac.new(_SECRET, nonce.encode("utf-8", "surrogateescape"), "sha256").hexdigest()[:32]
