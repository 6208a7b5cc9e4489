"""What the loss does to each token: d loss / d logprob, from what a run recorded and its configuration.

The formulae are those of `forge.losses.policy`, written for numpy, because the UI starts without torch; the tests hold
them against the real loss and its autograd. With W the weight of a token in the loss of the batch,

    gradient = W x (pull + penalty)

`pull` is the derivative of the surrogate with respect to the token's logprob, after the correction between sampler and
trainer, and `penalty` that of the divergence from the reference. A surrogate with one ratio for a whole sequence moves
the logprobs of all its tokens alike: `pull` is then the mean over the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from forge.config.algorithm import AlgorithmConfig, KLConfig, PolicyLossConfig, SequenceMaskConfig

Floats = NDArray[np.float64]

SURROGATES: Final = ("clip", "gspo", "cispo", "sapo", "reinforce")
INSIDE, CUT_LOW, CUT_HIGH, CUT_DUAL, OUTSIDE = range(5)
"""What the bounds of the ratio do to a token: nothing; the lower, the upper, or that of `dual_clip` acts on it; or its
ratio is outside, and the sign of its advantage keeps the gradient."""
_LARGEST_LOG: Final = 60.0


@dataclass(frozen=True, slots=True)
class LossRule:
    """What decides about the gradient of a token.

    Attributes:
        loss, kl: the sections of the configuration; `kl` is None where the penalty is not in the loss.
        iterations: optimizer steps on each batch. All that is said here is of the first.
        length: the fixed length of `average: constant`.
        mask_truncated: whether sequences that were cut off are left out.
    """

    loss: PolicyLossConfig
    kl: KLConfig | None
    iterations: int = 1
    length: int | None = None
    mask_truncated: bool = False

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, **others: Any) -> LossRule:
        """Return the rule of a configuration; `others` are what is not in its section `algorithm`."""
        kl = algorithm.kl
        return cls(algorithm.loss, kl if kl.coefficient > 0 and kl.place == "loss" else None, **others)

    @property
    def is_known(self) -> bool:
        """Whether the loss is one whose formula is here, and not one of the user's own."""
        return self.loss.function == "policy" and self.loss.kind in SURROGATES

    @property
    def is_per_sequence(self) -> bool:
        """Whether a whole sequence has one ratio."""
        return self.loss.kind == "gspo"

    @property
    def uses_ratio(self) -> bool:
        """Whether the ratio is in the loss."""
        return self.loss.kind != "reinforce"

    @property
    def needs_trainer(self) -> bool:
        """Whether the gradient depends on the trainer's logprobs: at the first step the ratio to them is 1."""
        correction = self.loss.correction
        is_corrected = correction.kind != "none" or correction.sequence_mask is not None
        return is_corrected or self.kl is not None or (self.uses_ratio and self.loss.proximal == "sampler")


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What the loss of a batch is divided by.

    Attributes:
        num_tokens: tokens that count in the loss.
        num_sequences: sequences, also those that were left out; `num_counted` those of which a token counts.
    """

    num_tokens: float
    num_sequences: int | None = None
    num_counted: int | None = None

    def divisor(self, rule: LossRule) -> float | None:
        """Return the divisor; None where it cannot be known."""
        average = rule.loss.average
        if average == "token_mean":
            return self.num_tokens or None
        if average == "constant":
            known = self.num_sequences is not None and rule.length is not None
            return float((self.num_sequences or 0) * (rule.length or 0)) or None if known else None
        count = self.num_sequences if rule.loss.count_masked and self.num_counted else self.num_counted
        return float(count) if count else None


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """The T tokens of one sequence that count in the loss. NaN stands for what is not known.

    Attributes:
        advantages, sampler: of each token: its advantage, and the sampler's logprob.
        trainer, reference: the logprobs of the trainer before the step, and of the reference; None where they were not
            recorded.
    """

    advantages: Floats
    sampler: Floats
    trainer: Floats | None = None
    reference: Floats | None = None


@dataclass(frozen=True, slots=True)
class SequenceGradient:
    """What the loss does to the T tokens of a sequence; before `weight` where the divisor of the batch is not known.

    Attributes:
        ratio: the ratio of the surrogate: of each token, or of the sequence.
        bound: what its bounds do, one of the numbers of this module.
        correction: what the surrogate's loss is multiplied by.
        is_masked: whether `correction.sequence_mask` leaves the sequence out.
        pull, penalty: the two parts of the gradient.
        weight: what both are multiplied by; None where it is not known.
    """

    ratio: Floats
    bound: NDArray[np.int8]
    correction: Floats
    is_masked: bool
    pull: Floats
    penalty: Floats
    weight: float | None

    @property
    def total(self) -> Floats:
        """d loss / d logprob of each token."""
        found: Floats = (self.pull + self.penalty) * (1.0 if self.weight is None else self.weight)
        return found


def sequence_gradient(rule: LossRule, tokens: SequenceTokens, batch: BatchSize) -> SequenceGradient:
    """Return what the first step on a batch does to the tokens of one sequence."""
    trainer = tokens.trainer
    if trainer is None:
        if rule.needs_trainer:
            raise ValueError("the gradient depends on the trainer's logprobs")
        trainer = tokens.sampler
    own_ratio = np.zeros_like(trainer) if rule.loss.proximal == "trainer" else trainer - tokens.sampler
    log_ratio = np.full_like(own_ratio, _bounded(own_ratio).mean()) if rule.is_per_sequence else own_ratio
    correction, is_masked = _correction(rule, trainer - tokens.sampler)
    by_logprob, by_ratio, bound = _surrogate(rule, trainer, log_ratio, tokens.advantages)
    kept = np.zeros_like(correction) if is_masked else correction
    moved = _through_ratio(rule, own_ratio, kept * by_ratio)
    penalty = np.zeros_like(trainer) if rule.kl is None else _penalty(rule, tokens, trainer, (own_ratio, log_ratio))
    divisor = batch.divisor(rule)
    share = 1.0 / len(trainer) if rule.loss.average == "sequence_mean" else 1.0
    return SequenceGradient(
        ratio=_ratio(log_ratio),
        bound=bound,
        correction=correction,
        is_masked=is_masked,
        pull=kept * by_logprob + moved,
        penalty=penalty,
        weight=None if divisor is None else share / divisor,
    )


def left_out(found: SequenceGradient) -> SequenceGradient:
    """Return the gradient of a sequence that does not count in the loss."""
    nothing = np.zeros_like(found.pull)
    return replace(found, pull=nothing, penalty=nothing, weight=0.0)


def _ratio(log_ratio: Floats) -> Floats:
    ratio: Floats = np.exp(np.minimum(log_ratio, _LARGEST_LOG))
    return ratio


def _bounded(log_ratio: Floats) -> Floats:
    return np.clip(log_ratio, -_LARGEST_LOG, _LARGEST_LOG)


def _through_ratio(rule: LossRule, own_ratio: Floats, by_ratio: Floats) -> Floats:
    """Return derivatives by logprobs from those by the logarithm of the ratio that each token has in the loss."""
    if not rule.is_per_sequence:
        return by_ratio
    return np.where(np.abs(own_ratio) > _LARGEST_LOG, 0.0, by_ratio.sum() / len(by_ratio))


def _surrogate(
    rule: LossRule, trainer: Floats, log_ratio: Floats, advantages: Floats
) -> tuple[Floats, Floats, NDArray[np.int8]]:
    """Return the derivatives of each token's loss by its logprob and by the logarithm of its ratio, and the bounds."""
    loss, nothing = rule.loss, np.zeros_like(trainer)
    ratio = _ratio(log_ratio)
    slope = np.where(log_ratio > _LARGEST_LOG, 0.0, ratio)
    low, high = 1.0 - loss.clip_low, 1.0 + loss.clip_high
    inside = np.zeros(len(ratio), np.int8)
    if loss.kind == "reinforce":
        return -advantages, nothing, inside
    if loss.kind == "sapo":
        tau = np.where(advantages > 0, loss.tau_positive, loss.tau_negative)
        with np.errstate(over="ignore"):
            gate = 1.0 / (1.0 + np.exp(-tau * (ratio - 1.0)))
        return nothing, -4.0 * gate * (1.0 - gate) * advantages * slope, inside
    is_low, is_high = ratio < low, ratio > high
    if loss.kind == "cispo":
        bound = np.select([is_low, is_high], [CUT_LOW, CUT_HIGH], INSIDE).astype(np.int8)
        return -np.clip(ratio, low, high) * advantages, nothing, bound
    is_cut = (is_low & (advantages < 0)) | (is_high & (advantages > 0))
    by_ratio = np.where(is_cut, 0.0, -advantages * slope)
    names = [is_cut & is_low, is_cut & is_high, (is_low | is_high) & (advantages != 0)]
    kinds = [CUT_LOW, CUT_HIGH, OUTSIDE]
    if loss.dual_clip is not None:
        is_dual = (advantages < 0) & (ratio > loss.dual_clip)
        by_ratio = np.where(is_dual, 0.0, by_ratio)
        names, kinds = [is_dual, *names], [CUT_DUAL, *kinds]
    return nothing, by_ratio, np.select(names, kinds, INSIDE).astype(np.int8)


