"""Making the next items of an iterator in a background thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """An iterator whose next `depth` items are made while the present one is used.

    Items come in their order. What the thread raises is raised to the consumer, after the items made before it. `close`
    ends the thread; the item that is being made then is thrown away.
    """

    def __init__(self, items: Iterator[T], *, depth: int) -> None:
        self._shared = _Shared[T](depth)
        self._thread = threading.Thread(target=_work, args=(items, self._shared), name="forge-data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        shared = self._shared
        with shared.changed:
            while not shared.ready and not shared.ended:
                shared.changed.wait()
            if shared.ready:
                shared.changed.notify_all()
                return shared.ready.popleft()
        self._thread.join()
        if shared.error is not None:
            raise shared.error
        raise StopIteration

    def close(self) -> None:
        """End the thread and wait for it."""
        with self._shared.changed:
            self._shared.ended = True
            self._shared.ready.clear()
            self._shared.changed.notify_all()
        if threading.current_thread() is not self._thread:  # garbage may be collected there
            self._thread.join()


class _Shared(Generic[T]):
    def __init__(self, depth: int) -> None:
        self.changed = threading.Condition()
        self.ready: deque[T] = deque()
        self.depth = depth
        self.ended = False
        self.error: BaseException | None = None


def _work(items: Iterator[T], shared: _Shared[T]) -> None:
    try:
        for item in items:
            with shared.changed:
                while len(shared.ready) >= shared.depth and not shared.ended:
                    shared.changed.wait()
                if shared.ended:
                    return
                shared.ready.append(item)
                shared.changed.notify_all()
    except BaseException as error:  # noqa: BLE001 — it is raised again where the items are used
        shared.error = error
    finally:
        with shared.changed:
            shared.ended = True
            shared.changed.notify_all()
