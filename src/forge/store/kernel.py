"""Copies rectangles of memory and sums digests on the way, at the speed of memory.

Addresses are plain integers: the caller keeps the memory alive and answers for the bounds of every row. A small C
library that is compiled at first use does the work, or numpy where that is not possible or `FORGE_NATIVE=0` is set; the
results are the same, byte for byte.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final, Literal, Protocol

import numpy as np

from forge.errors import StoreError
from forge.kernels import native_build
from forge.kernels.native_build import FLAG_SETS
from forge.store.copy_table import (
    COPY,
    DIGEST,
    FROM_DST,
    SAMPLES,
    STREAM,
    CopyTable,
    PieceLocations,
    TableSlice,
)
from forge.store.portable import Bases, Portable
from forge.store.proof import WORD_WEIGHTS, Words

KERNEL: Final = native_build.Kernel(
    Path(__file__).with_name("kernel.c"), without="copies and digests are slower but the same"
)


def build(environ: Mapping[str, str], *, flag_sets: tuple[tuple[str, ...], ...] = FLAG_SETS) -> ctypes.CDLL:
    """Return the loaded kernel, from the cache if it is there. Prints nothing."""
    library = native_build.build(KERNEL, environ, flag_sets=flag_sets)
    address, number, flags = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.forge_set_weights.argtypes = [address]
    library.forge_run.argtypes = [address, address, number, number, address, address, address, flags]
    library.forge_sample.argtypes = [ctypes.c_uint64, *[address] * 4, number, ctypes.c_uint64, address]
    library.forge_check.argtypes = [address, address, number, *[address] * 4, ctypes.c_uint64, address, address]
    for function in ("forge_set_weights", "forge_run", "forge_sample", "forge_check"):
        getattr(library, function).restype = None
    weights = WORD_WEIGHTS.astype("<u4")
    library.forge_set_weights(weights.ctypes.data)
    return library


SWITCH: Final = "FORGE_NATIVE"
STREAM_BYTES: Final = 16 << 20
"""Copies of at least this size in total are written past the cache, which would not hold them anyway."""
SAMPLE_BYTES: Final = 8 * SAMPLES


class Engine(Protocol):
    """Carries out tables. Both engines give the same bytes and the same sums."""

    name: str

    def rows(self, part: TableSlice, bases: Bases, slots: Words, flags: int) -> None: ...
    def sample(self, base: int, locations: PieceLocations, seed: int) -> bytes: ...
    def check(
        self, rects: CopyTable, dst: array[int], locations: PieceLocations, samples: bytes, seed: int
    ) -> list[int]: ...


class Native:
    """Runs tables in the C library; the interpreter is free meanwhile."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def rows(self, part: TableSlice, bases: Bases, slots: Words, flags: int) -> None:
        src, dst = bases
        self._library.forge_run(
            *part.rects.addresses(), part.first, part.last, _address(src), _address(dst), slots.ctypes.data, flags
        )

    def sample(self, base: int, locations: PieceLocations, seed: int) -> bytes:
        drawn = np.empty(SAMPLE_BYTES * len(locations), dtype=np.uint8)
        columns = (locations.starts, locations.numels, locations.itemsizes, locations.numbers)
        addresses = [column.ctypes.data for column in columns]
        self._library.forge_sample(base, *addresses, len(locations), seed, drawn.ctypes.data)
        return drawn.tobytes()

    def check(
        self, rects: CopyTable, dst: array[int], locations: PieceLocations, samples: bytes, seed: int
    ) -> list[int]:
        differs = np.zeros(len(locations), dtype=np.uint8)
        expected = np.frombuffer(samples, dtype=np.uint8)
        addresses = [column.ctypes.data for column in (locations.starts, locations.numels, locations.numbers)]
        table = rects.addresses()
        self._library.forge_check(
            *table, len(rects), _address(dst), *addresses, seed, expected.ctypes.data, differs.ctypes.data
        )
        return [int(piece) for piece in np.flatnonzero(differs)]


def _address(bases: array[int]) -> int | None:
    return bases.buffer_info()[0] if bases else None


