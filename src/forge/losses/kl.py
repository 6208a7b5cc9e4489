"""Estimates of the divergence from a reference, from the logprobs of the sampled tokens alone.

With r = p_reference / p_policy of a token that the policy sampled, all of these have the mean KL(policy || reference)
or come close to it:

| name | estimate | |
|---|---|---|
| `k1` | -log r | unbiased, of high variance, often negative. As a loss its gradient has mean 0: it suits rewards |
| `k2` | (log r)^2 / 2 | biased, never negative. Its gradient is that of the divergence |
| `k3` | r - 1 - log r | unbiased, never negative |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from forge.errors import ConfigError

Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """How strongly a policy is held to its reference, and by which estimate."""

    coefficient: float
    estimator: Estimator = "k3"

    def __post_init__(self) -> None:
        check_coefficient("kl.coefficient", self.coefficient)
        if self.estimator not in get_args(Estimator):
            raise ConfigError(
                "this estimate of the divergence is not known",
                path="kl.estimator",
                value=self.estimator,
                rule=f"one of {', '.join(get_args(Estimator))}",
                repair="use k3 if in doubt",
            )


def estimate_kl(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """The estimate for each token; differentiable with respect to both."""
    log_r = reference - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    return torch.expm1(log_r) - log_r


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
