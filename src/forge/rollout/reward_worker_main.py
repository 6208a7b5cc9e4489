"""The process that runs reward functions: `python -m forge.rollout.reward_worker_main DESCRIPTOR`.

It is started once and serves one call after the other. Anything that a reward function does ends at most this process:
the reward actor ends it when a call takes too long, and starts another.

What is started forks at once. The child runs the functions; its parent, the guard, does nothing but wait, so that a
function that signals its parent (`os.kill(os.getppid(), ...)`) does not reach the reward actor. The guard ends the
child when standard input closes, which the reward actor does to end a worker and the kernel does when the actor dies.
The child ends when the guard does.
"""

from __future__ import annotations

import math
import os
import pickle
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from forge.runtime import framing
from forge.runtime.rank_logging import NO_LOG_FILE, start_rank_logging
from forge.runtime.sandbox.confine import PR_SET_PDEATHSIG, prctl

SETUP, CALL, REPLY = 1, 2, 3
"""The kinds of frames: which functions to import, a call (its number is that of the function), and a reply."""

_MOST_CHARACTERS = 2000
Answer = tuple[bool, float | str, str]
"""Whether there is a number; the number, or why there is none; and then the traceback."""


def main() -> None:
    """Fork: wait in the parent, run the functions in the child."""
    descriptor, guard = int(sys.argv[1]), os.getpid()
    child = os.fork()
    if child:
        os.close(descriptor)
        _guard(child)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it died before the line above
        return
    os.set_inheritable(descriptor, False)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if start_rank_logging() == NO_LOG_FILE:
        os.dup2(2, 1)  # what rewards print goes where errors go
    _serve(socket.socket(fileno=descriptor))


def _guard(child: int) -> NoReturn:
    """Wait until the child ends or standard input closes; end the child then, and exit as it exited."""
    select.select([0, os.pidfd_open(child)], [], [])
    os.kill(child, signal.SIGKILL)  # without effect on one that has ended, and is not reaped yet
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _serve(line: socket.socket) -> None:
    """Import the functions, answer with the process id, and answer calls until the other end closes."""
    setup = framing.receive(line)
    if setup is None:
        return
    asked: list[tuple[str, dict[str, Any]]] = pickle.loads(setup[2])
    try:
        from forge.rewards import find

        functions = [partial(find(kind), **args) for kind, args in asked]
    except BaseException as error:  # noqa: BLE001 - whatever a user's module does on import, the parent says it
        _send(line, (False, explain(error), _traceback_of(error)))
        return
    process = os.getpid()
    _send(line, (True, float(process), ""))
    while (call := framing.receive(line)) is not None:
        answer = _answer(functions[call[1]], call[2])
        if os.getpid() != process:  # a reward forked and came back twice
            os._exit(1)
        _send(line, answer)


def _answer(function: partial[float], payload: bytes) -> Answer:
    try:
        return True, as_number(function(*pickle.loads(payload))), ""
    except BaseException as error:  # noqa: BLE001 - also an exit request: the call fails, and the worker continues
        return False, explain(error), _traceback_of(error)


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))[-_MOST_CHARACTERS * 4 :]
    except Exception as fault:  # noqa: BLE001 - of an error that cannot be shown
        return f"it has no traceback: {type(fault).__name__}"


def as_number(value: Any) -> float:
    """Return the reward as a float. Anything but a finite number raises."""
    convert: Callable[[Any], float] | None = getattr(type(value), "__float__", None)
    if convert is None:
        raise TypeError(f"the reward returned {type(value).__name__}, which is not a number")
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
    except Exception as fault:  # noqa: BLE001 - an error without a text
        text = f"its text cannot be had: {type(fault).__name__}"
    return f"{type(error).__name__}: {text[:_MOST_CHARACTERS]}{where}" if text else f"{type(error).__name__}{where}"


def _send(line: socket.socket, answer: Answer) -> None:
    framing.send(line, REPLY, 0, pickle.dumps(answer))


if __name__ == "__main__":
    main()
