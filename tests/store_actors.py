"""Actors that publish and read weights, for the tests of the store."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import forge.store as ts
from forge.runtime.endpoints import endpoint
from forge.service import ForgeActor


def placement(word: str) -> Placement:
    """`r` is Replicate, `s0` is Shard(0)."""
    return Replicate() if word == "r" else Shard(int(word[1:]))


def value(name: str, shape: tuple[int, ...], version: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a tensor of a version is: the same in every process."""
    generator = torch.Generator().manual_seed(hash_of(name) + 7919 * version)
    return torch.randn(shape, generator=generator).to(dtype)


def hash_of(name: str) -> int:
    return sum((position + 1) * ord(letter) for position, letter in enumerate(name))


Shapes = dict[str, tuple[int, ...]]


class Rank(ForgeActor):
    """One rank of a trainer or of a generator, with a device mesh."""

    def __init__(self, mesh_shape: tuple[int, ...] = ()) -> None:
        self.mesh_shape = mesh_shape
        self.fetched: dict[str, ts.Fetched] = {}
        self.memory: dict[str, Any] = {}

    @endpoint
    def setup(self) -> None:
        torch.set_num_threads(1)
        if self.mesh_shape:
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            names = tuple(f"d{dim}" for dim in range(len(self.mesh_shape)))
            self.mesh = init_device_mesh("cpu", self.mesh_shape, mesh_dim_names=names)

    def sharded(self, whole: torch.Tensor, words: str) -> torch.Tensor:
        return distribute_tensor(whole, self.mesh, [placement(word) for word in words.split()]) if words else whole

    @endpoint
    async def publish(
        self, key: str, version: int, shapes: Shapes, words: str = "", options: Any = None
    ) -> ts.Published:
        weights = ts.Weights(key, **(options or {}))
        self.memory = {name: self.sharded(value(name, shape, version), words) for name, shape in shapes.items()}
        return await weights.publish(self.memory, version=version)

    @endpoint
    async def die_while_publishing(self, key: str, version: int, shapes: Shapes, words: str = "") -> None:
        """Join a version, write the part, and be killed before the commit."""
        from forge.store.client import client
        from forge.store.writing import Contribution, Writer, ranks_of

        tensors = {name: self.sharded(value(name, shape, version), words) for name, shape in shapes.items()}
        writer = Writer(client())
        rank, world_size = ranks_of(None, None)
        contribution = Contribution(key, "weights", version, rank, world_size, keep=2)
        writer.stage(contribution, tensors, dtype=None)
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    async def fetch(self, key: str, shapes: Shapes, words: str = "", options: Any = None) -> tuple[int, str]:
        """Fetch into this rank's shards and compare them with what they should be; the version and its digest."""
        into = {name: self.sharded(torch.zeros(shape), words) for name, shape in shapes.items()}
        fetched = await ts.Weights(key).fetch(into, **(options or {}))
        for name, shape in shapes.items():
            expected = self.sharded(value(name, shape, fetched.version), words)
            found = into[name]
            if isinstance(found, DTensor):
                expected, found = expected.to_local(), found.to_local()
            assert torch.equal(expected, found), f"{name} of version {fetched.version} differs"
        return fetched.version, fetched.digest

    @endpoint
    async def hold(self, key: str, name: str) -> int:
        """Fetch without memory and keep the views."""
        self.fetched[name] = await ts.Weights(key).fetch()
        return self.fetched[name].version

    @endpoint
    async def check_held(self, name: str, shapes: Shapes) -> None:
        fetched = self.fetched[name]
        for entry, shape in shapes.items():
            assert torch.equal(fetched.tensors[entry], value(entry, shape, fetched.version)), entry

    @endpoint
    async def let_go(self, name: str) -> None:
        del self.fetched[name]

    @endpoint
    async def run(self, call: Any, *args: Any) -> Any:
        """Run a coroutine function here."""
        return await call(self, *args)

    @endpoint
    def pid(self) -> int:
        return os.getpid()
