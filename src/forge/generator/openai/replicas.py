"""The policy service as a server calls it: metered, bounded in time, and with another try where a replica fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Any, Final

from forge.config import UpdateMode
from forge.errors import CallTimeout, EngineDead, ForgeError, Overloaded, ServiceStopped, SyncError
from forge.generator.engine import EngineStats, UpdateReport
from forge.generator.openai.requests_open import RequestRecord, current_request
from forge.generator.openai.server_metrics import ServerMetrics
from forge.service.handle import Service
from forge.service.records import ServiceMetrics
from forge.types import Completion, Delta

_log = logging.getLogger("forge.generator.openai")

STATS_LIMIT_S: Final = 2.0
_MAX_SESSIONS: Final = 4096
_RETRIED: Final = (EngineDead, Overloaded, SyncError)
"""Errors of one replica that another may not have. A replica that is lost is the service's own affair: it retries."""


class ServedPolicy:
    """A policy service, with the endpoints that the server's routes use. Others are those of the service.

    Calls of named conversations go to the replica that answered the conversation before, whose cache has its prefix.
    """

    def __init__(self, service: Any, metrics: ServerMetrics) -> None:
        self._service, self._metrics = service, metrics
        self._is_replicated = isinstance(service, Service)
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._adapter_names: set[str] = set()
        self.num_replicas = 1
        self.generate = _Generate(self)
        self.generate_stream = _GenerateStream(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    async def open(self) -> None:
        """Find out how many replicas there are."""
        if self._is_replicated:
            self.num_replicas = len((await self._service.get_metrics()).replicas)

    async def describe(self) -> ServiceMetrics | None:
        """Return the state of the replicas; None for a service that has none."""
        return await self._service.get_metrics() if self._is_replicated else None

    async def has_hope(self) -> bool:
        """Return whether a replica is up, or may be again."""
        service = await self.describe()
        if service is not None:
            return any(replica.health not in ("given_up", "stopped") for replica in service.replicas)
        try:
            await self._service.stats.route()
        except ServiceStopped:
            return False
        except ForgeError:
            return True
        return True

    async def read_stats(self, limit_s: float = STATS_LIMIT_S) -> dict[int, EngineStats]:
        """Return the statistics of the replicas that answer in time, by replica."""
        if not self._is_replicated:
            try:
                async with asyncio.timeout(limit_s):
                    return dict(enumerate(await self._service.stats.fanout()))
            except (TimeoutError, ForgeError):
                return {}
        try:
            outcomes = await self._service.stats.options(partial=True, timeout_s=limit_s).fanout()
        except (CallTimeout, ServiceStopped):
            return {}
        return {outcome.replica: outcome.value for outcome in outcomes if outcome.ok}

    async def read_adapters(self, limit_s: float = STATS_LIMIT_S) -> dict[str, str]:
        """Return the digests of the adapters that all replicas serve which answer in time, by name."""
        found = [stats.more.get("adapters", {}) for stats in (await self.read_stats(limit_s)).values()]
        names = set.intersection(*map(set, found)) if found else set[str]()
        self._adapter_names |= names
        return {name: found[0][name] for name in sorted(names)}

    async def has_adapter(self, name: str) -> bool:
        """Return whether requests can select an adapter. One that was unloaded may still be known: then the replica
        says so."""
        return name in self._adapter_names or name in await self.read_adapters()

    async def update_weights(self, version: int, mode: UpdateMode) -> list[UpdateReport]:
        """Update one replica after another; new requests go to the others meanwhile."""
        if not self._is_replicated:
            return list(await self._service.update_weights.fanout(version, mode=mode))
        reports: list[UpdateReport] = await self._service.update_weights.rolling(version, mode=mode)
        return reports

    async def endpoint(self, name: str, conversation: str | None) -> Any:
        """Return an endpoint of the service; that of a conversation goes to one replica."""
        endpoint = getattr(self._service, name)
        if conversation is None or self.num_replicas == 1:
            return endpoint
        session = self._sessions.get(conversation)
        if session is None:
            session = self._sessions[conversation] = await self._service.start_session()
        self._sessions.move_to_end(conversation)
        endpoint = endpoint.options(session=session)
        if len(self._sessions) > _MAX_SESSIONS:
            _, oldest = self._sessions.popitem(last=False)
            await self._service.terminate_session(oldest)
        return endpoint

    def may_retry(self, error: Exception, attempt: int) -> bool:
        """Return whether a request is worth another try elsewhere, and count it if so."""
        if not isinstance(error, _RETRIED) or attempt >= self.num_replicas:
            return False
        _log.info("a request is sent again after %s: %s", type(error).__name__, error)
        self._metrics.num_retried += 1
        return True


class _Generate:
    """The endpoint `generate`."""

    def __init__(self, policy: ServedPolicy) -> None:
        self._policy = policy

    async def route(self, **arguments: Any) -> list[Completion]:
        """Return the completions of one prompt."""
        record = current_request() or _unlogged()
        attempt = 1
        while True:
            endpoint = await self._policy.endpoint("generate", record.conversation if attempt == 1 else None)
            try:
                async with record.limited():
                    completions: list[Completion] = await endpoint.route(**arguments)
            except _RETRIED as error:
                if not self._policy.may_retry(error, attempt):
                    raise
                attempt, record.error = attempt + 1, None
            else:
                record.note_completions(completions)
                return completions


class _GenerateStream:
    """The endpoint `generate_stream`."""

    def __init__(self, policy: ServedPolicy) -> None:
        self._policy = policy

    async def stream(self, **arguments: Any) -> AsyncGenerator[Delta, None]:
        """Yield the completions of one prompt as they grow. Until the first piece, a failure is retried elsewhere."""
        record = current_request() or _unlogged()
        attempt, has_begun = 1, False
        while True:
            endpoint = await self._policy.endpoint("generate_stream", record.conversation if attempt == 1 else None)
            try:
                async with contextlib.aclosing(endpoint.stream(**arguments)) as deltas:
                    while (delta := await _next(deltas, record)) is not None:
                        has_begun = True
                        record.note_delta(delta)
                        yield delta
                return
            except _RETRIED as error:
                if has_begun or not self._policy.may_retry(error, attempt):
                    raise
                attempt, record.error = attempt + 1, None


async def _next(deltas: AsyncGenerator[Delta, None], record: RequestRecord) -> Delta | None:
    async with record.limited():
        return await anext(deltas, None)


def _unlogged() -> RequestRecord:
    return RequestRecord("", "")
