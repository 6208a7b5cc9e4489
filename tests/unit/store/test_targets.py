"""Which part of a stored tensor goes where: regions, chunks, shards, and memory with a place of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import forge.store as ts
from forge.errors import StoreError
from forge.store.targets import allocate, is_place, resolve, stored_name
from store_scenarios import alone

FIXED = settings(derandomize=True, deadline=None, database=None, max_examples=200)
VERIFY = ("cheap", "full", "off")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A device mesh of one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1))
    dist.destroy_process_group()


# alone


@FIXED
@given(st.lists(st.integers(0, 7), min_size=1, max_size=3), st.data())
def test_chunks_are_those_of_torch(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    count = data.draw(st.integers(1, 9))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    expected = torch.chunk(whole, count, dim)
    for index in range(count):
        region = ts.Chunk(dim, index, count).resolve(tuple(shape))
        part = whole[tuple(map(slice, region.offset, region.end))]
        other = expected[index] if index < len(expected) else whole.narrow(dim, 0, 0)
        assert torch.equal(part, other)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.ones(1), True),
        (ts.At(torch.ones(1)), True),
        ([ts.At(torch.ones(1))], True),
        ([torch.ones(1)], False),
        ([ts.At(torch.ones(1)), torch.ones(1)], False),
        ([], False),
        (None, False),
    ],
)
def test_a_place_is_memory(value: Any, expected: bool) -> None:
    assert is_place(value) is expected


def test_an_at_says_which_tensor_fills_it() -> None:
    t = torch.ones(1)
    assert [stored_name("x", entry) for entry in (t, ts.At(t), ts.At(t, of="y"))] == ["x", "x", "y"]


def test_targets_have_the_pieces_that_belong_in_them() -> None:
    shapes = {"w": ((6, 4), "float32")}
    memory = torch.zeros(2, 4)
    targets = resolve("w", [ts.At(memory, (4, 0)), ts.At(memory, ts.Chunk(0, 1, 3)), ts.At(torch.zeros(6, 4))], shapes)
    assert [target.pieces[0].region.offset for target in targets] == [(4, 0), (2, 0), (0, 0)]
    assert targets[0].memory.data_ptr() == memory.data_ptr()
    with pytest.raises(StoreError, match="another dtype"):
        resolve("w", torch.zeros(6, 4, dtype=torch.int32), shapes)
    assert resolve("w", torch.zeros(6, 4, dtype=torch.int32), shapes, cast=True)[0].label == "w"
    with pytest.raises(StoreError, match="the shape of the stored tensor") as caught:
        resolve("w", memory, shapes)
    assert "At(tensor, offset)" in str(caught.value.repair)


def test_memory_for_a_part_says_which_part() -> None:
    shapes = {"w": ((6, 4), "float32")}
    # without `where` it would be the first rows on every rank
    with pytest.raises(StoreError, match="the shape of the stored tensor") as caught:
        resolve("qkv", [ts.At(torch.zeros(2, 4), of="w")], shapes)
    assert (caught.value.path, caught.value.value) == ("qkv", [2, 4])
    assert resolve("x", ts.At(torch.zeros(2, 4), (0, 0), of="w"), shapes)[0].pieces[0].region.offset == (0, 0)
    odd: Any
    for odd in (ts.Chunk("0", 0, 2), ts.Region(1, 2), ts.Region((1.0, 0), (2, 4)), (1.0, 0)):  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="part"):
            resolve("w", ts.At(torch.zeros(2, 4), odd), shapes)


def test_new_memory_has_the_size_of_the_part() -> None:
    tensor, target = allocate("w", ts.Region((1, 2), (3, 1)), (6, 4), "bfloat16")
    assert (tensor.shape, tensor.dtype, target.memory is tensor) == ((3, 1), torch.bfloat16, True)
    assert (target.pieces[0].region.offset, target.pieces[0].at) == ((1, 2), (0, 0))
    assert allocate("w", ts.Chunk(0, 3, 4), (3, 4), "int8")[1].pieces == ()


# in a store


def example() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    names = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "gate_up": (10, 6), "odd": (3, 5, 7), "scalar": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


@pytest.mark.parametrize("verify", VERIFY)
def test_parts_of_tensors(verify: Any) -> None:
    async def scenario() -> None:
        stored = example()
        await ts.put("v", stored)
        spec = {"q": ts.Region((2, 1), (3, 4)), "odd": ts.Chunk(-1, 1, 3), "k": ts.Chunk(0, 3, 4)}
        found = await ts.get("v", spec=spec, verify=verify)
        assert torch.equal(found["q"], stored["q"][2:5, 1:5])
        assert torch.equal(found["odd"], stored["odd"][:, :, 3:6])
        assert torch.equal(found["k"], stored["k"][3:4])
        assert torch.equal(found["gate_up"], stored["gate_up"]), "what the specification does not name comes whole"
        await ts.put("one", stored["odd"])
        assert torch.equal(await ts.get("one", spec=ts.Region((1, 0, 2), (2, 5, 1))), stored["odd"][1:3, :, 2:3])
        assert (await ts.get("one", spec=ts.Region((0, 0, 0), (0, 5, 7)))).shape == (0, 5, 7)
        assert (await ts.get("one", spec=ts.Chunk(0, 3, 4))).shape == (0, 5, 7)

    alone(scenario)


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("rank", [0, 1])
def test_separate_tensors_into_a_fused_one(verify: Any, rank: int) -> None:
    """A generator's shard of a fused qkv weight, from the q, k and v that a trainer publishes."""

    async def scenario() -> None:
        stored = example()
        policy = ts.Weights("policy", rank=0, world_size=1)
        await policy.publish(stored, version=1)
        qkv = torch.zeros(8, 6)
        into = {
            "qkv": [
                ts.At(qkv[0:4], ts.Chunk(0, rank, 2), of="q"),
                ts.At(qkv[4:6], ts.Chunk(0, rank, 2), of="k"),
                ts.At(qkv[6:8], (2 * rank, 0), of="v"),
            ]
        }
        fetched = await policy.fetch(into, strict=False, verify=verify)
        expected = torch.cat([stored[name].chunk(2)[rank] for name in "qkv"])
        assert torch.equal(qkv, expected)
        assert fetched.num_bytes == qkv.nbytes, "more was moved than is needed"

    alone(scenario)


