"""What is done about the difference between the probabilities of the sampler and those of the trainer.

Both compute with the same weights, or with weights that are a few steps apart, but not with the same program: the
tokens were sampled with p_sampler, and what is learned from is p_trainer. With w = p_trainer / p_sampler:

| kind | what the loss of a token is multiplied by | known as |
|---|---|---|
| `truncate` | w, at least `low` and at most `high` | truncated importance sampling, TIS |
| `mask` | w where low <= w <= high, else 0 | masked importance sampling, MIS; IcePop |

At the level `sequence`, w is the product over the tokens of a sequence that count, and the same for all of them.
`SequenceMask` leaves whole sequences out besides, by the ratio of the sequence, whatever weighs its tokens: with
`truncate` that is sequence-masked TIS. What is masked still counts in what the batch is divided by: that must be known
before anything is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from forge.config.algorithm import CorrectionConfig
from forge.errors import ConfigError
from forge.losses.base import TokenView
from forge.losses.surrogates import LARGEST_LOG_RATIO, ratio_of, sequence_log_ratio

NEAR = (0.9, 1.1)
"""Between which ratios a token counts as agreed upon by sampler and trainer."""

CorrectionKind = Literal["none", "truncate", "mask"]
Level = Literal["token", "sequence"]
SequenceRatio = Literal["geometric_mean", "product"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMask:
    """Leaves out the sequences on which sampler and trainer disagree as a whole.

    Attributes:
        ratio: what a sequence is measured by: the geometric mean of its tokens' ratios, which does not depend on its
            length, or their product.
        low: the smallest ratio of a sequence that counts.
        high: the largest; infinity for no limit.
    """

    ratio: SequenceRatio = "geometric_mean"
    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        _check_word("correction.sequence_mask.ratio", self.ratio, get_args(SequenceRatio))
        _check_bounds("correction.sequence_mask.low", self.low, self.high, usual="0.99 and 1.01 for a geometric mean")

    def is_masked(self, tokens: TokenView, log_ratio: Tensor) -> Tensor:
        """Which tokens belong to a sequence that is left out: bool [T]."""
        if self.ratio == "geometric_mean":
            ratio = ratio_of(sequence_log_ratio(tokens, log_ratio.detach()))
        else:
            ratio = ratio_of(_sequence_log_product(tokens, log_ratio))
        return (ratio > self.high) | (ratio < self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How the ratio of trainer to sampler weighs the loss of a token.

    Attributes:
        kind: `none`, `truncate` or `mask`; with `none` the ratio is only reported.
        level: whether the ratio is a token's or that of a whole sequence: a sample, or all samples of an episode.
        low: the smallest ratio: what `truncate` raises smaller ones to, and the smallest that `mask` lets pass.
        high: the largest ratio: what `truncate` cuts larger ones to, and the largest that `mask` lets pass; infinity
            for no limit.
        sequence_mask: which sequences are left out, with any `kind`; None for none.
    """

    kind: CorrectionKind = "none"
    level: Level = "token"
    low: float = 0.0
    high: float = 2.0
    sequence_mask: SequenceMask | None = None

    def __post_init__(self) -> None:
        _check_word("correction.kind", self.kind, get_args(CorrectionKind))
        _check_word("correction.level", self.level, get_args(Level))
        _check_bounds("correction.low", self.low, self.high, usual="0 and 2 for truncate, 0.5 and 5 for mask")

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether it looks at all tokens of a sequence at once."""
        return self.level == "sequence" or self.sequence_mask is not None

    def ratio(self, tokens: TokenView, log_ratio: Tensor) -> Tensor:
        """The ratio at each token, of the token or of its sequence; without gradient. Finite where it counts."""
        if self.level == "sequence":
            return ratio_of(_sequence_log_product(tokens, log_ratio))
        return ratio_of(_bounded(tokens, log_ratio))

    def is_outside(self, ratio: Tensor) -> Tensor:
        """Which ratios the correction acts on: bool [T]."""
        if self.kind == "none":
            return torch.zeros_like(ratio, dtype=torch.bool)
        return (ratio > self.high) | (ratio < self.low)

    def weights(self, ratio: Tensor, *, already_weighed: bool = False) -> Tensor:
        """What the loss of each token is multiplied by.

        `already_weighed` says that the ratio is in the loss as it is: then it is not multiplied in again, and `mask`
        only leaves out.
        """
        kept = torch.ones_like(ratio) if already_weighed else ratio
        if self.kind == "mask":
            return torch.where(self.is_outside(ratio), 0.0, kept)
        return kept.clamp(self.low, self.high) if self.kind == "truncate" else torch.ones_like(ratio)


def correction_of(config: CorrectionConfig) -> Correction:
    """Return the correction that a configuration describes."""
    mask = config.sequence_mask
    return Correction(
        kind=config.kind,
        level=config.level,
        low=config.low,
        high=config.high,
        sequence_mask=None if mask is None else SequenceMask(ratio=mask.ratio, low=mask.low, high=mask.high),
    )


def ratio_metrics(tokens: TokenView, ratio: Tensor, *, name: str) -> dict[str, Tensor]:
    """The mean, the largest and the smallest of a ratio, to be put together as `LossTerms` says."""
    above, below = (torch.where(tokens.counted_T, ratio, bound) for bound in (-math.inf, math.inf))
    nothing = ratio.new_full((1,), math.inf)
    return {
        name: tokens.sum(ratio),
        f"{name}_max": torch.cat([above, -nothing]).amax(),
        f"{name}_min": torch.cat([below, nothing]).amin(),
    }


def mismatch_metrics(tokens: TokenView, log_ratio: Tensor) -> dict[str, Tensor]:
    """How far the logprobs of sampler and trainer are apart, token by token, whatever the correction's level is.

    `mismatch` is the mean of |log w|, `mismatch_max` the largest (0 where nothing counts), and `mismatch_outside` the
    part of tokens with w below 0.9 or above 1.1; they are put together as `LossTerms` says.
    """
    counted = tokens.counted(log_ratio.detach())
    gap, (low, high) = counted.abs(), NEAR
    is_outside = (counted < math.log(low)) | (counted > math.log(high))
    return {
        "mismatch": tokens.sum(gap),
        "mismatch_max": torch.cat([gap, gap.new_zeros(1)]).amax(),
        "mismatch_outside": tokens.sum(is_outside.to(gap.dtype)),
    }


def effective_samples(metrics: Mapping[str, float]) -> float:
    """Return the part of a batch's tokens that would carry as much information if the trainer had sampled them.

    (mean w)^2 / mean w^2, from the metrics of a whole batch: 1 where sampler and trainer agree, close to 0 where a few
    tokens weigh more than all others. It is not a metric of the loss: it does not add up over micro-batches.
    """
    square = metrics["sampler_ratio_square"]
    mean = metrics["sampler_ratio"]
    return mean / square * mean if 0 < square < math.inf else 0.0


def _bounded(tokens: TokenView, log_ratio: Tensor) -> Tensor:
    return tokens.counted(log_ratio.detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def _sequence_log_product(tokens: TokenView, log_ratio: Tensor) -> Tensor:
    """Return the logarithm of the product of each sequence's ratios, at every token of it: [T]."""
    return tokens.sequence_sums(_bounded(tokens, log_ratio))[tokens.sequence_index()]


def _check_bounds(path: str, low: float, high: float, *, usual: str) -> None:
    if not 0 <= low <= high or not high > 0:
        raise ConfigError(
            "the bounds of the correction are out of range",
            path=path,
            value=(low, high),
            rule="0 <= low <= high, and high above 0",
            repair=f"{usual} are usual",
        )


def _check_word(path: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise ConfigError(
            "this correction between sampler and trainer is not known",
            path=path,
            value=word,
            rule=f"one of {', '.join(known)}",
            repair="leave it out if in doubt",
        )
