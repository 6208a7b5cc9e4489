"""Static types of endpoints: what a type checker knows of `policy.generate.route(...)`.

Type checkers see a handle as the actor's own class, and each endpoint of it as one of these classes, with the method's
own signature. They do not know which kind of handle it is: `route` and `fanout` are verbs of services, the others are
verbs of actors, and a verb of the other kind raises when it is called. At runtime `forge.service.calls`,
`forge.service.streams` and `forge.runtime.handle` do the work; nothing here is instantiated.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, overload

if TYPE_CHECKING:
    from forge.runtime.handle import Reply
    from forge.service.records import Outcome

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Item = TypeVar("Item")
Item_contra = TypeVar("Item_contra", contravariant=True)
Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)


class RankValues(Protocol[R_co]):
    """What `call` returns: one value for each rank (Monarch's `ValueMesh`)."""

    def item(self, **coordinates: int) -> R_co: ...
    def items(self) -> Iterable[tuple[Any, R_co]]: ...
    def values(self) -> Iterable[R_co]: ...
    def get(self, rank: int) -> R_co: ...
    def slice(self, **coordinates: int | builtins.slice) -> Self: ...
    def flatten(self, name: str) -> Self: ...
    def __iter__(self) -> Iterator[tuple[Any, R_co]]: ...
    def __len__(self) -> int: ...


if TYPE_CHECKING:

    class _ActorVerbs(Generic[P, R_co]):
        def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Reply[R_co]: ...
        def call(self, *args: P.args, **kwargs: P.kwargs) -> Reply[RankValues[R_co]]: ...
        def choose(self, *args: P.args, **kwargs: P.kwargs) -> Reply[R_co]: ...
        def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Reply[R_co]]: ...
        def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None: ...

    class Endpoint(_ActorVerbs[P, R_co]):
        """An endpoint that takes `P` and returns `R_co`."""

        async def route(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
        async def fanout(self, *args: P.args, **kwargs: P.kwargs) -> list[R_co]: ...
        async def rolling(self, *args: P.args, **kwargs: P.kwargs) -> list[R_co]: ...

        @overload
        def options(
            self,
            *,
            partial: Literal[True],
            all_ranks: Literal[True],
            timeout_s: float | None = ...,
            retry: bool | None = ...,
            session: str | None = ...,
        ) -> PartialEndpoint[P, tuple[R_co, ...]]: ...
        @overload
        def options(
            self,
            *,
            partial: Literal[True],
            all_ranks: Literal[False] = ...,
            timeout_s: float | None = ...,
            retry: bool | None = ...,
            session: str | None = ...,
        ) -> PartialEndpoint[P, R_co]: ...
        @overload
        def options(
            self,
            *,
            all_ranks: Literal[True],
            partial: Literal[False] = ...,
            timeout_s: float | None = ...,
            retry: bool | None = ...,
            session: str | None = ...,
        ) -> Endpoint[P, tuple[R_co, ...]]: ...
        @overload
        def options(
            self,
            *,
            partial: Literal[False] = ...,
            all_ranks: Literal[False] = ...,
            timeout_s: float | None = ...,
            retry: bool | None = ...,
            session: str | None = ...,
        ) -> Self: ...
        def options(self, **options: Any) -> Any: ...

    class AsyncEndpoint(Endpoint[P, R_co]):
        """An `async def` endpoint."""

        async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    class PlainEndpoint(Endpoint[P, R_co]):
        """A `def` endpoint."""

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    class PartialEndpoint(Generic[P, R_co]):
        """An endpoint with `options(partial=True)`: `fanout` returns an `Outcome` for each replica."""

        async def route(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
        async def fanout(self, *args: P.args, **kwargs: P.kwargs) -> list[Outcome]: ...
        async def rolling(self, *args: P.args, **kwargs: P.kwargs) -> list[Outcome]: ...
        def options(
            self, *, timeout_s: float | None = ..., retry: bool | None = ..., session: str | None = ...
        ) -> Self: ...

    class StreamEndpoint(Generic[P, R_co]):
        """An endpoint that yields `R_co`."""

        def stream(self, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[R_co, None]: ...
        def options(
            self, *, timeout_s: float | None = ..., retry: bool | None = ..., session: str | None = ...
        ) -> Self: ...
        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[R_co, None]: ...

    class _BatchedVerbs(_ActorVerbs[[list[Item_contra]], list[Answer_co]], Generic[Item_contra, Answer_co]):
        async def route(self, item: Item_contra, /) -> Answer_co: ...
        async def fanout(self, item: Item_contra, /) -> list[Answer_co]: ...
        def options(
            self, *, timeout_s: float | None = ..., retry: bool | None = ..., session: str | None = ...
        ) -> Self: ...

    class AsyncBatchEndpoint(_BatchedVerbs[Item_contra, Answer_co]):
        """An `async def` endpoint with `batch=`: callers of a service pass one item and get its answer."""

        async def __call__(self, items: list[Item_contra]) -> Sequence[Answer_co | Exception]: ...

    class PlainBatchEndpoint(_BatchedVerbs[Item_contra, Answer_co]):
        """A `def` endpoint with `batch=`."""

        def __call__(self, items: list[Item_contra]) -> Sequence[Answer_co | Exception]: ...

    class Marking(Protocol):
        """What `endpoint(...)` returns: the decorator."""

        @overload
        def __call__(self, method: Callable[Concatenate[Any, P], AsyncIterator[R]], /) -> StreamEndpoint[P, R]: ...  # type: ignore[overload-overlap]
        @overload
        def __call__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> AsyncEndpoint[P, R]: ...  # type: ignore[overload-overlap]
        @overload
        def __call__(self, method: Callable[Concatenate[Any, P], R], /) -> PlainEndpoint[P, R]: ...

    class BatchMarking(Protocol):
        """What `endpoint(batch=...)` returns: the decorator of a method that takes a list and returns a list."""

        @overload
        def __call__(
            self, method: Callable[[Any, list[Item]], Coroutine[Any, Any, Sequence[Answer | Exception]]], /
        ) -> AsyncBatchEndpoint[Item, Answer]: ...
        @overload
        def __call__(
            self, method: Callable[[Any, list[Item]], Sequence[Answer | Exception]], /
        ) -> PlainBatchEndpoint[Item, Answer]: ...
