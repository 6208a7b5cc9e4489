"""A small end-to-end check of the store, for `forge doctor`."""

from __future__ import annotations

import time

import torch

from forge.runtime.actor import MeshActor
from forge.runtime.endpoints import endpoint
from forge.runtime.lifetime import run
from forge.store.weights import Weights

_NAME = "forge-doctor"
_SHAPE = (1024, 1024)


class _Reader(MeshActor):
    @endpoint
    async def fetch(self) -> tuple[str, float]:
        into = {"weight": torch.zeros(_SHAPE)}
        fetched = await Weights(_NAME).fetch(into, verify="full")
        return fetched.digest, fetched.seconds


async def send_weights() -> str:
    """Publish weights here, fetch them in another process, and compare."""
    async with run():
        weights = Weights(_NAME, rank=0, world_size=1)
        published = await weights.publish({"weight": torch.randn(_SHAPE)}, version=0)
        reader = await _Reader.as_actor()
        began = time.perf_counter()
        digest, _ = await reader.fetch.call_one()
        took_s = time.perf_counter() - began
    if digest != published.digest:
        raise RuntimeError("the weights that arrived are not those that were sent")
    return f"4 MiB of weights reached another process in {took_s * 1e3:.0f} ms, verified"
