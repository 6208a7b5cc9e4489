"""Values of every kind: taken apart, stored, and put together again as they were."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import forge.store as ts
from forge.errors import StoreError
from forge.store.objects import MAX_REST, Leaf, put_together, take_apart, write_structure
from store_scenarios import alone

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")
    },
    key=str,
)
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    number: int
    tensor: Tensor


def is_tensor(node: Any) -> bool:
    return isinstance(node, Tensor)


def raw(tensor: Tensor) -> bytes:
    """What a tensor is, bit by bit; for dtypes that torch cannot compare."""
    plain = tensor.detach().contiguous()
    return bytes(plain.view(-1).view(torch.uint8).numpy()) if plain.numel() else b""


def check_same(found: Any, expected: Any) -> None:
    assert type(found) is (Tensor if isinstance(expected, torch.nn.Parameter) else type(expected))
    if isinstance(expected, Tensor):
        assert (found.dtype, found.shape, found.requires_grad) == (expected.dtype, expected.shape, False)
        assert raw(found) == raw(expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            check_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_same(one, other)
    else:
        assert found == expected


# taking apart


def test_leaves_are_named_by_the_way_to_them() -> None:
    t = [torch.full((), float(number)) for number in range(6)]
    value = {"a": t[0], "b": [t[1], (t[2], None)], 7: Pair(t[3], "text"), "o": OrderedDict(x=t[4]), "": t[5]}
    structure, leaves = take_apart(value, is_tensor)
    assert dict(leaves) == {"a": t[0], "b.0": t[1], "b.1.0": t[2], "7.left": t[3], "o.x": t[4], "": t[5]}
    assert structure["b"] == [Leaf("b.0"), (Leaf("b.1.0"), None)]
    assert structure[7] == Pair(Leaf("7.left"), "text")
    again = put_together(pickle.loads(write_structure("k", structure)), leaves.__getitem__)
    check_same(again, value)


def test_a_tensor_alone_has_no_name() -> None:
    t = torch.ones(2)
    structure, leaves = take_apart(t, is_tensor)
    assert (structure, leaves) == (Leaf(""), {"": t})
    assert put_together(structure, leaves.__getitem__) is t
    assert take_apart({"a": []}, is_tensor) == ({"a": []}, {})


@pytest.mark.parametrize(
    "value", [{"a": {"b": 0.0}, "a.b": 0.0}, {"a": [0.0], "a.0": 0.0}, {1: 0.0, "1": 0.0}, {"": 0.0, "x": 0.0, None: 1}]
)
def test_ways_that_collide_are_refused(value: dict[Any, Any]) -> None:
    def take() -> Any:
        return take_apart(value, lambda node: isinstance(node, float))

    if None in value:  # these do not collide
        assert set(take()[1]) == {"", "x"}
        return
    with pytest.raises(StoreError, match="two tensors of the value have the name") as caught:
        take()
    assert None not in (caught.value.path, caught.value.rule, caught.value.repair)


def test_the_rest_of_a_value_is_small_and_picklable() -> None:
    with pytest.raises(StoreError, match="cannot be pickled") as caught:
        write_structure("k", {"x": threading.Lock()})
    assert (caught.value.path, caught.value.repair) == ("k", "leave out what cannot be pickled")
    with pytest.raises(StoreError, match="too large"):
        write_structure("k", bytes(MAX_REST))
    assert pickle.loads(write_structure("k", bytes(MAX_REST - 100))) == bytes(MAX_REST - 100)


# storing


@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
def test_every_dtype_and_form_comes_back(is_large: bool) -> None:
    """Small values are kept by the registry itself, large ones in shared memory."""
    count = 300_000 if is_large else 24
    generator = torch.Generator().manual_seed(5)

    def some(dtype: torch.dtype, *shape: int) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        high = 2 if dtype == torch.bool else 256
        return torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)

    async def scenario() -> None:
        value: dict[str, Any] = {str(dtype): some(dtype, 4, 6) for dtype in DTYPES}
        value |= {f"0-dim {dtype}": some(dtype, 1).view(()) for dtype in DTYPES}
        value |= {f"empty {dtype}": some(dtype, 3, 0) for dtype in DTYPES}
        base = some(torch.float32, 6, count)
        value |= {
            "transposed": base.T,
            "strided": base[::2, 1::3],
            "reversed order": base.permute(1, 0)[5:, :],
            "expanded": base[:1].expand(5, count),
            "expanded scalar": torch.tensor(3.0).expand(7, 2),
            "needs grad": base.clone().requires_grad_(),
            "result": (base.clone().requires_grad_() * 2),
            "parameter": torch.nn.Parameter(base[0].clone()),
            "tied": base,
            "tied too": base,
            "nine dimensions": some(torch.int16, 1, 2, 1, 2, 1, 2, 1, 2, 2),
        }
        await ts.put("all", value)
        for verify in ("cheap", "full", "off"):
            check_same(await ts.get("all", verify=verify), value)
        into = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in value.items()}
        into["transposed"] = torch.zeros(6, count).T
        into["strided"] = torch.zeros(6, 2 * into["strided"].shape[1])[::2, ::2]
        assert await ts.get("all", into, verify="full") is into
        for name, tensor in into.items():
            assert raw(tensor) == raw(value[name]), name

    alone(scenario)


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        "text",
        b"bytes",
        [],
        {},
        {"a": None, "b": [1, (2, "x")], "c": {"d": b"\0"}},
        OrderedDict(b=torch.ones(2), a=torch.zeros(1)),
        Pair(torch.ones(2), [torch.zeros(3)]),
        [[torch.ones(1)], (torch.ones(2),)],
        {("a", 1): torch.ones(2), 3: torch.ones(1)},
    ],
    ids=repr,
)
def test_structures_come_back_as_they_were(value: Any) -> None:
    async def scenario() -> None:
        await ts.put("v", value)
        check_same(await ts.get("v"), value)

    alone(scenario)


def test_arrays_and_records_come_back() -> None:
    async def scenario() -> None:
        record = Record(3, torch.arange(4))
        await ts.put("v", {"array": np.arange(6).reshape(2, 3), "record": record})
        found = await ts.get("v")
        assert np.array_equal(found["array"], np.arange(6).reshape(2, 3))
        assert found["record"].number == 3
        assert torch.equal(found["record"].tensor, torch.arange(4))
        record.tensor[0] = 9
        assert (await ts.get("v"))["record"].tensor[0] == 0

    alone(scenario)


@pytest.mark.parametrize("count", [10, 100_000, 1_000_000], ids=["inline", "copied", "mapped"])
def test_what_was_got_is_the_readers_own(count: int) -> None:
    async def scenario() -> None:
        mine = torch.arange(count)
        await ts.put("v", {"x": mine})
        mine.zero_()
        first = (await ts.get("v"))["x"]
        assert torch.equal(first, torch.arange(count)), "the store has the writer's memory"
        first.fill_(7)
        second = (await ts.get("v"))["x"]
        assert torch.equal(second, torch.arange(count)), "the store has a reader's memory"
        await ts.put("v", {"x": torch.ones(count, dtype=torch.int64)})
        await ts.put("v", {"x": torch.zeros(count, dtype=torch.int64)})
        assert torch.equal(second, torch.arange(count)), "a later value changed what was got before"
        assert bool((first == 7).all())
        await ts.delete("v")
        assert torch.equal(second, torch.arange(count))

    alone(scenario)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_conversion_on_the_way(dtype: torch.dtype) -> None:
    async def scenario() -> None:
        value = {
            "f": torch.randn(5, 7, generator=torch.Generator().manual_seed(1)),
            "i": torch.arange(3),
            "e": torch.ones(0),
        }
        await ts.put("v", value, dtype=dtype)
        found = await ts.get("v")
        assert torch.equal(found["f"], value["f"].to(dtype))
        assert (found["i"].dtype, found["e"].dtype) == (torch.int64, dtype)
        back = {"f": torch.zeros(5, 7)}
        await ts.get("v", back, cast=True, verify="full")
        assert torch.equal(back["f"], value["f"].to(dtype).float())

    alone(scenario)
