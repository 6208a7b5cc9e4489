"""The routes of the server, and what happens around each request: its record, the key, and the limit of requests."""

from __future__ import annotations

import dataclasses
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from forge.envs.chat_api.errors import RequestError, json_errors, parameter_error
from forge.envs.chat_api.listening import admit
from forge.envs.chat_api.requests import CONVERSATION_HEADER, bearer_key, read_body, wrong_key
from forge.generator.openai.endpoints import complete_chat, complete_text
from forge.generator.openai.policy import Policy
from forge.generator.openai.prometheus import CONTENT_TYPE
from forge.generator.openai.replicas import ServedPolicy
from forge.generator.openai.requests_open import OpenRequests, RequestRecord, current_request, request_id
from forge.generator.openai.updates import WeightUpdates

ID_HEADER: Final = "X-Request-Id"
VERSION_HEADER: Final = "X-Forge-Weight-Version"
_OPEN_PATHS: Final = frozenset(("/health", "/ready"))
_UPDATE_PATH: Final = "/admin/update"
_PROBE_LIMIT_S: Final = 0.8
"""How long a probe waits for the replicas. Kubernetes gives a probe one second."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What the routes share."""

    policy: Policy
    replicas: ServedPolicy
    requests: OpenRequests
    names: tuple[str, ...]
    updates: WeightUpdates | None


_SERVING: Final[web.AppKey[Serving]] = web.AppKey("serving", Serving)


def make_app(serving: Serving, *, key: str | None, admin_key: str | None, max_bytes: int) -> web.Application:
    """Return the application. Requests need `key`, and updates of the weights `admin_key`; None for no key."""
    around = [_recorder(serving.requests), json_errors("serve.max_body_mb"), _key_checker(key, admin_key), _admit]
    app = web.Application(middlewares=around, client_max_size=max_bytes)
    app[_SERVING] = serving
    app.on_response_prepare.append(_prepare_stream)
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_post("/v1/completions", _completions)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{name:.+}", _model)
    app.router.add_get("/v1/stats", _stats)
    app.router.add_get("/health", _health)
    app.router.add_get("/ready", _ready)
    app.router.add_get("/metrics", _metrics)
    if admin_key is not None and serving.updates is not None:
        app.router.add_post(_UPDATE_PATH, _update)
    return app


# ---- Around each request ---------------------------------------------------------------------------------------------


