"""What the output layer computes in training: logprobs a chunk at a time, or the whole loss with its gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.losses.head import chunked_logprobs, chunked_nll
from forge.models.language_model import HeadFunction
from forge.models.rows import RowTask


def head_function(*, chunk_tokens: int | None, fp32_logits: bool = False) -> HeadFunction:
    """A head that never holds more than `chunk_tokens` rows of logits; None for what suits the device.

    `fp32_logits` is `model.head_precision: float32`: see `chunked_logprobs`.
    """

    def compute(hidden_ND: Tensor, weight_VD: Tensor, row: RowTask, group: Any) -> Any:
        start = 0 if group is None else dist.get_rank(group) * weight_VD.shape[0]
        if row.weights is not None:
            return chunked_nll(
                hidden_ND,
                weight_VD,
                row.targets,
                row.weights,
                chunk_tokens=chunk_tokens,
                fp32_logits=fp32_logits,
                group=group,
                vocab_start=start,
            )
        logprobs, entropy = chunked_logprobs(
            hidden_ND,
            weight_VD,
            row.targets,
            chunk_tokens=chunk_tokens,
            temperature=row.temperature,
            entropy=row.entropy,
            fp32_logits=fp32_logits,
            group=group,
            vocab_start=start,
        )
        return _as_row(logprobs, entropy, row) if row.as_row else (logprobs, entropy)

    return compute


def _as_row(logprobs: Tensor, entropy: Tensor | None, row: RowTask) -> Tensor:
    both = torch.stack([logprobs, torch.zeros_like(logprobs) if entropy is None else entropy], dim=-1)
    return both.new_zeros(row.positions.shape[1], 2).index_copy(0, row.index, both).unsqueeze(0)


def from_row(output_1L2: Tensor, row: RowTask) -> tuple[Tensor, Tensor]:
    """What `as_row` put into a row: logprobs and entropies of the places that were asked about."""
    both = output_1L2[0].index_select(0, row.index)
    return both[:, 0], both[:, 1]
