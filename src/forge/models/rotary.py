"""Rotary embeddings in the half-rotated order that Hugging Face checkpoints use, for every family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchtitan.models.common.rope import CosSinRoPE

from forge.kernels import cpu_layers
from forge.kernels.cpu_linear import is_rowwise
from forge.models import gpu_layers


class Rotary(CosSinRoPE):  # type: ignore[misc]
    """TorchTitan's rotary embedding, with Llama 3's stretching, and in no less precision than its input.

    Llama's own order of dimensions would need its weights permuted on the way in and out; this one takes them as they
    are, so that what the trainer holds is what the file holds.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):  # type: ignore[misc]
        pass

    def _precompute_cache(self) -> Tensor:
        config = self.config
        exponents = torch.arange(0, config.dim, 2, dtype=torch.int64).float() / config.dim
        frequencies = 1.0 / (config.theta**exponents)
        if config.scaling == "llama":
            frequencies = _stretched(frequencies, config)
        angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32), frequencies)
        both_halves = torch.cat([angles, angles], dim=-1)
        return torch.cat([both_halves.cos(), both_halves.sin()], dim=-1)

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotate query and key [1, L, N, H] to their positions: by one kernel, but on a GPU only without gradients."""
        if positions is not None and not torch.is_grad_enabled() and self.cache.is_contiguous():
            if is_rowwise(query) and cpu_layers.rotates(query) and cpu_layers.rotates(key):
                on_cpu = [cpu_layers.rotated(heads[0], self.cache, positions[0]) for heads in (query, key)]
                return on_cpu[0].unsqueeze(0), on_cpu[1].unsqueeze(0)
            if len(query) == 1 and gpu_layers.rotates(query) and gpu_layers.rotates(key):
                on_gpu = gpu_layers.rotated(query[0], key[0], self.cache, positions[0])
                return on_gpu[0].unsqueeze(0), on_gpu[1].unsqueeze(0)
        if positions is not None and torch.is_grad_enabled() and _has_cpu_kernel(query, key, self.cache):
            places = positions[0].contiguous()
            return _Rotated.apply(query, self.cache, places), _Rotated.apply(key, self.cache, places)
        both: tuple[Tensor, Tensor] = super().forward(query, key, positions)
        return both

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rope_cache.chunk(2, dim=-1)
        return _rotated(query, cos, sin), _rotated(key, cos, sin)


def _has_cpu_kernel(query: Tensor, key: Tensor, table: Tensor) -> bool:
    """Whether `forge.kernels.cpu_layers` rotates them, with gradients."""
    heads = all(is_rowwise(tensor) and len(tensor) == 1 and cpu_layers.rotates(tensor) for tensor in (query, key))
    return heads and is_rowwise(table) and bool(table.is_contiguous())


class _Rotated(torch.autograd.Function):  # type: ignore[misc]
    """Of [1, L, N, H]. The bits are those of `_rotated`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, positions_L: Tensor) -> Tensor:
        ctx.save_for_backward(table, positions_L)
        return cpu_layers.rotated(x[0], table, positions_L).unsqueeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        table, positions_L = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        return cpu_layers.rotated(grad[0], table, positions_L, backward=True).unsqueeze(0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * cos + CosSinRoPE._rotate_half(wide) * sin).type_as(x)


def _stretched(frequencies: Tensor, config: CosSinRoPE.Config) -> Tensor:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, those between blended."""
    waves = 2 * math.pi / frequencies
    longest = config.original_max_position_embeddings / config.low_freq_factor
    shortest = config.original_max_position_embeddings / config.high_freq_factor
    blend = (config.original_max_position_embeddings / waves - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - blend) * frequencies / config.scaling_factor + blend * frequencies
    result = torch.where(waves > longest, frequencies / config.scaling_factor, between)
    return torch.where(waves < shortest, frequencies, result)
