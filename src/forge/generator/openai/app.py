"""The server: routes, the key, errors, and its lifetime."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import hmac
import ipaddress
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from forge.config import ServeConfig
from forge.envs.chat_api.errors import JsonErrorRunner, RequestError, json_errors
from forge.envs.chat_api.requests import bearer_key, read_body, wrong_key
from forge.errors import ConfigError
from forge.generator.openai.endpoints import complete_chat, complete_text
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
    app = web.Application(middlewares=[json_errors("serve.max_body_mb"), _key_checker(key)], client_max_size=max_bytes)
    app[_POLICY] = policy
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_post("/v1/completions", _completions)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{name:.+}", _model)
    app.router.add_get("/v1/stats", _stats)
    app.router.add_get("/health", _health)
    return app


def _key_checker(key: str | None) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key is not None and request.path != "/health":
            given = (bearer_key(request) or "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, key.encode()):
                raise wrong_key()
        return await handler(request)

    return check


async def _chat(request: web.Request) -> web.StreamResponse:
    return await complete_chat(request.app[_POLICY], request, await _read_request(request))


async def _completions(request: web.Request) -> web.StreamResponse:
    return await complete_text(request.app[_POLICY], request, await _read_request(request))


async def _read_request(request: web.Request) -> Mapping[str, Any]:
    body = await read_body(request)
    _check_model(request.app[_POLICY], body["model"])
    return body


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
