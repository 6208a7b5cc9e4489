"""The server: its lifetime, its address and its keys."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from forge.config import ServeConfig
from forge.envs.chat_api.errors import JsonErrorRunner
from forge.envs.chat_api.listening import HttpListener, bind
from forge.errors import ConfigError, OptionError
from forge.generator.openai.access_log import AccessLog
from forge.generator.openai.policy import Policy
from forge.generator.openai.records import Recorder
from forge.generator.openai.replicas import ServedPolicy
from forge.generator.openai.requests_open import OpenRequests
from forge.generator.openai.routes import Serving, make_app
from forge.generator.openai.server_metrics import ServerMetrics
from forge.generator.openai.updates import UpdateOutcome, WeightPublisher, WeightUpdates
from forge.runtime.exposure import check_exposure, is_loopback_only

if TYPE_CHECKING:
    from forge.models.tokenizer import ChatTokenizer

KEY_VARIABLE: Final = "FORGE_API_KEY"
ADMIN_KEY_VARIABLE: Final = "FORGE_ADMIN_KEY"
_CUT_S: Final = 2.0
"""How long requests that are cut short have to send their error."""


class OpenAIServer:
    """A server that runs. `base_url` is what OpenAI's clients are given."""

    def __init__(
        self, *, host: str, port: int, model_name: str, serving: Serving | None = None, has_tls: bool = False
    ) -> None:
        self.host, self.port, self.model_name = host, port, model_name
        self._serving, self._scheme = serving, "https" if has_tls else "http"

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
        return f"{self._scheme}://[{host}]:{self.port}" if ":" in host else f"{self._scheme}://{host}:{self.port}"

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
    tls = _checked_tls(config)
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
            listener = HttpListener(runner, _bind(config), tls=tls)
            files.callback(listener.close)
            has_tls, port = tls is not None, listener.port
            try:
                yield OpenAIServer(host=config.host, port=port, model_name=name, serving=serving, has_tls=has_tls)
            finally:
                await requests.drain(drain_s)
                listener.close()
        finally:
            await runner.cleanup()


async def check_serving(config: ServeConfig) -> None:
    """Raise `ConfigError` for what would keep a server from starting: before a model is loaded, not after."""
    _checked_key(config)
    if config.record is not None:
        Recorder(config.record).close()
    AccessLog(config.access_log).close()
    _checked_tls(config)
    for sock in _bind(config):
        sock.close()


def _bind(config: ServeConfig) -> list[socket.socket]:
    try:
        return bind(config.host, config.port)
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise ConfigError(
            "the server cannot listen",
            path="serve.port" if is_port else "serve.host",
            value=config.port if is_port else config.host,
            rule=f"an address of this machine that is free: {error.strerror or error}",
            repair="choose another, such as serve.port=0 for any that is free" if is_port else "use 127.0.0.1",
        ) from None


def _checked_key(config: ServeConfig) -> str | None:
    key = config.api_key or os.environ.get(KEY_VARIABLE) or None
    if key is None and not is_loopback_only(config.host):
        raise ConfigError(
            "without an API key, everyone who reaches this address could use the model",
            path="serve.host",
            value=config.host,
            rule="without an API key, the server listens on loopback only",
            repair=f"set {KEY_VARIABLE} or serve.api_key, or leave the host at 127.0.0.1",
        )
    return key


def _checked_tls(config: ServeConfig) -> ssl.SSLContext | None:
    """Return how connections are encrypted; None for not at all, which only loopback and `insecure` allow."""
    if config.tls_cert is None and config.tls_key is None:
        if not config.insecure:
            check_exposure(
                config.host,
                what="the server and its API key",
                path="serve.host",
                value=config.host,
                repair="set serve.tls_cert and serve.tls_key, put a TLS proxy on this machine before 127.0.0.1, or set "
                "--insecure where the network is trusted or encrypts by itself",
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if config.tls_cert is None or config.tls_key is None:
            raise OSError("one of the two is missing")
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"the server's certificate cannot be used: {error}",
            path="serve.tls_key" if config.tls_key is None else "serve.tls_cert",
            value=config.tls_key if config.tls_key is None else config.tls_cert,
            rule="PEM files: serve.tls_cert a certificate, serve.tls_key its private key",
            repair="set both, and check that this user can read them",
        ) from None
    return context
