"""Actors that use the meeting point of their run, and a controller for runs in processes of their own.

usage: meeters.py pair ADDRESS ADDRESS    two hosts: one actor on each meets the root
       meeters.py alone                   a plain script, without any actor
       meeters.py fork                    a plain script that forks
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import desks
import forge
from forge import ForgeActor, endpoint
from forge.runtime import meeting
from forge.runtime.meeting import meet

meeting.SERVICES["test"] = "desks"
CHILD = "from forge.runtime.meeting import meet, run_id; import os; print(*meet('test').call('who')[:2], run_id())"


class Meeter(ForgeActor):
    """Speaks with the root."""

    @endpoint
    async def ask(self, name: str, body: Any = None) -> Any:
        return await meet("test").ask(name, body)

    @endpoint
    def call(self, name: str, body: Any = None) -> Any:
        return meet("test").call(name, body)

    @endpoint
    async def facts(self) -> dict[str, Any]:
        line = meet("test")
        return {
            "pid": os.getpid(),
            "run": meeting.run_id(),
            "line_run": line.run_id,
            "who": (await line.ask("who"))[1],
            "addresses": os.environ[meeting.MEETING],
            "host": meeting.host_id(),
            "has_point": meeting.is_point_open(),
        }

    @endpoint
    async def facts_of_child(self) -> dict[str, Any]:
        """Of an actor that this actor starts."""
        child = await Meeter.as_actor()
        facts: dict[str, Any] = await child.facts.call_one()
        return facts

    @endpoint
    def of_subprocess(self) -> list[str]:
        """As seen by a program that this actor starts, as inference engines do."""
        said = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=600, check=False)
        return said.stdout.split() or [said.stderr]

    @endpoint
    async def hold(self) -> None:
        meet("test").tell("hold", str(os.getpid()))
        await meet("test").ask("note", ("held", os.getpid()))

    @endpoint
    async def shutdown(self) -> None:
        meet("test").tell("note", ("last words", os.getpid()))


async def pair(addresses: list[str]) -> dict[str, Any]:
    from forge.config import LauncherConfig

    async with forge.run(LauncherConfig(kind="hosts", hosts=tuple(addresses))):
        both = await Meeter.options(hosts=2, env={meeting.HOST: ""}).as_actor()
        facts = [fact for _, fact in (await both.facts.call()).items()]
        children = [fact for _, fact in (await both.facts_of_child.call()).items()]
        return {"run": meeting.run_id(), "facts": facts, "children": children}


def alone() -> dict[str, Any]:
    line = meet("test")
    first = meeting.run_id(), line.run_id
    assert meet("test") is line
    child = subprocess.run(
        [sys.executable, "-c", CHILD], env={**os.environ, **meeting.environment()}, capture_output=True, text=True,
        timeout=600, check=True,
    ).stdout.split()  # fmt: skip
    asyncio.run(forge.shutdown())
    ended = not line.is_open
    second = meeting.run_id(), meet("test").run_id
    return {"first": first, "second": second, "ended": ended, "child": child, "closed": "closed" in desks.opened[0].log}


def fork() -> dict[str, Any]:
    """The child asks through a line of its own; it outlives its parent's next run, and is refused there."""
    assert meet("test").call("who")[1] == os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if meet("test").call("who")[1] == os.getpid() else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"child": code, "after": meet("test").call("who")[1] == os.getpid()}


async def local(wait: str) -> dict[str, Any]:
    """One run on this machine; `wait` keeps it open until standard input ends."""
    async with forge.run():
        actor = await Meeter.as_actor()
        facts = await actor.facts.call_one()
        print(json.dumps({"run": meeting.run_id(), "facts": facts}), flush=True)
        if wait == "wait":
            await asyncio.to_thread(sys.stdin.read)
        if wait == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        log = await actor.ask.call_one("read")
    return {"run": meeting.run_id(), "facts": facts, "log": log}


if __name__ == "__main__":
    import meeters  # so that actors travel by name

    what, *words = sys.argv[1:]
    if what == "pair":
        print(json.dumps(asyncio.run(meeters.pair(words))), flush=True)
    elif what == "local":
        print(json.dumps(asyncio.run(meeters.local(words[0]))), flush=True)
    else:
        print(json.dumps({"alone": meeters.alone, "fork": meeters.fork}[what]()), flush=True)
