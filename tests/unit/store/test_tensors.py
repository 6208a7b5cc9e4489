"""What a tensor is to the store, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from forge.errors import StoreError
from forge.store.records import itemsize
from forge.store.sharding import Piece, Region, TensorShards
from forge.store.tensors import dtype_name, dtype_of, local, region_pieces, shards_for, shards_of, wanted_shards

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = [dtype for dtype in DTYPES if str(dtype).startswith("torch.q")]


def check_error(error: StoreError, *, message: str, value: str, path: str | None = "w") -> None:
    assert message in error.message
    assert value in str(error.value)
    assert error.path == path
    assert error.rule
    assert error.repair


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in QUANTIZED], ids=str)
def test_every_element_type_has_a_name_and_lies_in_bytes(dtype: torch.dtype) -> None:
    name = dtype_name(dtype)
    assert dtype_of(name) is dtype
    assert f"torch.{name}" == str(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is announced as experimental
        tensor = torch.empty((3, 4), dtype=dtype)
    assert shards_of(tensor) == TensorShards((3, 4), name, (Piece(Region.whole((3, 4)), (0, 0)),))
    assert local(tensor).view(torch.uint8).numel() == 12 * itemsize(name)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_quantized_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(StoreError) as caught:
        dtype_name(dtype, path="w")
    check_error(caught.value, message="quantized", value=str(dtype))
    with pytest.raises(StoreError) as caught:
        dtype_of(str(dtype).removeprefix("torch."))
    check_error(caught.value, message="quantized", value="q", path=None)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(StoreError) as caught:
        dtype_of("float7")
    check_error(caught.value, message="no such element type", value="float7", path=None)


@pytest.mark.parametrize(
    ("tensor", "pieces"),
    [
        (torch.tensor(3.0), (Piece(Region((), ()), ()),)),
        (torch.empty(0, 4), ()),
        (torch.arange(12.0).view(3, 4).t(), (Piece(Region.whole((4, 3)), (0, 0)),)),
        (torch.ones(1).expand(5), (Piece(Region.whole((5,)), (0,)),)),
        (nn.Parameter(torch.ones(2)), (Piece(Region.whole((2,)), (0,)),)),
        ((torch.ones(2, requires_grad=True) * 2), (Piece(Region.whole((2,)), (0,)),)),
    ],
)
def test_a_plain_tensor_is_held_whole(tensor: torch.Tensor, pieces: tuple[Piece, ...]) -> None:
    assert shards_of(tensor) == TensorShards(tuple(tensor.shape), "float32", pieces)
    mine = local(tensor)
    assert type(mine) is torch.Tensor
    assert not mine.requires_grad
    assert mine.data_ptr() == tensor.data_ptr()
    assert type(shards_of(tensor).shape) is tuple


def test_a_subclass_that_is_plain_memory_is_taken_as_such() -> None:
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("the store reads memory, it calls no operation of the class")

    plain = torch.ones(3)
    with torch._C.DisableTorchFunctionSubclass():
        tensor = plain.as_subclass(Named)
    mine = local(tensor)
    assert type(mine) is torch.Tensor
    assert mine.data_ptr() == plain.data_ptr()
    assert shards_of(tensor) == shards_of(plain)


def freed(num_bytes_left: int = 0) -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(num_bytes_left)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.empty(2, device="meta"), "meta"),
        (lambda: nested(torch.strided), "nested"),
        (lambda: nested(torch.jagged), "NestedTensor"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, "negated"),
        (lambda: torch._efficientzerotensor((2,)), "no storage"),
        (freed, "no storage"),
        (lambda: freed(15), "no storage"),
        (fake, "FakeTensor"),
        (nn.UninitializedParameter, "UninitializedParameter"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(nested|Sparse CSR).*")
def test_a_tensor_without_plain_memory_is_refused(make: Any, value: str) -> None:
    tensor = make()
    for ask in (shards_of, local, wanted_shards):
        with pytest.raises(StoreError) as caught:
            ask(tensor, name="w")
        check_error(caught.value, message="no plain memory", value=value)


@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_a_quantized_tensor_is_refused() -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(StoreError) as caught:
        shards_of(tensor, name="w")
    check_error(caught.value, message="quantized", value="qint8")


def test_a_tensor_under_a_transform_is_refused() -> None:
    def ask(row: torch.Tensor) -> torch.Tensor:
        with pytest.raises(StoreError) as caught:
            shards_of(row, name="w")
        check_error(caught.value, message="no plain memory", value="no storage")
        return row

    torch.vmap(ask)(torch.ones(2, 3))


def test_a_dtensor_is_held_as_its_placements_say(mesh: DeviceMesh) -> None:
    tensor = nn.Parameter(distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [Shard(1)]))
    assert shards_of(tensor) == shards_for((2, 3), torch.float32, mesh, [Shard(1)]) == shards_of(torch.ones(2, 3))
    mine = local(tensor)
    assert type(mine) is torch.Tensor
    assert not mine.requires_grad
    mine.zero_()
    assert not tensor.to_local().any()


def test_a_partial_dtensor_is_refused_by_name(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(StoreError) as caught:
        shards_of(tensor, name="w")
    check_error(caught.value, message="Partial", value="Partial(sum)")
    assert "redistribute" in str(caught.value.repair)


def test_a_dtensor_that_claims_another_shape_is_refused(mesh: DeviceMesh) -> None:
    for shape in [(3,), (0,)]:
        tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], shape=shape, stride=(1,))
        with pytest.raises(StoreError) as caught:
            shards_of(tensor, name="w")
        check_error(caught.value, message="does not have the shape", value="local shape (2,)")


def test_a_dtensor_without_memory_is_refused(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(torch.ones(2, device="meta"), mesh, [Shard(0)])
    with pytest.raises(StoreError) as caught:
        shards_of(tensor, name="w")
    check_error(caught.value, message="no plain memory", value="meta")


def test_a_collective_that_still_runs_is_waited_for(mesh: DeviceMesh) -> None:
    pending = funcol.all_gather_single(torch.arange(3.0), 0, mesh)
    assert type(pending) is funcol.AsyncCollectiveTensor
    assert shards_of(pending) == shards_of(torch.ones(3))
    mine = local(DTensor.from_local(pending, mesh, [Replicate()]))
    assert type(mine) is torch.Tensor
    assert mine.tolist() == [0.0, 1.0, 2.0]


def test_a_slice_is_one_piece() -> None:
    assert region_pieces((8, 4), Region((2, 0), (3, 4))) == (Piece(Region((2, 0), (3, 4)), (0, 0)),)
    assert region_pieces((8, 4), Region((8, 0), (0, 4))) == ()
    assert region_pieces((), Region((), ())) == (Piece(Region((), ()), ()),)


@pytest.mark.parametrize(
    ("offset", "extent"), [((6, 0), (3, 4)), ((-1, 0), (1, 4)), ((0, 0), (-1, 4)), ((0,), (8,)), ((0, 0), (8,))]
)
def test_a_slice_outside_of_its_tensor_is_refused(offset: tuple[int, ...], extent: tuple[int, ...]) -> None:
    with pytest.raises(StoreError) as caught:
        region_pieces((8, 4), Region(offset, extent), name="w")
    check_error(caught.value, message="slice", value=f"offset {offset}")


def test_a_target_can_be_a_slice_of_what_is_stored(mesh: DeviceMesh) -> None:
    want = TensorShards((8, 4), "float32", (Piece(Region((2, 0), (3, 4)), (0, 0)),))
    plain = torch.empty(3, 4)
    assert wanted_shards(plain) == shards_of(plain)
    assert wanted_shards(plain, shape=(8, 4), offset=(2, 0)) == want
    assert wanted_shards(distribute_tensor(plain, mesh, [Shard(0)]), shape=(8, 4), offset=(2, 0)) == want
    assert wanted_shards(plain, shape=(8, 4)).pieces == (Piece(Region((0, 0), (3, 4)), (0, 0)),)
    with pytest.raises(StoreError) as caught:
        wanted_shards(plain, shape=(4, 4), offset=(2, 0), name="w")
    check_error(caught.value, message="slice", value="offset (2, 0)")


def test_a_target_whose_elements_share_memory_is_refused() -> None:
    with pytest.raises(StoreError) as caught:
        wanted_shards(torch.ones(1).expand(5), name="w")
    check_error(caught.value, message="share memory", value="strides (0,)")
