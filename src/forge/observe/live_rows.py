"""Rows that are drawn again and again in one place: `rich.live.Live`, for rows that never wrap."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleRenderable, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text


class LiveRows(Live):
    """Draws rows at the foot of a console.

    A terminal that is made narrower breaks the rows that are on it into several; more lines are then erased than were
    drawn, so that nothing of them stays behind.

    Args:
        console: the terminal.
        rows: returns what is drawn, cut to the width of the console.
        refresh_s: how often it is drawn by itself; 0 for never.
        takes_streams: whether what the program prints by itself goes above the rows.
    """

    def __init__(
        self, console: Console, rows: Callable[[], Sequence[Text]], *, refresh_s: float, takes_streams: bool
    ) -> None:
        self._rows = rows
        self._drawn: list[int] = []
        self._next: list[int] = []
        super().__init__(
            console=console,
            get_renderable=self._draw,
            auto_refresh=refresh_s > 0,
            refresh_per_second=1 / (refresh_s or 1.0),
            vertical_overflow="crop",
            redirect_stdout=takes_streams,
            redirect_stderr=takes_streams,
        )

    def start(self, refresh: bool = False) -> None:
        """Start drawing. The cursor stays visible: after `kill -9` nothing could show it again."""
        super().start(refresh)
        self.console.show_cursor(True)

    def _draw(self) -> Group:
        rows = list(self._rows())[: self.console.height]
        self._next = [row.cell_len for row in rows]
        return Group(*rows)

    def refresh(self) -> None:
        """Draw the rows, unless the terminal is gone: a run continues without it."""
        with contextlib.suppress(OSError):
            super().refresh()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        extra = num_broken(self._drawn, width=self.console.width)
        self._drawn = self._next
        codes = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * extra
        return [*([Control(*codes)] if codes else []), *super().process_renderables(renderables)]


def num_broken(lengths: Sequence[int], *, width: int) -> int:
    """Return how many lines more than there are rows a terminal of this width shows."""
    return sum(max(0, -(-length // max(1, width)) - 1) for length in lengths)
