"""How a loss per token becomes one number for a batch. Shared by all policy losses.

| name | the loss of a batch | long samples |
|---|---|---|
| `token_mean` | the mean over all tokens | count more, by their tokens |
| `sequence_mean` | the mean over samples of each one's mean over its tokens | count as much as short ones |
| `constant` | the sum over all tokens / (samples x a fixed length) | count more, whatever else is in the batch |

Each is a weight for every token (`token_weights`) and a divisor for the batch (`divisor`).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from forge.errors import ConfigError
from forge.losses.base import TokenView
from forge.types import Batch

Average = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(tokens: TokenView, average: Average) -> Tensor:
    """What each token's loss is multiplied by before it is added up: [T], 0 where a token does not count."""
    if average != "sequence_mean":
        return tokens.weights_T
    sums = tokens.sample_sums(tokens.weights_T)[tokens.sample_index()]
    return torch.where(tokens.counted_T, tokens.weights_T / sums, 0.0)


def divisor(batch: Batch, average: Average, *, length: int | None = None, count_masked: bool = False) -> float:
    """Return what the sum over the whole batch is divided by.

    `sequence_mean` divides by the samples of which a token counts; with `count_masked` by all samples, as long as
    anything counts at all. `constant` always divides by all samples.
    """
    if average == "token_mean":
        return batch.total_weight
    if average == "sequence_mean":
        num_counted = sum(bool((sample.loss_weights != 0).any()) for sample in batch.samples())
        return float(len(batch) if count_masked and num_counted else num_counted)
    assert length is not None
    return float(len(batch) * length)


def check_average(average: str, length: int | None) -> None:
    """Refuse a way of averaging that is not known, or that lacks its length."""
    if average not in get_args(Average):
        raise ConfigError(
            "this way to average a loss is not known",
            path="average",
            value=average,
            rule=f"one of {', '.join(get_args(Average))}",
            repair="use token_mean if in doubt",
        )
    if (average == "constant") != (length is not None) or (length is not None and length < 1):
        raise ConfigError(
            "only `constant` averages over a fixed length, and it needs one",
            path="length",
            value=length,
            rule="at least 1 for `constant`, None otherwise",
            repair="give the longest completion, in tokens, or choose another average",
        )
