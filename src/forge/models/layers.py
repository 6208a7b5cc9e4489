"""Layers whose results for a token do not depend on its batch: products, norms, gates, experts, rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE

from forge.kernels import cpu_layers
from forge.kernels.cpu_linear import is_rowwise, product
from forge.kernels.cpu_step import LowRank
from forge.models import gpu_layers
from forge.models.adapter_segments import LIVE, AdapterSegment, StepSegments
from forge.models.quantized import QuantizedWeight, find_quantized
from forge.models.sizes import GROUP_MULTIPLE

_STACKS = ("w1_EFD", "w2_EDF", "w3_EFD")


def rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias over the last dimension of `x`.

    In float32 on a CPU a row has the same bits whatever else `x` holds, with and without gradients: both are computed
    by `forge.kernels.cpu_linear`. Gradients are torch's own products. Elsewhere, and for DTensors, it is torch's layer.
    """
    num_rows = x.numel() // max(x.shape[-1], 1)
    if num_rows == 0 or not (is_rowwise(x) and is_rowwise(weight)):
        return F.linear(x, weight, bias)
    rows = x.reshape(num_rows, x.shape[-1])
    wants_gradient = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    found: Tensor = _Product.apply(rows, weight) if wants_gradient else product(rows, weight)
    found = found if bias is None else found + bias
    return found.view(*x.shape[:-1], weight.shape[0])


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        return product(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_rows = grad.mm(weight) if ctx.needs_input_grad[0] else None
        of_weight = grad.t().mm(rows) if ctx.needs_input_grad[1] else None
        return of_rows, of_weight


class _QuantizedProduct(torch.autograd.Function):  # type: ignore[misc]
    """The product with a frozen weight in few bits. It is dequantised again for the backward pass, and never kept.

    The weight is not an input of the graph: hooks on saved tensors would copy it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight) -> Tensor:
        ctx.weight, ctx.dtype = weight, x.dtype
        return rows_linear(x, weight.dequantize(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight = ctx.weight.dequantize(ctx.dtype)
        return grad.reshape(-1, grad.shape[-1]).mm(weight).view(*grad.shape[:-1], weight.shape[-1]), None


class RowLinear(Linear):  # type: ignore[misc]
    """TorchTitan's linear layer by `rows_linear`: what a token gets does not depend on its batch.

    `forge.models.adapters` may give it a LoRA adapter: `lora_a` [r, in] and `lora_b` [out, r]. In a generator it may
    have more, by number; `segments` then says which rows of a step are whose. Below it, `forge.models.quantized` may
    keep the weight in few bits.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.register_parameter("lora_a", None)
        self.register_parameter("lora_b", None)
        self.lora_scale = 1.0
        self.is_adapter_on = True
        self.adapters: dict[int, LowRank] = {}
        self.segments: StepSegments | None = None
        self.quantized: dict[str, Any] = {}

    def forward(self, input: Tensor) -> Tensor:
        base = find_quantized(self, "weight")
        if base is None:
            out = rows_linear(input, self.weight, self.bias)
        else:
            out = _QuantizedProduct.apply(input, base)
            out = out if self.bias is None else out + self.bias
        if self.segments is not None and self.segments.current:
            return self._add_updates(input, out, self.segments.current)
        if self.lora_a is None or not self.is_adapter_on:
            return out
        if isinstance(out, DTensor):
            return out + self._split_update(input, out)
        return out + low_rank(input, self.lora_a, self.lora_b, self.lora_scale)

    def adapter(self, number: int) -> LowRank | None:
        """Return what an adapter adds; None if it adds nothing here."""
        if number == LIVE and self.lora_a is not None and self.is_adapter_on:
            return LowRank(self.lora_a, self.lora_b, self.lora_scale)
        return self.adapters.get(number)

    def _add_updates(self, input: Tensor, out: Tensor, segments: Sequence[AdapterSegment]) -> Tensor:
        """Add to the rows of each segment what its adapter adds, in place."""
        for segment in segments:
            own = self.adapter(segment.adapter)
            if own is not None:
                rows = slice(segment.start, segment.end)
                out[:, rows] += low_rank(input[:, rows], own.a, own.b, own.scale)
        return out

    def _split_update(self, input: Tensor, out: DTensor) -> DTensor:
        """Return what the adapter adds on tensor parallel ranks, laid out as what it is added to.

        Each rank computes with its own part of one matrix and the whole other one, whose gradient is then a part of the
        sum. Where the inputs are split, so is the sum that the layer computes: no rank waits for another here.
        """
        mesh, splits = self.weight.device_mesh, self.weight.placements
        grads = [Partial() if split.is_shard(0) else own for split, own in zip(splits, input.placements, strict=True)]
        update = low_rank(
            input.to_local(grad_placements=grads),
            _local_beside(self.lora_a, self.weight),
            _local_beside(self.lora_b, self.weight),
            self.lora_scale,
        )
        return DTensor.from_local(update, mesh, out.placements, run_check=False)


def low_rank(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return (scale * x a^T) b^T: what an adapter adds. Its matrices may be kept in a wider dtype than `x`."""
    return rows_linear(rows_linear(x, a.to(x.dtype)) * scale, b.to(x.dtype))


def _local_beside(matrix: Tensor, weight: Tensor) -> Tensor:
    """Return this rank's part of an adapter's matrix, with a gradient that is summed where only the weight is split."""
    placements = zip(matrix.placements, weight.placements, strict=True)
    grads = [Partial() if own.is_replicate() and not other.is_replicate() else own for own, other in placements]
    return matrix.to_local(grad_placements=grads)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, by one kernel where there is one. An element's bits depend on the two elements alone."""
    if is_rowwise(gate) and is_rowwise(up) and cpu_layers.library() is not None:
        out: Tensor = _Gated.apply(gate, up)
        return out
    if gpu_layers.gates(gate, up):
        return gpu_layers.gated(gate, up)
    return F.silu(gate) * up


class _Gated(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return cpu_layers.gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return cpu_layers.gate_gradients(grad.contiguous(), gate, up)


class RowFeedForward(FeedForward):  # type: ignore[misc]
    """TorchTitan's feed-forward layer by `gated`: what a token gets does not depend on its batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):  # type: ignore[misc]
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(gated(self.w1(x), self.w3(x)))


class RowNorm(RMSNorm):  # type: ignore[misc]
    """TorchTitan's norm, with its bits. In float32 on a CPU and with gradients, `forge.kernels.cpu_layers` does it."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):  # type: ignore[misc]
        pass

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and is_rowwise(x) and is_rowwise(self.weight) and cpu_layers.library() is not None:
            by_rows: Tensor = _Normed.apply(x, self.weight, self.eps)
            return by_rows
        out: Tensor = super().forward(x)
        return out


class _Normed(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        factors = x.square().mean(-1).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, factors)
        return cpu_layers.normed(_rows(x), factors, weight).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factors = ctx.saved_tensors
        of_x, of_weight = cpu_layers.norm_gradients(_rows(grad.contiguous()), _rows(x), factors, weight)
        return of_x.view(x.shape), of_weight, None


def _rows(tensor: Tensor) -> Tensor:
    width = tensor.shape[-1]
    return tensor.view(tensor.numel() // width, width)


class Experts(GroupedExperts):  # type: ignore[misc]
    """Experts that compute in the dtype of their input. TorchTitan's own take bfloat16: float32 logits move by 0.6."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for name in _STACKS:
            self.register_parameter(f"{name}_lora_a", None)
            self.register_parameter(f"{name}_lora_b", None)
        self.lora_scale = 1.0
        self.is_adapter_on = True
        self.adapters: dict[int, dict[str, LowRank]] = {}
        self.segments: StepSegments | None = None
        self.quantized: dict[str, Any] = {}

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        hidden = gated(self._product("w1_EFD", x_RD, ends), self._product("w3_EFD", x_RD, ends))
        return self._product("w2_EDF", hidden, ends)

    def has_adapter(self, number: int) -> bool:
        """Whether an adapter adds anything here."""
        own = (getattr(self, f"{name}_lora_a") for name in _STACKS)
        return number in self.adapters or (number == LIVE and any(each is not None for each in own))

    def _product(self, name: str, x: Tensor, ends: Tensor) -> Tensor:
        """Return each expert's rows times its weight, with what its adapter adds."""
        weight, a, b = (
            each.to_local() if isinstance(each, DTensor) else each
            for each in (getattr(self, name), getattr(self, f"{name}_lora_a"), getattr(self, f"{name}_lora_b"))
        )
        base = find_quantized(self, name)
        out = _grouped(x, weight, ends) if base is None else _QuantizedGroups.apply(x, base, ends)
        if self.segments is not None and self.segments.current and self.segments.current[0].adapter != LIVE:
            own = self.adapters.get(self.segments.current[0].adapter, {}).get(name)
            return out if own is None else out + _grouped(_grouped(x, own.a, ends) * own.scale, own.b, ends)
        if a is None or not self.is_adapter_on:
            return out
        return out + _grouped(_grouped(x, a, ends) * self.lora_scale, b, ends)


class _QuantizedGroups(torch.autograd.Function):  # type: ignore[misc]
    """As `_QuantizedProduct`, for a stack of experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, ends: Tensor) -> Tensor:
        ctx.weight, ctx.dtype, ctx.ends = weight, x.dtype, ends
        return _grouped(x, weight.dequantize(x.dtype), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.weight.dequantize(ctx.dtype)
        if _has_group_kernel(weight):
            return torch._grouped_mm(grad, weight, offs=ctx.ends), None, None
        bounds = [0, *ctx.ends.tolist()]
        parts = [grad[start:end].mm(weight[expert]) for expert, (start, end) in enumerate(pairwise(bounds))]
        return torch.cat([*parts, grad.new_zeros(len(grad) - bounds[-1], weight.shape[-1])]), None, None


def _has_group_kernel(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and all(size % GROUP_MULTIPLE == 0 for size in weight.shape[1:])


def _grouped(x: Tensor, weight_EOI: Tensor, ends: Tensor) -> Tensor:
    """Return each expert's rows times its weight."""
    weight = weight_EOI.to(x.dtype)
    if _has_group_kernel(weight):
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    bounds = [0, *ends.tolist()]
    parts = [rows_linear(x[start:end], weight[expert]) for expert, (start, end) in enumerate(pairwise(bounds))]
    rest = x.new_zeros(x.shape[0] - bounds[-1], weight.shape[1])
    return torch.cat([*parts, rest])


class SegmentedMoE(MoE):  # type: ignore[misc]
    """TorchTitan's mixture. Where adapters of experts differ between the rows of a step, each segment by itself:
    experts get the tokens of all rows in an order of their own."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):  # type: ignore[misc]
        pass

    segments: StepSegments | None = None

    def forward(self, x_BLD: Tensor) -> Tensor:
        whole = () if self.segments is None else self.segments.current
        experts = self.routed_experts.inner_experts
        if self.segments is None or len(whole) < 2 or not any(experts.has_adapter(each.adapter) for each in whole):
            found: Tensor = super().forward(x_BLD)
            return found
        parts = []
        try:
            for each in whole:
                self.segments.current = (AdapterSegment(each.adapter, 0, each.end - each.start),)
                parts.append(super().forward(x_BLD[:, each.start : each.end]))
        finally:
            self.segments.current = whole
        return torch.cat(parts, dim=1)


class Rotary(CosSinRoPE):  # type: ignore[misc]
    """TorchTitan's rotary embedding in the half-rotated order of Hugging Face, with Llama 3's stretching.

    It computes in no less precision than its input.

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
    """Return whether `forge.kernels.cpu_layers` rotates them, with gradients."""
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
    """Stretch long waves by the factor, keep short ones, and blend those between, as Llama 3.1 does."""
    waves = 2 * math.pi / frequencies
    longest = config.original_max_position_embeddings / config.low_freq_factor
    shortest = config.original_max_position_embeddings / config.high_freq_factor
    blend = (config.original_max_position_embeddings / waves - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - blend) * frequencies / config.scaling_factor + blend * frequencies
    result = torch.where(waves > longest, frequencies / config.scaling_factor, between)
    return torch.where(waves < shortest, frequencies, result)
