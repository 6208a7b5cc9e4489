"""Surrogates: the loss of a token of weight 1, before averaging, corrections and penalties.

In all of them r is the ratio p_policy / p_proximal, given as its logarithm, and A the advantage.

| name | loss of a token | gradient where r leaves the bounds |
|---|---|---|
| `clip` | -min(r A, clip(r) A) (PPO) | none, where the bound cuts |
| `gspo` | the same, with one r for a whole sequence | none for the whole sequence |
| `cispo` | -sg(clip(r)) A logprob | of a bounded size |
| `sapo` | -(4 / tau) sigmoid(tau (r - 1)) A | no bounds: it fades, the faster the larger tau |
| `reinforce` | -A logprob | r is not used |

`sg` stands for "without gradient".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forge.errors import ConfigError
from forge.losses.base import TokenView
from forge.registry import SURROGATES

LARGEST_LOG_RATIO = 60.0


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A loss per token, and what it declares about itself. A plain function counts as one with the defaults.

    Attributes:
        loss: returns the loss of each token: [T]. It is called with those that its signature names of `logprobs`,
            `log_ratio`, `advantages` (each [T], 0 where a token does not count), `clip_low`, `clip_high`, `dual_clip`,
            `tau_positive`, `tau_negative` and the arguments of the configuration.
        uses_ratio: whether the ratio is in the loss, so that a correction must not multiply it in again.
        per_sequence: whether `log_ratio` is the mean over each sequence instead of a token's own.
        bounds: which tokens the metrics `clip_low` and `clip_high` count: those whose ratio is outside the bounds
            (`always`), of these only those whose advantage makes the bound cut (`by_sign`), or none.
    """

    loss: Callable[..., Tensor]
    uses_ratio: bool = True
    per_sequence: bool = False
    bounds: Literal["by_sign", "always", "none"] = "none"

    def __call__(self, *args: Tensor, **kwargs: object) -> Tensor:
        return self.loss(*args, **kwargs)


def find_surrogate(kind: str | Callable[..., Tensor]) -> Surrogate:
    """Return a surrogate by its name, or as it is given."""
    found = SURROGATES.find(kind, path="kind") if isinstance(kind, str) else kind
    return found if isinstance(found, Surrogate) else Surrogate(found)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), at most e^60 and without a gradient there.

    A sampler's logprob of -inf makes the ratio infinite, and an infinite one would turn the gradient into NaN even
    where it is clipped away.
    """
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) for each token, with r = exp(log_ratio).

    With `dual_clip`, the loss of a negative advantage is at most `dual_clip` times its size: without it nothing bounds
    it when the ratio grows. A ratio above e^60 counts as e^60, without a gradient; see `ratio_of`.
    """
    ratio = ratio_of(log_ratio)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def sequence_log_ratio(tokens: TokenView, log_ratio: Tensor) -> Tensor:
    """The mean of `log_ratio` over the tokens of each sequence that count, at every token of it: [T].

    Its exponential is GSPO's ratio, the geometric mean of the tokens' ratios. With such a surrogate sequences are never
    split over micro-batches, so that any split gives the same.
    """
    bounded = tokens.counted(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    num_counted = tokens.sequence_sums(tokens.counted_T.to(bounded.dtype)).clamp(min=1.0)
    return (tokens.sequence_sums(bounded) / num_counted)[tokens.sequence_index()]


def weighted_logprobs(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob for each token: every token keeps a gradient."""
    weights = ratio_of(log_ratio.detach()).clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weights * advantages * logprobs


def gated_surrogate(log_ratio: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A for each token, with tau by the sign of A (SAPO, arXiv 2511.20347).

    At r = 1 the gradient is that of r A. Away from it the gradient is 4 s (1 - s) times as large, with s the sigmoid:
    it fades smoothly on both sides instead of ending at a bound.
    """
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    return -torch.sigmoid(tau * (ratio_of(log_ratio) - 1.0)) * (4.0 / tau) * advantages


def plain_logprobs(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A logprob for each token."""
    return -advantages * logprobs


def clipped_value_loss(values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None = None) -> Tensor:
    """Half the squared error of each value; with `clip`, of the worse one of it and its clipped twin.

    The twin is as far from `old_values`, the critic's before the first update on the batch, as `clip` allows. A value
    that moved too far *towards* its return gets no gradient; one that moved away from it keeps its own.

    Like every loss per token it is to be weighted, added up and divided as `PolicyLoss` does.
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


clip = Surrogate(clipped_surrogate, bounds="by_sign")
gspo = Surrogate(clipped_surrogate, per_sequence=True, bounds="by_sign")
cispo = Surrogate(weighted_logprobs, bounds="always")
sapo = Surrogate(gated_surrogate)
reinforce = Surrogate(plain_logprobs, uses_ratio=False)
