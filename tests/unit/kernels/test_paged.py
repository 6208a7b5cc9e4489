"""Which neighbours of a decode step share their first pages, and what the GPU's attention refuses of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forge.errors import ModelError
from forge.kernels.paged import PagedLayout, find_shares
from forge.models.gpu_attention import Tuning, decode_attend, decode_shares, share_out

Item = tuple[int, int, int]


def step(*groups: tuple[int, int], length: int = 100, width: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Groups of (members, common pages): a table in which all other pages are different, and the lengths."""
    num_sequences = sum(size for size, _ in groups)
    table = np.arange(num_sequences * width, dtype=np.int32).reshape(num_sequences, width)
    first = 0
    for size, num_pages in groups:
        table[first : first + size, :num_pages] = table[first, :num_pages]
        first += size
    return table, np.full(num_sequences, length, dtype=np.int32)


def items_of(shares: np.ndarray) -> list[Item]:
    """The items, after checks that hold of every result."""
    num_items, most = shares[0, :2].tolist()
    items = [tuple(row) for row in shares[1 : num_items + 1, :3].tolist()]
    assert shares.dtype == np.int32
    assert not shares[num_items + 1 :, :3].any()
    assert most == max((chunks for _, _, chunks in items), default=0)
    told = np.zeros(len(shares) - 1, dtype=np.int32)
    for first, size, chunks in items:
        assert size >= 2
        assert chunks >= 1
        assert not told[first : first + size].any()
        told[first : first + size] = chunks
    assert shares[1:, 3].tolist() == told.tolist()
    return items


def found(arrays: tuple[np.ndarray, np.ndarray], *, chunk: int = 32, max_members: int = 8) -> list[Item]:
    return items_of(find_shares(*arrays, chunk=chunk, max_members=max_members))


def test_groups_side_by_side_are_told_apart() -> None:
    assert found(step((3, 2), (1, 0), (8, 5), (2, 4), (1, 0))) == [(0, 3, 1), (4, 8, 2), (12, 2, 2)]


@pytest.mark.parametrize("num_pages", [0, 1])
def test_less_than_a_chunk_is_not_shared(num_pages: int) -> None:
    assert found(step((8, num_pages))) == []


@pytest.mark.parametrize(("shortest", "num_chunks"), [(0, None), (31, None), (32, 1), (63, 1), (64, 2), (100, 2)])
def test_a_chunk_lies_within_the_context_of_every_member(shortest: int, num_chunks: int | None) -> None:
    table, lens = step((2, 4))
    lens[1] = shortest
    assert found((table, lens)) == ([] if num_chunks is None else [(0, 2, num_chunks)])


def test_what_the_table_holds_beyond_the_contexts_counts_for_nothing() -> None:
    table, _ = step((2, 8))
    assert found((table, np.array([40, 0]))) == []
    assert found((np.zeros((4, 8), dtype=np.int32), np.array([100, 100, 0, 0]))) == [(0, 2, 3)]


@pytest.mark.parametrize(
    ("size", "max_members", "sizes"),
    [(8, 8, [8]), (9, 8, [4, 5]), (17, 8, [5, 6, 6]), (5, 4, [2, 3]), (4, 2, [2, 2]), (5, 2, [2, 2]), (8, 1, [])],
)
def test_a_run_is_cut_into_items_that_fit(size: int, max_members: int, sizes: list[int]) -> None:
    items = found(step((1, 0), (size, 4)), max_members=max_members)
    assert [members for _, members, _ in items] == sizes
    assert all(chunks == 2 for _, _, chunks in items)


def test_a_prompt_common_to_all_does_not_hide_the_groups() -> None:
    table, lens = step((7, 6), (1, 0), (1, 0), (8, 6))
    table[:, :2] = 999
    assert found((table, lens)) == [(0, 7, 3), (7, 2, 1), (9, 8, 3)]


def test_nobody_shares_alone() -> None:
    assert found(step((1, 0))) == []
    nobody = find_shares(np.zeros((0, 8), dtype=np.int32), np.zeros(0, dtype=np.int32), chunk=32, max_members=8)
    assert nobody.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("seed", range(20))
