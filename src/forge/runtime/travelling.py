"""Exceptions that cross processes: each arrives as itself, with the traceback of where it was raised."""

from __future__ import annotations

import traceback
from typing import Any

from forge.errors import RemoteError
from forge.runtime.wire import decode, encode


class Traveller(Exception):
    """Carries an exception and its traceback; where it arrives it is that exception, with the traceback attached.

    The original gets no note: an actor may raise the same object again.
    """

    def __init__(self, error: Exception, text: str) -> None:
        super().__init__()
        self.error, self.text = error, text

    def __reduce__(self) -> tuple[Any, ...]:
        return (_arrive, (self.error, self.text))


def _arrive(error: Exception, text: str) -> Exception:
    error.__dict__["remote_traceback"] = text
    error.add_note(f"\nRemote traceback:\n{text}")
    return error


def portable(error: BaseException) -> Traveller:
    """`error` ready to travel, or a `RemoteError` that stands for it where it cannot."""
    text = "".join(traceback.format_exception(error))
    error.__traceback__ = None  # told; an object that is raised again would collect the frames of every time
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    if isinstance(error, Exception) and not isinstance(error, StopIteration) and _survives(error):
        return Traveller(error, text)
    return Traveller(RemoteError(f"{name}: {_text(error)}", type_name=name), text)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the caller must hear of it, printable or not
        return "<its text could not be made>"


def _survives(error: Exception) -> bool:
    try:
        return type(decode(encode(error))) is type(error)
    except Exception:  # noqa: BLE001 - any failure to copy it means the same: send a stand-in
        return False
