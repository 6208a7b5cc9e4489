"""Rotary embeddings on a GPU, without gradients: one kernel in place of a dozen and a half small ones.

A recorded decode step spends more on the small ones' beginnings and ends than on what they compute.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Final

import torch
from torch import Tensor, nn

from forge.models.gpu_attention import device_of, power_of_two

_PLAIN: Final = (Tensor, nn.Parameter)
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_plain(tensor: Tensor) -> bool:
    """Whether kernels of ours can take a tensor: a plain one on a GPU, outside of torch.compile."""
    return (
        tensor.is_cuda
        and type(tensor) in _PLAIN
        and tensor.dtype in _DTYPES
        and not torch.compiler.is_compiling()
        and _has_triton()
    )


def is_for(x_LNH: Tensor) -> bool:
    """Whether `rotated` can take these heads."""
    return is_plain(x_LNH) and x_LNH.stride(-1) == 1 and x_LNH.shape[-1] % 2 == 0


def rotated(q_LNH: Tensor, k_LNH: Tensor, table: Tensor, positions_L: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned to their positions, in their dtype and in the bits of torch's operations.

    It waits for nothing, and can be captured in a CUDA graph as `forge.models.gpu_attention` says.

    Args:
        q_LNH, k_LNH: of one dtype and width, of any strides if the last is 1; the numbers of heads may differ.
        table: float32 [positions, 2 * H], contiguous: cosines and sines, each for both halves of a head.
        positions_L: int64, of any stride. One that is not in the table makes NaN, which whoever draws tokens reports.
    """
    from forge.models.gpu_program import rotate

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
