"""The store on a GPU: device memory between two processes, without a trip through the host."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import forge.store as ts
from forge.runtime.control import control
from forge.runtime.rendezvous import close_server
from forge.store import device_kernel, kernel
from forge.store.copy_table import CopyTable, row_major
from forge.store.digest import digest_tensor
from store_peers import Peer

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here"),
]

SHAPES = {
    "embed": (1000, 256),
    "weight": (513, 1024),
    "norm": (1024,),
    "odd": (7, 5, 3),
    "scalar": (),
    "empty": (0, 4),
}


def make(version: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def publish(state: dict[str, Any], version: int, options: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> str:
    weights = state.setdefault("weights", ts.Weights("policy", **options))
    on_gpu = {name: tensor.cuda() for name, tensor in make(version, dtype).items()}
    return weights.publish(on_gpu, version=version).result(60).digest


def fetch(state: dict[str, Any], device: str, verify: str, dtype: torch.dtype = torch.bfloat16) -> tuple[int, str, str]:
    into = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in SHAPES.items()}
    fetched = ts.Weights("policy").fetch_blocking(into, verify=verify)
    for name, expected in make(fetched.version).items():
        assert torch.equal(into[name].cpu(), expected.to(dtype)), name
    held = ts.Weights("policy").fetch_blocking()
    for name, expected in make(fetched.version).items():
        assert torch.equal(held.tensors[name].cpu(), expected), name
    return fetched.version, fetched.digest, str(held.tensors["weight"].device)


def fetch_columns(state: dict[str, Any], verify: str) -> None:
    whole = make(ts.Weights("policy").fetch_blocking().version)
    part = torch.zeros(513, 256, dtype=torch.bfloat16, device="cuda")
    rows = torch.zeros(100, 256, dtype=torch.bfloat16, device="cuda")
    places = {"weight": ts.At(part, ts.Chunk(1, 2, 4)), "embed": ts.At(rows, (300, 0))}
    ts.Weights("policy").fetch_blocking(places, strict=False, verify=verify)
    assert torch.equal(part.cpu(), whole["weight"][:, 512:768])
    assert torch.equal(rows.cpu(), whole["embed"][300:400])


def flip(state: dict[str, Any], at: int) -> None:
    from forge.store.client import client

    (segment,) = [s for s in client().device_segments.values() if s.name == client_newest(state)]
    segment.memory[at] ^= 1


def client_newest(state: dict[str, Any]) -> str:
    from forge.store.client import client

    return next(reversed(client().device_segments))


def fails(state: dict[str, Any], verify: str) -> str:
    into = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in SHAPES.items()}
    try:
        ts.Weights("policy").fetch_blocking(into, verify=verify)
    except ts.StoreError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def hold(state: dict[str, Any]) -> None:
    state["held"] = ts.Weights("policy").fetch_blocking()


def check_held(state: dict[str, Any]) -> int:
    held = state["held"]
    for name, expected in make(held.version).items():
        assert torch.equal(held.tensors[name].cpu(), expected), name
    return held.version


def close_client(state: dict[str, Any]) -> None:
    """What happens in a process when its run ends."""
    from forge.store.client import client

    client().close()


def free_memory(state: dict[str, Any]) -> int:
    return torch.cuda.mem_get_info()[0]


def publish_large(state: dict[str, Any]) -> None:
    weights = state["large"] = ts.Weights("large", on="cuda")
    weights.publish({"w": torch.ones(1 << 28, device="cuda")}, version=0).result(60)


def retire_large(state: dict[str, Any]) -> None:
    asyncio.run(state["large"].retire(keep=0))
    asyncio.run(state["large"].versions())  # what was told before has arrived


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    started: list[Peer] = []
    yield started
    for peer in started:
        peer.stop()
    control().start(close_server()).result(20)


@pytest.mark.parametrize("on", ["cuda", "auto", "host"])
def test_two_processes_on_one_gpu(peers: list[Peer], on: str) -> None:
    publisher, reader, blind = Peer(), Peer(), Peer(CUDA_VISIBLE_DEVICES="")
    peers.extend([publisher, reader, blind])
    for version in range(4):
        digest = publisher.run(publish, version, {"on": on})
        for verify in ("off", "cheap", "full"):
            number, found, where = reader.run(fetch, "cuda", verify)
            assert (number, found) == (version, digest)
            assert where == ("cpu" if on == "host" else "cuda:0"), "views are where the data is"
            reader.run(fetch_columns, verify)
        assert blind.run(fetch, "cpu", "full")[:2] == (version, digest), "a process without a GPU can read it too"
    on_host = asyncio.run(_publish_on_host(version))
    assert on_host == digest, "the digest depends on the device"


async def _publish_on_host(version: int) -> str:
    return (await ts.Weights("on-host", rank=0, world_size=1).publish(make(version), version=version)).digest


def test_conversion_on_publish(peers: list[Peer]) -> None:
    publisher, reader = Peer(), Peer()
    peers.extend([publisher, reader])
    publisher.run(publish, 1, {"on": "cuda", "dtype": torch.bfloat16}, torch.float32)
    assert reader.run(fetch, "cuda", "full")[0] == 1


def test_a_flipped_bit_is_seen(peers: list[Peer]) -> None:
    publisher, reader = Peer(), Peer()
    peers.extend([publisher, reader])
    publisher.run(publish, 1, {"on": "cuda"})
    publisher.run(flip, 4096 + 77)
    for verify in ("cheap", "full"):
        told = reader.run(fails, verify)
        assert told.startswith("WeightMismatch")
        assert "embed" in told


def test_views_of_device_memory_keep_their_version(peers: list[Peer]) -> None:
    publisher, reader = Peer(), Peer()
    peers.extend([publisher, reader])
    publisher.run(publish, 0, {"on": "cuda"})
    reader.run(hold)
    for version in range(1, 5):
        publisher.run(publish, version, {"on": "cuda"})
    assert reader.run(check_held) == 0
    reader.run(close_client)
    assert reader.run(check_held) == 0, "views outlive the run"


def test_memory_of_a_retired_version_is_free_again(peers: list[Peer]) -> None:
    publisher = Peer()
    peers.append(publisher)
    publisher.run(publish_large)
    held = publisher.run(free_memory)
    publisher.run(retire_large)
    assert publisher.run(free_memory) - held >= 1 << 30


def test_a_version_on_a_gpu_ends_with_its_publisher(peers: list[Peer]) -> None:
    publisher, reader, next_one = Peer(), Peer(), Peer()
    peers.extend([publisher, reader, next_one])
    publisher.run(publish, 1, {"on": "cuda"})
    reader.run(fetch, "cuda", "cheap")
    publisher.kill()
    assert "lost" in reader.run(fails, "cheap")
    next_one.run(publish, 2, {"on": "cuda"})
    assert reader.run(fetch, "cuda", "full")[0] == 2


def test_the_kernel_agrees_with_the_host() -> None:
    shapes = [(300, 70), (64, 64, 6), (5000,), (1, 4), (2, 1030)]
    sources = [torch.randn(shape) for shape in shapes]
    rects, host = CopyTable(), CopyTable()
    for slot, tensor in enumerate(sources):
        strides = row_major(tuple(tensor.shape), 4)
        for table in (rects, host):
            table.add(
                tensor.shape, itemsize=4, src=(slot, 0, strides), dst=(slot, 0, strides), image=(slot, 8, strides)
            )
    on_gpu = [tensor.cuda() for tensor in sources]
    targets = [torch.zeros_like(tensor) for tensor in on_gpu]
    table = device_kernel.build(rects, torch.device("cuda", 0))
    found = device_kernel.run(table, [t.data_ptr() for t in on_gpu], [t.data_ptr() for t in targets])
    expected = kernel.digest_only(host, [t.data_ptr() for t in sources])
    assert found == expected
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target.cpu())
        assert digest_tensor(source) == digest_tensor(target)
