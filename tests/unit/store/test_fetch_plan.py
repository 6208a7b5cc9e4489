"""Which bytes are fetched, and which slots can be proved: against reading element by element."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge.errors import WeightMismatch
from forge.store import kernel
from forge.store.copy_table import SLOT
from forge.store.fetch_plan import Copy, FetchPlan, Stored, make_plan, plan_copies, read_catalog
from forge.store.proof import pack_digests
from forge.store.records import Layout, Lease, Part, SegmentRecord, Version, packing
from forge.store.sharding import Piece, Region, TensorShards
from forge.store.targets import At, resolve

CPU = torch.device("cpu")
FIXED = settings(derandomize=True, deadline=None, database=None, max_examples=150)


def leased(whole: Tensor, boxes: list[list[Region]]) -> tuple[Lease, list[Tensor]]:
    """A version of one tensor, of which each part has some boxes; and what is in the parts."""
    dtype = str(whole.dtype).removeprefix("torch.")
    layouts, parts, memories = {}, [], []
    for rank, mine in enumerate(boxes):
        held = TensorShards(tuple(whole.shape), dtype, tuple(Piece(box, (0,) * whole.ndim) for box in mine))
        layout = Layout.of(("w",), (held,))
        packed = packing(layout, None)
        memory = torch.zeros(packed.size, dtype=torch.uint8)
        for entry in packed.pieces:
            box = entry.piece.region
            rectangle = whole[tuple(map(slice, box.offset, box.end))].contiguous()
            memory[entry.start : entry.start + entry.num_bytes] = rectangle.view(-1).view(torch.uint8)
        layouts[layout.id] = layout
        digests = pack_digests([0] * len(mine))
        parts.append(Part(rank, layout.id, None, SegmentRecord(packed.size, 1), digests, b""))
        memories.append(memory)
    return Lease(1, Version("policy", 1, tuple(parts), "", b""), layouts), memories


def fetch(lease: Lease, parts: list[Tensor], places: list[At | Tensor], mapped: list[bool]) -> FetchPlan:
    """Plan, pull what has to be pulled, and copy, as a reader does."""
    known = read_catalog(lease)
    targets = [target for place in places for target in resolve("w", place, known.shapes)]
    made = make_plan("policy", known, targets, [CPU if is_mapped else None for is_mapped in mapped])
    shadows = [torch.full_like(part, 255) for part in parts]
    memories = [target.memory for target in targets]
    for index, pulls in made.pulls.items():
        for wanted in pulls:
            data = parts[index][wanted.offset : wanted.offset + wanted.num_bytes]
            if wanted.target < 0:
                shadows[index][wanted.offset : wanted.offset + wanted.num_bytes] = data
            else:
                memory = memories[wanted.target]
                flat = memory.as_strided((memory.numel(),), (1,), memory.storage_offset()).view(torch.uint8)
                flat[wanted.at : wanted.at + wanted.num_bytes] = data
    bases = [part if is_mapped else shadow for part, shadow, is_mapped in zip(parts, shadows, mapped, strict=True)]
    kernel.run(
        made.rects, [base.data_ptr() for base in bases], [memory.data_ptr() for memory in memories], digest=False
    )
    return made


def partial_slots(made: FetchPlan) -> set[int]:
    """The slots of which a part is read."""
    return {table.row(index)[SLOT] for table in made.partial.values() for index in range(len(table))}


def grid(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Region]:
    spans = [
        [(low, high) for low, high in itertools.pairwise([0, *sorted(cut), size]) if low < high]
        for cut, size in zip(cuts, shape, strict=True)
    ]
    return [
        Region(tuple(low for low, _ in span), tuple(high - low for low, high in span))
        for span in itertools.product(*spans)
    ]


@FIXED
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), st.data())
def test_what_is_wanted_arrives_and_nothing_else_is_pulled(shape: tuple[int, ...], data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((torch.int8, torch.int16, torch.float64)))
    whole = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    boxes = grid(shape, [data.draw(st.lists(st.integers(0, size), max_size=2)) for size in shape])
    num_parts = data.draw(st.integers(1, 3))
    lease, parts = leased(whole, [boxes[rank::num_parts] for rank in range(num_parts)])
    mapped = data.draw(st.lists(st.booleans(), min_size=num_parts, max_size=num_parts))
    low = [data.draw(st.integers(0, size - 1)) for size in shape]
    extent = tuple(data.draw(st.integers(1, size - start)) for size, start in zip(shape, low, strict=True))
    target = torch.zeros(tuple(reversed(extent)), dtype=dtype).permute(*reversed(range(len(shape))))
    if data.draw(st.booleans()):
        target = torch.zeros(extent, dtype=dtype)
    made = fetch(lease, parts, [At(target, Region(tuple(low), extent))], mapped)
    wanted = Region(tuple(low), extent)
    assert torch.equal(target, whole[tuple(map(slice, wanted.offset, wanted.end))])
    assert made.num_bytes == wanted.numel * dtype.itemsize
    pulled = sum(pull.num_bytes for pulls in made.pulls.values() for pull in pulls)
    far = [box for rank in range(num_parts) if not mapped[rank] for box in boxes[rank::num_parts]]
    shared = [box.intersect(wanted) for box in far]
    assert pulled == sum(box.numel for box in shared if box is not None) * dtype.itemsize
    assert set(made.pulls) == {rank for rank in range(num_parts) if not mapped[rank]}
    known = read_catalog(lease)
    for slot, stored in enumerate(entry.region for entry in known.entries["w"].stored):
        part = stored.intersect(wanted)
        number = known.entries["w"].slots[slot]
        assert (number in made.whole, number in partial_slots(made)) == (part == stored, part not in (None, stored))


def test_what_lies_in_one_run_lands_without_a_shadow() -> None:
    whole = torch.arange(48, dtype=torch.int32).view(8, 6)
    lease, parts = leased(whole, [[Region.whole((8, 6))]])
    rows, columns = torch.zeros(3, 6, dtype=torch.int32), torch.zeros(8, 2, dtype=torch.int32)
    made = fetch(lease, parts, [At(rows, (2, 0)), At(columns, (0, 4))], [False])
    assert torch.equal(rows, whole[2:5])
    assert torch.equal(columns, whole[:, 4:])
    assert [(pull.num_bytes, pull.target) for pull in made.pulls[0]] == [(72, 0)] + [(8, -1)] * 8
    assert (len(made.landed), len(made.rects)) == (1, 1)


@pytest.mark.parametrize(
    ("regions", "times"),
    [
        ([Region((0, 0), (4, 4))], 1),
        ([Region((0, 0), (2, 4)), Region((2, 0), (2, 4))], 1),
        ([Region((0, 0), (4, 4))] * 3, 3),
        ([Region((0, 0), (2, 4))], 0),
        ([Region((0, 0), (2, 4))] * 2, 0),
        ([Region((0, 0), (4, 4)), Region((0, 0), (2, 4))], 0),
        ([Region((0, 0), (3, 4)), Region((3, 0), (1, 3)), Region((0, 0), (1, 1))], 0),
    ],
)
def test_a_piece_counts_as_read_whole_only_when_each_element_is_read_equally_often(
    regions: list[Region], times: int
) -> None:
    whole = torch.arange(16.0).view(4, 4)
    lease, parts = leased(whole, [[Region.whole((4, 4))]])
    places: list[At | Tensor] = [At(torch.zeros(region.shape), region) for region in regions]
    made = fetch(lease, parts, places, [True])
    assert made.whole == ({0: times} if times else {})
    assert partial_slots(made) == (set() if times else {0})


def test_converted_tensors_are_left_to_torch() -> None:
    whole = torch.arange(16.0).view(4, 4)
    lease, _ = leased(whole, [[Region.whole((4, 4))]])
    known = read_catalog(lease)
    targets = resolve("w", torch.zeros(4, 4, dtype=torch.bfloat16), known.shapes, cast=True)
    made = make_plan("policy", known, targets, [None])
    assert (len(made.rects), len(made.landed), len(made.torch_copies)) == (0, 0, 1)
    assert sum(pull.num_bytes for pull in made.pulls[0]) == 64
    assert all(pull.target < 0 for pull in made.pulls[0]), "unconverted bytes would land in the reader's memory"


def test_what_nobody_published_is_named() -> None:
    whole = torch.arange(16.0).view(4, 4)
    lease, parts = leased(whole, [[Region((0, 0), (2, 4))]])
    with pytest.raises(WeightMismatch, match="a part of 'w' is in no segment") as caught:
        fetch(lease, parts, [torch.zeros(4, 4)], [True])
    assert caught.value.tensors == ("w",)
    assert None not in (caught.value.path, caught.value.rule, caught.value.repair)
    rows = torch.zeros(2, 4)
    fetch(lease, parts, [At(rows, (0, 0))], [True])
    assert torch.equal(rows, whole[:2])


def test_a_scalar_and_an_empty_tensor() -> None:
    lease, parts = leased(torch.tensor(5.0), [[Region((), ())]])
    for is_mapped in (True, False):
        target = torch.zeros(())
        made = fetch(lease, parts, [target], [is_mapped])
        assert (target.item(), made.whole) == (5.0, {0: 1})
    lease, parts = leased(torch.zeros(3, 0), [[]])
    assert fetch(lease, parts, [torch.zeros(3, 0)], [True]).num_bytes == 0


def stored(*boxes: Region) -> list[Stored]:
    return [Stored(number, 0, box) for number, box in enumerate(boxes)]


def whole_piece(shape: tuple[int, ...]) -> Piece:
    return Piece(Region.whole(shape), (0,) * len(shape))


def points(box: Region) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, end) for start, end in zip(box.offset, box.end, strict=True))))


def test_a_whole_tensor_is_one_copy() -> None:
    assert plan_copies(stored(Region.whole((3, 4))), [whole_piece((3, 4))], target=7) == (
        [Copy(0, 7, (3, 4), (0, 0), (0, 0))],
        0,
    )


def test_a_scalar_is_one_copy() -> None:
    assert plan_copies(stored(Region.whole(())), [whole_piece(())]) == ([Copy(0, 0, (), (), ())], 0)


def test_rows_become_columns() -> None:
    rows = stored(Region((0, 0), (2, 4)), Region((2, 0), (2, 4)))
    columns = [Piece(Region((0, 2), (4, 2)), (0, 0))]
    assert plan_copies(rows, columns) == ([Copy(0, 0, (2, 2), (0, 2), (0, 0)), Copy(1, 0, (2, 2), (0, 2), (2, 0))], 0)


def test_a_piece_lands_at_its_place_in_the_local_tensor() -> None:
    pieces = [Piece(Region((1,), (2,)), (0,)), Piece(Region((5,), (3,)), (2,))]
    assert plan_copies(stored(Region.whole((8,))), pieces) == (
        [Copy(0, 0, (2,), (1,), (0,)), Copy(0, 0, (3,), (5,), (2,))],
        0,
    )


def test_what_nobody_stored_is_missing_exactly() -> None:
    copies, num_missing = plan_copies(stored(Region((1, 1), (1, 1))), [whole_piece((3, 3))])
    assert [copy.shape for copy in copies] == [(1, 1)]
    assert num_missing == 8


def test_nothing_stored_means_that_all_is_missing() -> None:
    assert plan_copies([], [whole_piece((3,))]) == ([], 3)
    assert plan_copies(stored(Region((0,), (0,))), [whole_piece((3,))]) == ([], 3)


def test_nothing_wanted_means_no_copies() -> None:
    assert plan_copies(stored(Region.whole((3, 4))), []) == ([], 0)


def test_many_boxes_on_both_sides() -> None:
    rows = stored(*(Region((64 * row, 0), (64, 4096)) for row in range(64)))
    columns = [Piece(Region((0, 64 * column), (4096, 64)), (0, 0)) for column in range(64)]
    copies, num_missing = plan_copies(rows, columns)
    assert num_missing == 0
    assert len({(copy.stored, copy.src_at) for copy in copies}) == len(copies) == 64 * 64
    assert {copy.shape for copy in copies} == {(64, 64)}


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[Region], list[Piece]]:
    """Cells of an irregular grid, some of them left out, in any order; and any pieces."""
    cuts = [sorted({0, 8, *draw(st.lists(st.integers(1, 7), max_size=3))}) for _ in range(2)]
    spans = [list(itertools.pairwise(along)) for along in cuts]
    cells = [
        Region((top, left), (bottom - top, right - left)) for (top, bottom), (left, right) in itertools.product(*spans)
    ]
    chosen = draw(st.lists(st.sampled_from(cells), unique=True))
    corner = st.tuples(st.integers(0, 7), st.integers(0, 7))
    pieces = st.builds(
        lambda at, to: Piece(Region(at, tuple(b - a for a, b in zip(at, to, strict=True))), at), corner, corner
    )
    wanted = draw(st.lists(pieces.filter(lambda piece: min(piece.region.shape) >= 0), max_size=3))
    return chosen, wanted


@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(grids())
def test_copies_and_missing_parts_add_up_to_what_is_wanted(case: tuple[list[Region], list[Piece]]) -> None:
    boxes, wanted = case
    have = set().union(*map(points, boxes))
    for piece in wanted:
        copies, num_missing = plan_copies(stored(*boxes), [piece])
        landed: list[tuple[int, ...]] = []
        for copy in copies:
            source = boxes[copy.stored]
            assert copy.stored == boxes.index(source)
            start = tuple(a + b for a, b in zip(source.offset, copy.src_at, strict=True))
            assert start == copy.dst_at  # pieces of this test lie in the local tensor where they lie in the whole
            landed.extend(points(Region(start, copy.shape)))
        assert sorted(landed) == sorted(points(piece.region) & have)
        assert num_missing == len(points(piece.region) - have)
