"""Ranks that wait for others can be cancelled, hold up nobody else, and do not keep a process from ending."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAD = """
import asyncio
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import forge.store as ts

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
shard = DTensor.from_local(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])  # rank 1 never comes
"""

CANCELLED = """
async def main():
    for _ in range(3):
        try:
            await asyncio.wait_for(ts.put("value", shard), 0.2)
        except TimeoutError:
            print("gave up")
    await ts.put("value", torch.ones(4))
    assert (await ts.get("value")).tolist() == [1.0] * 4

asyncio.run(main())
"""

MANY = """
async def main():
    await ts.put("value", torch.ones(4))
    waiting = [asyncio.create_task(ts.put(f"value/{number}", shard)) for number in range(100)]
    await asyncio.sleep(0.5)
    assert (await asyncio.wait_for(ts.get("value"), 600)).tolist() == [1.0] * 4

asyncio.run(main())
"""

ENDING = """
async def main():
    publication = ts.Weights("policy").publish({"w": torch.ones(1 << 16)}, version=1)
    try:
        await asyncio.wait_for(publication, 0.2)
    except TimeoutError:
        print("gave up")

asyncio.run(main())
"""


@pytest.mark.parametrize("body", [CANCELLED, MANY, ENDING], ids=["cancelled", "many", "ending"])
def test_waiting_for_a_rank_that_never_comes(body: str) -> None:
    ended = subprocess.run([sys.executable, "-c", HEAD + body], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
