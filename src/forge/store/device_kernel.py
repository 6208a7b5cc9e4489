"""What `kernel` does, on a GPU: copies rectangles between device memories and sums their digests on the way.

A table of rectangles is cut into blocks of at most 4096 bytes that do not cross a block of the digest; one launch
works through all of them. Rows whose runs are not made of whole, aligned words are left to torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forge.store.copy_table import CAST, DST, DST_BASE, HEAD, IMAGE, ITEM, NDIM, SLOT, SRC, SRC_BASE, CopyTable, Walk
from forge.store.proof import BLOCK_SALT, BLOCK_WORDS, WORD_WEIGHTS, splitmix64_each

BLOCK_BYTES: Final = 4 * BLOCK_WORDS
GROUP: Final = 4
"""Blocks that one program of the launch works through. They have one slot, to which it adds once."""
COLUMNS: Final = 7
"""Source base and offset, destination base and offset, words (and place in the block), slot, weight of the block."""

_MAX_BASES: Final = 8

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """A table of rectangles, cut into blocks, in the memory of a device."""

    full: Tensor
    """Groups of blocks that have all their words, one row for each block."""
    rest: Tensor
    """The other groups."""
    num_slots: int
    is_cast: bool
    """Whether float32 is read and bfloat16 written."""
    is_aligned: bool
    """Whether all offsets are multiples of 16 bytes, so that threads can load four words at once."""
    bases: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Addresses that were given before, on the device."""


def are_words(shape: Sequence[int], *, itemsize: int, walks: tuple[Walk, Walk, Walk], is_cast: bool = False) -> bool:
    """Return whether a rectangle consists of whole, aligned words in its source, its destination and its image."""
    run, outer = _collapsed(shape, itemsize, [walk[2] for walk in walks], is_cast=is_cast)
    offsets = (*(walk[1] for walk in walks), run)
    return all(value % 4 == 0 for value in offsets) and all(step % 4 == 0 for dim in outer for step in dim[1:])


def has_words(rects: CopyTable) -> bool:
    """Return whether all rows of a table consist of words."""
    for row in rects.each():
        ndim = row[NDIM]
        shape, src, dst, image = (row[HEAD + ndim * part : HEAD + ndim * (part + 1)] for part in range(4))
        walks = ((0, row[SRC], src), (0, row[DST], dst), (0, row[IMAGE], image))
        if not are_words(shape, itemsize=row[ITEM], walks=walks, is_cast=bool(row[CAST])):
            return False
    return True


def build(rects: CopyTable, device: torch.device) -> DeviceTable:
    """Cut a table into blocks. Every row must consist of words; and all of them convert to bfloat16, or none."""
    groups = [_grouped(block) for index in range(len(rects)) for block in _blocks(rects.row(index))]
    table = np.concatenate(groups) if groups else np.zeros((0, COLUMNS), dtype=np.int64)
    is_aligned = bool(np.all(table[:, (1, 3)] % 16 == 0))
    by_group = table.reshape(-1, GROUP, COLUMNS)
    is_full = (by_group[:, :, 4] == BLOCK_WORDS).all(axis=1)
    full, rest = (torch.from_numpy(by_group[chosen].reshape(-1, COLUMNS)).to(device) for chosen in (is_full, ~is_full))
    is_cast = any(row[CAST] for row in rects.each())
    return DeviceTable(full, rest, rects.num_slots, is_cast, is_aligned)


def _collapsed(
    shape: Sequence[int], itemsize: int, walks: Sequence[Sequence[int]], *, is_cast: bool
) -> tuple[int, list[tuple[int, ...]]]:
    """Return the bytes of the innermost run, and the dimensions around it: extent, and the stride of each walk."""
    dims = [dim for dim in zip(shape, *walks, strict=True) if dim[0] != 1]
    run = itemsize
    while dims and dims[-1][1:] == (run * (1 + is_cast), run, run):
        run *= dims.pop()[0]
    return run, dims


def _blocks(row: Sequence[int]) -> Iterator[Numbers]:
    """Return the blocks of one row."""
    ndim = row[NDIM]
    shape = row[HEAD : HEAD + ndim]
    if 0 in shape:
        return
    walks = [row[HEAD + ndim * walk : HEAD + ndim * (walk + 1)] for walk in (1, 2, 3)]
    run, dims = _collapsed(shape, row[ITEM], walks, is_cast=bool(row[CAST]))
    offsets = np.array([[row[SRC], row[DST], row[IMAGE]]], dtype=np.int64)
    for extent, *strides in dims:
        steps = np.arange(extent, dtype=np.int64)[None, :, None] * np.array(strides, dtype=np.int64)
        offsets = (offsets[:, None, :] + steps).reshape(-1, 3)
    first = offsets[:, 2] // BLOCK_BYTES
    count = (offsets[:, 2] + run - 1) // BLOCK_BYTES - first + 1
    which = np.repeat(np.arange(len(offsets)), count)
    number = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    block = first[which] + number
    begin = np.maximum(block * BLOCK_BYTES, offsets[which, 2])
    end = np.minimum((block + 1) * BLOCK_BYTES, offsets[which, 2] + run)
    moved = begin - offsets[which, 2]
    table = np.empty((len(which), COLUMNS), dtype=np.int64)
    table[:, 0], table[:, 1] = row[SRC_BASE], offsets[which, 0] + moved * (1 + row[CAST])
    table[:, 2], table[:, 3] = row[DST_BASE], offsets[which, 1] + moved
    table[:, 4] = (end - begin) // 4 + ((begin % BLOCK_BYTES // 4) << 32)
    table[:, 5] = row[SLOT]
    weights = splitmix64_each(block.astype(np.uint64) + np.uint64(BLOCK_SALT)) | np.uint64(1)
    table[:, 6] = weights.view(np.int64)
    yield table


def _grouped(table: Numbers) -> Numbers:
    """Fill up with empty blocks to a whole number of groups."""
    missing = -len(table) % GROUP
    if not missing:
        return table
    filler = np.repeat(table[-1:], missing, axis=0)
    filler[:, 4] = 0
    return np.concatenate([table, filler])


@lru_cache(maxsize=16)
def _word_weights(device: torch.device) -> Tensor:
    return torch.from_numpy(WORD_WEIGHTS.astype(np.uint32).view(np.int32)).to(device)


def run(
    table: DeviceTable, sources: Sequence[int], targets: Sequence[int], *, copy: bool = True, digest: bool = True
) -> list[int]:
    """Copy every block, and return one digest for each slot ([] without `digest`). Waits until the device is done."""
    from forge.store.device_program import work

    device = table.full.device
    given = (*sources, *targets)
    is_aligned = table.is_aligned and not any(address % 16 for address in given)
    bases = table.bases.get(given)
    if bases is None:
        if len(table.bases) >= _MAX_BASES:
            table.bases.clear()
        bases = table.bases[given] = torch.tensor(given, dtype=torch.int64, device=device)
    sums = torch.zeros(max(1, table.num_slots), dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        for blocks in (table.full, table.rest):
            if not len(blocks):
                continue
            work[(len(blocks) // GROUP,)](
                blocks,
                bases,
                bases[len(sources) :],
                _word_weights(device),
                sums,
                COPY=copy,
                DIGEST=digest,
                ALIGNED=is_aligned,
                FULL=blocks is table.full,
                CAST=table.is_cast,
                PER=GROUP,
                WORDS=BLOCK_WORDS,
                num_warps=4,
            )
        if not digest:
            torch.cuda.current_stream().synchronize()
            return []
    return [value % (1 << 64) for value in sums[: table.num_slots].tolist()]
