"""A controller program that the tests run as a process of its own, to end it in every way there is.

It prints one JSON line with the pids of everything it started, then waits for a line and does what its argument says.
The last line that it prints are the threads which Python leaves running when it ends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import sys
import threading

# Before Monarch is imported, so that it runs after Monarch's own.
atexit.register(lambda: print(json.dumps([thread.name for thread in threading.enumerate()]), flush=True))

import forge  # noqa: E402
from actors import Worker  # noqa: E402


async def main(how: str) -> None:
    async with contextlib.nullcontext() if how == "forget" else forge.run():
        service = await Worker.options(num_replicas=2).as_service()
        actor = await Worker.options(procs=2).as_actor()
        pids = [pid for replica in (await service.get_metrics()).replicas for pid in replica.pids] + list(actor.pids)
        print(json.dumps(pids), flush=True)
        sys.stdin.readline()  # until then, all of them are there
        if how == "exception":
            raise ValueError("the user's own mistake")
        if how in ("return", "forget"):
            return
        await service.hold.route("never")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
