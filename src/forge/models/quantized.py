"""The frozen weights below an adapter in 8 or 4 bits: make a model hold them, quantise and dequantise them.

The formats and kernels are those of bitsandbytes: row-wise int8 (`absmax / 127`), and NF4 in blocks of 64 values with
scales in float32, as QLoRA has it. Weights are always quantised on a CPU, from float32: the same file gives the same
bits in a trainer and a generator, in every precision and on every device.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from forge.config.adapter import BaseDtype
from forge.config.schema import ModelConfig
from forge.models.quantized_names import (
    BLOCK,
    INT8_PIECE,
    PACKED,
    SCALES,
    check_library,
    num_scales,
    packed_shape,
    quantized_slots,
)
from forge.models.weight_names import plain_name

_PIECE: Final = 1 << 20
"""Values that are quantised at once: what the library makes on the way is small, and stays in a processor's cache."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight in few bits, in the memory of its module."""

    packed: Tensor
    scales: Tensor
    shape: tuple[int, ...]
    base_dtype: BaseDtype

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in another precision, rounded once from float32. It is a copy."""
        if self.base_dtype == "nf4":
            return _from_nf4(self.packed, self.scales, self.shape, dtype)
        return _from_int8(self.packed, self.scales, dtype)

    @torch.no_grad()
    def store(self, weight: Tensor) -> None:
        """Quantise a weight, which is on a CPU, into this memory."""
        flat = weight.detach().float().contiguous()
        if self.base_dtype == "int8":
            _to_int8(flat, self.packed, self.scales)
        else:
            _to_nf4(flat, self.packed, self.scales)


def attach_quantized(model: nn.Module, config: ModelConfig, base_dtype: BaseDtype) -> None:
    """Replace the linear weights of a model that has no memory yet (device meta) by empty ones in few bits.

    The model then never exists in full precision. They are buffers: FSDP leaves them whole on every rank.
    """
    check_library(base_dtype)
    for slot in quantized_slots(config):
        path, _, name = slot.name.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, name, None)
        packed = torch.int8 if base_dtype == "int8" else torch.uint8
        forms = (
            (PACKED, packed_shape(slot.shape, base_dtype), packed),
            (SCALES, (num_scales(slot.shape, base_dtype),), torch.float32),
        )
        for suffix, shape, dtype in forms:
            empty = torch.empty(shape, dtype=dtype, device="meta")
            module.register_buffer(name + suffix, empty, persistent=False)
        module.quantized = {**module.quantized, name: (slot.shape, base_dtype)}


def find_quantized(module: nn.Module, name: str) -> QuantizedWeight | None:
    """Return a weight of a layer, if it is kept in few bits."""
    form = module.quantized.get(name)
    if form is None:
        return None
    return QuantizedWeight(getattr(module, name + PACKED), getattr(module, name + SCALES), *form)


def quantized_weights(parts: Sequence[nn.Module]) -> dict[str, QuantizedWeight]:
    """Return the weights of this rank that are kept in few bits, by the name that the whole weight has."""
    found: dict[str, QuantizedWeight] = {}
    for part in parts:
        for path, module in part.named_modules():
            for name in getattr(module, "quantized", ()):
                weight = find_quantized(module, name)
                assert weight is not None
                found[plain_name(f"{path}.{name}")] = weight
    return found


def quantized_tensors(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the tensors of these weights, by name."""
    return {
        name + suffix: tensor
        for name, weight in quantized_weights(parts).items()
        for suffix, tensor in ((PACKED, weight.packed), (SCALES, weight.scales))
    }


# ---- The library ---------------------------------------------------------------------------------------------------


@functools.cache
def _library() -> Any:
    """Return the operators of bitsandbytes, which are torch's once it is imported."""
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    before = log.level
    log.setLevel(logging.ERROR)  # it would warn that a fused product for CPUs is missing, which is not used here
    try:
        import bitsandbytes  # noqa: F401
    finally:
        log.setLevel(before)
    return torch.ops.bitsandbytes


def _to_int8(weight: Tensor, packed: Tensor, scales: Tensor) -> None:
    width = weight.shape[-1]
    rows, into = weight.view(-1, width), packed.view(-1, width)
    for start, end in _pieces(len(rows), max(1, _PIECE // width)):
        values, largest, _ = _library().int8_vectorwise_quant(rows[start:end])
        into[start:end].copy_(values.masked_fill(largest.unsqueeze(-1) == 0, 0))  # 0 / 0 is not a number
        scales[start:end].copy_(largest)


def _from_int8(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """By the library's own function, which makes float32, a piece at a time."""
    width = packed.shape[-1]
    rows, out = packed.view(-1, width), torch.empty(packed.shape, dtype=dtype, device=packed.device)
    into = out.view(-1, width)
    for start, end in _pieces(len(rows), max(1, INT8_PIECE // width)):
        into[start:end].copy_(_library().int8_vectorwise_dequant(rows[start:end], scales[start:end]))
    return out


def _to_nf4(weight: Tensor, packed: Tensor, scales: Tensor) -> None:
    flat = weight.view(-1)
    for start, end in _pieces(len(scales), _PIECE // BLOCK):
        values = flat[start * BLOCK : end * BLOCK]
        values = torch.nn.functional.pad(values, (0, (end - start) * BLOCK - len(values)))
        both, largest = _library().quantize_4bit(values, BLOCK, "nf4", torch.uint8)
        packed[start * BLOCK // 2 : end * BLOCK // 2].copy_(both.view(-1))
        scales[start:end].copy_(largest)


def _from_nf4(packed: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """By the library's kernel, in rows of one block: on a CPU with AVX-512 it misreads the scales of others."""
    narrow = dtype if dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
    blocks = _library().dequantize_4bit(packed.view(-1, 1), scales, BLOCK, "nf4", (len(scales), BLOCK), narrow)
    size = 1
    for extent in shape:
        size *= extent
    return blocks.view(-1)[:size].view(shape).to(dtype)


def _pieces(size: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, size)) for start in range(0, size, step)]
