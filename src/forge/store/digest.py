"""The digest of tensors: it does not depend on how a tensor is laid out or sharded, and parts of it add up.

A tensor's digest is a weighted sum, modulo 2**64, over the 32-bit words of its row-major bytes. A shard contributes the
words, or the bytes of words, that it holds; the contributions of all shards, each element counted once, add up to the
tensor's digest. One changed word always changes it, since all weights are odd. Any other accident goes unseen with a
chance of about 2**-64, or 2**-33 at worst, when it touches nothing but the highest bit of words. It is no protection
against somebody who wants to deceive.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from forge.errors import StoreError
from forge.store import kernel, weighing
from forge.store.boxes import Box

DENSE_STEP_BYTES: Final = 8 << 20
SPARSE_STEP_ELEMENTS: Final = 1 << 19
"""How much of a tensor is worked on at once on a device: either way about 64 MB of temporary memory at most."""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOW_WORD: Final = 0xFFFFFFFF


def digest_tensor(tensor: Tensor, box: Box | None = None, shape: Sequence[int] | None = None) -> int:
    """What this tensor contributes to the digest of the tensor of `shape` of which it is `box`; without them: its own.

    The data stays where it is: on another device than the CPU the sum is made there, in steps of bounded memory.
    """
    box, shape = _placed(tensor, box, shape)
    if tensor.numel() == 0:
        return 0
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        return digest_on_device(tensor, box=box, shape=shape)
    itemsize = tensor.element_size()
    image = kernel.row_major(shape, itemsize)
    rects = kernel.Rects()
    rects.add(
        box.shape,
        itemsize=itemsize,
        src=(0, 0, [step * itemsize for step in tensor.stride()]),
        image=(0, kernel.byte_offset(box.offset, image), image),
    )
    return kernel.digest_only(rects, [tensor.data_ptr()])[0]


def _placed(tensor: Tensor, box: Box | None, shape: Sequence[int] | None) -> tuple[Box, tuple[int, ...]]:
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise StoreError(
            "a tensor without plain memory has no digest",
            path="tensor",
            value=f"{tensor.layout} on {tensor.device}",
            rule="a strided tensor with data",
            repair="make it dense, or give it data, first",
        )
    local = tuple(tensor.shape)
    whole = local if shape is None else tuple(shape)
    box = Box.whole(whole) if box is None else box
    inside = len(box.shape) == len(whole) and all(
        start >= 0 and start + size <= limit for start, size, limit in zip(box.offset, box.shape, whole, strict=True)
    )
    if box.shape != local or not inside:
        raise StoreError(
            "the tensor is not that part of the whole",
            path="box",
            value=f"{box} of {whole} for a tensor of shape {local}",
            rule="the box has the tensor's shape and lies inside the whole",
            repair="give the box that this tensor is and the shape of the whole tensor",
        )
    return box, whole


def digest_on_device(tensor: Tensor, *, box: Box, shape: Sequence[int]) -> int:
    """The same contribution by torch operations on the tensor's own device; one number travels to the host."""
    shape, offset, extent = tuple(shape), box.offset, box.shape
    if tensor.element_size() == 16:
        tensor, shape, offset, extent = torch.view_as_real(tensor), (*shape, 2), (*offset, 0), (*extent, 2)
    itemsize = tensor.element_size()
    bits = tensor.view(_INTEGERS[itemsize])
    image = kernel.row_major(shape, itemsize)
    start = kernel.byte_offset(offset, image)
    dims = _joined(extent, bits.stride(), image)
    span = 1 + sum((size - 1) * step for size, step, _ in dims)
    flat = bits.as_strided((span,), (1,))
    if not dims or (len(dims) == 1 and dims[0][1:] == (1, itemsize)):
        return _dense(flat.view(torch.uint8), start)
    return _sparse(flat, dims, start)


def _joined(shape: Sequence[int], steps: Sequence[int], image: Sequence[int]) -> list[tuple[int, int, int]]:
    """(size, element stride, image byte stride) of the fewest dimensions that walk the same way."""
    dims: list[tuple[int, int, int]] = []
    for size, step, image_step in zip(shape, steps, image, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (size * step, size * image_step):
            dims[-1] = (dims[-1][0] * size, step, image_step)
        else:
            dims.append((size, step, image_step))
    return dims


def _dense(data: Tensor, start: int) -> int:
    """Bytes that follow each other in memory and in the image: block by block."""
    block_bytes = 4 * weighing.BLOCK_WORDS
    weights = _word_weights(data.device)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    first, end = start // block_bytes, start + data.numel()
    step = DENSE_STEP_BYTES // block_bytes
    for block in range(first, -(-end // block_bytes), step):
        low, high = max(start, block * block_bytes), min(end, (block + step) * block_bytes)
        num_blocks = -(-high // block_bytes) - block
        words = torch.zeros(num_blocks * weighing.BLOCK_WORDS, dtype=torch.int32, device=data.device)
        words.view(torch.uint8)[low - block * block_bytes : high - block * block_bytes] = data[
            low - start : high - start
        ]
        sums = words.to(torch.int64).bitwise_and_(_LOW_WORD).view(num_blocks, -1).mul_(weights).sum(1)
        total += (sums * _block_weights(torch.arange(block, block + num_blocks, device=data.device))).sum()
    return int(total.item()) & weighing.MASK


def _sparse(flat: Tensor, dims: Sequence[tuple[int, int, int]], start: int) -> int:
    """Elements anywhere: each is fetched from its place and weighed by its place in the image."""
    itemsize = flat.element_size()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    numel = 1
    for size, _, _ in dims:
        numel *= size
    for low in range(0, numel, SPARSE_STEP_ELEMENTS):
        left = torch.arange(low, min(numel, low + SPARSE_STEP_ELEMENTS), device=flat.device)
        place, image = torch.zeros_like(left), torch.full_like(left, start)
        for size, step, image_step in reversed(dims):
            index = left % size
            left = left // size
            place += index * step
            image += index * image_step
        del left, index
        values = flat[place].to(torch.int64)
        if itemsize < 4:
            words = (values & ((1 << 8 * itemsize) - 1)) << (8 * (image & 3))
            total += _weighed(words, image >> 2)
        else:
            total += _weighed(values & _LOW_WORD, image >> 2)
        if itemsize == 8:
            total += _weighed((values >> 32) & _LOW_WORD, (image >> 2) + 1)
    return int(total.item()) & weighing.MASK


def _weighed(words: Tensor, at: Tensor) -> Tensor:
    weights = _word_weights(words.device)[at % weighing.BLOCK_WORDS]
    return (words * weights * _block_weights(at // weighing.BLOCK_WORDS)).sum()


@lru_cache(maxsize=64)
def _word_weights(device: torch.device) -> Tensor:
    return torch.from_numpy(weighing.WORD_WEIGHTS.astype("int64")).to(device)


def _block_weights(blocks: Tensor) -> Tensor:
    """`weighing.block_weight` of each; int64 arithmetic wraps around like that of 64-bit words."""
    x = blocks + _signed(weighing.BLOCK_SALT) + _signed(weighing.STEP)
    x = (x ^ _shifted(x, 30)) * _signed(weighing.FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(weighing.SECOND)
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
