"""Sampling from plain softmax distributions on a GPU in one kernel, in place of a dozen passes over the logits."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Final

import torch
from torch import Tensor

from forge.models.gpu_attention import device_of, power_of_two

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK: Final = 2048
_MOST_BLOCKS: Final = 512
_UNITS: Final = 2.0**42
"""What the probability of the most likely token is as a whole number. A million tokens of it stay below 2^63."""


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def takes(logits_SV: Tensor) -> bool:
    """Return whether the kernel can sample from these logits."""
    fits = 0 < logits_SV.shape[1] <= _BLOCK * _MOST_BLOCKS and logits_SV.stride(1) == 1
    return bool(logits_SV.is_cuda) and fits and logits_SV.dtype in DTYPES and _has_triton()


def sample(logits_SV: Tensor, uniforms_S: Tensor, *, scale_S1: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return one token per row, int64 [S], and its logprob, float32 [S].

    A row's token is the first at which the running sum of softmax(logits * scale), in the order of the vocabulary,
    exceeds its uniform number (float64, from 0 to below 1). The sums are of whole numbers, so they are exact, and a
    token that is 2^42 times less likely than the most likely one is never sampled. A row whose logits are not finite
    gets some token and a NaN.
    """
    from forge.generator.native.gpu_sampling_program import sample as program

    num_rows, vocab = logits_SV.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits_SV.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits_SV.device)
    if num_rows:
        with device_of(logits_SV):
            program[(num_rows,)](
                logits_SV,
                logits_SV.stride(0),
                uniforms_S if scale_S1 is None else scale_S1,
                uniforms_S,
                token_ids,
                logprobs,
                vocab,
                SCALED=scale_S1 is not None,
                UNITS=_UNITS,
                BLOCK=_BLOCK,
                BLOCKS=power_of_two(-(-vocab // _BLOCK)),
                num_warps=16,
            )
    return token_ids, logprobs
