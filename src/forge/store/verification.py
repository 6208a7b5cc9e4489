"""Whether what arrived is what was published."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from forge.errors import StoreError, WeightMismatch
from forge.store import device_kernel, kernel
from forge.store.copy_table import CopyTable, PieceLocations, byte_offset, row_bytes, row_major
from forge.store.fetch_plan import Catalog, published_digests
from forge.store.proof import MODULUS, sample_seed
from forge.store.records import Version

Verify = Literal["cheap", "full", "off"]
"""How a reader checks what it got.

- `cheap`: pieces that are read whole are digested while they are copied, of others a few elements are compared. The
  memory that was filled is not read again.
- `full`: the digest of what is in the reader's memory afterwards is compared, and of pieces that are read in part the
  source is digested too.
- `off`: nothing but that the segment was not overwritten meanwhile.
"""


def check_verify(path: str, value: object) -> Verify:
    if value not in get_args(Verify):
        raise StoreError(
            "this way to verify does not exist",
            path=path,
            value=value,
            rule=f"one of {', '.join(get_args(Verify))}",
            repair="verify='cheap'",
        )
    return value  # type: ignore[return-value]


def compare_digests(catalog: Catalog, version: Version, found: Sequence[int], times: dict[int, int]) -> set[str]:
    """Return the tensors whose digests differ from what was published, for slots that were read whole so many times."""
    published = published_digests(version.parts)
    return {catalog.owner[slot] for slot, count in times.items() if found[slot] != published[slot] * count % MODULUS}


def compare_samples(
    catalog: Catalog, version: Version, tables: Iterable[CopyTable], targets: Sequence[int], slots: Iterable[int]
) -> set[str]:
    """Return the tensors of which a sampled element differs in the reader's memory. Parts on a GPU have no samples."""
    wanted = {slot for slot in slots if version.parts[part_of_slot(catalog, slot)].samples}
    if not wanted:
        return set()
    samples = b"".join(part.samples or bytes(kernel.SAMPLE_BYTES * (len(part.digests) // 8)) for part in version.parts)
    seed = sample_seed(version.key, version.number)
    differ: set[str] = set()
    for table in tables:
        if len(table):
            wrong = kernel.check_samples(table, targets, locations=catalog.locations, samples=samples, seed=seed)
            differ |= {catalog.owner[slot] for slot in wrong if slot in wanted}
    return differ


def check_part(catalog: Catalog, version: Version, index: int, *, address: int, verify: Verify) -> set[str]:
    """Return the tensors of one part that are not in its memory as they were published."""
    part = version.parts[index]
    first, count = catalog.first_slot[index], len(part.digests) // 8
    differ: set[str] = set()
    if verify == "full":
        table = digest_table(catalog, index, range(first, first + count))
        found = kernel.digest_only(table, [address], num_threads=torch.get_num_threads())
        published = published_digests((part,))
        differ |= {
            catalog.owner[first + number] for number in range(count) if found[first + number] != published[number]
        }
    elif verify == "cheap" and part.samples:
        locations = part_locations(catalog, first, count)
        found_bytes = kernel.sample(address, locations, seed=sample_seed(version.key, version.number))
        size = kernel.SAMPLE_BYTES
        differ |= {
            catalog.owner[first + number]
            for number in range(count)
            if found_bytes[number * size : (number + 1) * size] != part.samples[number * size : (number + 1) * size]
        }
    return differ


def check_slots(catalog: Catalog, version: Version, index: int, slots: Sequence[int], *, address: int) -> set[str]:
    """Return the tensors of which a piece, one of these of one part, has not the digest that was published."""
    found = kernel.digest_only(digest_table(catalog, index, slots), [address], num_threads=torch.get_num_threads())
    return compare_digests(catalog, version, found, dict.fromkeys(slots, 1))


def check_part_on_device(catalog: Catalog, version: Version, index: int, memory: Tensor) -> set[str]:
    """Check a part in the memory of a GPU as `check_part` does. It is always digested whole: that is fast."""
    part = version.parts[index]
    first, count = catalog.first_slot[index], len(part.digests) // 8
    slots = range(first, first + count)
    table = catalog.device_tables.get(index)
    if table is None:
        rects = digest_table(catalog, index, slots)
        if not device_kernel.has_words(rects):
            copied = memory.cpu()
            return check_part(catalog, version, index, address=copied.data_ptr(), verify="full")
        table = catalog.device_tables[index] = device_kernel.build(rects, memory.device)
    found = device_kernel.run(table, [memory.data_ptr()], [], copy=False)
    return compare_digests(catalog, version, found, dict.fromkeys(slots, 1))


def part_of_slot(catalog: Catalog, slot: int) -> int:
    """Return which part a slot belongs to."""
    return bisect_right(catalog.first_slot, slot) - 1


def part_locations(catalog: Catalog, first: int, count: int) -> PieceLocations:
    columns = catalog.locations
    cut = slice(first, first + count)
    return PieceLocations(columns.starts[cut], columns.numels[cut], columns.itemsizes[cut], columns.numbers[cut])


def digest_table(catalog: Catalog, index: int, slots: Iterable[int]) -> CopyTable:
    """Return a table that digests whole stored pieces of one part, whose memory is base 0."""
    wanted = frozenset(slots)
    table = CopyTable(num_slots=catalog.num_slots)
    for entry in catalog.entries.values():
        for stored, slot in zip(entry.stored, entry.slots, strict=True):
            if slot not in wanted or stored.part != index:
                continue
            size = int(catalog.locations.itemsizes[slot])
            strides = row_major(entry.shape, size)
            image = (slot, byte_offset(stored.region.offset, strides), strides)
            source = (0, stored.start, row_major(stored.region.shape, size))
            table.add(stored.region.shape, itemsize=size, src=source, image=image)
    return table


def table_of(rows: Iterable[list[int]], *, num_slots: int) -> CopyTable:
    """Return a table from plain numbers, as they come from another process."""
    table = CopyTable(num_slots=num_slots)
    for row in rows:
        table.append_row(row, row_bytes(row))
    return table


def raise_if_any(version: Version, names: set[str], *, why: str) -> None:
    """Raise `WeightMismatch` for these tensors, if there are any."""
    if not names:
        return
    tensors = sorted(names)
    shown = ", ".join(tensors[:8]) + (f" and {len(tensors) - 8} more" if len(tensors) > 8 else "")
    raise WeightMismatch(
        f"{len(tensors)} tensor(s) of version {version.number} of {version.key!r} are not what was published: {shown}",
        tensors=tensors,
        path=version.key,
        value=version.number,
        rule=why,
        repair="fetch again; if that fails too, publish again and look for a process that writes into shared memory",
    )
