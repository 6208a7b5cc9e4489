"""Tools in processes of their own: `@tool(process=True)`.

Every call starts a process, which imports the tool's module, calls the function and ends. Whatever the function does,
hang, crash, print or exhaust its memory, affects this call only; when its time is up it is killed with everything that
it started. It is no boundary against hostile code: that is what `forge.sandbox` is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from forge.errors import ForgeError, OptionError

MAX_BYTES: Final = 4 << 20
"""What a tool may return, as text; more is refused."""

_END_S: Final = 10.0
"""How long a process may take to end after it has answered, before it is killed."""

_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class ToolProcessFailed(ForgeError, RuntimeError):
    """A tool's process gave no answer: the function raised, or the process ended before it answered."""


def check_importable(function: Callable[..., Any], name: str) -> None:
    """Refuse a function that another process cannot import."""
    module, place = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", "")
    if module == "__main__" or not place.isidentifier():
        raise OptionError(
            "a tool that runs in a process of its own must be importable there",
            path=f"tool {name}: process",
            value=f"{module}:{place}",
            rule="a function at the top level of a module",
            repair="move it into a module of its own, or leave process=True out",
        )


async def call_in_process(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Call a function in a new process and return its answer as text. When this is cancelled, the process is killed."""
    path = os.pathsep.join(place for place in sys.path if place)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, function.__module__, function.__qualname__, str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), "PYTHONPATH": path},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(pickle.dumps(dict(arguments)))
        process.stdin.close()
        answer = await process.stdout.read(MAX_BYTES + 1)
        while answer and len(answer) <= MAX_BYTES and (more := await process.stdout.read(MAX_BYTES)):
            answer += more
        if len(answer) <= MAX_BYTES:
            async with asyncio.timeout(_END_S):  # it has nothing left to do; how it ends is told
                await process.wait()
    except TimeoutError:
        if not answer:
            raise
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())
    if len(answer) > MAX_BYTES:
        raise ToolProcessFailed(f"it returned more than {MAX_BYTES} bytes")
    try:
        found = json.loads(answer)
    except ValueError:
        raise ToolProcessFailed(f"its process ended without an answer (exit status {process.returncode})") from None
    if "error" in found:
        raise ToolProcessFailed(found["error"])
    return str(found["text"])


def main() -> None:
    """Run one call: arguments come on standard input, the answer goes to standard output, and nothing else does."""
    from importlib import import_module

    from forge.envs.tools import Tool, as_text
    from forge.runtime.sandbox.confine import PR_SET_PDEATHSIG, prctl

    module, name, owner = sys.argv[1], sys.argv[2], int(sys.argv[3])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:  # it died before the line above
        return
    answer = os.dup(1)
    os.dup2(2, 1)  # what the function prints goes where errors go
    arguments = pickle.loads(sys.stdin.buffer.read())
    try:
        found = getattr(import_module(module), name)
        function = found.function if isinstance(found, Tool) else found
        value = function(**arguments)
        value = asyncio.run(value) if inspect.iscoroutine(value) else value
        told = {"text": as_text(value)}
    except BaseException as error:  # noqa: BLE001 - whatever it raises is the tool's answer
        told = {"error": f"{type(error).__name__}: {error}"[:2000]}
    with os.fdopen(answer, "wb") as file:
        file.write(json.dumps(told).encode())


if __name__ == "__main__":
    main()
