"""Whether this process is the kernel of a notebook, and how it shows something."""

from __future__ import annotations

import sys
from typing import Any, Protocol


class Output(Protocol):
    """A place in a notebook whose content can change."""

    def show(self, html: str, text: str) -> None:
        """Put this there, instead of what was there before. `text` is for what cannot show HTML."""


def is_notebook() -> bool:
    """Return whether this is the process of a Jupyter kernel. IPython in a terminal is none."""
    shell = _shell()
    return shell is not None and getattr(shell, "kernel", None) is not None


def _shell() -> Any:
    found = sys.modules.get("IPython")
    return found.get_ipython() if found is not None and hasattr(found, "get_ipython") else None


def without_groups(error: BaseException) -> None:
    """Remove exception groups from what an error was raised in: because of one IPython prints a plain traceback instead
    of showing the error."""
    while error.__context__ is not None:
        if isinstance(error.__context__, BaseExceptionGroup):
            error.__context__ = None
        else:
            error = error.__context__


class KernelOutput:
    """A place in the output of the cell that shows something first."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, html: str, text: str) -> None:
        from IPython.display import display

        content = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