def test_members_have_the_same_pages_and_no_closest_pair_is_left_out(seed: int) -> None:
    draw = np.random.default_rng(seed)
    table = draw.integers(0, 2, (40, 8), dtype=np.int32)
    table[:, 0:4] = np.where(draw.random((40, 1)) < 0.7, 0, table[:, 0:4])
    lens = draw.integers(0, 129, 40).astype(np.int32)
    max_members = int(draw.integers(2, 6))
    items = found((table, lens), max_members=max_members)
    for first, size, chunks in items:
        members = slice(first, first + size)
        assert size <= max_members
        assert (table[members, : 2 * chunks] == table[first, : 2 * chunks]).all()
        assert (lens[members] >= 32 * chunks).all()
    common = [
        next((c for c in range(min(a, b) // 32, 0, -1) if (x[: 2 * c] == y[: 2 * c]).all()), 0)
        for x, y, a, b in zip(table, table[1:], lens, lens[1:], strict=False)
    ]
    inside = {place for first, size, _ in items for place in range(first, first + size)}
    for place, chunks in enumerate(common):
        sides = [common[side] for side in (place - 1, place + 1) if 0 <= side < len(common)]
        if chunks and all(chunks > side for side in sides):
            assert {place, place + 1} <= inside


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "sizes"),
    [(16, 8, [8, 8]), (8, 8, [16]), (32, 8, [4, 4, 4, 4]), (64, 8, [2] * 8), (9, 1, []), (17, 1, [])],
)
def test_an_item_has_as_many_members_as_the_gpu_takes_at_once(
    num_heads: int, num_kv_heads: int, sizes: list[int]
) -> None:
    table, lens = step((16, 16), length=300, width=20)
    items = items_of(decode_shares(table, lens, num_heads=num_heads, num_kv_heads=num_kv_heads))
    assert [members for _, members, _ in items] == sizes


@pytest.mark.parametrize(
    ("num_pairs", "num_chunks", "part_bytes", "expected"),
    [
        (4096, 6, 100, (1, 6)),  # enough pairs to fill the GPU
        (4096, 11, 100, (1, 10)),
        (16, 6, 100, (6, 6)),  # a program for each chunk
        (16, 10, 100, (10, 10)),
        (16, 11, 100, (1, 10)),  # their parts would not fit
        (500, 10, 100, (3, 10)),
        (500, 10, 0, (1, 1)),
    ],
)
def test_chunks_are_shared_out_only_where_all_parts_have_room(
    num_pairs: int, num_chunks: int, part_bytes: int, expected: tuple[int, int]
) -> None:
    tuning = Tuning(programs=1024, part_bytes=part_bytes)
    assert share_out(num_pairs, num_chunks, chunk_bytes=10, tuning=tuning) == expected


@pytest.mark.parametrize(
    "shares",
    [
        torch.zeros(4, 4, dtype=torch.int32),
        torch.zeros(5, 3, dtype=torch.int32),
        torch.zeros(5, 4, dtype=torch.int64),
        torch.zeros(4, 5, dtype=torch.int32).mT,
    ],
)
def test_shares_of_another_step_are_refused(shares: torch.Tensor) -> None:
    cache, lens = torch.zeros(3, 2, 16, 8), torch.zeros(4, dtype=torch.int32)
    table = torch.zeros(4, 3, dtype=torch.int32)
    with pytest.raises(ModelError) as caught:
        decode_attend(torch.zeros(4, 2, 8), cache, cache, context_lens_S=lens, table_SP=table, scale=1.0, shares=shares)
    assert caught.value.path == "shares"
    assert "strides" in str(caught.value.value)
    assert "[5, 4]" in str(caught.value.rule)
    assert "decode_shares" in str(caught.value.repair)


def test_a_layout_shares_nothing_unless_it_is_said() -> None:
    assert PagedLayout.of_documents((5, 20)).shares is None
