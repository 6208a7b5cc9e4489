"""Actors that publish and read weights, for the tests of the store."""

from __future__ import annotations

import logging
import os
import random
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import forge.store as ts
from forge.runtime.endpoints import endpoint
from forge.service import ForgeActor
from forge.store.volumes import Volume


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
        from forge.store.records import Begin
        from forge.store.writer import Writer, ranks_of

        tensors = {name: self.sharded(value(name, shape, version), words) for name, shape in shapes.items()}
        writer = Writer(client())
        rank, world_size = ranks_of(None, None)
        request = Begin(key, "weights", version, rank, world_size, keep=2)
        writer.stage(request, tensors, dtype=None)
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


# What tests run inside a rank: `await rank.run.call_one(function, ...)`.

EVERY_DTYPE = {
    "float32": (65, 33),
    "float64": (17, 9),
    "float16": (31, 8),
    "bfloat16": (129, 7),
    "float8_e4m3fn": (33, 5),
    "int64": (5, 3),
    "int32": (7,),
    "int8": (1001,),
    "uint8": (3, 3, 3),
    "bool": (11, 13),
    "complex64": (6, 4),
}
"""A tensor of each dtype, by the dtype's name."""


def of_dtype(name: str, version: int) -> torch.Tensor:
    """The tensor of that dtype in a version: any bits that its elements can have, but for bool."""
    dtype, shape = getattr(torch, name), EVERY_DTYPE[name]
    drawn = torch.Generator().manual_seed(hash_of(name) + 7919 * version)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=drawn).bool()
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=drawn, dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def every_dtype(version: int) -> dict[str, torch.Tensor]:
    odd = {"scalar": torch.tensor(float(version)), "empty": torch.empty(0, 4), "turned": value("turned", (9, 40), 1).T}
    return {name: of_dtype(name, version) for name in EVERY_DTYPE} | odd


def bits_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, so that NaNs compare too."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


