"""Batching: several callers' items become one call of an endpoint that takes a list.

It happens in the caller's process, before routing, so that a batch is one message. Each caller gets its own item's
answer; an exception in an item's place is raised to that caller alone; a caller that gives up takes its item out of a
batch that has not been sent.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from forge.errors import OptionError, RemoteError
from forge.runtime.endpoints import Batch, EndpointSpec

if TYPE_CHECKING:
    from forge.service.calls import CallOptions, CallPath


class _Open:
    """The batch that is being filled on one event loop."""

    def __init__(self) -> None:
        self.items: list[tuple[Any, asyncio.Future[Any]]] = []
        self.timer: asyncio.TimerHandle | None = None


class Batcher:
    """Collects the calls of one batched endpoint."""

    def __init__(self, spec: EndpointSpec, path: CallPath, options: CallOptions) -> None:
        assert spec.batch is not None
        self._spec, self._path, self._options = spec, path, options
        self._rule: Batch = spec.batch
        self._open: dict[tuple[asyncio.AbstractEventLoop, str | None], _Open] = {}
        self._sending: set[asyncio.Task[None]] = set()

    @staticmethod
    def check_item(spec: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) != 1 or kwargs:
            raise OptionError(
                f"{spec.name} is batched and takes one item a call",
                path=f"{spec.name}.route",
                value=(args, kwargs),
                rule="exactly one positional argument: the item",
                repair=f"{spec.name}.route(item)",
            )

    async def submit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put one item into the open batch and wait for its answer."""
        self.check_item(self._spec, args, kwargs)
        loop = asyncio.get_running_loop()
        key = (loop, self._path.session_of(self._options))
        batch = self._open.get(key)
        if batch is None:
            batch = self._open[key] = _Open()
            batch.timer = loop.call_later(self._rule.wait_s, self._close, key, batch)
        answer: asyncio.Future[Any] = loop.create_future()
        batch.items.append((args[0], answer))
        if len(batch.items) >= self._rule.size:
            self._close(key, batch)
        return await answer

    def _close(self, key: tuple[asyncio.AbstractEventLoop, str | None], batch: _Open) -> None:
        if self._open.get(key) is not batch:
            return
        del self._open[key]
        if batch.timer is not None:
            batch.timer.cancel()
        items = [(item, answer) for item, answer in batch.items if not answer.done()]
        if items:
            task = asyncio.ensure_future(self._send(items))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
            for _, answer in items:
                answer.add_done_callback(lambda _: self._drop_if_unwanted(task, items))

    @staticmethod
    def _drop_if_unwanted(task: asyncio.Task[None], items: list[tuple[Any, asyncio.Future[Any]]]) -> None:
        if all(answer.cancelled() for _, answer in items):
            task.cancel()

    async def _send(self, items: list[tuple[Any, asyncio.Future[Any]]]) -> None:
        try:
            values = await self._path.route(self._spec, ([item for item, _ in items],), {}, self._options)
            check_answers(self._spec, values, len(items))
        except Exception as error:  # noqa: BLE001 - every caller of the batch gets it
            for _, answer in items:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), value in zip(items, values, strict=True):
            if answer.done():
                continue
            if isinstance(value, StopIteration):  # asyncio refuses it
                answer.set_exception(RemoteError(f"StopIteration: {value}", type_name="builtins.StopIteration"))
            elif isinstance(value, Exception):
                answer.set_exception(value)
            else:
                answer.set_result(value)


def check_answers(spec: EndpointSpec, values: Any, num_items: int) -> None:
    length = len(values) if isinstance(values, (list, tuple)) else None
    if length != num_items:
        raise OptionError(
            f"{spec.name} is batched and must answer a list",
            path=spec.name,
            value=type(values).__name__ if length is None else f"{length} answers",
            rule=f"a list with one answer for each of the {num_items} items",
            repair="return [answer for item in items]",
        )
