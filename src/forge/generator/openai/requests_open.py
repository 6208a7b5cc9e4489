"""The requests that are being answered: what is known of each, how many may be open, and how they end at a shutdown."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from forge.errors import CallTimeout, ForgeError, Overloaded, ServiceStopped
from forge.generator.openai.access_log import AccessLog
from forge.generator.openai.server_metrics import ServerMetrics
from forge.types import Completion, Delta

CLIENT_GONE: Final = 499
"""The status in log and metrics of a request whose client went away before it was answered, as in nginx."""

_USABLE_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request, as log and metrics report it.

    Attributes:
        id: the client's `X-Request-Id`, or a new one.
        route: the pattern of the path, such as `/v1/models/{name}`.
        limit_s: how long the answer may take.
        versions: the versions of the weights that sampled its tokens, so far.
        error: the class of the error that ended generation; a stream that has begun has the status 200 all the same.
    """

    id: str
    route: str
    client: str | None = None
    limit_s: float | None = None
    model: str | None = None
    conversation: str | None = None
    status: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    versions: set[int] = field(default_factory=set)
    first_token_s: float | None = None
    token_s: float | None = None
    error: str | None = None
    arrived: float = field(default_factory=time.time)
    seconds: float = 0.0
    _started: float = field(default_factory=time.perf_counter)
    _deadline: float | None = None
    _limits: set[asyncio.Timeout] = field(default_factory=set)
    _cut: ForgeError | None = None

    def __post_init__(self) -> None:
        if self.limit_s is not None:
            self._deadline = asyncio.get_running_loop().time() + self.limit_s

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def note_delta(self, delta: Delta) -> None:
        """Take note of a piece of a streamed completion."""
        if self.first_token_s is None:
            self.first_token_s = self.elapsed_s
        self.versions.add(delta.version)
        if delta.completion is not None:
            self.note_completions([delta.completion])
            if len(delta.completion) > 1:
                mean_s = (self.elapsed_s - self.first_token_s) / (len(delta.completion) - 1)
                self.token_s = mean_s if self.token_s is None else min(self.token_s, mean_s)

    def note_completions(self, completions: Iterable[Completion]) -> None:
        """Take note of completions that have ended. The n completions of one prompt read it once."""
        for completion in completions:
            self.num_prompt_tokens += len(completion.prompt_ids) if completion.index == 0 else 0
            self.num_tokens += len(completion.token_ids)
            self.versions.update(span.version for span in completion.versions)

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Bound a wait by the request's time limit, and by `cut`: then `CallTimeout` or the given error is raised."""
        if self._cut is not None:
            self.error = type(self._cut).__name__
            raise self._cut
        limit = asyncio.timeout_at(self._deadline)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except Exception as error:
            ended = (self._cut or self._late()) if limit.expired() else error
            self.error = type(ended).__name__
            if ended is error:
                raise
            raise ended from None

    def cut(self, error: ForgeError) -> None:
        """End the request now with an error. Its client gets it as the answer, or as the stream's last event."""
        self._cut = self._cut or error
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    def _late(self) -> CallTimeout:
        return CallTimeout(
            "the request was not answered in time",
            path="serve.request_timeout_s",
            value=f"{self.limit_s:g} s",
            rule="an answer, streamed or not, ends within this time, the wait in queues included",
            repair="ask for fewer tokens, or raise serve.request_timeout_s",
        )


_current: ContextVar[RequestRecord] = ContextVar("the request that this task answers")


def current_request() -> RequestRecord | None:
    """Return the record of the request that this task answers."""
    return _current.get(None)


def request_id(given: str | None) -> str:
    """Return the client's id of a request where it is one that can go into headers and logs, or a new one."""
    return given if given is not None and _USABLE_ID.fullmatch(given) else uuid.uuid4().hex


class OpenRequests:
    """The requests that a server answers at this moment."""

    def __init__(self, metrics: ServerMetrics, log: AccessLog, *, limit: int | None, timeout_s: float | None) -> None:
        self.metrics, self._log, self._limit, self.timeout_s = metrics, log, limit, timeout_s
        self._generating: set[RequestRecord] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._hurried = asyncio.Event()
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._generating)

    @contextmanager
    def recorded(self, record: RequestRecord) -> Iterator[None]:
        """Make a request the current one of this task; at the end, log and count it."""
        token = _current.set(record)
        try:
            yield
        except asyncio.CancelledError:
            record.status = CLIENT_GONE
            raise
        finally:
            _current.reset(token)
            record.seconds = record.elapsed_s
            self.metrics.note(record)
            self._log.write(record)

    @contextmanager
    def admitted(self, record: RequestRecord) -> Iterator[None]:
        """Count a request that generates. Raise `Overloaded` if there are too many, `ServiceStopped` at the end."""
        if self.is_draining:
            self.metrics.rejected.add(1, "draining")
            raise ServiceStopped(
                "this server is shutting down", rule="it only finishes its open requests", repair="send it elsewhere"
            )
        if self._limit is not None and len(self._generating) >= self._limit:
            self.metrics.rejected.add(1, "overloaded")
            raise Overloaded(
                "too many requests are open",
                path="serve.max_requests",
                value=len(self._generating),
                rule=f"at most {self._limit} requests in progress or waiting",
                repair="try again later; raise serve.max_requests, or add replicas",
            )
        self._generating.add(record)
        self._idle.clear()
        try:
            yield
        finally:
            self._generating.discard(record)
            if not self._generating:
                self._idle.set()

    async def drain(self, limit_s: float) -> int:
        """Accept no more requests, wait until the open ones have ended, and cut what is open after `limit_s`.

        Return how many were cut. `hurry` ends the wait.
        """
        self.is_draining = True
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, self._hurried)]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            left = list(self._generating)
            for record in left:
                record.cut(
                    ServiceStopped(
                        "the server was shut down before this answer was complete",
                        path="serve.drain_s",
                        value=f"{limit_s:g} s",
                        rule="open requests have this long to end after the server was asked to stop",
                        repair="send the request again; raise serve.drain_s for longer answers",
                    )
                )
        return len(left)

    def hurry(self) -> None:
        """Do not wait for open requests any longer."""
        self._hurried.set()
