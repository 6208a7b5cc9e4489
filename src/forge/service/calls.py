"""The path of a call: choose a replica, send, wait, and handle failure, time-out and cancellation."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

from forge.errors import ActorFailure, CallTimeout, FanoutError, ForgeError, OptionError
from forge.runtime.endpoints import EndpointSpec, unknown_verb
from forge.runtime.option_checks import check_known, check_seconds
from forge.runtime.replies import read_answers, reply_channel
from forge.runtime.serialization import encode
from forge.service.batching import Batcher, check_answers
from forge.service.records import Outcome, Request
from forge.service.routing_table import RoutingTable
from forge.service.targets import Target

if TYPE_CHECKING:
    from forge.service.handle import Service


class Call:
    """One call: what to send, and until when the caller waits."""

    __slots__ = ("args", "deadline", "kwargs", "options", "spec", "timeout_s")

    def __init__(
        self,
        spec: EndpointSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        limit_s: float | None,
    ) -> None:
        self.spec, self.args, self.kwargs, self.options, self.timeout_s = spec, args, kwargs, options, limit_s
        self.begin_wait()

    def begin_wait(self) -> None:
        """Start the caller's wait, for as long as its time-out says."""
        self.deadline = None if self.timeout_s is None else asyncio.get_running_loop().time() + self.timeout_s


class CallPath:
    """Sends calls to the replicas of one service, for one process."""

    def __init__(self, table: RoutingTable, *, max_retries: int, timeout_s: float | None) -> None:
        self.table, self.max_retries, self.timeout_s = table, max_retries, timeout_s
        self.num_retried = self.num_timeouts = self.num_cancelled = 0
        self.session: contextvars.ContextVar[str | None] = contextvars.ContextVar(f"session of {table.name}")

    def limit_s(self, options: CallOptions) -> float | None:
        """Return how long a call with these options may take."""
        return self.timeout_s if options.timeout_s is None else options.timeout_s

    def session_of(self, options: CallOptions) -> str | None:
        """Return the session of a call: the one that its options name, or that of the current task."""
        return options.session if options.session is not None else self.session.get(None)

    def retries_of(self, spec: EndpointSpec, options: CallOptions) -> int:
        """Return how often a call may be sent again after a loss."""
        return self.max_retries if (spec.retry if options.retry is None else options.retry) else 0

    async def route(
        self, spec: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
    ) -> Any:
        """Send to one replica and return its answer; after a loss send again, where the endpoint allows it."""
        call = Call(spec, args, kwargs, options, self.limit_s(options))
        session, attempt = self.session_of(options), 0
        while True:
            request = Request(spec.name, session, attempt)
            target = self.table.try_acquire(request)
            if target is None:
                target = await self.acquire(request, call)
            try:
                return await self._send(target, call)
            except ActorFailure as failure:
                if is_remote(failure) or attempt >= self.retries_of(spec, options):
                    raise
                attempt += 1
                self.num_retried += 1
            finally:
                self.table.release(target)

    async def acquire(self, request: Request, call: Call) -> Target:
        """Wait for a slot, for as long as the call may take."""
        try:
            async with asyncio.timeout_at(call.deadline):
                return await self.table.acquire(request)
        except TimeoutError:
            self.num_timeouts += 1
            raise self.late(call, "no replica had a free slot") from None

    async def _send(self, target: Target, call: Call) -> Any:
        loop, channel = asyncio.get_running_loop(), reply_channel()
        payload = encode((call.args, call.kwargs))
        call_id, reply = channel.open(target.entry.num_ranks)
        target.calls.add(reply, loop)
        timer = None if call.deadline is None else loop.call_at(call.deadline, _expire, reply)
        try:
            if not target.is_connected:
                target.connect(channel)
            target.invoke(channel.caller, call_id, call.spec.name, payload)
            values = read_answers(await reply)
        except _Expired:
            self._abandon(target, call_id)
            self.num_timeouts += 1
            raise self.late(call, f"replica {target.index} did not answer") from None
        except asyncio.CancelledError:
            self._abandon(target, call_id)
            self.num_cancelled += 1
            raise
        except Exception as error:
            count_error(target, error)
            raise
        finally:
            channel.close(call_id)
            target.calls.discard(reply)
            if timer is not None:
                timer.cancel()
        target.num_ok += 1
        return tuple(values) if call.options.all_ranks else values[0]

    def _abandon(self, target: Target, call_id: int) -> None:
        if target.calls.failure is None:
            target.cancel(call_id)

    def late(self, call: Call, why: str) -> CallTimeout:
        """Return the error of a call whose time is up."""
        where = f"{self.table.name}.{call.spec.name}"
        return CallTimeout(
            f"{where}: {why} in time",
            path=where,
            value=f"{call.timeout_s} s",
            rule="a call ends, and a stream yields its next item, within the timeout, including the wait for a slot",
            repair="raise it: options(call_timeout_s=...) or endpoint.options(timeout_s=...)",
        )

    async def fanout(
        self, spec: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
    ) -> list[Outcome]:
        """Send to every healthy replica, regardless of limits, and return what each returned or raised."""
        call = Call(spec, args, kwargs, options, self.limit_s(options))
        while not (targets := self.table.hold_live()):
            target = await self.acquire(Request(spec.name, None, 0), call)
            self.table.release(target)

        async def one(target: Target) -> Outcome:
            try:
                return Outcome(target.index, await self._send(target, call))
            except Exception as error:  # noqa: BLE001 - it becomes this replica's outcome
                return Outcome(target.index, error=error)

        try:
            return list(await asyncio.gather(*(one(target) for target in targets)))
        finally:
            self.table.let_go(targets)

    async def rolling(
        self, spec: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
    ) -> list[Outcome]:
        """Send to one healthy replica after another, until one raises; a replica that is lost is passed over."""
        outcomes: list[Outcome] = []
        held = self.table.hold_live()
        try:
            for index in [target.index for target in held]:
                target = next((target for target in self.table.live() if target.index == index), None)
                if target is None:
                    continue
                call = Call(spec, args, kwargs, options, self.limit_s(options))
                with self.table.held_back(index):
                    try:
                        outcomes.append(Outcome(index, await self._send(target, call)))
                    except Exception as error:  # noqa: BLE001 - it becomes this replica's outcome
                        outcomes.append(Outcome(index, error=error))
                        if is_remote(error) or not isinstance(error, ActorFailure):
                            return outcomes
        finally:
            self.table.let_go(held)
        return outcomes