def _recorder(requests: OpenRequests) -> Middleware:
    """Return the middleware that logs and counts every request."""

    @web.middleware
    async def record_request(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        record = RequestRecord(
            request_id(request.headers.get(ID_HEADER)),
            "unknown" if resource is None else resource.canonical,
            client=request.remote,
            limit_s=requests.timeout_s,
            conversation=request.headers.get(CONVERSATION_HEADER),
        )
        with requests.recorded(record):
            response = await handler(request)
            record.status = response.status
            if not response.prepared:
                _add_headers(record, response)
                if requests.is_draining:
                    response.force_close()
                    if response.status == 503:
                        response.headers["Retry-After"] = "1"
            return response

    return record_request


async def _prepare_stream(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of a stream, which starts while its handler still runs."""
    record = current_request()
    if record is not None:
        record.status = response.status
        _add_headers(record, response)


def _add_headers(record: RequestRecord, response: web.StreamResponse) -> None:
    response.headers[ID_HEADER] = record.id
    if record.versions:
        response.headers[VERSION_HEADER] = ",".join(map(str, sorted(record.versions)))


def _key_checker(key: str | None, admin_key: str | None) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        needed = admin_key if request.path == _UPDATE_PATH else key
        if needed is not None and request.path not in _OPEN_PATHS:
            given = (bearer_key(request) or "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, needed.encode()):
                raise wrong_key()
        if needed is None or request.path not in _OPEN_PATHS:
            admit(request)
        return await handler(request)

    return check


@web.middleware
async def _admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    record = current_request()
    if record is None or request.method != "POST" or not request.path.startswith("/v1/"):
        return await handler(request)
    with request.app[_SERVING].requests.admitted(record):
        return await handler(request)


# ---- Completions and models ------------------------------------------------------------------------------------------


async def _chat(request: web.Request) -> web.StreamResponse:
    return await complete_chat(request.app[_SERVING].policy, request, await _read_request(request))


async def _completions(request: web.Request) -> web.StreamResponse:
    return await complete_text(request.app[_SERVING].policy, request, await _read_request(request))


async def _read_request(request: web.Request) -> Mapping[str, Any]:
    body = await _select(request.app[_SERVING], await read_body(request))
    record, metadata = current_request(), body.get("metadata")
    if record is not None:
        record.model = body["model"]
        named = metadata.get("conversation") if isinstance(metadata, dict) else None
        if record.conversation is None and isinstance(named, str):
            record.conversation = named
    return body


async def _select(serving: Serving, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request that asks for the adapter which its model names, if that is one."""
    name = body["model"]
    if name in serving.names:
        return body
    if not await serving.replicas.has_adapter(name):
        raise await _no_model(serving, name)
    if body.get("adapter") not in (None, name):
        raise parameter_error("adapter", f"must be left out: the model '{name}' is an adapter itself")
    return {**body, "adapter": name}


async def _no_model(serving: Serving, name: str) -> RequestError:
    names = (*serving.names, *await serving.replicas.read_adapters(_PROBE_LIMIT_S))
    text = f"The model '{name}' does not exist; this server has {', '.join(repr(each) for each in names)}."
    return RequestError(text, status=404, param="model", code="model_not_found")


async def _models(request: web.Request) -> web.StreamResponse:
    serving = request.app[_SERVING]
    version = await _version(serving)
    data = [_describe(serving, name, version) for name in serving.names]
    adapters = await serving.replicas.read_adapters(_PROBE_LIMIT_S)
    data += [_describe(serving, name, version, digest=digest) for name, digest in adapters.items()]
    return web.json_response({"object": "list", "data": data})


async def _model(request: web.Request) -> web.StreamResponse:
    serving, name = request.app[_SERVING], request.match_info["name"]
    adapters = {} if name in serving.names else await serving.replicas.read_adapters(_PROBE_LIMIT_S)
    if name not in serving.names and name not in adapters:
        raise await _no_model(serving, name)
    return web.json_response(_describe(serving, name, await _version(serving), digest=adapters.get(name)))


async def _version(serving: Serving) -> int | None:
    """Return the version that all replicas serve, or the older one during an update; None if no replica answers."""
    stats = await serving.replicas.read_stats(_PROBE_LIMIT_S)
    return min((engine.version for engine in stats.values()), default=None)


def _describe(serving: Serving, name: str, version: int | None, *, digest: str | None = None) -> dict[str, Any]:
    """Describe a model as clients see it; with `digest`, an adapter on the model."""
    card = serving.policy.card
    adapter = {} if digest is None else {"parent": serving.names[0], "adapter_digest": digest}
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "torchforge",
        "root": serving.names[0],
        "max_model_len": card["max_seq_len"],
        "engine": card["engine"],
        "weight_version": version,
        **adapter,
    }


# ---- Operation -------------------------------------------------------------------------------------------------------


async def _stats(request: web.Request) -> web.StreamResponse:
    """Answer with the statistics of each replica's engine, where it answers."""
    stats = await request.app[_SERVING].replicas.read_stats()
    replicas = [{"replica": index, **dataclasses.asdict(engine)} for index, engine in stats.items()]
    return web.json_response({"replicas": replicas})


async def _health(request: web.Request) -> web.StreamResponse:
    """Answer whether this server is alive: only one that will never serve again is not."""
    serving = request.app[_SERVING]
    if not await serving.replicas.has_hope():
        text = "No generator is left: all were dropped after failed restarts."
        raise RequestError(text, status=503, kind="server_error", code="unavailable")
    stats = await serving.replicas.read_stats(_PROBE_LIMIT_S)
    if not stats:
        return web.json_response({"status": "degraded", "weight_version": None})
    version = min(engine.version for engine in stats.values())
    status = "asleep" if all(engine.is_asleep for engine in stats.values()) else "ok"
    return web.json_response({"status": status, "weight_version": version})


async def _ready(request: web.Request) -> web.StreamResponse:
    """Answer whether requests should be sent here: a generator with weights must be up."""
    serving = request.app[_SERVING]
    stats = await serving.replicas.read_stats(_PROBE_LIMIT_S)
    able = [engine for engine in stats.values() if not (engine.is_stopped or engine.is_asleep)]
    reason = None
    if serving.requests.is_draining:
        reason = "This server is shutting down."
    elif not stats:
        reason = "No generator answers."
    elif not able:
        reason = "No generator accepts requests: all are asleep, or have weights that could not be verified."
    if reason is not None:
        raise RequestError(reason, status=503, kind="server_error", code="unavailable")
    total = serving.replicas.num_replicas
    return web.json_response({"status": "ready", "replicas": {"able": len(able), "total": total}})


async def _metrics(request: web.Request) -> web.StreamResponse:
    """Answer with the metrics in Prometheus' text format."""
    serving = request.app[_SERVING]
    service, stats = await serving.replicas.describe(), await serving.replicas.read_stats(_PROBE_LIMIT_S)
    metrics = serving.requests.metrics
    metrics.note_replicas(service, stats)
    metrics.in_flight.set(len(serving.requests))
    metrics.draining.set(float(serving.requests.is_draining))
    return web.Response(body=metrics.text().encode(), headers={"Content-Type": CONTENT_TYPE})


async def _update(request: web.Request) -> web.StreamResponse:
    """Update the weights of all replicas, and answer when that is done."""
    serving = request.app[_SERVING]
    assert serving.updates is not None
    body = await read_body(request, needs_model=False) if request.can_read_body else {}
    unknown = sorted(set(body) - {"path"})
    if unknown or not isinstance(body.get("path"), str | None):
        param = unknown[0] if unknown else "path"
        text = f"'{param}': the only parameter is 'path', a folder on the server; leave it out for the usual one"
        raise RequestError(text, param=param, code="invalid_value")
    outcome = await serving.updates.run(body.get("path"))
    return web.json_response(dataclasses.asdict(outcome))
