"""One pass over a chunk of logits on a GPU, in place of half a dozen."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

_BLOCK = 4096
_WARPS = 16


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def takes(logits: Tensor) -> bool:
    """Whether the kernel can judge these: on a GPU, with Triton, in a precision that float32 holds."""
    return bool(logits.is_cuda) and logits.dtype != torch.float64 and logits.shape[1] > 0 and _has_triton()


def judge(logits_CV: Tensor, targets_C: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """The logprobs of targets and the logsumexp of each row, float32 [C].

    With the gradient, `logits_CV` then holds p - 1[target], rounded to its dtype once. A target outside the vocabulary
    has a NaN logprob.
    """
    from forge.losses.head_program import judge as program

    logprobs, lse = (torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device) for _ in range(2))
    if len(logits_CV):
        with torch.cuda.device(logits_CV.device):
            program[(len(logits_CV),)](
                logits_CV,
                logits_CV.stride(0),
                targets_C,
                logprobs,
                lse,
                logits_CV.shape[1],
                GRADIENT=with_gradient,
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )
    return logprobs, lse
