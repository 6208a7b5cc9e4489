"""The `endpoint` decorator: which methods of an actor others may call, and how."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from forge.errors import OptionError
from forge.runtime.backend import EndpointProperty
from forge.runtime.option_checks import check_count, check_seconds

if TYPE_CHECKING:
    from forge.runtime.typed_endpoints import AsyncEndpoint, BatchMarking, Marking, PlainEndpoint, StreamEndpoint

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Batch:
    """Up to `size` calls, or those that arrive within `wait_s` of the first, become one call of the endpoint."""

    size: int
    wait_s: float = 0.005

    def __post_init__(self) -> None:
        check_count("size", self.size, where="Batch")
        check_seconds("wait_s", self.wait_s, zero=True, where="Batch")


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """What is declared about one endpoint."""

    name: str
    method: Callable[..., Any]
    is_async: bool
    retry: bool = False
    concurrent: bool = False
    batch: Batch | None = None
    is_stream: bool = False


class ForgeEndpoint(EndpointProperty):  # type: ignore[misc]
    """A method that was marked with `endpoint`: Monarch sees an endpoint that answers through its port."""

    def __init__(self, spec: EndpointSpec) -> None:
        self.spec = spec

        @functools.wraps(spec.method)
        async def serve(actor: Any, port: Any, *args: Any, **kwargs: Any) -> None:
            actor._forge_dispatcher().start(actor, port, self.spec, args, kwargs)

        serve.__signature__ = _with_port(inspect.signature(spec.method))  # type: ignore[attr-defined]
        super().__init__(serve, propagator=None, explicit_response_port=True, instrument=False)
        self.__doc__ = spec.method.__doc__

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else BoundEndpoint(self, instance)


class BoundEndpoint(EndpointProperty):  # type: ignore[misc]
    """An endpoint seen from inside its actor: `self.other(...)` and `super().setup()` simply call the method."""

    def __init__(self, endpoint: ForgeEndpoint, actor: Any) -> None:
        super().__init__(endpoint._method, propagator=None, explicit_response_port=True, instrument=False)
        self._spec, self._actor = endpoint.spec, actor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._spec.method(self._actor, *args, **kwargs)


def _with_port(signature: inspect.Signature) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    positional_only = any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in parameters[1:])
    kind = inspect.Parameter.POSITIONAL_ONLY if positional_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    port = inspect.Parameter("_forge_port", kind)
    return signature.replace(parameters=[parameters[0], port, *parameters[1:]])


@overload
def endpoint(method: Callable[Concatenate[Any, P], AsyncIterator[R]], /) -> StreamEndpoint[P, R]: ...  # type: ignore[overload-overlap]
@overload
def endpoint(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> AsyncEndpoint[P, R]: ...  # type: ignore[overload-overlap]
@overload
def endpoint(method: Callable[Concatenate[Any, P], R], /) -> PlainEndpoint[P, R]: ...
@overload
def endpoint(*, retry: bool = False, concurrent: bool = False, batch: None = None) -> Marking: ...
@overload
def endpoint(*, retry: bool = False, concurrent: bool = False, batch: Batch | int) -> BatchMarking: ...
def endpoint(
    method: Callable[..., Any] | None = None,
    *,
    retry: bool = False,
    concurrent: bool = False,
    batch: Batch | int | None = None,
) -> Any:
    """Mark a method of a `ForgeActor` as callable from other processes.

    The method may be `async def` or plain `def`, and a class may have both. A plain `def` runs on a thread of its own,
    so that it can compute for minutes while the actor still answers its heartbeat. Endpoints of one actor run one at a
    time, in the order in which calls arrive, unless they say otherwise.

    An `async def` that yields is a *streaming* endpoint: it always runs beside other calls, and callers read its items
    with `async for item in handle.name.stream(...)`. When the reader leaves, the generator is cancelled.

    Args:
        retry: running it twice does no harm: when a replica dies, a service sends the request to another one. A stream
            is sent again only while it has not yielded anything.
        concurrent: run beside other calls instead of after them (`async def` only).
        batch: the endpoint takes one list and returns one list of the same length; callers pass single items. An int is
            short for `Batch(size=that)`.
    """
    if method is None:
        return functools.partial(endpoint, retry=retry, concurrent=concurrent, batch=batch)
    is_stream = inspect.isasyncgenfunction(method)
    is_async = is_stream or inspect.iscoroutinefunction(method)
    where = f"{getattr(method, '__qualname__', method)}"
    if not inspect.isfunction(method) or inspect.isgeneratorfunction(method):
        raise OptionError(
            "an endpoint must be a plain method or an async method",
            path=where,
            value=method,
            rule="a def or async def method, not a class or property; a method that yields must be async def",
            repair="write `async def` and yield, or return a list",
        )
    if not inspect.signature(method).parameters:
        raise OptionError(
            "an endpoint must take self", path=where, rule="its first parameter is the actor", repair="add `self`"
        )
    if concurrent and not is_async:
        raise OptionError(
            "a concurrent endpoint must be async",
            path=where,
            value="def",
            rule="concurrent=True needs async def",
            repair="write `async def`, or drop concurrent=True",
        )
    if is_stream:
        _check_stream(method, where, batch)
    chosen = batch if batch is None or isinstance(batch, Batch) else Batch(batch)
    spec = EndpointSpec(method.__name__, method, is_async, retry, concurrent or is_stream, chosen, is_stream)
    return ForgeEndpoint(spec)


def _check_stream(method: Callable[..., Any], where: str, batch: object) -> None:
    if batch is not None:
        raise OptionError(
            "a streaming endpoint cannot be batched",
            path=where,
            value=batch,
            rule="batch= is for endpoints that return one list",
            repair="drop batch=, or return a list instead of yielding",
        )
    if method.__name__ == "setup":
        raise OptionError(
            "setup cannot be a streaming endpoint",
            path=where,
            value=method,
            rule="setup is awaited before the actor serves calls, and nothing reads items from it",
            repair="return instead of yielding",
        )


def streams_only(where: str, verb: str) -> OptionError:
    """Return the error for a streaming endpoint that is called with another verb than `stream`."""
    return OptionError(
        f"{where} is a streaming endpoint: it has no {verb}",
        path=f"{where}.{verb}",
        value=verb,
        rule="a method that yields is read item by item, with stream",
        repair=f"async for item in {where}.stream(...)",
    )


def unknown_verb(where: str, verb: str, equivalents: Mapping[str, str]) -> AttributeError:
    """Return the error for a verb that an endpoint does not have.

    `equivalents` names the verb to use for those of other kinds of handles and of other libraries.
    """
    meant = equivalents.get(verb)
    known = ", ".join(dict.fromkeys(equivalents.values()))
    hint = f"use .{meant}(...)" if meant is not None else f"an endpoint is called with {known} or stream"
    return AttributeError(f"{where} has no {verb!r}: {hint}")


def specs_of(cls: type) -> dict[str, EndpointSpec]:
    """Return every endpoint that a class declares or inherits, by name."""
    found: dict[str, EndpointSpec] = {}
    for name in dir(cls):
        value = inspect.getattr_static(cls, name, None)
        if isinstance(value, ForgeEndpoint):
            found[name] = replace(value.spec, name=name)
    return found


def check_endpoint_names(cls: type, reserved: Collection[str]) -> None:
    """Raise when an endpoint has the name of one of its handle's own attributes."""
    for name in specs_of(cls):
        if name in reserved:
            raise OptionError(
                f"an endpoint cannot be named {name!r}: handles have that name themselves",
                path=f"{cls.__name__}.{name}",
                value=name,
                rule=f"not one of {', '.join(sorted(reserved))}",
                repair="rename the endpoint",
            )
