"""Errors as OpenAI's clients know them: a status, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from aiohttp.web_protocol import RequestHandler, RequestPayloadError

from forge.envs.chat_api.send_limit import SendLimit
from forge.errors import (
    INPUT_ERRORS,
    ActorFailure,
    CallTimeout,
    EngineDead,
    ForgeError,
    Overloaded,
    PromptError,
    ServiceStopped,
    SyncError,
)

_log = logging.getLogger("forge.envs.chat_api")

RETRY_AFTER_S = 1
"""The Retry-After header when every replica is busy."""


class RequestError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.code = message, status, kind, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 429:
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def parameter_error(param: str, rule: str, *, code: str = "invalid_value") -> RequestError:
    """Return the error for a parameter that breaks a rule."""
    return RequestError(f"'{param}': {rule}", param=param, code=code)


def request_error(error: BaseException) -> RequestError:
    """Return the answer to an error of the service. Unexpected errors are logged with their traceback."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, INPUT_ERRORS):
        code = "context_length_exceeded" if isinstance(error, PromptError) and _is_length(error) else "invalid_value"
        param = None if error.path is None else error.path.removeprefix("sampling.")
        return RequestError(str(error), param=param, code=code)
    if isinstance(error, Overloaded):
        return RequestError(str(error), status=429, kind="rate_limit_error", code="overloaded")
    if isinstance(error, EngineDead | ActorFailure | ServiceStopped | SyncError):
        return RequestError(str(error), status=503, kind="server_error", code="unavailable")
    if isinstance(error, CallTimeout):
        return RequestError(str(error), status=504, kind="server_error", code="timeout")
    _log.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error)
    text = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
    return RequestError(text, status=500, kind="server_error", code="internal_error")


def _is_length(error: PromptError) -> bool:
    """Return whether the prompt is too long. Frameworks use that code to shorten a conversation."""
    return "longer than the context" in error.message


def is_malformed(error: BaseException) -> bool:
    """Return whether an error says that the bytes of a request break the rules of HTTP: the client's fault."""
    return isinstance(error, HttpProcessingError | RequestPayloadError)


def malformed_request(reason: str) -> RequestError:
    """Return the answer to a request that cannot be parsed."""
    return RequestError(f"The request is not valid HTTP: {' '.join(reason.split())}", code="invalid_http")


def json_errors(size_limit: str) -> Middleware:
    """Return the middleware that answers errors as JSON. `size_limit` names what bounds the size of a request."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as refused:
            if refused.status == 413:
                text = f"The request is too large; {size_limit} allows {request.client_max_size / 2**20:g} MiB."
            else:
                text = f"{request.method} {request.path}: {refused.reason}"
            error = RequestError(text, status=refused.status, code=(refused.reason or "").lower().replace(" ", "_"))
        except ConnectionError:
            raise  # the client is gone
        except Exception as cause:  # noqa: BLE001 - sent to the client, and logged
            error = malformed_request(str(cause)) if is_malformed(cause) else request_error(cause)
        return web.json_response(error.body, status=error.status, headers=error.headers)

    return answer


class JsonErrorRunner(web.AppRunner):
    """Runs an application on connections whose own errors are JSON, too."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server
        return server


class _Server(web.Server):
    """Makes a connection of each client."""

    def __call__(self) -> RequestHandler:
        return Connection(self, loop=asyncio.get_running_loop(), **self._kwargs)


class Connection(RequestHandler):
    """Answers what the parser refuses, and what a handler did not catch, as OpenAI does.

    Attributes:
        only_key: the one key that requests on this connection may have; None for any.
        on_lost: called when the connection has ended.
        is_crowded: whether others wait for this connection to end.
        is_idle: whether it had requests, and has none now.
        on_admitted: called when a request had an accepted key, and when the connection has ended.
        send_limit_s: how long the client may take nothing of what is sent to it; None for as long as it likes.
    """

    only_key: str | None = None
    on_lost: Callable[[], None] | None = None
    is_crowded: Callable[[], bool] | None = None
    is_idle = False
    on_admitted: Callable[[], None] | None = None
    send_limit_s: float | None = None
    _send_limit: SendLimit | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.send_limit_s is not None and isinstance(transport, asyncio.Transport):
            self._send_limit = SendLimit(transport, self.send_limit_s)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self._send_limit is not None:
            self._send_limit.end()
        if self.on_admitted is not None:
            self.on_admitted()
        if self.on_lost is not None:
            self.on_lost()

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("a response has started: the connection can only be closed")
        if status < 500:
            _log.debug("a request could not be parsed: %s", message)
            error = malformed_request(message or "it cannot be parsed")
        else:
            error = request_error(exc or RuntimeError(message or "no answer"))
        response = web.json_response(error.body, status=status)
        response.force_close()
        return response
