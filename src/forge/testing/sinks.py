"""A sink that keeps everything in memory."""

from __future__ import annotations

from collections.abc import Mapping

from forge.observe.sink import Value, closed_error


class ListSink:
    """Keeps what was written, in order, in `entries`. `fail_at` makes it raise at that step, to see who notices."""

    def __init__(self, *, fail_at: int | None = None) -> None:
        self.entries: list[tuple[int, dict[str, Value]]] = []
        self.closed = False
        self._fail_at = fail_at

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        if self.closed:
            raise closed_error(self)
        if step == self._fail_at:
            raise OSError(f"configured to fail at step {step}")
        self.entries.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True

    def series(self, name: str) -> list[Value]:
        """Every value of one name, in the order in which they were written."""
        return [values[name] for _, values in self.entries if name in values]
