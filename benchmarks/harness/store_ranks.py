"""A process that publishes or fetches weights, and copies memory for comparison, when the benchmark says so."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import forge.store as ts
from forge import ForgeActor, endpoint
from harness.memory import Holdings, holdings
from harness.state_dicts import Block, Shapes
from harness.throughput import Span

_SOCKET_CHUNK = 8 << 20


class _Clock:
    """Begins together with the others, and says when it began and ended."""

    def __init__(self, at: float) -> None:
        self._at = at

    async def start(self) -> None:
        await asyncio.sleep(max(0.0, self._at - time.perf_counter()))
        self._cpu, self._began = time.process_time(), time.perf_counter()

    def stop(self, num_bytes: int, extra: float = 0.0) -> Span:
        ended = time.perf_counter()
        return Span(self._began, ended, time.process_time() - self._cpu, num_bytes, extra)


class StoreRank(ForgeActor):
    """Every measuring endpoint is called on all ranks; those from `active` on answer None and do nothing."""

    def __init__(self) -> None:
        self.blocks: dict[str, Block] = {}
        self.places: dict[str, Mapping[str, Tensor]] = {}
        self.weights: dict[str, ts.Weights] = {}
        self.background: asyncio.Task[int] | None = None
        self.line: socket.socket | None = None

    @endpoint
    def setup(self) -> None:
        torch.set_num_threads(1)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def holdings(self) -> Holdings:
        return holdings(os.getpid())

    # memory

    @endpoint
    def hold(self, name: str, shapes: Shapes, dtype: torch.dtype, active: int) -> int:
        """Have a state dict in warm memory, unless it is there already; its bytes."""
        if self.rank >= active:
            return 0
        if name not in self.blocks:
            self.blocks[name] = Block(shapes, dtype, fill=1.0 + self.rank)
            self.places[name] = self.blocks[name].tensors
        return self.blocks[name].num_bytes

    @endpoint
    def hold_shards(self, name: str, shapes: Shapes, dtype: torch.dtype, dim: int, active: int) -> int:
        """Have this rank's shards of a state dict, as DTensors over the first `active` ranks. Tensors that lack the
        dimension are whole on every rank."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        mesh = DeviceMesh("cpu", list(range(active)))
        if self.rank >= active:
            return 0
        local = {key: _shard_shape(shape, dim, self.rank, active) for key, shape in shapes.items()}
        block = self.blocks[name] = Block(local, dtype, fill=1.0 + self.rank)
        self.places[name] = {
            key: DTensor.from_local(
                block.tensors[key],
                mesh,
                [Shard(dim) if len(shape) > dim else Replicate()],
                run_check=False,
                shape=torch.Size(shape),
                stride=torch.empty(shape, device="meta").stride(),
            )
            for key, shape in shapes.items()
        }
        return block.num_bytes

    @endpoint
    def forget(self, name: str) -> None:
        self.blocks.pop(name, None)
        self.places.pop(name, None)

    @endpoint
    async def copy(self, name: str, active: int, at: float) -> Span | None:
        """The peer: as many bytes by plain copies."""
        if self.rank >= active:
            return None
        block, clock = self.blocks[name], _Clock(at)
        await clock.start()
        block.copy_within()
        return clock.stop(block.num_bytes)

    @endpoint
    async def copy_libc(self, name: str, active: int, at: float) -> Span | None:
        """The same bytes by the C library's memcpy, which writes past the cache."""
        if self.rank >= active:
            return None
        block, clock = self.blocks[name], _Clock(at)
        half = block.flat.numel() * block.flat.element_size() // 2
        first = block.flat.data_ptr()
        await clock.start()
        ctypes.memmove(first, first + half, half)
        ctypes.memmove(first + half, first, half)
        return clock.stop(block.num_bytes)

    # weights

    def _weights(self, key: str, options: dict[str, Any] | None = None) -> ts.Weights:
        if key not in self.weights:
            self.weights[key] = ts.Weights(key, **(options or {}))
        return self.weights[key]

    @endpoint
    async def publish(
        self, name: str, active: int, at: float, key: str, version: int, options: dict[str, Any] | None = None
    ) -> Span | None:
        """Publish a version; `extra` is how long the snapshot took."""
        if self.rank >= active:
            return None
        ranks = {"rank": self.rank, "world_size": active}
        weights, clock = self._weights(key, {**ranks, **(options or {})}), _Clock(at)
        await clock.start()
        published = await weights.publish(self.places[name], version=version)
        return clock.stop(self.blocks[name].num_bytes, published.snapshot_s)

    @endpoint
    async def fetch(self, name: str, active: int, at: float, key: str, verify: str = "cheap") -> Span | None:
        """Fetch the newest version in place."""
        if self.rank >= active:
            return None
        weights, clock = self._weights(key), _Clock(at)
        await clock.start()
        await weights.fetch(self.places[name], verify=verify)  # type: ignore[arg-type]
        return clock.stop(self.blocks[name].num_bytes)

    @endpoint
    async def view(self, name: str, active: int, at: float, key: str, verify: str = "cheap") -> Span | None:
        """Fetch the newest version without a copy; `extra` is one element of it."""
        if self.rank >= active:
            return None
        weights, clock = self._weights(key), _Clock(at)
        await clock.start()
        fetched = await weights.fetch(verify=verify)  # type: ignore[arg-type]
        span = clock.stop(self.blocks[name].num_bytes, float(next(iter(fetched.tensors.values())).view(-1)[0]))
        assert fetched.num_bytes == 0, "something was copied"
        return span

    @endpoint
    async def retire(self, key: str, keep: int, active: int) -> None:
        if self.rank < active:
            await self._weights(key).retire(keep=keep)

    # torn reads

    @endpoint
    async def republish(self, name: str, key: str, active: int) -> None:
        """Publish one version after the other until `settle`; every element of version n is n."""
        if self.rank >= active:
            return
        block = self.blocks[name]
        weights = self._weights(key, {"rank": 0, "world_size": 1})

        async def go() -> int:
            version = 0
            while True:
                block.flat.fill_(float(version))
                await weights.publish(block.tensors, version=version)
                version += 1
                if self.is_settling:
                    return version

        self.is_settling = False
        self.background = asyncio.create_task(go())
        await weights.wait()

    @endpoint(concurrent=True)
    async def settle(self, active: int) -> int:
        """How many versions were published."""
        if self.rank >= active:
            return 0
        assert self.background is not None
        self.is_settling = True
        return await self.background

    @endpoint
    async def read_often(self, name: str, active: int, key: str, num_reads: int) -> dict[str, int]:
        """Read again and again, in place and as views in turn; how often elements of two versions were mixed."""
        found = {"reads": 0, "torn": 0, "refused": 0, "versions": 0}
        if self.rank >= active:
            return found
        block, weights, seen = self.blocks[name], self._weights(key), set()
        for number in range(num_reads):
            found["reads"] += 1
            try:
                fetched = await weights.fetch(block.tensors if number % 2 else None, verify="off")
            except ts.WeightMismatch:
                found["refused"] += 1
                continue
            seen.add(fetched.version)
            tensors = fetched.tensors or block.tensors
            found["torn"] += any(not bool((tensor == fetched.version).all()) for tensor in tensors.values())
            del fetched, tensors
        found["versions"] = len(seen)
        return found

    # publishing while training

    @endpoint
    def train(
        self, name: str, key: str, versions: list[int | None], num_products: int, active: int
    ) -> list[tuple[float, float]]:
        """Steps of a loop like a trainer's: computing, then an update of the weights. In those with a version the
        weights are published meanwhile. For each: how long it took, and how long it waited for the snapshot."""
        if self.rank >= active:
            return []
        block = self.blocks[name]
        weights = self._weights(key, {"rank": 0, "world_size": 1})
        left, right = torch.randn(512, 512), torch.randn(512, 512)
        taken = []
        for version in versions:
            began = time.perf_counter()
            publication = None if version is None else weights.publish(block.tensors, version=version)
            for _ in range(num_products):
                torch.mm(left, right)
            waiting = time.perf_counter()
            if publication is not None:
                publication.snapshot_blocking()
            waited_s = time.perf_counter() - waiting
            block.flat.mul_(0.999)
            taken.append((time.perf_counter() - began, waited_s))
            if publication is not None:
                publication.result()
        return taken

    # a raw socket

    @endpoint
    def listen(self) -> int:
        """The port of a loopback listener."""
        self.listener = socket.create_server(("127.0.0.1", 0))
        return int(self.listener.getsockname()[1])

    @endpoint
    def accept(self) -> None:
        self.line, _ = self.listener.accept()
        self.listener.close()

    @endpoint
    def dial(self, port: int) -> None:
        self.line = socket.create_connection(("127.0.0.1", port))

    @endpoint
    def send_raw(self, name: str) -> float:
        """Send a block; when that began."""
        assert self.line is not None
        began = time.perf_counter()
        self.line.sendall(_bytes_of(self.blocks[name]))
        return began

    @endpoint
    def receive_raw(self, name: str) -> Span:
        assert self.line is not None
        view, at = _bytes_of(self.blocks[name]), 0
        cpu, began = time.process_time(), time.perf_counter()
        while at < len(view):
            count = self.line.recv_into(view[at:], min(_SOCKET_CHUNK, len(view) - at))
            if not count:
                raise ConnectionError("the other side of the raw socket has gone")
            at += count
        return Span(began, time.perf_counter(), time.process_time() - cpu, len(view))

    @endpoint
    def hang_up(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None


def _bytes_of(block: Block) -> memoryview:
    return memoryview(block.flat.view(torch.uint8).numpy()).cast("B")


def _shard_shape(shape: tuple[int, ...], dim: int, rank: int, count: int) -> tuple[int, ...]:
    """As `torch.chunk` cuts."""
    if len(shape) <= dim:
        return shape
    step = -(-shape[dim] // count)
    extent = max(0, min(step, shape[dim] - rank * step))
    return (*shape[:dim], extent, *shape[dim + 1 :])