async def become_rank(_: Rank, rank: int, world_size: int) -> None:
    """Be this rank of those who publish, although an actor of its own."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)


async def publish_every_dtype(_: Rank, key: str, version: int, padding: int) -> ts.Published:
    tensors = every_dtype(version) | {"padding": torch.zeros(padding)}
    return await ts.Weights(key, rank=0, world_size=1).publish(tensors, version=version)


async def check_every_dtype(_: Rank, key: str, verify: Any) -> None:
    """Read every dtype as views and into memory."""
    fetched = await ts.Weights(key).fetch(verify=verify)
    expected = every_dtype(fetched.version)
    into = {name: torch.empty_like(tensor) for name, tensor in fetched.tensors.items()}
    await ts.Weights(key).fetch(into, verify=verify)
    for name, tensor in expected.items():
        for found in (fetched.tensors[name], into[name]):
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert bits_of(found) == bits_of(tensor), name


async def check_regions(_: Rank, key: str, shapes: Shapes, seed: int, verify: Any) -> int:
    """Read three rectangles of each tensor, into memory with gaps between its rows; how many bytes that copied."""
    draw = random.Random(seed)
    places: dict[str, list[ts.At]] = {}
    for name, shape in shapes.items():
        for _number in range(3):
            offset = tuple(draw.randrange(extent) for extent in shape)
            extent = tuple(draw.randint(1, size - at) for size, at in zip(shape, offset, strict=True))
            wide = torch.zeros(*extent[:-1], 2 * extent[-1]) if extent else torch.zeros(())
            places.setdefault(name, []).append(ts.At(wide[..., : extent[-1]] if extent else wide, offset))
    fetched = await ts.Weights(key).fetch(places, verify=verify)
    for name, ats in places.items():
        whole = value(name, shapes[name], fetched.version)
        for at in ats:
            cut = tuple(slice(start, start + size) for start, size in zip(at.where, at.tensor.shape, strict=True))  # type: ignore[arg-type]
            assert torch.equal(at.tensor, whole[cut]), f"{name} at {at.where}"
    return fetched.num_bytes


async def check_as(_: Rank, key: str, shapes: Shapes, stored: str, wanted: str, verify: Any) -> str:
    """Read what was published as one dtype, into memory of another; the digest of the version."""
    into = {name: torch.zeros(shape, dtype=getattr(torch, wanted)) for name, shape in shapes.items()}
    fetched = await ts.Weights(key).fetch(into, verify=verify, cast=stored != wanted)
    for name, shape in shapes.items():
        expected = value(name, shape, fetched.version).to(getattr(torch, stored)).to(getattr(torch, wanted))
        assert torch.equal(into[name], expected), name
    return fetched.digest


async def num_segments(_: Rank) -> int:
    from forge.store.client import client

    await client().line.call_async("hello")  # what the registry has told this process before is done
    return len(client().segments)


async def num_opened(_: Rank) -> int:
    """How many segments of others are mapped here, to be read."""
    from forge.store.client import client

    return len(client()._opened)


async def publish_and_listen(rank: Rank, key: str, shapes: Shapes) -> tuple[list[str], list[bool]]:
    """Publish version 0: what the store logged meanwhile, and which segments are on disk."""
    from forge.store.client import client

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("forge.store").addHandler(handler)
    try:
        tensors = {name: value(name, shape, 0) for name, shape in shapes.items()}
        await ts.Weights(key, rank=0, world_size=1).publish(tensors, version=0)
    finally:
        logging.getLogger("forge.store").removeHandler(handler)
    return said, [segment.is_on_disk for segment in client().segments._segments.values()]


# Continuous publishing: every element of every tensor of a version is its number.


async def republish(_: Rank, key: str, num_tensors: int, numel: int) -> int:
    """Publish version after version until there is a value under the key `stop`; the last version."""
    weights = ts.Weights(key, rank=0, world_size=1)
    tensors = {f"t{number}": torch.zeros(numel + number) for number in range(num_tensors)}
    version = 0
    while not await ts.exists("stop"):
        for tensor in tensors.values():
            tensor.fill_(version)
        await weights.publish(tensors, version=version)
        version += 1
    return version - 1


async def count_torn(_: Rank, key: str, num_tensors: int, numel: int, num_reads: int) -> dict[str, int]:
    """Read that many times and more than ten versions, in four ways in turn; how many reads were torn, and how many
    versions were seen."""
    weights = ts.Weights(key)
    into = {f"t{number}": torch.zeros(numel + number) for number in range(num_tensors)}
    seen: set[int] = set()
    torn = 0
    await weights.wait()
    number = -1
    while (number := number + 1) < num_reads or len(seen) <= 10:
        verify: Any = "off" if number % 4 < 2 else "cheap"
        if number % 2:
            fetched = await weights.fetch(verify=verify)
            tensors = fetched.tensors
        else:
            fetched = await weights.fetch(into, verify=verify)
            tensors = into
        seen.add(fetched.version)
        torn += not all(bool((tensor == fetched.version).all()) for tensor in tensors.values())
    return {"reads": number, "torn": torn, "versions": len(seen)}


# Ends in the middle of things.


class DyingShelf:
    """The segments of a process that is killed when it is asked for bytes once too often."""

    def __init__(self, shelf: Any, num_requests: int) -> None:
        self.segments, self.left = shelf, num_requests

    def open(self, name: str) -> tuple[int, int]:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        found: tuple[int, int] = self.segments.open(name)
        return found

    def release(self, name: str) -> None:
        self.segments.release(name)

    def wait_for(self, name: str, ranges: Any) -> None:
        self.segments.wait_for(name, ranges)

    def mapped(self, name: str) -> Any:
        return self.segments.mapped(name)

    def create(self, size: int) -> Any:
        return self.segments.create(size)


def die_after(num_requests: int) -> None:
    """Be killed with kill -9 when others have asked this process for bytes that often, and ask again."""
    from forge.store.client import client

    data_plane = client().data_plane
    data_plane.serve()._segments = DyingShelf(data_plane.segments, num_requests)


async def die_while_serving(_: Rank, num_requests: int) -> None:
    die_after(num_requests)


async def host_and_pid(_: Rank) -> tuple[str, int]:
    from forge.runtime.rendezvous import host_id

    return host_id(), os.getpid()


# Spoiling what was published, where it lies, and reading it in every manner.


async def spoil(rank: Rank, key: str, kind: str, seed: int) -> list[str]:
    """Spoil the newest version in the segment of one of the ranks, chosen by the seed; the tensors that were hit."""
    from forge.store.client import client
    from forge.store.fetch_plan import read_catalog
    from forge.store.records import Acquire
    from forge.store.tensors import piece_view
    from forge.store.writer import ranks_of

    me, world_size = ranks_of(None, None)
    draw = random.Random(f"{kind} {seed}")
    if draw.randrange(world_size) != me:
        return []
    here = client()
    lease = await here.acquire(Acquire(key, "weights", None))
    known = read_catalog(lease)
    held = [(segment, segment.flat()) for segment in here.segments._segments.values()]
    mine = next(
        memory for segment, memory in held for part in lease.version.parts if segment.stamp == part.segment.stamp
    )
    here.release(lease.id)
    pieces = {}
    for name, entry in known.entries.items():
        for stored in entry.stored:
            if stored.part == me:
                pieces[name] = (stored.region, piece_view(mine, stored.start, stored.region.shape, entry.dtype))
    rank.memory = {"mine": mine, "saved": mine.clone()}
    if kind == "swapped":
        (_, one), (_, other) = pieces["a"], pieces["b"]
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
        return ["a", "b"]
    name = draw.choice(sorted(pieces))
    box, piece = pieces[name]
    if kind == "bit":
        at = draw.randrange(piece.numel() * piece.element_size())
        piece.flatten().view(torch.uint8)[at] ^= 1 << draw.randrange(8)
    elif kind == "stale":
        cut = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
        piece.copy_(value(name, known.entries[name].shape, lease.version.number - 1)[cut])
    elif kind == "dropped":
        piece.zero_()
    else:
        assert kind == "short"
        piece[-draw.randint(1, piece.shape[0] // 2) :].zero_()
    return [name]


async def restore(rank: Rank) -> None:
    """Make good what was spoilt."""
    if "saved" in rank.memory:
        rank.memory["mine"].copy_(rank.memory["saved"])
    rank.memory = {}


def places_for(reader: str, shapes: Shapes, seed: int) -> dict[str, Any] | None:
    """Memory for a kind of reader. Those that want a part want some of both halves of the rows, not all of them."""
    if reader == "views":
        return None
    draw = random.Random(f"{reader} {seed}")
    places: dict[str, Any] = {}
    for name, shape in shapes.items():
        offset, extent = [0] * len(shape), list(shape)
        if reader in ("rows", "slice"):
            offset[0] = draw.randint(1, shape[0] // 2 - 1)
            extent[0] = draw.randint(shape[0] // 2 + 1, shape[0] - 1) - offset[0]
        if reader in ("columns", "slice"):
            offset[1] = draw.randint(0, shape[1] - 2)
            extent[1] = draw.randint(1, shape[1] - offset[1] - (offset[1] == 0))
        whole = torch.zeros(extent)
        places[name] = whole if reader == "whole" else ts.At(whole, tuple(offset))
    return places


async def attempt(_: Rank, key: str, shapes: Shapes, seed: int) -> dict[tuple[str, str], tuple[str, ...] | None]:
    """For every kind of reader and both ways to verify: the tensors that were said to be wrong; None if none was."""
    found: dict[tuple[str, str], tuple[str, ...] | None] = {}
    weights = ts.Weights(key)
    verifying: tuple[Any, ...] = ("full", "cheap")
    for reader in ("whole", "rows", "columns", "slice", "views"):
        for verify in verifying:
            try:
                await weights.fetch(places_for(reader, shapes, seed), verify=verify)
                found[reader, verify] = None
            except ts.WeightMismatch as error:
                found[reader, verify] = error.tensors
    return found


class DyingVolume(Volume):
    """A storage volume that can be told to be killed in the middle of an answer."""

    @endpoint
    def die_while_serving(self, num_requests: int) -> None:
        die_after(num_requests)
