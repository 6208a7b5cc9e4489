"""Streaming endpoints of a service: a routed call whose answer is read item by item."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Self

from forge.errors import ActorFailure, OptionError
from forge.runtime.endpoints import streams_only
from forge.runtime.replies import reply_channel
from forge.runtime.serialization import encode
from forge.runtime.streams import End, Expired, StreamReader
from forge.service.calls import Call, ServiceEndpoint, count_error, is_remote
from forge.service.records import Request
from forge.service.targets import Target


class StreamEndpoint(ServiceEndpoint):
    """An endpoint that yields: `async for item in service.name.stream(...)`."""

    def options(self, **overrides: Any) -> Self:
        """As for other endpoints, except that `partial` and `all_ranks` have no meaning here and raise.

        `timeout_s` (and the service's `call_timeout_s`) limits each wait for an item, from the moment it is asked for:
        the first includes the wait for a slot. What the reader does between two items is not counted.
        """
        for name in ("all_ranks", "partial"):
            if overrides.get(name):
                raise OptionError(
                    f"{self._spec.name} is a streaming endpoint: it has no {name}",
                    path=f"{self._spec.name}.options({name}=)",
                    value=overrides[name],
                    rule="a stream comes from one replica and is what its rank 0 yields",
                    repair="remove it",
                )
        return super().options(**overrides)

    def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Yield the items that one healthy replica yields, in order, each as soon as it is yielded.

        Nothing is sent before the first item is asked for; the session is that of the task that calls this. The replica
        runs at most 64 items ahead of the reader. Leaving the loop, `aclose()` and cancelling the reader's task cancel
        the generator in the replica and free its slot at once. What the generator raises is raised here after the items
        before it. When the replica is lost, what has arrived is still read, and then `ActorFailure` is raised at once;
        with `retry=True`, a stream of which nothing has arrived is sent to another replica instead.
        """
        return self._items(self._path.session_of(self._options), args, kwargs)

    async def _items(
        self, session: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        path, spec, limit_s = self._path, self._spec, self._path.limit_s(self._options)
        call = Call(spec, args, kwargs, self._options, limit_s)
        await self._service._ready(limit_s)
        payload = encode((args, kwargs))
        attempt, has_begun = 0, False
        while True:
            target = await path.acquire(Request(spec.name, session, attempt), call)
            try:
                with self._counted(target, call), _stream_reader(target) as reader:
                    reader.start(spec.name, payload)
                    while (item := await reader.next(call.deadline)) is not End:
                        has_begun = True
                        yield item
                        call.begin_wait()
                return
            except ActorFailure as failure:
                if has_begun or is_remote(failure) or attempt >= path.retries_of(spec, self._options):
                    raise
                attempt += 1
                path.num_retried += 1
            finally:
                path.table.release(target)

    @contextlib.contextmanager
    def _counted(self, target: Target, call: Call) -> Iterator[None]:
        """Count how a stream ends, as for other calls; a reader that leaves early counts as cancelled."""
        try:
            yield
        except Expired:
            self._path.num_timeouts += 1
            raise self._path.late(call, f"replica {target.index} did not yield") from None
        except (asyncio.CancelledError, GeneratorExit):
            self._path.num_cancelled += 1
            raise
        except Exception as error:
            count_error(target, error)
            raise
        target.num_ok += 1

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: a streaming endpoint is read with `stream`."""
        raise streams_only(f"{self._path.table.name}.{self._spec.name}", "route")

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Raises: a streaming endpoint is read with `stream`."""
        raise streams_only(f"{self._path.table.name}.{self._spec.name}", "fanout")

    async def rolling(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Raises: a streaming endpoint is read with `stream`."""
        raise streams_only(f"{self._path.table.name}.{self._spec.name}", "rolling")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"choose how to call it: async for item in {self._spec.name}.stream(...)")


def _stream_reader(target: Target) -> StreamReader:
    channel = reply_channel()
    if not target.is_connected:
        target.connect(channel)
    return StreamReader(target.entry.actor, channel, calls=target.calls, num_ranks=target.entry.num_ranks)
