"""Values and exceptions as bytes, encoded and decoded where an error reaches the caller.

Monarch would pickle arguments itself, but a value that cannot be decoded on the other side then kills the actor or is
lost. Here each end encodes and decodes its own values, and a failure is raised to the process that made the call.
"""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import cloudpickle

from forge.errors import RemoteError


def encode(value: object) -> bytes:
    """Return `value` as bytes. Classes and functions of `__main__` are pickled by value, others by name."""
    data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return data


def decode(data: bytes | memoryview) -> Any:
    return pickle.loads(data)


class RemoteRaise(Exception):
    """An exception with its traceback; unpickled, it is that exception with the remote traceback attached.

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


def as_remote(error: BaseException) -> RemoteRaise:
    """Return `error` ready to be pickled, or a `RemoteError` in its place where it cannot be."""
    text = "".join(traceback.format_exception(error))
    error.__traceback__ = None  # an object that is raised again would collect the frames of every time
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    if isinstance(error, Exception) and not isinstance(error, StopIteration) and _survives(error):
        return RemoteRaise(error, text)
    return RemoteRaise(RemoteError(f"{name}: {_text(error)}", type_name=name), text)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the caller gets the error, printable or not
        return "<no text>"


def _survives(error: Exception) -> bool:
    try:
        return type(decode(encode(error))) is type(error)
    except Exception:  # noqa: BLE001 - whatever the reason, it cannot be sent
        return False
