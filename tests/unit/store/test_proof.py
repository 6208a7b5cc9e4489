"""The digest of a version: of its names, shapes, dtypes and values, and of nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.store.digest import digest_tensor
from forge.store.proof import MODULUS, added, pack_digests, sample_seed, unpack_digests, version_digest
from forge.store.records import Layout, Part, SegmentRecord, packing
from forge.store.sharding import Piece, Region, TensorShards

Tensors = dict[str, torch.Tensor]


def rank_of(number: int, tensors: Tensors, rows: dict[str, list[tuple[int, int]]]) -> tuple[Part, Layout]:
    """What a rank publishes that holds those rows of tensors, digested as they lie in the whole."""
    helds = []
    for name, tensor in tensors.items():
        boxes = [Region((low, 0), (high - low, tensor.shape[1])) for low, high in rows[name]]
        dtype = str(tensor.dtype).removeprefix("torch.")
        helds.append(TensorShards(tuple(tensor.shape), dtype, tuple(Piece(box, (0, 0)) for box in boxes)))
    layout = Layout.of(tuple(tensors), tuple(helds))
    digests = []
    for packed in packing(layout, None).pieces:
        box, tensor = packed.piece.region, tensors[layout.names[packed.tensor]]
        digests.append(digest_tensor(tensor[box.offset[0] : box.end[0]], box, tuple(tensor.shape)))
    return Part(number, layout.id, None, SegmentRecord(0, 1), pack_digests(digests), b""), layout


def digest_of(tensors: Tensors, cuts: dict[str, list[int]] | None = None, extra: bytes = b"") -> str:
    """The digest of tensors that are cut into rows, of which rank i holds the i-th piece."""
    cuts = cuts or {}
    pieces = {
        name: list(itertools.pairwise([0, *sorted(cuts.get(name, [])), len(tensor)]))
        for name, tensor in tensors.items()
    }
    num_ranks = max(map(len, pieces.values()))
    rows = [
        {name: [span for span in spans[rank : rank + 1] if span[0] < span[1]] for name, spans in pieces.items()}
        for rank in range(num_ranks)
    ]
    made = [rank_of(rank, tensors, rows[rank]) for rank in range(num_ranks)]
    return version_digest([part for part, _ in made], {layout.id: layout for _, layout in made}, extra)


def example() -> Tensors:
    return {"a": torch.arange(24, dtype=torch.float32).view(6, 4), "b": torch.arange(10, dtype=torch.int16).view(5, 2)}


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(st.lists(st.integers(0, 6), max_size=3), st.lists(st.integers(0, 5), max_size=3))
def test_the_digest_does_not_depend_on_the_layout(cuts_a: list[int], cuts_b: list[int]) -> None:
    assert digest_of(example(), {"a": cuts_a, "b": cuts_b}) == digest_of(example())


def test_the_digest_does_not_depend_on_the_order_of_names() -> None:
    tensors = example()
    assert digest_of(dict(reversed(tensors.items()))) == digest_of(tensors)


def test_everything_that_a_version_says_is_in_the_digest() -> None:
    plain = example()
    a, b = plain["a"], plain["b"]
    flipped = a.clone()
    flipped.view(torch.int32)[5, 3] ^= 1
    moved = a.clone()
    moved[[0, 1]] = a[[1, 0]]
    others: list[Tensors] = [
        {"a": a},
        {"a": a, "c": b},
        {"a": flipped, "b": b},
        {"a": moved, "b": b},
        {"a": a.view(4, 6), "b": b},
        {"a": a.view(torch.int32), "b": b},
        {"a": a, "b": b, "c": torch.zeros(0, 2)},
        {"a": a, "b": b, "c": torch.zeros(1, 2)},
        {"a": a, "b": b, "c": torch.zeros(2, 1)},
    ]
    digests = [digest_of(tensors) for tensors in (plain, *others)] + [digest_of(plain, extra=b"x")]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 64 for digest in digests)


def test_two_tensors_of_one_shape_cannot_be_swapped() -> None:
    one, other = torch.ones(4, 4), torch.zeros(4, 4)
    assert digest_of({"a": one, "b": other}) != digest_of({"a": other, "b": one})


def test_a_tensor_of_which_nobody_holds_anything_counts() -> None:
    tensors = {"a": torch.ones(2, 2), "empty": torch.zeros(0, 2)}
    part, layout = rank_of(0, tensors, {"a": [(0, 2)], "empty": []})
    without, layout_without = rank_of(0, {"a": tensors["a"]}, {"a": [(0, 2)]})
    assert without.digests == part.digests
    assert version_digest([part], {layout.id: layout}) != version_digest([without], {layout_without.id: layout_without})


def test_pieces_and_digests_must_be_as_many() -> None:
    part, layout = rank_of(0, {"a": torch.ones(2, 2)}, {"a": [(0, 1), (1, 2)]})
    short = Part(0, layout.id, None, part.segment, part.digests[:8], b"")
    with pytest.raises(ValueError, match="1 digests for 2 pieces"):
        version_digest([short], {layout.id: layout})


@settings(derandomize=True, deadline=None, database=None, max_examples=50)
@given(st.lists(st.integers(0, MODULUS - 1), max_size=5))
def test_digests_come_back_from_bytes(digests: list[int]) -> None:
    assert list(unpack_digests(pack_digests(digests))) == digests


def test_sums_stay_below_the_modulus() -> None:
    assert added([1, MODULUS - 1], [2, 3]) == [3, 2]
    assert added([], [5]) == [5]
    with pytest.raises(ValueError, match="zip"):
        added([1], [1, 2])


def test_other_elements_are_sampled_for_every_version_and_key() -> None:
    seeds = [sample_seed(key, version) for key in ("a", "b") for version in range(50)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < MODULUS for seed in seeds)
    assert sample_seed("policy", 3) == sample_seed("policy", 3)
