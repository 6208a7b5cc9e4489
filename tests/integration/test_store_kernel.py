"""Copying rectangles with their digest: every engine against a byte-by-byte reference."""

from __future__ import annotations

import math
import os
import random
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.errors import StoreError
from forge.kernels import native_build
from forge.store import kernel
from forge.store.copy_table import COPY, DIGEST, SAMPLES, STREAM, CopyTable, PieceLocations, TableSlice, row_major
from kernel_reference import Rectangle, digest_of_bytes, splitmix64, to_bf16

FLAGS = {"native": native_build.FLAG_SETS, "plain": (("-O3",),), "avx2": (("-O3", "-mavx2"),)}


@pytest.fixture(scope="module", params=["native", "plain", "avx2", "portable"])
def using(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> kernel.Engine:
    """The C kernel for this processor, without vector instructions, with older ones, and the numpy one."""
    if request.param == "portable":
        return kernel.Portable()
    if request.param == "avx2" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    return kernel.Native(kernel.build(environ, flag_sets=FLAGS[request.param]))


CALM = settings(
    derandomize=True, deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def memory(size: int, seed: int = 0) -> np.ndarray:
    return np.frombuffer(random.Random(seed).randbytes(size + 64), dtype=np.uint8).copy()


def address(array: np.ndarray, shift: int = 0) -> int:
    return array.ctypes.data + shift


def table(*rectangles: Rectangle) -> CopyTable:
    rects = CopyTable()
    for r in rectangles:
        rects.add(
            r.shape,
            itemsize=r.itemsize,
            src=(0, *r.src),
            dst=(0, *r.dst),
            image=None if r.slot < 0 else (r.slot, *r.image),
            cast=r.cast,
        )
    return rects


@st.composite
def strides(draw: st.DrawFn, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Without overlap: the dimensions in any order, with gaps."""
    order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else list(range(len(shape)))
    found = [0] * len(shape)
    step = itemsize
    for dim in reversed(order):
        step *= draw(st.sampled_from((1, 1, 1, 2, 3)))
        found[dim] = step
        step *= max(1, shape[dim])
    return tuple(found)


@st.composite
def rectangles(draw: st.DrawFn) -> Rectangle:
    shape = tuple(draw(st.lists(st.sampled_from((0, 1, 2, 3, 5, 9)), max_size=4)))
    if draw(st.booleans()):
        shape = (*shape[:2], draw(st.integers(1, 70)))
    cast = draw(st.booleans()) and draw(st.booleans())
    itemsize = 2 if cast else draw(st.sampled_from((1, 2, 4, 8, 16)))
    whole = tuple(size + draw(st.sampled_from((0, 0, 0, 1, 7))) for size in shape)
    offset = draw(st.integers(0, 3000)) * itemsize
    return Rectangle(
        shape,
        itemsize,
        src=(draw(st.integers(0, 5)) * itemsize, draw(strides(shape, 4 if cast else itemsize))),
        dst=(draw(st.integers(0, 5)) * itemsize, draw(strides(shape, itemsize))),
        image=(offset, row_major(whole, itemsize)),
        cast=cast,
    )


@given(rectangle=rectangles(), shift=st.integers(0, 63), stream=st.booleans())
@CALM
def test_any_rectangle(using: kernel.Engine, rectangle: Rectangle, shift: int, stream: bool) -> None:
    src_size, dst_size = rectangle.extents()
    src, dst = memory(src_size, 1), memory(dst_size + 64, 2)
    expected = bytearray(dst.tobytes())
    image = bytearray(expected[shift:])
    digest = rectangle.apply(src.tobytes(), image)
    expected[shift:] = image
    rects, slots = table(rectangle), np.zeros(1, dtype=np.uint64)
    bases = kernel._bases(rects, [address(src)], [address(dst, shift)])
    using.rows(TableSlice(rects, 0, 1), bases, slots, COPY | DIGEST | (STREAM if stream else 0))
    assert dst.tobytes() == bytes(expected)
    assert int(slots[0]) == digest
    assert kernel.digest_only(rects, [address(src)], using=using) == [digest]
    assert kernel.digest_only(rects, [address(dst, shift)], side="dst", using=using) == [digest]
    again = memory(dst_size + 64, 2)
    assert kernel.run(rects, [address(src)], [address(again, shift)], digest=False, using=using) == []
    assert again.tobytes() == bytes(expected)


@given(
    size=st.integers(0, 20_000),
    at=st.integers(0, 20_000),
    src_shift=st.integers(0, 63),
    dst_shift=st.integers(0, 63),
    stream=st.booleans(),
)
@settings(CALM, max_examples=60)
def test_runs_across_blocks(
    using: kernel.Engine, size: int, at: int, src_shift: int, dst_shift: int, stream: bool
) -> None:
    src, dst = memory(size + 64, 1), memory(size + 64, 2)
    expected = dst.copy()
    expected[dst_shift : dst_shift + size] = src[src_shift : src_shift + size]
    rects, slots = table(Rectangle((size,), 1, src=(0, (1,)), dst=(0, (1,)), image=(at, (1,)))), np.zeros(1, np.uint64)
    bases = kernel._bases(rects, [address(src, src_shift)], [address(dst, dst_shift)])
    for flags in (COPY | DIGEST, COPY):
        using.rows(TableSlice(rects, 0, 1), bases, slots, flags | (STREAM if stream else 0))
        assert (dst == expected).all()
        dst[:] = memory(size + 64, 2)
    assert int(slots[0]) == digest_of_bytes(src[src_shift : src_shift + size].tobytes(), at)


def test_rows_of_one_slot_add_up_and_rows_without_one_are_only_copied(using: kernel.Engine) -> None:
    src, dst = memory(64, 1), memory(64, 2)
    parts = [
        Rectangle((4,), 4, src=(16 * i, (4,)), dst=(16 * (2 - i), (4,)), image=(16 * i, (4,)), slot=slot)
        for i, slot in enumerate((2, 2, -1))
    ]
    rects = table(*parts)
    assert kernel.run(rects, [address(src)], [address(dst)], digest=True, using=using) == [
        0,
        0,
        digest_of_bytes(src[:32].tobytes()),
    ]
    assert dst[:48].tobytes() == src[32:48].tobytes() + src[16:32].tobytes() + src[:16].tobytes()


def test_slots_that_no_row_names_are_zero(using: kernel.Engine) -> None:
    assert kernel.run(CopyTable(num_slots=3), [], [], digest=True, using=using) == [0, 0, 0]


def test_cast_is_that_of_torch(using: kernel.Engine) -> None:
    """Every upper half of a word, with lower halves around the rounding boundary: denormals, infinities, NaNs, ties."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values, cast = torch.from_numpy(bits.view(np.float32)), torch.empty(len(bits), dtype=torch.bfloat16)
    rects = table(Rectangle((len(bits),), 2, src=(0, (4,)), dst=(0, (2,)), image=(0, (2,)), cast=True))
    digests = kernel.run(rects, [values.data_ptr()], [cast.data_ptr()], digest=True, using=using)
    is_nan = values.isnan()
    assert torch.equal(cast.view(torch.int16)[~is_nan], values.to(torch.bfloat16).view(torch.int16)[~is_nan])
    assert set(cast.view(torch.int16)[is_nan].tolist()) == {0x7FC0}
    assert digests == kernel.digest_only(rects, [cast.data_ptr()], side="dst", using=using)
    assert to_bf16(struct.pack("<f", 1.00390625)) == cast.new_tensor([1.0]).view(torch.uint8).numpy().tobytes()


def test_nine_dimensions_that_can_be_joined(using: kernel.Engine) -> None:
    shape = (2, 1, 2, 1, 3, 2, 1, 2, 2)
    src, dst = torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape), torch.zeros(shape, dtype=torch.int16)
    steps = row_major(shape, 2)
    rects = table(Rectangle(shape, 2, src=(0, steps), dst=(0, steps), image=(0, steps)))
    digests = kernel.run(rects, [src.data_ptr()], [dst.data_ptr()], digest=True, using=using)
    assert torch.equal(src, dst)
    assert digests == [digest_of_bytes(src.numpy().tobytes())]


def test_threads_share_one_huge_row_and_many_small_ones(using: kernel.Engine) -> None:
    big, width = 3 << 20, 5001
    src, dst = memory(2 * big, 1), np.zeros(2 * big, dtype=np.uint8)
    rows = [Rectangle((big,), 1, src=(0, (1,)), dst=(big, (1,)), image=(5, (1,)))]
    rows += [
        Rectangle((width,), 1, src=(at, (1,)), dst=(at - big, (1,)), image=(at, (1,)), slot=1 + at % 7)
        for at in range(big, 2 * big - width, width)
    ]
    rects = table(*rows)
    shares = rects.slices(4)
    assert len(shares) == 4
    loads = [sum(math.prod(share.rects.row(i)[9:10]) for i in range(share.first, share.last)) for share in shares]
    assert sum(loads) == rects.total_bytes
    assert max(loads) < 1.3 * rects.total_bytes / 4
    alone = kernel.run(rects, [address(src)], [address(dst)], digest=True, using=using)
    done, dst = dst, np.zeros_like(dst)
    assert kernel.run(rects, [address(src)], [address(dst)], digest=True, num_threads=4, using=using) == alone
    assert (done == dst).all()
    assert (dst[big : 2 * big] == src[:big]).all()


def test_one_table_may_run_in_several_threads(using: kernel.Engine) -> None:
    size = 1 << 20
    sources = [memory(size, seed) for seed in range(4)]
    targets = [np.zeros(size, dtype=np.uint8) for _ in sources]
    rects = table(Rectangle((size,), 1, src=(0, (1,)), dst=(0, (1,)), image=(0, (1,))))

    def work(i: int) -> list[int]:
        return kernel.run(rects, [address(sources[i])], [address(targets[i])], digest=True, num_threads=2, using=using)

    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(work, range(4)))
    assert digests == [kernel.digest_only(rects, [address(source)], using=using) for source in sources]
    assert all((target == source[:size]).all() for target, source in zip(targets, sources, strict=True))


def test_a_forked_child_has_threads_of_its_own() -> None:
    program = """
import os, numpy as np
from forge.store import kernel
from forge.store.copy_table import CopyTable
size = 1 << 20
src, dst = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
rects = CopyTable()
rects.add((size,), itemsize=1, src=(0, 0, (1,)), dst=(0, 0, (1,)), image=(0, 0, (1,)))
run = lambda: kernel.run(rects, [src.ctypes.data], [dst.ctypes.data], digest=True, num_threads=2)
before = run()
child = os.fork()
if child == 0:
    os._exit(0 if run() == before else 3)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=600)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"itemsize": 3}, "itemsize"),
        ({"itemsize": 4, "cast": True}, "itemsize"),
        ({"dst": (0, 0, (4, 4))}, "strides"),
        ({"image": (0, 0, ())}, "strides"),
    ],
)
def test_rows_that_make_no_sense_are_refused(change: dict[str, object], path: str) -> None:
    row: dict[str, object] = {"itemsize": 4, "src": (0, 0, (4,)), "dst": (0, 0, (4,)), "image": (0, 0, (4,))}
    with pytest.raises(StoreError) as caught:
        CopyTable().add((5,), **(row | change))  # type: ignore[arg-type]
    assert caught.value.path == path
    assert caught.value.rule
    assert caught.value.repair


def test_nine_dimensions_with_gaps_are_refused() -> None:
    walk = (0, 0, tuple(3**d for d in reversed(range(9))))
    with pytest.raises(StoreError, match="too many dimensions") as caught:
        CopyTable().add((2,) * 9, itemsize=1, src=walk, dst=walk, image=walk)
    assert caught.value.value == (2,) * 9


def test_missing_bases_are_refused(using: kernel.Engine) -> None:
    rects = CopyTable()
    rects.add((1,), itemsize=1, src=(1, 0, (1,)), dst=(2, 0, (1,)))
    with pytest.raises(StoreError) as caught:
        kernel.run(rects, [1], [1, 1, 1], digest=False, using=using)
    assert (caught.value.path, caught.value.value) == ("src", "1 addresses")
    with pytest.raises(StoreError) as caught:
        kernel.digest_only(rects, [1, 1], side="dst", using=using)
    assert caught.value.path == "dst"


SEED = (1 << 64) - 5


def stored_pieces() -> tuple[np.ndarray, PieceLocations, list[tuple[int, int, int]]]:
    """A segment of pieces that are 12 x 10 matrices of every item size, and an empty one."""
    pieces, start = [], 256
    for itemsize in (1, 2, 4, 8, 16):
        pieces.append((start, 120, itemsize))
        start += -(-120 * itemsize // 256) * 256
    pieces.append((start, 0, 4))
    starts, numels, itemsizes = zip(*pieces, strict=True)
    return memory(start, 3), PieceLocations.of(starts, numels=numels, itemsizes=itemsizes), pieces


def test_samples_are_elements_of_their_pieces(using: kernel.Engine) -> None:
    segment, places, pieces = stored_pieces()
    drawn = kernel.sample(address(segment), places, seed=SEED, using=using)
    expected = b""
    for number, (start, numel, itemsize) in enumerate(pieces):
        for j in range(SAMPLES):
            at = start + splitmix64((SEED + SAMPLES * number + j) % (1 << 64)) % max(1, numel) * itemsize
            element = segment[at : at + min(8, itemsize)].tobytes() if numel else b""
            expected += element.ljust(8, b"\0")
    assert drawn == expected


def fetched(places: PieceLocations, columns: range) -> CopyTable:
    """Those columns of every piece, into transposed destinations."""
    rects = CopyTable(num_slots=len(places))
    for piece, (start, numel, itemsize) in enumerate(
        zip(places.starts.tolist(), places.numels.tolist(), places.itemsizes.tolist(), strict=True)
    ):
        shape = (12 if numel else 0, len(columns))
        src = (0, start + columns.start * itemsize, (10 * itemsize, itemsize))
        image = row_major((12, 10), itemsize)
        rects.add(
            shape,
            itemsize=itemsize,
            src=src,
            dst=(piece, 0, (itemsize, 12 * itemsize)),
            image=(piece, columns.start * itemsize, image),
        )
    return rects


@pytest.mark.parametrize("columns", [range(10), range(3, 8), range(9, 10), range(1)])
def test_a_changed_sample_is_found_where_it_was_copied_to(using: kernel.Engine, columns: range) -> None:
    segment, places, pieces = stored_pieces()
    drawn = kernel.sample(address(segment), places, seed=SEED, using=using)
    rects, targets = fetched(places, columns), [memory(120 * 16, 4) for _ in pieces]
    bases = [address(target) for target in targets]
    kernel.run(rects, [address(segment)], bases, digest=False, using=using)

    def check() -> list[int]:
        return kernel.check_samples(rects, bases, locations=places, samples=drawn, seed=SEED, using=using)

    assert check() == []
    seen = 0
    for piece, (_, numel, itemsize) in enumerate(pieces):
        chosen = {splitmix64((SEED + SAMPLES * piece + j) % (1 << 64)) % max(1, numel) for j in range(SAMPLES)}
        for position in range(numel):
            row, column = divmod(position, 10)
            if column not in columns:
                continue
            at = (row + 12 * (column - columns.start)) * itemsize
            targets[piece][at] ^= 1
            assert check() == ([piece] if position in chosen else [])
            seen += position in chosen
            targets[piece][at] ^= 1
    assert seen or len(columns) == 1


def test_samples_of_several_segments_keep_their_own_numbers(using: kernel.Engine) -> None:
    """A reader that copies the third piece of one segment and the first of another."""
    segment, places, pieces = stored_pieces()
    drawn = kernel.sample(address(segment), places, seed=7, using=using)
    starts, numels, itemsizes = zip(pieces[2], pieces[0], strict=True)
    chosen = PieceLocations.of(starts, numels=numels, itemsizes=itemsizes, numbers=[2, 0])
    size = kernel.SAMPLE_BYTES
    samples = drawn[2 * size : 3 * size] + drawn[:size]
    rects, targets = fetched(chosen, range(10)), [memory(120 * 16, 4) for _ in range(2)]
    bases = [address(target) for target in targets]
    kernel.run(rects, [address(segment)], bases, digest=False, using=using)
    check = {"locations": chosen, "seed": 7, "using": using}
    assert kernel.check_samples(rects, bases, samples=samples, **check) == []
    assert kernel.check_samples(rects, bases, samples=bytes(2 * size), **check) == [0, 1]


def test_samples_see_through_a_cast(using: kernel.Engine) -> None:
    values, cast = torch.randn(40, generator=torch.Generator().manual_seed(0)), torch.empty(40, dtype=torch.bfloat16)
    rects = table(Rectangle((40,), 2, src=(0, (4,)), dst=(0, (2,)), image=(0, (2,)), cast=True))
    places = PieceLocations.of([0], numels=[40], itemsizes=[4])
    drawn = kernel.sample(values.data_ptr(), places, seed=1, using=using)
    kernel.run(rects, [values.data_ptr()], [cast.data_ptr()], digest=False, using=using)
    check = {"locations": places, "samples": drawn, "seed": 1, "using": using}
    assert kernel.check_samples(rects, [cast.data_ptr()], **check) == []
    cast.neg_()
    assert kernel.check_samples(rects, [cast.data_ptr()], **check) == [0]


def test_samples_of_other_pieces_are_refused(using: kernel.Engine) -> None:
    _, places, _ = stored_pieces()
    with pytest.raises(StoreError, match="do not belong") as caught:
        kernel.check_samples(
            fetched(places, range(10)), [0] * 6, locations=places, samples=bytes(32), seed=0, using=using
        )
    assert caught.value.path == "samples"