@cache
def _threads() -> ThreadPoolExecutor:
    """Return a pool that lasts as long as the process, with no more threads than processors."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="forge-copy")


os.register_at_fork(after_in_child=_threads.cache_clear)  # the threads stay with the parent


@cache
def _chosen() -> tuple[Engine, str | None]:
    """Return the engine of this process, decided at first use, and why it is not the native one."""
    return choose(os.environ.get(SWITCH, ""))


def choose(switch: str) -> tuple[Engine, str | None]:
    """Return the engine that this value of `FORGE_NATIVE` gives here and, unless it is the native one, why."""
    if switch not in ("", "0", "1"):
        raise StoreError(
            "unknown setting of the native kernel",
            path=SWITCH,
            value=switch,
            rule="0 (never), 1 or unset (when it can be compiled)",
            repair=f"unset {SWITCH}",
        )
    if switch == "0":
        return Portable(), f"{SWITCH}=0"
    try:
        return Native(build(os.environ)), None
    except native_build.NoNativeKernel as error:
        return Portable(), str(error)


def engine() -> Engine:
    return _chosen()[0]


def native() -> bool:
    """Return whether the C kernel does the work in this process; compile it if it is not compiled yet."""
    return why_not() is None


def why_not() -> str | None:
    """Return why the C kernel is not used, with the compiler's output if that was the reason; None if it is used."""
    return _chosen()[1]


def run(
    rects: CopyTable,
    src: Sequence[int],
    dst: Sequence[int],
    *,
    digest: bool,
    num_threads: int = 1,
    using: Engine | None = None,
) -> list[int]:
    """Copy every row and return one digest per slot, summed over the rows of that slot; [] without `digest`.

    Destinations that overlap each other or a source give undefined bytes.
    """
    bases = _bases(rects, src, dst)
    flags = COPY | (DIGEST if digest else 0) | (STREAM if rects.total_bytes >= STREAM_BYTES else 0)
    return _work(rects, bases, flags, num_threads, using)


def digest_only(
    rects: CopyTable,
    bases: Sequence[int],
    *,
    side: Literal["src", "dst"] = "src",
    num_threads: int = 1,
    using: Engine | None = None,
) -> list[int]:
    """Return the same digests as `run`, from the memory of one side alone, without copying.

    The source side of a row with a cast counts as what the cast would write.
    """
    if side == "src":
        return _work(rects, _bases(rects, bases, None), DIGEST, num_threads, using)
    return _work(rects, _bases(rects, None, bases), DIGEST | FROM_DST, num_threads, using)


def sample(base: int, locations: PieceLocations, *, seed: int, using: Engine | None = None) -> bytes:
    """Return a few elements of each piece of the segment at `base`: SAMPLE_BYTES per piece."""
    return (using or engine()).sample(base, locations, seed % (1 << 64))


def check_samples(
    rects: CopyTable,
    dst: Sequence[int],
    *,
    locations: PieceLocations,
    samples: bytes,
    seed: int,
    using: Engine | None = None,
) -> list[int]:
    """Return the pieces whose samples differ from the destination, as far as the rows cover the sampled elements.

    A row's slot is the piece that it copies from, as an index into `locations` and, times SAMPLE_BYTES, into `samples`;
    rows without a slot are not checked. The source side of every row must lie in the row-major memory of its piece.
    """
    bases = _bases(rects, None, dst)[1]
    if rects.num_slots > len(locations) or len(samples) != SAMPLE_BYTES * len(locations):
        raise StoreError(
            "the samples do not belong to these pieces",
            path="samples",
            value=f"{len(samples)} bytes for {len(locations)} locations and {rects.num_slots} slots",
            rule=f"{SAMPLE_BYTES} bytes per place, and a place for every slot",
            repair="use the locations and the samples of the version that was copied",
        )
    return (using or engine()).check(rects, bases, locations, samples, seed % (1 << 64))


def _bases(rects: CopyTable, src: Sequence[int] | None, dst: Sequence[int] | None) -> Bases:
    for name, given, needed in (("src", src, rects.num_src), ("dst", dst, rects.num_dst)):
        if given is not None and len(given) < needed:
            raise StoreError(
                "rows name a base address that was not given",
                path=name,
                value=f"{len(given)} addresses",
                rule=f"at least {needed}, as the table names them by index",
                repair="give the addresses in the order in which the table was built",
            )
    return array("Q", src or ()), array("Q", dst or ())


def _work(rects: CopyTable, bases: Bases, flags: int, num_threads: int, using: Engine | None) -> list[int]:
    chosen = using or engine()
    slices = rects.slices(num_threads)
    sums = [np.zeros(rects.num_slots, dtype=np.uint64) for _ in slices]
    if len(slices) == 1:
        chosen.rows(slices[0], bases, sums[0], flags)
    else:
        pool = _threads()
        jobs = [pool.submit(chosen.rows, part, bases, slots, flags) for part, slots in zip(slices, sums, strict=True)]
        for job in jobs:
            job.result()
    if not flags & DIGEST:
        return []
    totals: list[int] = np.add.reduce(sums, axis=0, dtype=np.uint64).tolist()
    return totals
