"""The clipped policy gradient of PPO and GRPO.

A policy loss is made of parts that stand alone: a loss per token (`clipped_surrogate`), how tokens become one number
(`averaging`), and what holds the policy to its reference (`kl`). Another member of the family is another loss per token
with the same rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forge.errors import ConfigError, DataError
from forge.losses.averaging import Average, check_average, divisor, token_weights
from forge.losses.base import LossTerms, TokenView
from forge.losses.kl import KLPenalty, check_coefficient, estimate_kl
from forge.types import Batch

LARGEST_LOG_RATIO = 60.0
ADVANTAGES, OLD_LOGPROBS, REF_LOGPROBS = "advantages", "old_logprobs", "ref_logprobs"


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) for each token, with r = exp(log_ratio).

    A ratio above e^60, as a sampler's logprob of -inf makes it, counts as e^60, without a gradient: an infinite one
    would turn the gradient into NaN even where it is clipped away.
    """
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedPolicy:
    """PPO's clipped surrogate for each token, against the policy that sampled the tokens.

    Reads the fields `advantages` and `old_logprobs` (the sampler's own), and `ref_logprobs` with a `kl` penalty. Tokens
    of weight 0 never count, even where their fields are NaN.

    Metrics: `ratio`, `ratio_max`, `clip_low` and `clip_high` (the parts of tokens whose gradient was cut off below and
    above), `approx_kl` (k3 between the sampler and the policy), `kl` with a penalty, and `entropy` where it is known.

    Attributes:
        clip_low: how far below 1 a ratio may count for a negative advantage; 1 for no limit.
        clip_high: how far above 1 a ratio may count for a positive one; infinity for no limit.
        average: how tokens become one number; see `forge.losses.averaging`.
        length: the fixed length of `average="constant"`.
        kl: what holds the policy to its reference; None for nothing.
        entropy_coefficient: how much a nat of entropy lowers the loss.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    average: Average = "token_mean"
    length: int | None = None
    kl: KLPenalty | None = None
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise _wrong_clip("clip_low", self.clip_low, "at least 0 and at most 1")
        if not self.clip_high >= 0:
            raise _wrong_clip("clip_high", self.clip_high, "at least 0")
        check_average(self.average, self.length)
        check_coefficient("entropy_coefficient", self.entropy_coefficient)

    @property
    def fields(self) -> tuple[str, ...]:
        return (ADVANTAGES, OLD_LOGPROBS) if self.kl is None else (ADVANTAGES, OLD_LOGPROBS, REF_LOGPROBS)

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coefficient > 0

    @property
    def is_nll(self) -> bool:
        return False

    def normalizer(self, batch: Batch) -> float:
        return divisor(batch, self.average, length=self.length)

    def __call__(self, tokens: TokenView) -> LossTerms:
        logprobs = tokens.counted(tokens.logprobs_T)
        advantages = tokens.value(ADVANTAGES)
        log_ratio = logprobs - tokens.value(OLD_LOGPROBS)
        loss = clipped_surrogate(log_ratio, advantages, clip_low=self.clip_low, clip_high=self.clip_high)
        metrics = self._ratio_metrics(tokens, log_ratio.detach(), advantages)
        if self.kl is not None:
            divergence = estimate_kl(logprobs, tokens.value(REF_LOGPROBS), self.kl.estimator)
            loss = loss + self.kl.coefficient * divergence
            metrics["kl"] = tokens.sum(divergence.detach())
        if tokens.entropy_T is not None:
            metrics["entropy"] = tokens.sum(tokens.entropy_T.detach())
        if self.needs_entropy:
            loss = loss - self.entropy_coefficient * _entropy(tokens)
        return LossTerms((token_weights(tokens, self.average) * loss).sum(), metrics)

    def _ratio_metrics(self, tokens: TokenView, log_ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        ratio = log_ratio.exp()
        cut_low = (ratio < 1.0 - self.clip_low) & (advantages < 0)
        cut_high = (ratio > 1.0 + self.clip_high) & (advantages > 0)
        nothing = ratio.new_full((1,), -math.inf)
        return {
            "ratio": tokens.sum(ratio),
            "ratio_max": torch.cat([torch.where(tokens.counted_T, ratio, -math.inf), nothing]).amax(),
            "clip_low": tokens.sum(cut_low.to(ratio.dtype)),
            "clip_high": tokens.sum(cut_high.to(ratio.dtype)),
            "approx_kl": tokens.sum(estimate_kl(torch.zeros_like(log_ratio), log_ratio, "k3")),
        }


def _entropy(tokens: TokenView) -> Tensor:
    if tokens.entropy_T is None:
        raise DataError(
            "a loss with an entropy bonus was called without entropies",
            path="entropy_T",
            value=None,
            rule="needed when `needs_entropy` is true",
            repair="compute logprobs with entropy=True",
        )
    return tokens.counted(tokens.entropy_T)


def _wrong_clip(path: str, value: float, rule: str) -> ConfigError:
    repair = "0.2 is usual; 1 and infinity turn clipping off below and above"
    return ConfigError(
        "a clipping range of the policy loss is out of range", path=path, value=value, rule=rule, repair=repair
    )
