"""What a token of weight 1 adds to a policy loss: the members of the family, each a pure function.

In all of them r is the ratio p_policy / p_proximal, given as its logarithm, and A the advantage.

| function | loss of a token | gradient where r leaves the bounds |
|---|---|---|
| `clipped_surrogate` | -min(r A, clip(r) A) | none, where the bound cuts |
| the same with `sequence_log_ratio` | the same, with one r for a whole sample (GSPO) | none for the whole sample |
| `weighted_logprobs` | -sg(clip(r)) A logprob (CISPO) | of a bounded size |
| `plain_logprobs` | -A logprob (REINFORCE) | r is not looked at |

`sg` stands for "without gradient".
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.losses.base import TokenView

LARGEST_LOG_RATIO = 60.0


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
    """The mean of `log_ratio` over the tokens of each sample that count, at every token of it: [T].

    Its exponential is GSPO's ratio, the geometric mean of the tokens' ratios. Samples are never split over
    micro-batches, so that any split gives the same.
    """
    bounded = tokens.counted(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    num_counted = tokens.sample_sums(tokens.counted_T.to(bounded.dtype)).clamp(min=1.0)
    return (tokens.sample_sums(bounded) / num_counted)[tokens.sample_index()]


def weighted_logprobs(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob for each token: every token keeps a gradient."""
    weights = ratio_of(log_ratio.detach()).clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weights * advantages * logprobs


def plain_logprobs(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A logprob for each token."""
    return -advantages * logprobs