@pytest.mark.parametrize("verify", VERIFY)
def test_a_fused_tensor_into_separate_ones(verify: Any) -> None:
    async def scenario() -> None:
        stored = example()
        policy = ts.Weights("policy", rank=0, world_size=1)
        await policy.publish(stored, version=1)
        gate, up, columns = torch.zeros(5, 6), torch.zeros(6, 5).T, torch.zeros(10, 2)
        into = {
            "gate": ts.At(gate, (0, 0), of="gate_up"),
            "up": ts.At(up, ts.Region((5, 0), (5, 6)), of="gate_up"),
            "columns": ts.At(columns, (0, 4), of="gate_up"),
            "gate_up": torch.zeros(10, 6, dtype=torch.float64),
            "odd": ts.At(torch.zeros(3, 5, 7)),
            "scalar": ts.At(torch.zeros(())),
        }
        await policy.fetch(into, strict=False, verify=verify, cast=True)
        assert torch.equal(torch.cat([gate, up]), stored["gate_up"])
        assert torch.equal(columns, stored["gate_up"][:, 4:])
        assert torch.equal(into["gate_up"], stored["gate_up"].double())
        assert torch.equal(into["odd"].tensor, stored["odd"])
        assert torch.equal(into["scalar"].tensor, stored["scalar"])

    alone(scenario)


def test_the_same_places_are_filled_from_every_version() -> None:
    """Plans are kept: another version, other memory at the same place, and another place must all come out right."""

    async def scenario() -> None:
        policy = ts.Weights("policy", rank=0, world_size=1)
        memory = torch.zeros(4, 6)
        for version in range(4):
            stored = {name: tensor + version for name, tensor in example().items()}
            await policy.publish(stored, version=version)
            for start in (0, 4):
                await policy.fetch({"q": ts.At(memory, (start, 0))}, strict=False)
                assert torch.equal(memory, stored["q"][start : start + 4])
            other = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
            fetched = await policy.fetch(other)
            assert all(torch.equal(other[name], tensor) for name, tensor in stored.items())
            assert fetched.version == version

    alone(scenario)


