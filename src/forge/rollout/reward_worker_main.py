"""The process that runs reward functions: `python -m forge.rollout.reward_worker_main DESCRIPTOR PARENT`.

It is started once and serves one call after the other. Anything that a reward function does ends at most this process:
the parent kills it when a call takes too long, and starts another. It ends when its parent does.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from forge.runtime.sandbox.confine import PR_SET_PDEATHSIG, prctl

LENGTH = struct.Struct("!I")
"""Before every message: how many bytes it has. A call's message begins with the number of its function, as such."""

_MOST_CHARACTERS = 2000


def main() -> None:
    """Get ready, say so, and serve."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be told
        return
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)  # what rewards print goes where errors go
    line = socket.socket(fileno=descriptor)
    asked: list[tuple[str, dict[str, Any]]] = pickle.loads(_receive(line))
    try:
        from forge.rewards import find

        functions = [partial(find(kind), **args) for kind, args in asked]
    except BaseException as error:  # noqa: BLE001 - whatever a user's module does on import, the parent says it
        _send(line, (False, explain(error)))
        return
    _send(line, (True, 0.0))
    process = os.getpid()
    while message := _receive(line):
        answer = _answer(functions, message)
        if os.getpid() != process:  # a reward forked and came back twice
            os._exit(1)
        _send(line, answer)


def _answer(functions: list[partial[float]], message: bytes) -> tuple[bool, float | str]:
    try:
        prompt, completion = pickle.loads(memoryview(message)[LENGTH.size :])
        return True, as_number(functions[LENGTH.unpack_from(message)[0]](prompt, completion))
    except BaseException as error:  # noqa: BLE001 - also an exit request: the call fails, and the worker goes on
        return False, explain(error)


def as_number(value: Any) -> float:
    """The reward as a float. What is no finite number raises."""
    convert: Callable[[Any], float] | None = getattr(type(value), "__float__", None)
    if convert is None:
        raise TypeError(f"the reward returned {type(value).__name__}, which is no number")
    number = float(convert(value))
    if not math.isfinite(number):
        raise ValueError(f"the reward returned {number}")
    return number


def explain(error: BaseException) -> str:
    """An error in one line: its kind, its text, and where it was raised."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else f" ({os.path.basename(place.tb_frame.f_code.co_filename)}:{place.tb_lineno})"
    try:
        text = " ".join(str(error).split())
    except Exception as fault:  # noqa: BLE001 - an error that cannot even be said
        text = f"its text cannot be had: {type(fault).__name__}"
    return f"{type(error).__name__}: {text[:_MOST_CHARACTERS]}{where}" if text else f"{type(error).__name__}{where}"


def _receive(line: socket.socket) -> bytes:
    """The next message; empty when the parent has gone."""
    length = _exactly(line, LENGTH.size)
    return _exactly(line, LENGTH.unpack(length)[0]) if length else b""


def _exactly(line: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        num_read = line.recv_into(view)
        if num_read == 0:
            return b""
        view = view[num_read:]
    return bytes(data)


def _send(line: socket.socket, answer: tuple[bool, float | str]) -> None:
    data = pickle.dumps(answer)
    line.sendall(LENGTH.pack(len(data)) + data)


if __name__ == "__main__":
    main()
