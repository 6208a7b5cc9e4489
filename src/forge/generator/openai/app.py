"""The server: its lifetime, its address and its keys."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from forge.config import ServeConfig
from forge.envs.chat_api.errors import JsonErrorRunner
from forge.errors import ConfigError, OptionError
from forge.generator.openai.access_log import AccessLog
from forge.generator.openai.policy import Policy
from forge.generator.openai.records import Recorder
from forge.generator.openai.replicas import ServedPolicy
from forge.generator.openai.requests_open import OpenRequests
from forge.generator.openai.routes import Serving, make_app
from forge.generator.openai.server_metrics import ServerMetrics
from forge.generator.openai.updates import UpdateOutcome, WeightPublisher, WeightUpdates

if TYPE_CHECKING:
    from forge.models.tokenizer import ChatTokenizer

KEY_VARIABLE: Final = "FORGE_API_KEY"
ADMIN_KEY_VARIABLE: Final = "FORGE_ADMIN_KEY"
_CUT_S: Final = 2.0
"""How long requests that are cut short have to send their error."""


class OpenAIServer:
    """A server that runs. `base_url` is what OpenAI's clients are given."""

    def __init__(self, *, host: str, port: int, model_name: str, serving: Serving | None = None) -> None:
        self.host, self.port, self.model_name = host, port, model_name
        self._serving = serving

    async def update_weights(self, folder: str | None = None) -> UpdateOutcome:
        """Update the replicas' weights, one replica after another, from a folder or from where they come usually."""
        if self._serving is None or self._serving.updates is None:
            raise OptionError(
                "this server has no source of weights",
                path="serve_openai(publisher=)",
                rule="updates need a publisher of weights",
                repair="publish the weights yourself, and call service.update_weights.rolling(version, mode='drain')",
            )
        return await self._serving.updates.run(folder)

    @property
    def num_open(self) -> int:
        """How many requests are in progress or wait."""
        return 0 if self._serving is None else len(self._serving.requests)

    def hurry(self) -> None:
        """When the block ends, or is ending, do not wait for open requests."""
        if self._serving is not None:
            self._serving.requests.hurry()

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
    drain_s: float | None = None,
    publisher: WeightPublisher | None = None,
) -> AsyncIterator[OpenAIServer]:
    """Serve a policy service to OpenAI's clients until the block ends. It runs on the caller's event loop, so that a
    training loop can serve its own policy while it trains.

    With the model's `tokenizer`, conversations are tokenised here and later turns begin with exactly the tokens of the
    earlier ones; without it the service tokenises each turn anew, and logprobs name tokens by number. When the block
    ends, new requests are refused, and open ones get `drain_s` seconds (by default the configuration's) to finish; then
    they end with an error. The service is left as it is. With a `publisher`, the server can update the weights.
    """
    config = config or ServeConfig()
    drain_s = config.drain_s if drain_s is None else drain_s
    key, admin_key = _checked_key(config), config.admin_key or os.environ.get(ADMIN_KEY_VARIABLE) or None
    card: Mapping[str, Any] = await service.card.route()
    metrics = ServerMetrics()
    with contextlib.ExitStack() as files:
        recorder = None
        if config.record is not None:
            recorder = Recorder(config.record)
            files.callback(recorder.close)
        log = AccessLog(config.access_log)
        files.callback(log.close)
        replicas = ServedPolicy(service, metrics)
        await replicas.open()
        limit, most = config.max_requests, card.get("max_open")
        if limit is None and most is not None:
            limit = most * replicas.num_replicas
        requests = OpenRequests(metrics, log, limit=limit, timeout_s=config.request_timeout_s)
        name = config.model_name or str(card["name"])
        policy = Policy(replicas, name=name, card=card, tokenizer=tokenizer, recorder=recorder)
        files.callback(policy.close)
        updates = None
        if publisher is not None:
            updates = WeightUpdates(replicas, publisher, mode=config.update_mode, metrics=metrics)
        names = tuple(dict.fromkeys((name, *config.model_aliases)))
        if taken := sorted(set(names) & set(await replicas.read_adapters())):
            raise ConfigError(
                "an adapter has the name of the model, so that no request could select it",
                path="serve.model_name" if taken[0] == name else "serve.model_aliases",
                value=taken[0],
                rule="a name that no adapter has",
                repair="rename the adapter in generator.adapters, or set another name here",
            )
        serving = Serving(policy, replicas, requests, names, updates)
        app = make_app(serving, key=key, admin_key=admin_key, max_bytes=int(config.max_body_mb * 2**20))
        # A client that goes away cancels its handler, which cancels the request in the engine.
        runner = JsonErrorRunner(app, handler_cancellation=True, shutdown_timeout=_CUT_S, access_log=None)
        await runner.setup()
        try:
            port = await _listen(runner, config)
            try:
                yield OpenAIServer(host=config.host, port=port, model_name=name, serving=serving)
            finally:
                await requests.drain(drain_s)
        finally:
            await runner.cleanup()


async def check_serving(config: ServeConfig) -> None:
    """Raise `ConfigError` for what would keep a server from starting: before a model is loaded, not after."""
    _checked_key(config)
    if config.record is not None:
        Recorder(config.record).close()
    AccessLog(config.access_log).close()
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
