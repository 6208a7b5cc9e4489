"""The handle of a spawned actor: Monarch's verbs, with errors as a caller wants them.

`call_one`, `call`, `choose`, `stream`, `broadcast` and `rref` behave as Monarch's do, except that a user's exception is
raised as itself and the death of a process raises `ActorFailure`: within milliseconds at the actor's owner, within
seconds through a handle that was sent to another process. An endpoint that yields has `stream` alone, and it is read
with `async for`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Generator, Iterator
from types import GenericAlias
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from forge.errors import ActorFailure, CallTimeout
from forge.runtime.control import control
from forge.runtime.endpoints import specs_of, streams_only, unknown_verb
from forge.runtime.group import RankGroup, translate
from forge.runtime.pending_calls import PendingCalls
from forge.runtime.replies import reply_channel
from forge.runtime.serialization import encode
from forge.runtime.streams import End, StreamReader

_EQUIVALENTS = {"route": "call_one", "fanout": "call", "call_all": "call"}
"""Verbs of services and of other libraries, and what an actor has instead."""

R_co = TypeVar("R_co", covariant=True)


class Reply(Generic[R_co]):
    """The result of a call: `await` it, or `get()` it where no event loop runs."""

    def __init__(self, future: Any, calls: PendingCalls | None, label: str) -> None:
        self._future, self._calls, self._label = future, calls, label

    def __await__(self) -> Generator[Any, None, R_co]:
        return self._wait().__await__()

    async def _wait(self) -> R_co:
        reply: asyncio.Future[R_co] = self._future.as_asyncio()
        if self._calls is not None:
            self._calls.add(reply, asyncio.get_running_loop())
        try:
            return await reply
        except Exception as error:  # noqa: BLE001 - translated, never swallowed
            raise translate(error, self._label) from None
        finally:
            if self._calls is not None:
                self._calls.discard(reply)

    def get(self, timeout: float | None = None) -> R_co:
        """Block until the result is there. Not inside an event loop: `await` there."""
        waiting = control().start(self._wait())
        try:
            return waiting.result(timeout)
        except TimeoutError as error:
            if getattr(error, "remote_traceback", None) is not None:
                raise
            waiting.cancel()
            raise CallTimeout(f"{self._label} did not answer", value=f"{timeout} s") from None


class EndpointVerbs:
    """One endpoint of a spawned actor."""

    def __init__(self, endpoint: Any, calls: PendingCalls | None, label: str) -> None:
        self._endpoint, self._calls, self._label = endpoint, calls, label

    def call_one(self, *args: Any, **kwargs: Any) -> Reply[Any]:
        """Call the only rank."""
        return Reply(self._endpoint.call_one(*args, **kwargs), self._calls, self._label)

    def call(self, *args: Any, **kwargs: Any) -> Reply[Any]:
        """Call every rank; the result is Monarch's `ValueMesh`."""
        return Reply(self._endpoint.call(*args, **kwargs), self._calls, self._label)

    def choose(self, *args: Any, **kwargs: Any) -> Reply[Any]:
        """Call one rank, chosen at random."""
        return Reply(self._endpoint.choose(*args, **kwargs), self._calls, self._label)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Reply[Any]]:
        """Call every rank and take the results as they come."""
        for future in self._endpoint.stream(*args, **kwargs):
            yield Reply(future, self._calls, self._label)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise unknown_verb(f"an endpoint of actor {self._label}", name, _EQUIVALENTS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "choose how to call it: .call_one(...), .call(...), .choose(...), .stream(...) or .broadcast(...)"
        )

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Send to every rank without waiting. An exception there is logged in that process."""
        self._endpoint.broadcast(*args, **kwargs)


class StreamVerbs:
    """One streaming endpoint of a spawned actor: `async for item in handle.name.stream(...)`."""

    def __init__(self, actor: Any, name: str, calls: PendingCalls | None, label: str) -> None:
        self._actor, self._name, self._calls, self._label = actor, name, calls, label

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Run the generator on every rank and take the first rank's items, in order, each as soon as it is yielded.

        Leaving the loop, `aclose()` and cancelling the reader cancel the generator. What it raises is raised here after
        the items before it; the death of the actor raises `ActorFailure`.
        """
        channel, ranks = reply_channel(), self._actor._ndslice
        calls = PendingCalls() if self._calls is None else self._calls
        payload = encode((args, kwargs))
        with StreamReader(self._actor, channel, calls=calls, num_ranks=len(ranks), sender=ranks.offset) as reader:
            self._actor._forge_connect.broadcast(channel.caller, channel.port)
            reader.start(self._name, payload, is_watched=self._calls is None)
            while (item := await reader.next()) is not End:
                yield item

    def _refuse(self, verb: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise streams_only(f"{self._label}.{self._name}", verb)

    call = functools.partialmethod(_refuse, "call")
    call_one = functools.partialmethod(_refuse, "call_one")
    choose = functools.partialmethod(_refuse, "choose")
    broadcast = functools.partialmethod(_refuse, "broadcast")
    rref = functools.partialmethod(_refuse, "rref")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"choose how to call it: async for item in {self._name}.stream(...)")


class ActorHandle:
    """A spawned actor. Endpoints are attributes; mesh operations (`slice`, `sizes`, `flatten`…) are Monarch's.

    It may be sent to other actors, where it can call but not stop. In annotations: `ActorHandle[Policy]`.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)

    def __init__(self, actor: Any, label: str, *, group: RankGroup | None = None) -> None:
        self._actor, self._label, self._group = actor, label, group

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._actor, name, None)
        if value is None:
            declared = ", ".join(specs_of(self._actor._class))
            raise AttributeError(
                f"actor {self._label} has no endpoint {name!r}; its class declares: {declared or 'none'}"
            )
        if hasattr(value, "call_one"):
            spec = getattr(getattr(self._actor._class, name, None), "spec", None)
            if spec is not None and spec.is_stream:
                return StreamVerbs(self._actor, name, self._group.calls if self._group else None, self._label)
            return EndpointVerbs(value, self._group.calls if self._group else None, self._label)
        return value

    def slice(self, **coordinates: int | slice) -> ActorHandle:
        """Return a part of the mesh, such as `slice(procs=0)`."""
        return ActorHandle(self._actor.slice(**coordinates), self._label, group=self._group)

    def flatten(self, name: str) -> ActorHandle:
        """Return the same ranks along one dimension."""
        return ActorHandle(self._actor.flatten(name), self._label, group=self._group)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each rank."""
        return tuple(pid for _, pid in self._owned().pids)

    @property
    def is_alive(self) -> bool:
        """False once any rank has died or the actor was stopped."""
        return self._owned().is_alive

    async def stop(self) -> None:
        """End the actor's processes and give its GPUs back. A second call does nothing."""
        from forge.runtime.lifetime import runtime

        group = self._owned()
        await control().submit(group.stop())
        runtime().forget(group)

    def _owned(self) -> RankGroup:
        if self._group is None:
            raise RuntimeError(f"this handle of {self._label} was sent here; only its owner can ask that")
        return self._group

    def __reduce__(self) -> tuple[Any, ...]:
        if self._group is not None and not self._group.is_alive:
            raise ActorFailure(f"{self._label} has ended; its handle can no longer be sent", path=self._label)
        return (ActorHandle, (self._actor, self._label))

    def __repr__(self) -> str:
        return f"ActorHandle({self._label}, {dict(self._actor.sizes)})"
