"""The server: routes, the key, errors, and its lifetime."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import hmac
import ipaddress
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from forge.config import ServeConfig
from forge.errors import ConfigError
from forge.generator.openai.endpoints import complete_chat, complete_text
from forge.generator.openai.errors import (
    JsonErrorRunner,
    RequestError,
    is_malformed,
    malformed_request,
    parameter_error,
    request_error,
)
from forge.generator.openai.policy import Policy
from forge.generator.openai.records import Recorder

if TYPE_CHECKING:
    from forge.models.tokenizer import ChatTokenizer

KEY_VARIABLE: Final = "FORGE_API_KEY"
_HEALTH_LIMIT_S: Final = 10.0
_POLICY: Final[web.AppKey[Policy]] = web.AppKey("policy", Policy)


class OpenAIServer:
    """A server that runs. `base_url` is what OpenAI's clients are given."""

    def __init__(self, *, host: str, port: int, model_name: str) -> None:
        self.host, self.port, self.model_name = host, port, model_name

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


@contextlib.asynccontextmanager
async def serve_openai(
    service: Any,
    config: ServeConfig | None = None,
    *,
    tokenizer: ChatTokenizer | None = None,
    drain_s: float = 2.0,
) -> AsyncIterator[OpenAIServer]:
    """Serve a policy service to OpenAI's clients until the block ends. It runs on the caller's event loop, so that a
    training loop can serve its own policy while it trains.

    With the model's `tokenizer`, conversations are tokenised here and later turns begin with exactly the tokens of the
    earlier ones; without it the service tokenises each turn anew, and logprobs name tokens by number. When the block
    ends, requests under way get `drain_s` seconds to end, and are cancelled then. The service is left as it is.
    """
    config = config or ServeConfig()
    key = _checked_key(config)
    card: Mapping[str, Any] = await service.card.route()
    recorder = None if config.record is None else Recorder(config.record)
    try:
        policy = Policy(
            service,
            name=config.model_name or str(card["name"]),
            card=card,
            tokenizer=tokenizer,
            recorder=recorder,
        )
        app = _make_app(policy, key=key, max_bytes=int(config.max_body_mb * 2**20))
        # A client that goes away cancels its handler, which cancels the request in the engine.
        runner = JsonErrorRunner(app, handler_cancellation=True, shutdown_timeout=drain_s, access_log=None)
        await runner.setup()
        try:
            port = await _listen(runner, config)
            yield OpenAIServer(host=config.host, port=port, model_name=policy.name)
        finally:
            await runner.cleanup()
            policy.close()
    finally:
        if recorder is not None:
            recorder.close()


async def check_serving(config: ServeConfig) -> None:
    """Raise `ConfigError` for what would keep a server from starting: before a model is loaded, not after."""
    _checked_key(config)
    if config.record is not None:
        Recorder(config.record).close()
    runner = web.AppRunner(web.Application())
    await runner.setup()
    try:
        await _listen(runner, config)
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, config: ServeConfig) -> int:
    try:
        await web.TCPSite(runner, config.host, config.port).start()
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise ConfigError(
            "the server cannot listen",
            path="serve.port" if is_port else "serve.host",
            value=config.port if is_port else config.host,
            rule=f"an address of this machine that is free: {error.strerror or error}",
            repair="choose another, such as serve.port=0 for any that is free" if is_port else "use 127.0.0.1",
        ) from None
    port: int = runner.addresses[0][1]
    return port


