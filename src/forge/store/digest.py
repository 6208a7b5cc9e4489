"""The digest of tensors: it does not depend on how a tensor is laid out or sharded, and parts of it add up.

A tensor's digest is a weighted sum, modulo 2**64, over the 32-bit words of its row-major bytes. A shard contributes the
words, or the bytes of words, that it holds; the contributions of all shards, each element counted once, add up to the
tensor's digest. One changed word always changes it, since all weights are odd. Any other accident goes unseen with a
chance of about 2**-64, or 2**-33 at worst, when it touches nothing but the highest bit of words. It does not protect
against deliberate forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from forge.errors import StoreError
from forge.store import device_kernel, kernel
from forge.store.copy_table import CopyTable, byte_offset, row_major
from forge.store.proof import described_forms, pack_digests
from forge.store.sharding import Region
from forge.store.tensors import dtype_name


def digest_tensor(tensor: Tensor, region: Region | None = None, shape: Sequence[int] | None = None) -> int:
    """Return what this tensor contributes to the digest of the tensor of `shape` of which it is `region`; without them,
    its own digest.

    A tensor of whole words on a GPU is digested there. Any other tensor on a device is copied to the host first.
    """
    region, shape = _placed(tensor, region, shape)
    if tensor.numel() == 0:
        return 0
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_cpu:
        table = _table(tensor, region, shape)
        if tensor.is_cuda and tensor.data_ptr() % 4 == 0 and device_kernel.has_words(table):
            blocks = device_kernel.build(table, tensor.device)
            return device_kernel.run(blocks, [tensor.data_ptr()], [], copy=False)[0]
        tensor = tensor.cpu()
    return kernel.digest_only(_table(tensor, region, shape), [tensor.data_ptr()])[0]


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the digest that a version with these tensors has when it is published as they are. All are whole."""
    names = sorted(state)
    forms = described_forms({name: (dtype_name(state[name].dtype), tuple(state[name].shape)) for name in names})
    return hashlib.sha256(forms + pack_digests([digest_tensor(state[name]) for name in names])).hexdigest()


def _table(tensor: Tensor, region: Region, shape: tuple[int, ...]) -> CopyTable:
    itemsize = tensor.element_size()
    image = row_major(shape, itemsize)
    table = CopyTable()
    table.add(
        region.shape,
        itemsize=itemsize,
        src=(0, 0, [step * itemsize for step in tensor.stride()]),
        image=(0, byte_offset(region.offset, image), image),
    )
    return table


def _placed(tensor: Tensor, region: Region | None, shape: Sequence[int] | None) -> tuple[Region, tuple[int, ...]]:
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
    region = Region.whole(whole) if region is None else region
    inside = len(region.shape) == len(whole) and all(
        start >= 0 and start + size <= limit
        for start, size, limit in zip(region.offset, region.shape, whole, strict=True)
    )
    if region.shape != local or not inside:
        raise StoreError(
            "the tensor is not that part of the whole",
            path="region",
            value=f"{region} of {whole} for a tensor of shape {local}",
            rule="the region has the tensor's shape and lies inside the whole",
            repair="give the region that this tensor is and the shape of the whole tensor",
        )
    return region, whole
