"""A process that has used the store forks: the child uses it too."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, os, signal, sys
import torch
import forge.store as ts

torch.set_num_threads(1)  # torch's own threads do not live through a fork
weights = ts.Weights("policy", rank=0, world_size=1)

async def use(version):
    await weights.publish({"w": torch.full((1 << 18,), float(version))}, version=version)
    into = {"w": torch.zeros(1 << 18)}
    await weights.fetch(into)
    await ts.put("step", {"version": version})
    return into["w"].unique().tolist(), (await ts.get("step"))["version"], (await weights.fetch()).tensors

*first, views = asyncio.run(use(1))
child = os.fork()
if child == 0:
    signal.alarm(500)
    *found, _ = asyncio.run(use(2))
    del views
    os._exit(0 if found == [[2.0], 2] else 1)
assert os.waitpid(child, 0)[1] == 0, "the child"
assert first == [[1.0], 1] and views["w"].unique().tolist() == [1.0]
*found, _ = asyncio.run(use(3))
assert found == [[3.0], 3]
"""


def test_a_forked_child_publishes_fetches_and_puts(leaves_nothing: None) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
