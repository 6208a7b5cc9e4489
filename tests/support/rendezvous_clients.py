"""Actors that use the rendezvous server of their run, and a controller for runs in processes of their own.

usage: rendezvous_clients.py pair ADDRESS ADDRESS    two hosts: one actor on each meets the root
       rendezvous_clients.py alone                   a plain script, without any actor
       rendezvous_clients.py fork                    a plain script that forks
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import forge
import registries
from forge import ForgeActor, endpoint
from forge.runtime import rendezvous
from forge.runtime.rendezvous import connect

rendezvous.REGISTRIES["test"] = "registries"
CHILD = "from forge.runtime.rendezvous import *; print(*connect('test').call('who')[:2], run_id())"


class Client(ForgeActor):
    """Speaks with the root."""

    @endpoint
    async def ask(self, name: str, body: Any = None) -> Any:
        return await connect("test").call_async(name, body)

    @endpoint
    def call(self, name: str, body: Any = None) -> Any:
        return connect("test").call(name, body)

    @endpoint
    async def facts(self) -> dict[str, Any]:
        connection = connect("test")
        return {
            "pid": os.getpid(),
            "run": rendezvous.run_id(),
            "line_run": connection.run_id,
            "who": (await connection.call_async("who"))[1],
            "addresses": os.environ[rendezvous.RENDEZVOUS],
            "host": rendezvous.host_id(),
            "has_point": rendezvous.is_server_open(),
        }

    @endpoint
    async def facts_of_child(self) -> dict[str, Any]:
        """Of an actor that this actor starts."""
        child = await Client.as_actor()
        facts: dict[str, Any] = await child.facts.call_one()
        return facts

    @endpoint
    def of_subprocess(self) -> list[str]:
        """As seen by a program that this actor starts, as inference engines do."""
        said = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=600, check=False)
        return said.stdout.split() or [said.stderr]

    @endpoint
    async def hold(self) -> None:
        connect("test").notify("hold", str(os.getpid()))
        await connect("test").call_async("note", ("held", os.getpid()))

    @endpoint
    async def shutdown(self) -> None:
        connect("test").notify("note", ("last words", os.getpid()))


async def pair(addresses: list[str]) -> dict[str, Any]:
    from forge.config import LauncherConfig

    async with forge.run(LauncherConfig(kind="hosts", hosts=tuple(addresses))):
        both = await Client.options(hosts=2, env={rendezvous.HOST: ""}).as_actor()
        facts = [fact for _, fact in (await both.facts.call()).items()]
        children = [fact for _, fact in (await both.facts_of_child.call()).items()]
        return {"run": rendezvous.run_id(), "facts": facts, "children": children}


def alone() -> dict[str, Any]:
    connection = connect("test")
    first = rendezvous.run_id(), connection.run_id
    assert connect("test") is connection
    child = subprocess.run(
        [sys.executable, "-c", CHILD], env={**os.environ, **rendezvous.environment()}, capture_output=True, text=True,
        timeout=600, check=True,
    ).stdout.split()  # fmt: skip
    asyncio.run(forge.shutdown())
    ended = not connection.is_open
    second = rendezvous.run_id(), connect("test").run_id
    closed = "closed" in registries.opened[0].log
    return {"first": first, "second": second, "ended": ended, "child": child, "closed": closed}


def fork() -> dict[str, Any]:
    """The child asks through a connection of its own; it outlives its parent's next run, and is refused there."""
    assert connect("test").call("who")[1] == os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if connect("test").call("who")[1] == os.getpid() else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"child": code, "after": connect("test").call("who")[1] == os.getpid()}


async def local(wait: str) -> dict[str, Any]:
    """One run on this machine; `wait` keeps it open until standard input ends."""
    async with forge.run():
        actor = await Client.as_actor()
        facts = await actor.facts.call_one()
        print(json.dumps({"run": rendezvous.run_id(), "facts": facts}), flush=True)
        if wait == "wait":
            await asyncio.to_thread(sys.stdin.read)
        if wait == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        log = await actor.ask.call_one("read")
    return {"run": rendezvous.run_id(), "facts": facts, "log": log}


if __name__ == "__main__":
    import rendezvous_clients  # so that actors travel by name

    what, *words = sys.argv[1:]
    if what == "pair":
        print(json.dumps(asyncio.run(rendezvous_clients.pair(words))), flush=True)
    elif what == "local":
        print(json.dumps(asyncio.run(rendezvous_clients.local(words[0]))), flush=True)
    else:
        print(json.dumps({"alone": rendezvous_clients.alone, "fork": rendezvous_clients.fork}[what]()), flush=True)