def _checked_key(config: ServeConfig) -> str | None:
    key = config.api_key or os.environ.get(KEY_VARIABLE) or None
    if key is None and not _is_loopback(config.host):
        raise ConfigError(
            "without an API key, everyone who reaches this address could use the model",
            path="serve.host",
            value=config.host,
            rule="without an API key, the server listens on loopback only",
            repair=f"set {KEY_VARIABLE} or serve.api_key, or leave the host at 127.0.0.1",
        )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _make_app(policy: Policy, *, key: str | None, max_bytes: int) -> web.Application:
    app = web.Application(middlewares=[_errors_as_json, _key_checker(key)], client_max_size=max_bytes)
    app[_POLICY] = policy
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_post("/v1/completions", _completions)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{name:.+}", _model)
    app.router.add_get("/v1/stats", _stats)
    app.router.add_get("/health", _health)
    return app


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as refused:
        if refused.status == 413:
            text = f"The request is too large; serve.max_body_mb allows {request.client_max_size / 2**20:g} MiB."
        else:
            text = f"{request.method} {request.path}: {refused.reason}"
        error = RequestError(text, status=refused.status, code=(refused.reason or "").lower().replace(" ", "_"))
    except ConnectionError:
        raise  # the client is gone
    except Exception as cause:  # noqa: BLE001 - sent to the client, and logged
        error = malformed_request(str(cause)) if is_malformed(cause) else request_error(cause)
    return web.json_response(error.body, status=error.status, headers=error.headers)


def _key_checker(key: str | None) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key is not None and request.path != "/health":
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            is_right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode())
            if scheme.lower() != "bearer" or not is_right:
                text = "Incorrect API key: the header must be `Authorization: Bearer KEY`."
                raise RequestError(text, status=401, kind="authentication_error", code="invalid_api_key")
        return await handler(request)

    return check


async def _chat(request: web.Request) -> web.StreamResponse:
    return await complete_chat(request.app[_POLICY], request, await _read_body(request))


async def _completions(request: web.Request) -> web.StreamResponse:
    return await complete_text(request.app[_POLICY], request, await _read_body(request))


async def _read_body(request: web.Request) -> Mapping[str, Any]:
    if request.content_type != "application/json":
        # It also keeps web pages of other origins out: they may not send this type without asking first.
        text = "The request must be of the type application/json."
        raise RequestError(text, status=415, code="unsupported_media_type")
    announced = request.content_length or 0
    if announced > request.client_max_size:  # refused before any of it is awaited
        raise web.HTTPRequestEntityTooLarge(max_size=request.client_max_size, actual_size=announced)
    try:
        raw = await request.read()
        body = json.loads(raw, parse_constant=_no_constant)
        if b"\\u" in raw:  # JSON can spell halves of characters, which are not text
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    if not isinstance(body.get("model"), str):
        raise parameter_error("model", "must name the model", code="missing_required_parameter")
    _check_model(request.app[_POLICY], body["model"])
    return body


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def _check_model(policy: Policy, name: str) -> None:
    if name != policy.name:
        text = f"The model '{name}' does not exist; this server has '{policy.name}'."
        raise RequestError(text, status=404, param="model", code="model_not_found")


async def _models(request: web.Request) -> web.StreamResponse:
    return web.json_response({"object": "list", "data": [await _describe(request.app[_POLICY])]})


async def _model(request: web.Request) -> web.StreamResponse:
    policy = request.app[_POLICY]
    _check_model(policy, request.match_info["name"])
    return web.json_response(await _describe(policy))


async def _describe(policy: Policy) -> dict[str, Any]:
    card: Mapping[str, Any] = await policy.service.card.route()
    return {
        "id": policy.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "torchforge",
        "max_model_len": card["max_seq_len"],
        "engine": card["engine"],
        "weight_version": card["version"],
    }


async def _stats(request: web.Request) -> web.StreamResponse:
    """Answer with the statistics of each replica's engine."""
    replicas = await request.app[_POLICY].service.stats.fanout()
    return web.json_response({"replicas": [dataclasses.asdict(stats) for stats in replicas]})


async def _health(request: web.Request) -> web.StreamResponse:
    try:
        async with asyncio.timeout(_HEALTH_LIMIT_S):
            stats = await request.app[_POLICY].service.stats.route()
    except TimeoutError:
        text = f"No generator answered within {_HEALTH_LIMIT_S:g} s."
        raise RequestError(text, status=503, kind="server_error", code="unavailable") from None
    return web.json_response({"status": "asleep" if stats.is_asleep else "ok", "weight_version": stats.version})
