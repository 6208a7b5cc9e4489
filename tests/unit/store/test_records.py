"""How pieces lie in a segment, and which of them are the same everywhere."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.store.records import ALIGN, HEADER, Layout, itemsize, numbered_pieces, packing
from forge.store.sharding import Piece, Region, TensorShards
from forge.store.tensors import dtype_name, dtype_of

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")
    },
    key=str,
)
NAMES = ("bool", "int8", "bfloat16", "float32", "complex128")


def piece(*shape: int) -> Piece:
    return Piece(Region.whole(shape), (0,) * len(shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_size_of_an_element_follows_from_the_name(dtype: torch.dtype) -> None:
    assert itemsize(dtype_name(dtype)) == dtype.itemsize
    assert dtype_of(dtype_name(dtype)) == dtype


@pytest.mark.parametrize("name", ["", "32", "Float32", "float"])
def test_a_name_without_a_size_is_no_dtype(name: str) -> None:
    with pytest.raises(ValueError, match="no dtype is named"):
        itemsize(name)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    helds = []
    for _ in range(draw(st.integers(0, 4))):
        shapes = draw(st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), max_size=3))
        helds.append(TensorShards((99, 99), draw(st.sampled_from(NAMES)), tuple(piece(*shape) for shape in shapes)))
    return Layout.of(tuple(f"t{i}" for i in range(len(helds))), tuple(helds))


@settings(derandomize=True, deadline=None, database=None, max_examples=200)
@given(layouts(), st.data())
def test_pieces_are_aligned_in_order_and_apart(layout: Layout, data: st.DataObject) -> None:
    count = sum(len(held.pieces) for held in layout.shards)
    chosen = data.draw(st.none() | st.sets(st.integers(0, count - 1) if count else st.nothing()))
    written = None if chosen is None else tuple(sorted(chosen))
    found = packing(layout, written)
    assert [packed.number for packed in found.pieces] == (list(range(count)) if written is None else list(written))
    end = HEADER
    for packed in found.pieces:
        held = layout.shards[packed.tensor]
        assert packed.piece in held.pieces
        assert packed.num_bytes == packed.piece.region.numel * itemsize(held.dtype)
        assert packed.start % ALIGN == 0
        assert end <= packed.start < end + ALIGN
        end = packed.start + packed.num_bytes
    assert found.size % ALIGN == 0
    assert end <= found.size < end + ALIGN


def test_pieces_are_numbered_through_all_tensors() -> None:
    layout = Layout.of(
        ("a", "none", "b"),
        (
            TensorShards((4,), "int8", (piece(1), piece(3))),
            TensorShards((0,), "int8", ()),
            TensorShards((), "int8", (piece(),)),
        ),
    )
    assert [(number, tensor) for number, tensor, _, _ in numbered_pieces(layout)] == [(0, 0), (1, 0), (2, 2)]


def test_a_layout_is_what_it_says() -> None:
    """Its identity crosses processes: nothing but names, shapes, dtypes and pieces may count, and all of those do."""
    held = TensorShards((4,), "int8", (piece(4),))
    one = Layout.of(("a", "b"), (held, held))
    same = pickle.loads(pickle.dumps(one))
    assert (same, hash(same), same.id) == (one, hash(one), one.id)
    others = [
        Layout.of(("b", "a"), (held, held)),
        Layout.of(("a", "c"), (held, held)),
        Layout.of(("a", "b"), (held, TensorShards((4,), "uint8", (piece(4),)))),
        Layout.of(("a", "b"), (held, TensorShards((5,), "int8", (piece(4),)))),
        Layout.of(("a", "b"), (held, TensorShards((4,), "int8", ()))),
        Layout.of(("a", "b"), (held, TensorShards((4,), "int8", (Piece(Region((0,), (4,)), (1,)),)))),
        Layout.of(("a",), (held,)),
    ]
    assert len({one, *others}) == len(others) + 1
    assert one != "layout"
