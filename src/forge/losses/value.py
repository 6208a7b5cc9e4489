"""The loss of a critic, as PPO has it."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.errors import ConfigError


def clipped_value_loss(values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None = None) -> Tensor:
    """Half the squared error of each value; with `clip`, of the worse one of it and its clipped twin.

    The twin is as far from `old_values`, the critic's before the first update on the batch, as `clip` allows. A value
    that moved too far *towards* its return gets no gradient; one that moved away from it keeps its own.

    Like every loss per token it is to be weighted, added up and divided as `forge.losses.averaging` does.
    """
    if clip is not None and not clip > 0:
        raise ConfigError(
            "the clipping range of the value loss is out of range",
            path="clip",
            value=clip,
            rule="above 0, or None",
            repair="0.2 and 0.5 are usual; None turns clipping off",
        )
    error = (values - returns).square()
    if clip is not None:
        twin = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (twin - returns).square())
    return error / 2
