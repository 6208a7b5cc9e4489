"""Estimates of the divergence from a reference, from the logprobs of the sampled tokens alone.

With r = p_reference / p_policy of a token that the policy sampled, all of these have the mean KL(policy || reference)
or come close to it:

| name | estimate | |
|---|---|---|
| `k1` | -log r | unbiased, of high variance, often negative. As a loss its gradient has mean 0: it suits rewards |
| `k2` | (log r)^2 / 2 | biased, never negative. Its gradient is that of the divergence |
| `k3` | r - 1 - log r | unbiased, never negative |

Their gradients are another matter: only that of `k2` has the divergence's own gradient as its mean, for tokens that the
policy sampled. Multiplied by the policy's ratio, gradient included (`KLPenalty.weighted`), `k3` has it as well, and so
has `k1`; for tokens that an older policy sampled, too. `KLPenalty.score_gradient` adds the same term of the gradient,
the estimate times the gradient of the logprob, and leaves the value as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from forge.errors import ConfigError
from forge.losses.surrogates import ratio_of

Estimator = Literal["k1", "k2", "k3"]
LARGEST_LOG_R = 60.0


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """How strongly a policy is held to its reference, and by which estimate.

    Attributes:
        coefficient: what the estimate is multiplied by in the loss.
        estimator: which estimate.
        weighted: multiply the estimate by the policy's ratio, gradient included, so that its gradient is that of the
            divergence even for tokens that another policy sampled (DeepSeek-V3.2, arXiv 2512.02556).
        clamp: the largest size of a token's estimate; None for no limit. Beyond it there is no gradient.
        score_gradient: multiply the estimate by p / sg(p), which is 1: the gradient then includes that of the sampling
            probability (arXiv 2506.09477). `weighted` includes it by itself.
    """

    coefficient: float
    estimator: Estimator = "k3"
    weighted: bool = False
    clamp: float | None = None
    score_gradient: bool = False

    def __post_init__(self) -> None:
        check_coefficient("kl.coefficient", self.coefficient)
        if self.clamp is not None and not 0 < self.clamp < float("inf"):
            raise ConfigError(
                "the largest estimate of the divergence is out of range",
                path="kl.clamp",
                value=self.clamp,
                rule="a finite number above 0, or None",
                repair="10 is usual; None turns it off",
            )
        if self.estimator not in get_args(Estimator):
            raise ConfigError(
                "this estimate of the divergence is not known",
                path="kl.estimator",
                value=self.estimator,
                rule=f"one of {', '.join(get_args(Estimator))}",
                repair="use k3 if in doubt",
            )

    def of_tokens(self, logprobs: Tensor, reference: Tensor, *, log_ratio: Tensor) -> Tensor:
        """Return the penalty of each token, before the coefficient; `log_ratio` is that of the surrogate."""
        estimate = estimate_kl(logprobs, reference, self.estimator)
        if self.weighted:
            estimate = estimate * ratio_of(log_ratio)
        elif self.score_gradient:
            estimate = estimate * (logprobs - logprobs.detach()).exp()
        return estimate if self.clamp is None else estimate.clamp(-self.clamp, self.clamp)


def estimate_kl(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """The estimate for each token; differentiable with respect to both.

    In `k3`, r above e^60 counts as e^60: an infinite one would turn the gradient into NaN.
    """
    log_r = reference - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    return torch.expm1(log_r.clamp(max=LARGEST_LOG_R)) - log_r


def check_coefficient(path: str, value: float) -> None:
    """Refuse a coefficient that is negative, infinite or NaN."""
    if not 0 <= value < float("inf"):
        raise ConfigError(
            "a coefficient of the loss is out of range",
            path=path,
            value=value,
            rule="a finite number of at least 0",
            repair="use 0 to leave the term out",
        )