def test_fetched_tensors_are_copied_into_places() -> None:
    async def scenario() -> None:
        stored = example()
        policy = ts.Weights("policy", rank=0, world_size=1)
        await policy.publish(stored, version=1)
        fetched = await policy.fetch()
        half, whole = torch.zeros(4, 6), torch.zeros(4, 6, dtype=torch.bfloat16)
        fetched.copy_into({"q": ts.At(half, ts.Chunk(0, 1, 2)), "k": whole}, strict=False, cast=True)
        assert torch.equal(half, stored["q"][4:])
        assert torch.equal(whole, stored["k"].bfloat16())
        with pytest.raises(StoreError, match="`into` does not name"):
            fetched.copy_into({"k": torch.zeros(4, 6)})
        with pytest.raises(StoreError, match="another dtype"):
            fetched.copy_into({"k": whole}, strict=False)
        fetched.release()

    alone(scenario)


@pytest.mark.parametrize("verify", ["cheap", "full"])
def test_memory_of_two_names_holds_both_or_raises(verify: Any) -> None:
    async def scenario() -> None:
        policy, one = ts.Weights("tied", rank=0, world_size=1), torch.randn(4, 6)
        await policy.publish({"embed": one, "head": one, "x": torch.ones(2)}, version=1)
        memory, x = torch.zeros(4, 6), torch.zeros(2)
        into = {"embed": memory, "head": memory, "x": x}
        await policy.fetch(into, verify=verify)
        assert torch.equal(memory, one)
        await policy.publish({"embed": one, "head": one + 1, "x": torch.ones(2)}, version=2)
        with pytest.raises(ts.WeightMismatch) as caught:
            await policy.fetch(into, verify=verify)
        assert caught.value.tensors == ("embed", "head")
        for other in (ts.At(memory[1:3], (0, 0), of="head"), ts.At(memory.view(-1)[:2], of="x")):
            with pytest.raises(StoreError, match="share memory"):
                await policy.fetch({"embed": memory, "other": other}, strict=False, verify=verify)
        rows = torch.zeros(4, 12)  # interleaved, but apart
        await policy.fetch({"embed": rows[:, :6], "head": rows[:, 6:], "x": x}, verify=verify)
        assert torch.equal(rows, torch.cat([one, one + 1], 1))

    alone(scenario)


def test_destinations_whose_elements_overlap_are_refused() -> None:
    shapes = {"w": ((4, 4), "float32"), "v": ((3, 2), "float32")}
    with pytest.raises(StoreError, match="share memory"):
        resolve("w", torch.zeros(10).unfold(0, 4, 2), shapes)
    resolve("w", torch.zeros(4, 8)[:, ::2].t(), shapes)
    resolve("v", torch.zeros(8).as_strided((3, 2), (2, 3)), shapes)  # crossing, but apart


def test_nothing_is_copied_into_places_of_which_one_does_not_fit() -> None:
    async def scenario() -> None:
        model = torch.nn.Linear(3, 4)
        policy = ts.Weights("policy", rank=0, world_size=1)
        await policy.publish(model, version=1)
        fetched = await policy.fetch()
        weight = torch.zeros(4, 3)
        with pytest.raises(StoreError, match="the shape of the stored tensor"):
            fetched.copy_into({"weight": weight, "bias": torch.zeros(5)})
        assert not weight.any(), "the memory is a mixture now"
        other = torch.nn.Linear(3, 4)
        fetched.copy_into(other)
        assert torch.equal(other.weight, model.weight)
        with pytest.raises(StoreError, match="no memory to fill"):
            fetched.copy_into(weight)  # type: ignore[arg-type]

    alone(scenario)