def is_remote(error: BaseException) -> bool:
    """Return whether an error was raised by the user's code in the replica (and not about the replica)."""
    return getattr(error, "remote_traceback", None) is not None


def count_error(target: Target, error: Exception) -> None:
    if isinstance(error, ActorFailure) and not is_remote(error):
        target.num_lost += 1
    else:
        target.num_errors += 1


class _Expired(Exception):
    """A call's time is up. Never leaves this module."""


def _expire(reply: asyncio.Future[Any]) -> None:
    if not reply.done():
        reply.set_exception(_Expired())


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How one caller's calls are sent; see `ServiceEndpoint.options`."""

    timeout_s: float | None = None
    retry: bool | None = None
    session: str | None = None
    partial: bool = False
    all_ranks: bool = False

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s, optional=True)


_PLAIN = CallOptions()

_EQUIVALENTS = {"call_one": "route", "choose": "route", "call_all": "fanout", "call": "fanout", "broadcast": "fanout"}
"""Verbs of actors and of other libraries, and what a service has instead."""


class ServiceEndpoint:
    """One endpoint of a service: `route` to one replica, `fanout` to all."""

    def __init__(self, service: Service, spec: EndpointSpec, options: CallOptions = _PLAIN) -> None:
        self._service, self._spec, self._options = service, spec, options
        self._path = service._path
        self._batcher = None if spec.batch is None else service._batcher(spec, options)

    def options(self, **overrides: Any) -> Self:
        """Return this endpoint with other call options.

        Args:
            timeout_s: how long a call may take, waiting for a slot included; of a stream, how long each item may take.
            retry: whether a lost call is sent again, whatever the endpoint declares.
            session: the session (from `start_session`) to which the calls belong.
            partial: `fanout` returns an `Outcome` for each replica instead of raising `FanoutError`.
            all_ranks: a replica of several ranks answers with a tuple of all ranks' values instead of rank 0's.
        """
        check_known(overrides, CallOptions, where=f"{self._spec.name}.options")
        merged = replace(self._options, **overrides)
        if merged.session is not None and not self._path.table.knows_session(merged.session):
            raise OptionError(
                f"service {self._path.table.name} has no session {merged.session!r}",
                path=f"{self._spec.name}.options(session=)",
                value=merged.session,
                rule="a session that was started and not yet terminated",
                repair="session = await service.start_session()",
            )
        return type(self)(self._service, self._spec, merged)

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Call one healthy replica and return its answer. The user's exception is raised as itself."""
        if self._service._supervisor is None:
            await self._service._ready(self._path.limit_s(self._options))
        if self._batcher is not None:
            return await self._batcher.submit(args, kwargs)
        return await self._path.route(self._spec, args, kwargs, self._options)

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call every healthy replica. Returns their values, or raises `FanoutError` if any replica failed.

        With `options(partial=True)` it returns an `Outcome` for each replica and raises nothing.
        """
        await self._service._ready(self._path.limit_s(self._options))
        if self._spec.batch is not None:
            args, kwargs = _one_item_batch(self._spec, args, kwargs)
        outcomes = await self._path.fanout(self._spec, args, kwargs, self._options)
        if self._spec.batch is not None:
            outcomes = [_only_item(self._spec, outcome) for outcome in outcomes]
        return self._values(outcomes, [outcome for outcome in outcomes if not outcome.ok])

    async def rolling(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call one healthy replica after another; new calls go to the others meanwhile, if there are any.

        Returns the values. The first error ends it and raises `FanoutError`; replicas after that are not called. A
        replica that is lost meanwhile is passed over: it has no value. With `options(partial=True)` it returns an
        `Outcome` for each replica that was called and raises nothing. For what holds a replica up, such as an update of
        its weights.
        """
        await self._service._ready(self._path.limit_s(self._options))
        if self._spec.batch is not None:
            raise OptionError(
                f"{self._spec.name} is called in batches",
                path=f"{self._spec.name}.rolling",
                rule="only endpoints without batch= are called one replica at a time",
                repair=f"await {self._spec.name}.fanout(...)",
            )
        outcomes = await self._path.rolling(self._spec, args, kwargs, self._options)
        lost = [outcome for outcome in outcomes if isinstance(outcome.error, ActorFailure)]
        failed = [outcome for outcome in outcomes if not outcome.ok and outcome not in lost]
        return self._values([one for one in outcomes if self._options.partial or one not in lost], failed)

    def _values(self, outcomes: list[Outcome], failed: list[Outcome]) -> list[Any]:
        """Return what replicas returned, or raise what failed, as the options say."""
        if self._options.partial:
            return outcomes
        if not failed:
            return [outcome.value for outcome in outcomes]
        name = f"{self._path.table.name}.{self._spec.name}"
        error = FanoutError(
            f"{name}: {len(failed)} of {len(outcomes)} replicas failed: "
            + "; ".join(f"replica {o.replica}: {type(o.error).__name__}: {_first_line(o.error)}" for o in failed),
            outcomes=outcomes,
        )
        raise error from failed[0].error

    def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Read the items of a streaming endpoint (see `StreamEndpoint`); an ordinary one, as this, has none."""
        where = f"{self._path.table.name}.{self._spec.name}"
        raise OptionError(
            f"{where} is not a streaming endpoint: it returns one value",
            path=f"{where}.stream",
            value="stream",
            rule="only a method that yields can be read item by item",
            repair=f"await {where}.route(...), or yield in {self._spec.name}",
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise unknown_verb(f"{self._path.table.name}.{self._spec.name}", name, _EQUIVALENTS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"choose how to call it: {self._spec.name}.route(...) or {self._spec.name}.fanout(...)")


def _one_item_batch(
    spec: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    Batcher.check_item(spec, args, kwargs)
    return ([args[0]],), {}


def _only_item(spec: EndpointSpec, outcome: Outcome) -> Outcome:
    """Return the outcome of a batch of one as that of its item: an exception in its place is this replica's error."""
    if not outcome.ok:
        return outcome
    try:
        check_answers(spec, outcome.value, 1)
    except OptionError as error:
        return Outcome(outcome.replica, error=error)
    item = outcome.value[0]
    return Outcome(outcome.replica, error=item) if isinstance(item, Exception) else Outcome(outcome.replica, item)


def _first_line(error: Exception | None) -> str:
    text = error.message if isinstance(error, ForgeError) else str(error)
    return text.splitlines()[0] if text else ""
