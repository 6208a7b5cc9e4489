"""A program that finds out that AMX traps, and prints as JSON what its children find in their environment."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import forge
from actors import Worker
from forge import _amx
from forge.generator.vllm.environment import engine_environment

NAMES = (*_amx.LIMITS, _amx.VARIABLE)
TRAPS = ("/bin/sh", "-c", "kill -ILL $$")
CHILD = f"import forge, json, os; print(json.dumps([os.environ.get(name) for name in {NAMES}]))"


def child() -> list[str | None]:
    printed = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout
    found: list[str | None] = json.loads(printed)
    return found


async def of_actors() -> list[list[str | None]]:
    async with asyncio.timeout(100), forge.run():
        worker = await Worker.options(procs=2).as_actor()
        every = [facts for _, facts in (await worker.describe.call()).items()]
        with engine_environment("cpu"):
            engine = await asyncio.to_thread(child)
        return [*([facts[name] for name in NAMES] for facts in every), engine]


def main() -> None:
    del os.environ[_amx.VARIABLE]  # what is so on this machine
    _amx.apply(os.environ, TRAPS)
    plain = child()
    *actors, engine = asyncio.run(of_actors())
    print(json.dumps({"plain": plain, "actors": actors, "engine": engine}))


if __name__ == "__main__":
    main()
