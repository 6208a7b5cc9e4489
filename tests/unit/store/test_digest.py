"""The digest of tensors: of any dtype and memory layout, and of parts that add up."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.errors import StoreError
from forge.store.digest import digest_tensor
from forge.store.sharding import Region
from kernel_reference import digest_of_bytes

CALM = settings(derandomize=True, deadline=None, max_examples=100)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes, whatever they mean."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    numel = Region.whole(shape).numel
    data = torch.randint(0, 256, (numel * itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (data % 2 if dtype is torch.bool else data).view(dtype).reshape(shape)


def content(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    tensor = random_tensor((5, 7), dtype)
    assert digest_tensor(tensor) == digest_of_bytes(content(tensor))
    assert digest_tensor(tensor.t()) == digest_of_bytes(content(tensor.t()))
    part = tensor[1:4, 2:5]
    assert digest_tensor(part) == digest_of_bytes(content(part))
    assert digest_tensor(tensor[2, 3]) == digest_of_bytes(content(tensor[2:3, 3:4]))


def test_expanded_and_shifted_memory() -> None:
    base = random_tensor((1, 6), torch.int16)
    assert digest_tensor(base.expand(4, 6)) == digest_of_bytes(content(base) * 4)
    odd = random_tensor((4099,), torch.uint8)[3:]
    assert digest_tensor(odd) == digest_of_bytes(content(odd))


def test_empty_and_conjugated_and_trained_tensors() -> None:
    assert digest_tensor(torch.empty(3, 0)) == 0
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert digest_tensor(value.conj()) == digest_tensor(value.conj().resolve_conj().clone())
    assert digest_tensor(value.conj()) != digest_tensor(value)
    assert digest_tensor(torch.ones(3, requires_grad=True)) == digest_tensor(torch.ones(3))


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[int]]]:
    """A tensor and where to cut each of its dimensions."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from((torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    return random_tensor(shape, dtype, draw(st.integers(0, 9))), cuts


@given(case=cut_tensors())
@CALM
def test_parts_add_up_to_the_whole(case: tuple[torch.Tensor, list[list[int]]]) -> None:
    tensor, cuts = case
    shape, parts = tuple(tensor.shape), []
    for spans in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        region = Region(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))
        part = tensor[tuple(slice(low, high) for low, high in spans)]
        parts.append(digest_tensor(part, region=region, shape=shape))
        assert digest_tensor(part.clone(), region=region, shape=shape) == parts[-1]
    assert sum(parts) % (1 << 64) == digest_of_bytes(content(tensor))


@pytest.mark.parametrize("bit", range(8))
def test_one_bit_changes_it(bit: int) -> None:
    tensor = random_tensor((3000,), torch.uint8)
    before = digest_tensor(tensor)
    for at in range(0, 3000, 37):
        tensor[at] ^= 1 << bit
        assert digest_tensor(tensor) != before
        tensor[at] ^= 1 << bit
    assert digest_tensor(tensor) == before


def test_it_is_the_same_for_ever() -> None:
    """Processes of different releases compare digests: these values may never change."""
    assert digest_tensor(torch.arange(5000, dtype=torch.int32)) == 3720724781977193554


@pytest.mark.parametrize(
    ("tensor", "region", "shape", "path"),
    [
        (torch.ones(2, 2), Region((0, 0), (2, 3)), (4, 4), "region"),
        (torch.ones(2, 2), Region((3, 0), (2, 2)), (4, 4), "region"),
        (torch.ones(2, 2), Region((-1, 0), (2, 2)), (4, 4), "region"),
        (torch.ones(2, 2), Region((0, 0), (2, 2)), (4, 4, 4), "region"),
        (torch.ones(2, 2), None, (4, 2), "region"),
        (torch.ones(2, 2).to_sparse(), None, None, "tensor"),
        (torch.ones(2, 2, device="meta"), None, None, "tensor"),
    ],
)
def test_what_is_not_part_of_the_whole_is_refused(
    tensor: torch.Tensor, region: Region | None, shape: tuple[int, ...] | None, path: str
) -> None:
    with pytest.raises(StoreError) as caught:
        digest_tensor(tensor, region=region, shape=shape)
    assert caught.value.path == path
    assert caught.value.rule
    assert caught.value.repair
