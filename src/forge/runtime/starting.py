"""An actor or a service on its way: what `as_actor` and `as_service` return, to be awaited."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")


class Starting(Coroutine[Any, Any, T]):
    """A coroutine that says so when it is used as the handle that it will give.

    It can be awaited, gathered and made a task of, as any other.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], *, call: str) -> None:
        self._coroutine, self._call = coroutine, call

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, kind: Any, value: Any = None, traceback: TracebackType | None = None) -> Any:
        return self._coroutine.throw(kind if value is None else value)

    def close(self) -> None:
        self._coroutine.close()

    if not TYPE_CHECKING:  # a type checker is to report what is missing

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            call = self.__dict__.get("_call", "as_service")
            raise AttributeError(f"{call}(...) was not awaited, so there is no {name!r} yet: write `await {call}(...)`")

    def __repr__(self) -> str:
        return f"<{self._call}(...), not awaited>"
