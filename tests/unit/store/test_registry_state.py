"""Who writes what: every element once, whoever holds it, and an error where that cannot be."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.errors import StoreError
from forge.store.records import Layout, numbered_pieces
from forge.store.registry_state import assign_pieces, check_whole
from forge.store.sharding import Piece, Region, TensorShards

Boxes = list[Region]


def held(shape: tuple[int, ...], boxes: Boxes, dtype: str = "float32") -> TensorShards:
    return TensorShards(shape, dtype, tuple(Piece(box, (0,) * len(shape)) for box in boxes))


def layout(**tensors: TensorShards) -> Layout:
    return Layout.of(tuple(tensors), tuple(tensors.values()))


def rows(start: int, count: int, width: int = 4) -> Region:
    return Region((start, 0), (count, width))


def written(layouts: list[Layout], shares: list[tuple[int, ...] | None]) -> Counter[tuple[str, tuple[int, ...]]]:
    """How often each element of each tensor is written."""
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for one, share in zip(layouts, shares, strict=True):
        for number, tensor, _, piece in numbered_pieces(one):
            if share is None or number in share:
                ranges = (range(low, high) for low, high in zip(piece.region.offset, piece.region.end, strict=True))
                found.update((one.names[tensor], at) for at in itertools.product(*ranges))
    return found


def test_many_ranks_do_not_hold_up_the_controller() -> None:
    """512 ranks of FSDP with 20 tensors: the shards of each are 512 boxes, and not all pairs of them are compared."""
    layouts = [layout(**{f"t{i}": held((512, 4), [rows(rank, 1)]) for i in range(20)}) for rank in range(512)]
    began = time.process_time()
    shares = assign_pieces("policy", tuple(layouts))
    took_s = time.process_time() - began
    assert shares == [tuple(range(20))] * 512
    assert took_s < 0.8
    with pytest.raises(StoreError, match="overlap"):
        check_whole("policy", "w", held((8, 4), []), [rows(0, 4), rows(4, 2), rows(3, 5)])


def test_one_rank_writes_all_it_has() -> None:
    alone = layout(a=held((4, 4), [rows(0, 1), rows(1, 3)]), b=held((), [Region((), ())]), none=held((0, 4), []))
    assert assign_pieces("policy", (alone,)) == [None]


def test_replicas_are_shared_out_by_bytes() -> None:
    large, small = held((8, 4), [Region.whole((8, 4))], "float64"), held((8, 4), [Region.whole((8, 4))], "int8")
    layouts = [layout(large=large, a=small, b=small, c=small)] * 2
    assert assign_pieces("policy", tuple(layouts)) == [(0,), (1, 2, 3)]


def test_ranks_may_have_other_tensors_and_other_orders() -> None:
    """Stages of a pipeline: each has its own, and one that both have."""
    part = held((4, 4), [Region.whole((4, 4))])
    layouts = [layout(first=part, both=part), layout(both=part, last=part)]
    shares = assign_pieces("policy", tuple(layouts))
    assert set(written(layouts, shares).values()) == {1}
    assert {name for name, _ in written(layouts, shares)} == {"first", "both", "last"}


def test_a_rank_that_has_nothing_writes_nothing() -> None:
    layouts = [layout(w=held((2, 4), [Region.whole((2, 4))])), layout(w=held((2, 4), []))]
    assert assign_pieces("policy", tuple(layouts)) == [(0,), ()]


@st.composite
def meshes(draw: st.DrawFn) -> list[Layout]:
    """Rows cut in some ways, each tensor by its own number of shards, each shard on one or more ranks."""
    num_ranks = draw(st.integers(1, 4))
    tensors: dict[str, list[TensorShards]] = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        height = draw(st.integers(0, 6))
        cuts = sorted(draw(st.lists(st.integers(0, height), max_size=3)))
        boxes = [rows(low, high - low) for low, high in itertools.pairwise([0, *cuts, height]) if low < high]
        owners = [draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)) for _ in boxes]
        tensors[name] = [
            held((height, 4), [box for box, ranks in zip(boxes, owners, strict=True) if rank in ranks])
            for rank in range(num_ranks)
        ]
    return [layout(**{name: helds[rank] for name, helds in tensors.items()}) for rank in range(num_ranks)]


@settings(derandomize=True, deadline=None, database=None, max_examples=200)
@given(meshes())
def test_every_element_is_written_once_by_somebody_who_has_it(layouts: list[Layout]) -> None:
    shares = assign_pieces("policy", tuple(layouts))
    found = written(layouts, shares)
    expected = {
        (name, at)
        for name, have in zip(layouts[0].names, layouts[0].shards, strict=True)
        for at in itertools.product(*map(range, have.shape))
    }
    assert set(found) == expected
    assert set(found.values()) <= {1}


@pytest.mark.parametrize(
    ("boxes", "what"),
    [
        ([rows(0, 3)], "'w' is not whole: 12 of 16 elements"),
        ([], "'w' is not whole: 0 of 16"),
        ([rows(0, 3), rows(2, 2)], "parts of 'w' overlap"),
        ([rows(0, 4), rows(0, 2)], "parts of 'w' overlap"),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_tensor_that_is_not_whole_is_refused(boxes: Boxes, what: str, num_ranks: int) -> None:
    layouts = [layout(w=held((4, 4), boxes[rank::num_ranks])) for rank in range(num_ranks)]
    with pytest.raises(StoreError, match=what) as caught:
        assign_pieces("policy", tuple(layouts))
    assert caught.value.path == "policy/w"
    assert None not in (caught.value.rule, caught.value.repair)


@pytest.mark.parametrize("other", [held((4, 5), [rows(0, 4, 5)]), held((4, 4), [rows(0, 4)], "bfloat16")])
def test_ranks_must_agree_about_shape_and_dtype(other: TensorShards) -> None:
    mine = held((4, 4), [rows(0, 4)])
    with pytest.raises(StoreError, match="disagree about 'w'") as caught:
        assign_pieces("policy", (layout(a=mine, w=mine), layout(w=other)))
    assert (caught.value.path, "on rank 1" in str(caught.value.value)) == ("policy/w", True)
    assert "[4, 4] float32" in str(caught.value.rule)


def test_a_scalar_and_an_empty_tensor_are_whole() -> None:
    check_whole("policy", "scalar", held((), []), [Region((), ())])
    check_whole("policy", "empty", held((3, 0), []), [])
    with pytest.raises(StoreError, match="0 of 1 elements"):
        check_whole("policy", "scalar", held((), []), [])
