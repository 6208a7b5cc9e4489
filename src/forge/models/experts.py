"""The experts of a mixture, in the precision of their input."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts

from forge.models.gate import gated
from forge.models.linear import rows_linear

_KERNEL_MULTIPLE = 8  # of bfloat16 values: the kernel for all experts at once wants rows of whole 16 bytes


class Experts(GroupedExperts):  # type: ignore[misc]
    """Experts that compute in the dtype of their input. TorchTitan's own take bfloat16: float32 logits move by 0.6."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc]
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        gate, down, up = (
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        hidden = gated(_grouped(x_RD, gate, ends), _grouped(x_RD, up, ends))
        return _grouped(hidden, down, ends)


def _grouped(x: Tensor, weight_EOI: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows times its weight."""
    weight = weight_EOI.to(x.dtype)
    if x.dtype == torch.bfloat16 and all(size % _KERNEL_MULTIPLE == 0 for size in weight.shape[1:]):
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    bounds = [0, *ends.tolist()]
    parts = [rows_linear(x[start:end], weight[expert]) for expert, (start, end) in enumerate(pairwise(bounds))]
    rest = x.new_zeros(x.shape[0] - bounds[-1], weight.shape[1])
    return torch.cat([*parts, rest])
