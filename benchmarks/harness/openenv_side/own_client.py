"""The peer: OpenEnv's own client, in its own venv: `own_client.py URL NUM_SESSIONS NUM_TURNS TEXT typed|generic`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from openenv.core import GenericEnvClient


async def main() -> None:
    url, num_sessions, num_turns, text, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    make: Any = GenericEnvClient
    action: Any = {"message": text}
    if kind == "typed":
        from echo_env.client import EchoEnv
        from echo_env.models import EchoAction

        make, action = EchoEnv, EchoAction(message=text)
    clients = [make(base_url=url, connect_timeout_s=120.0, message_timeout_s=120.0) for _ in range(num_sessions)]
    for client in clients:
        await client.connect()
    await asyncio.gather(*(client.reset(seed=1) for client in clients))

    async def turns(client: Any) -> None:
        for _ in range(num_turns):
            await client.step(action)

    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*map(turns, clients))
    found = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    await asyncio.gather(*(client.close() for client in clients))
    print(json.dumps(found))


asyncio.run(main())
