"""Requests that are not HTTP, answered in OpenAI's form. aiohttp would answer them in plain text."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler, RequestPayloadError

from forge.generator.openai.errors import RequestError, request_error

_log = logging.getLogger("forge.generator.openai")


def is_malformed(error: BaseException) -> bool:
    """Return whether an error says that the bytes of a request break the rules of HTTP: the client's fault."""
    return isinstance(error, HttpProcessingError | RequestPayloadError)


def malformed_request(reason: str) -> RequestError:
    """Return the answer to a request that cannot be parsed."""
    return RequestError(f"The request is not valid HTTP: {' '.join(reason.split())}", code="invalid_http")


class JsonErrorRunner(web.AppRunner):
    """Runs an application on connections whose own errors are JSON, too."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server
        return server


class _Server(web.Server):
    """Makes a connection of each client."""

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._kwargs)


class _Connection(RequestHandler):
    """Answers what the parser refuses, and what a handler did not catch, as OpenAI does."""

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way: the connection can only be closed")
        if status < 500:
            _log.debug("a request could not be parsed: %s", message)
            error = malformed_request(message or "it cannot be parsed")
        else:
            error = request_error(exc or RuntimeError(message or "no answer"))
        response = web.json_response(error.body, status=status)
        response.force_close()
        return response