def test_tensors_of_inference_mode_are_filled() -> None:
    async def scenario() -> None:
        model = torch.nn.Linear(3, 4)
        policy = ts.Weights("policy", rank=0, world_size=1)
        await policy.publish(model, version=1)
        with torch.inference_mode():
            into = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in model.state_dict().items()}
        for _ in range(2):
            await policy.fetch(into, cast=True)
            assert torch.equal(into["weight"], model.weight.bfloat16())
        into["weight"] = torch.zeros(4, 3, dtype=torch.bfloat16)
        (await policy.fetch()).copy_into(into, cast=True)
        assert torch.equal(into["weight"], model.weight.bfloat16())

    alone(scenario)


def test_nobody_waits_for_a_version_that_has_gone() -> None:
    async def scenario() -> None:
        policy = ts.Weights("policy", rank=0, world_size=1)
        for version in (1, 2, 3):
            await policy.publish({"x": torch.ones(2)}, version=version)
        async with asyncio.timeout(300):
            with pytest.raises(ts.StoreKeyError, match="version 1"):
                await policy.fetch(version=1, wait_s=3600)
        waiting = asyncio.ensure_future(policy.fetch(version=4, wait_s=3600))
        await policy.publish({"x": torch.ones(2)}, version=4)
        assert (await waiting).version == 4

    alone(scenario)


def test_errors_say_what_to_give() -> None:
    async def scenario() -> None:
        await ts.put("one", torch.ones(4, 4))
        await ts.put("many", {"a": torch.ones(4)})
        for key, into in (("one", {"a": torch.ones(4, 4)}), ("many", torch.ones(4))):
            with pytest.raises(ts.WeightMismatch) as mixed:
                await ts.get(key, into)
            assert mixed.value.path == "into"
            assert "a tensor for a tensor" in str(mixed.value.repair)
        with pytest.raises(StoreError, match="already names the part") as both:
            await ts.get("one", torch.ones(2, 4), spec=ts.Chunk(0, 1, 2))
        assert "At(tensor, Chunk(" in str(both.value.repair)
        with pytest.raises(StoreError) as newest:
            await ts.Weights("policy").fetch(version="newest")  # type: ignore[arg-type]
        assert '"latest"' in str(newest.value.rule)

    alone(scenario)


def test_dtensors_of_one_rank(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    async def scenario() -> None:
        stored = example()
        await ts.put("v", {"q": distribute_tensor(stored["q"], mesh, [Shard(0), Replicate()]), "k": stored["k"]})
        assert torch.equal((await ts.get("v"))["q"], stored["q"])
        found = (await ts.get("v", spec={"q": ts.Placed(mesh, [Replicate(), Shard(1)])}))["q"]
        assert isinstance(found, DTensor)
        assert found.placements == (Replicate(), Shard(1))
        assert torch.equal(found.full_tensor(), stored["q"])
        into = distribute_tensor(torch.zeros(8, 6), mesh, [Shard(1), Shard(1)])
        await ts.get("v", {"q": into}, verify="full")
        assert torch.equal(into.full_tensor(), stored["q"])

    alone(scenario)


def test_lazy_views_of_memory_that_is_known_are_refused() -> None:
    async def body() -> None:
        numbers = torch.randn(3, dtype=torch.complex64)
        for name, plain, lazy in (("c", numbers, numbers.conj()), ("n", numbers.imag, numbers.conj().imag)):
            policy = ts.Weights(name, rank=0, world_size=1)
            await policy.publish({"x": plain}, version=1)
            with pytest.raises(StoreError, match="no plain memory"):
                await policy.publish({"x": lazy}, version=2)  # the same address, dtype, shape and strides
            memory = torch.zeros_like(plain)
            await policy.fetch({"x": memory})
            with pytest.raises(StoreError, match="no plain memory"):
                await policy.fetch({"x": memory.conj() if name == "c" else torch._neg_view(memory)})

    alone(body)


def test_nested_tensors_are_refused_by_name() -> None:
    async def body() -> None:
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        with pytest.raises(StoreError) as caught:
            await ts.Weights("nested", rank=0, world_size=1).publish({"x": nested}, version=1)
        assert (caught.value.path, caught.value.value) == ("x", "nested")

    alone(body)