def _correction(rule: LossRule, log_ratio: Floats) -> tuple[Floats, bool]:
    """Return what each token's surrogate is multiplied by, and whether the sequence is left out."""
    section = rule.loss.correction
    bounded = _bounded(log_ratio)
    mask = section.sequence_mask
    is_masked = mask is not None and _is_outside(mask, bounded)
    if section.kind == "none":
        return np.ones_like(bounded), is_masked
    is_sequence = section.level == "sequence"
    ratio = _ratio(np.full_like(bounded, bounded.sum()) if is_sequence else bounded)
    kept = np.ones_like(ratio) if rule.loss.proximal == "sampler" and rule.uses_ratio else ratio
    if section.kind == "mask":
        return np.where((ratio > section.high) | (ratio < section.low), 0.0, kept), is_masked
    return np.clip(kept, section.low, section.high), is_masked


def _is_outside(mask: SequenceMaskConfig, bounded: Floats) -> bool:
    total = float(bounded.mean() if mask.ratio == "geometric_mean" else bounded.sum())
    ratio = float(np.exp(min(total, _LARGEST_LOG)))
    return ratio > mask.high or ratio < mask.low


def _penalty(rule: LossRule, tokens: SequenceTokens, trainer: Floats, log_ratios: tuple[Floats, Floats]) -> Floats:
    """Return the derivative of the divergence from the reference by each token's logprob, times its coefficient."""
    kl = rule.kl
    if kl is None or tokens.reference is None:
        return np.zeros_like(trainer)
    log_r = tokens.reference - trainer
    if kl.estimator == "k1":
        value, slope = -log_r, np.ones_like(log_r)
    elif kl.estimator == "k2":
        value, slope = log_r**2 / 2, -log_r
    else:
        value = np.expm1(np.minimum(log_r, _LARGEST_LOG)) - log_r
        slope = 1.0 - np.where(log_r > _LARGEST_LOG, 0.0, np.exp(np.minimum(log_r, _LARGEST_LOG)))
    own_ratio, log_ratio = log_ratios
    by_ratio = np.zeros_like(value)
    if kl.weighted:
        ratio = _ratio(log_ratio)
        by_ratio = value * np.where(log_ratio > _LARGEST_LOG, 0.0, ratio)
        value, slope = value * ratio, slope * ratio
    elif kl.score_gradient:
        slope = slope + value
    if kl.clamp is not None:
        is_cut = np.abs(value) > kl.clamp
        slope, by_ratio = np.where(is_cut, 0.0, slope), np.where(is_cut, 0.0, by_ratio)
    found: Floats = kl.coefficient * (slope + _through_ratio(rule, own_ratio, by_ratio))
    return found


BOUND_NAMES: Final[Mapping[int, str]] = {
    INSIDE: "", CUT_LOW: "low", CUT_HIGH: "high", CUT_DUAL: "dual", OUTSIDE: "outside",
}  # fmt: skip
