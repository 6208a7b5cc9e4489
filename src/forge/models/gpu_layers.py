"""Norms, gates and rotary embeddings on a GPU, without gradients: one kernel in place of many small ones.

torch gives every row of a norm a block of threads of its own. A head's norm has rows of 64 or 128 numbers, and there
are as many of them as tokens times heads: most of such a block waits. Rotary embeddings take a dozen and a half
operations, whose starts and ends take longer in a recorded decode step than what they compute.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Final

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
from torch import Tensor, nn
from torchtitan.models.common.nn_modules import RMSNorm

from forge.models.gpu_attention import device_of, power_of_two

_PLAIN: Final = (Tensor, nn.Parameter)
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_NUMBERS: Final = 2048
"""What one program of a norm takes: as many rows as make up so many, or one."""
_GATE_NUMBERS: Final = 1024
_ADDED: Final = 4096
_LEAST_ADDED: Final = 1 << 16
"""Smaller sums are left to torch, which starts faster."""


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_plain(tensor: Tensor) -> bool:
    """Return whether kernels of ours can take a tensor: a plain one on a GPU, outside of torch.compile."""
    return (
        tensor.is_cuda
        and type(tensor) in _PLAIN
        and tensor.dtype in _DTYPES
        and not torch.compiler.is_compiling()
        and _has_triton()
    )


def rotates(x_LNH: Tensor) -> bool:
    """Return whether `rotated` can take these heads."""
    return is_plain(x_LNH) and x_LNH.stride(-1) == 1 and x_LNH.shape[-1] % 2 == 0


def rotated(q_LNH: Tensor, k_LNH: Tensor, table: Tensor, positions_L: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys to their positions, in their dtype and in the bits of torch's operations.

    It waits for nothing, and can be captured in a CUDA graph as `forge.models.gpu_attention` says.

    Args:
        q_LNH, k_LNH: of one dtype and width, of any strides if the last is 1; the numbers of heads may differ.
        table: float32 [positions, 2 * H], contiguous: cosines and sines, each for both halves of a head.
        positions_L: int64, of any stride. One that is not in the table makes NaN, which the sampler reports.
    """
    from forge.models.gpu_layer_program import rotate

    num_tokens, num_q_heads, width = q_LNH.shape
    num_k_heads = k_LNH.shape[1]
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_LNH, k_LNH))
    if not num_tokens:
        return q_out, k_out
    with device_of(q_LNH):
        rotate[(num_tokens,)](
            q_LNH,
            k_LNH,
            table,
            positions_L,
            q_out,
            k_out,
            *q_LNH.stride()[:2],
            *k_LNH.stride()[:2],
            positions_L.stride(0),
            table.shape[0],
            num_q_heads,
            num_k_heads,
            width // 2,
            Q_HEADS=power_of_two(num_q_heads),
            K_HEADS=power_of_two(num_k_heads),
            HALF=power_of_two(width // 2),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return q_out, k_out


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in float32, in x's dtype.

    A row's bits depend on that row alone. `x` and `weight` are contiguous. It can be captured in a CUDA graph as
    `forge.models.gpu_attention` says.
    """
    from forge.models.gpu_layer_program import normalize

    width = x.shape[-1]
    num_rows = x.numel() // width
    out = torch.empty_like(x)
    if not num_rows:
        return out
    padded = power_of_two(width)
    rows = max(1, _NUMBERS // padded)
    with device_of(x):
        normalize[(-(-num_rows // rows),)](
            x, weight, out, num_rows, width, eps, ROWS=rows, WIDTH=padded, num_warps=4 if padded <= 4096 else 8
        )
    return out


def gates(gate: Tensor, up: Tensor) -> bool:
    """Return whether `gated` can take these."""
    is_plain_pair = is_plain(gate) and is_plain(up) and gate.dtype == up.dtype and gate.shape == up.shape
    return is_plain_pair and gate.is_contiguous() and up.is_contiguous() and not torch.is_grad_enabled()


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, each rounded to their dtype. It can be captured in a CUDA graph as `normed` can."""
    from forge.models.gpu_layer_program import gate as program

    out, total = torch.empty_like(gate), gate.numel()
    if total:
        with device_of(gate):
            program[(-(-total // _GATE_NUMBERS),)](gate, up, out, total, BLOCK=_GATE_NUMBERS, num_warps=4)
    return out


def add_into(sums: Tensor, values: Tensor) -> None:
    """Add values to sums in place. Where these are wider, torch's own addition reaches half of a GPU's bandwidth."""
    is_mixed = sums.dtype == torch.float32 and values.dtype in (torch.bfloat16, torch.float16)
    is_alike = sums.shape == values.shape and sums.is_contiguous() and values.is_contiguous()
    if not (is_mixed and is_alike and is_plain(sums) and is_plain(values)) or sums.numel() < _LEAST_ADDED:
        sums += values
        return
    from forge.models.gpu_layer_program import add_into as program

    with device_of(sums):
        program[(-(-sums.numel() // _ADDED),)](sums, values, sums.numel(), BLOCK=_ADDED, num_warps=8)


class GpuNorm(RMSNorm):  # type: ignore[misc]
    """TorchTitan's norm, by `normed` where that can take it. Without gradients only: it has no backward pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):  # type: ignore[misc]
        pass

    def forward(self, x: Tensor) -> Tensor:
        if is_plain(x) and is_plain(self.weight) and x.is_contiguous() and not torch.is_grad_enabled():
            return normed(x, self.weight, self.eps)
        found: Tensor = super().forward(x)
        return found
