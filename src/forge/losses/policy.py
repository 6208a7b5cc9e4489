"""The policy gradients: one loss for the whole family, made of parts that stand alone.

A loss per token (`surrogates`), how tokens become one number (`average`), what is done about the difference between
sampler and trainer (`correction`), and what holds the policy to its reference (`kl`). Another member of the family is
another loss per token with the same rest. `forge.losses.make_loss` puts one together from a configuration.

How a loss per token becomes one number for a batch (`average`), by a weight for every token and a divisor:

| name | the loss of a batch | long sequences |
|---|---|---|
| `token_mean` | the mean over all tokens | count more, by their tokens |
| `sequence_mean` | the mean over sequences of each one's mean over its tokens | count as much as short ones |
| `constant` | the sum over all tokens / (sequences x a fixed length) | count more, whatever else is in the batch |

A sequence is a sample, or all samples of an episode (`Sample.sequence`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from forge.config.algorithm import AlgorithmConfig
from forge.config.base import FrozenDict
from forge.config.problems import InvalidConfig, argument_problems
from forge.errors import ConfigError, DataError
from forge.losses.base import LossTerms, TokenView
from forge.losses.correction import Correction, correction_of, mismatch_metrics, ratio_metrics
from forge.losses.kl import KLPenalty, check_coefficient, estimate_kl
from forge.losses.surrogates import Surrogate, find_surrogate, sequence_log_ratio
from forge.registry import call
from forge.types import Batch

Average = Literal["token_mean", "sequence_mean", "constant"]
ADVANTAGES, OLD_LOGPROBS, REF_LOGPROBS = "advantages", "old_logprobs", "ref_logprobs"
PROXIMAL_LOGPROBS = "proximal_logprobs"
Proximal = Literal["sampler", "trainer"]
_SHAPE = ("clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative")
_OFFERED = ("logprobs", "log_ratio", "advantages", *_SHAPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The loss of a policy that is taught by advantages.

    Reads the fields `advantages` and `old_logprobs` (the sampler's own), `ref_logprobs` with a `kl` penalty, and
    `proximal_logprobs` where the ratio is taken against the trainer's own logprobs and a batch is learned from more
    than once. Tokens of weight 0 never count, even where their fields are NaN.

    Metrics: `ratio`, `ratio_max`, `ratio_min` (of the surrogate); `clip_low`, `clip_high`, `clip_dual` (the parts of
    tokens that a bound acted on); `sampler_ratio`, `…_max`, `…_min`, `…_square`, `…_outside` (trainer / sampler, and
    the part that the correction acted on); `sequence_masked` with `correction.sequence_mask` (the part of tokens in
    sequences that it left out); `mismatch`, `mismatch_max`, `mismatch_outside` (the mean and the largest
    difference of a token's logprob between sampler and trainer, and the part of tokens whose ratio is below 0.9 or
    above 1.1); `approx_kl` (k3 between the sampler and the policy); `kl` with a penalty;
    `entropy`. The entropy is exact where it was computed. Elsewhere it is the mean of -logprob over the sampled tokens,
    which estimates the same for tokens that the policy sampled, and costs nothing.

    Attributes:
        kind: which surrogate: a name, `module:attribute`, a `Surrogate`, or a function; see `forge.losses.surrogates`.
        args: arguments of a surrogate of your own.
        clip_low: how far below 1 a ratio may count; 1 for no limit.
        clip_high: how far above 1 a ratio may count; infinity for no limit.
        dual_clip: for `clip` and `gspo`, the loss of a negative advantage is at most so many times its size.
        tau_positive, tau_negative: for `sapo`, how fast the gradient fades with the distance of the ratio from 1, where
            the advantage is positive and where it is not.
        average: how tokens become one number; see the table at the top of this module.
        length: the fixed length of `average="constant"`.
        count_masked: whether `average="sequence_mean"` divides by all sequences, also those of which no token counts.
        proximal: whose logprobs the ratio is taken against. For `trainer` with one iteration these are the policy's
            own of the moment, and the ratio is 1 with the gradient of the logprob. `reinforce` has no ratio.
        iterations: how many optimizer steps a batch is used for.
        correction: what the ratio of trainer to sampler does; see `forge.losses.correction`. `truncate` is refused
            where that ratio is in the loss already, since it would count twice; `mask` then only leaves out. The
            penalty and the entropy bonus are not corrected.
        kl: what holds the policy to its reference; None for nothing.
        entropy_coefficient: how much a nat of entropy lowers the loss.
        exact_entropy: whether the metric `entropy` is to be exact even without a bonus. On a CPU that is some percent
            of the output layer; on a GPU the layer's one-pass kernel cannot be used.
        temperature: what the trainer divides logits by before it computes logprobs: that of the sampler.
    """

    kind: str | Callable[..., Tensor] = "clip"
    args: Mapping[str, Any] = field(default_factory=FrozenDict)
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    average: Average = "token_mean"
    length: int | None = None
    count_masked: bool = False
    proximal: Proximal = "sampler"
    iterations: int = 1
    correction: Correction = field(default_factory=Correction)
    kl: KLPenalty | None = None
    entropy_coefficient: float = 0.0
    exact_entropy: bool = False
    temperature: float = 1.0

    def __post_init__(self) -> None:
        problems = argument_problems(
            self.surrogate.loss, self.args, path="algorithm.loss.args", what="the surrogate", offered=_OFFERED
        )
        if problems:
            raise InvalidConfig(problems)
        if self.proximal not in get_args(Proximal):
            raise _out_of_range("proximal", self.proximal, f"one of {', '.join(get_args(Proximal))}")
        if not 0 <= self.clip_low <= 1:
            raise _out_of_range("clip_low", self.clip_low, "at least 0 and at most 1")
        if not self.clip_high >= 0:
            raise _out_of_range("clip_high", self.clip_high, "at least 0")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise _out_of_range("dual_clip", self.dual_clip, "above 1, or None")
        for name, tau in (("tau_positive", self.tau_positive), ("tau_negative", self.tau_negative)):
            if not 0 < tau < math.inf:
                raise _out_of_range(name, tau, "a finite number above 0")
        if self.iterations < 1:
            raise _out_of_range("iterations", self.iterations, "at least 1")
        if not 0 < self.temperature < math.inf:
            raise _out_of_range("temperature", self.temperature, "a finite number above 0")
        check_average(self.average, self.length)
        check_coefficient("entropy_coefficient", self.entropy_coefficient)
        if self.correction.kind == "truncate" and self._has_sampler_ratio:
            raise ConfigError(
                "the ratio of trainer to sampler would count twice",
                path="correction.kind",
                value="truncate",
                rule="`none` or `mask` with proximal `sampler`: the surrogate has the ratio trainer / sampler already",
                repair="set algorithm.loss.proximal: trainer, or leave the correction out",
            )

    @property
    def fields(self) -> tuple[str, ...]:
        wanted = [ADVANTAGES, OLD_LOGPROBS]
        wanted += [REF_LOGPROBS] if self.kl is not None else []
        wanted += [PROXIMAL_LOGPROBS] if self._reads_proximal else []
        return tuple(wanted)

    @property
    def needs_entropy(self) -> bool:
        return self.exact_entropy or self.entropy_coefficient > 0

    @property
    def is_nll(self) -> bool:
        return False

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether a sequence has one ratio, so that all of its samples must be in one micro-batch."""
        return self.surrogate.per_sequence or self.correction.needs_whole_sequences

    @property
    def surrogate(self) -> Surrogate:
        """The loss per token."""
        return find_surrogate(self.kind)

    @property
    def _has_sampler_ratio(self) -> bool:
        """Whether the loss per token holds the ratio of trainer to sampler by itself."""
        return self.proximal == "sampler" and self.surrogate.uses_ratio

    @property
    def _reads_proximal(self) -> bool:
        return self.proximal == "trainer" and self.iterations > 1 and self.surrogate.uses_ratio

    def normalizer(self, batch: Batch) -> float:
        return divisor(batch, self.average, length=self.length, count_masked=self.count_masked)

    def __call__(self, tokens: TokenView) -> LossTerms:
        logprobs = tokens.counted(tokens.logprobs_T)
        advantages, sampler = tokens.value(ADVANTAGES), tokens.value(OLD_LOGPROBS)
        trainer = tokens.value(PROXIMAL_LOGPROBS) if self._reads_proximal else logprobs.detach()
        log_ratio = logprobs - (sampler if self.proximal == "sampler" else trainer)
        if self.surrogate.per_sequence:
            log_ratio = sequence_log_ratio(tokens, log_ratio)
        loss = self._token_losses(logprobs, log_ratio, advantages)
        metrics = self._ratio_metrics(tokens, log_ratio.detach(), advantages)
        drift = logprobs.detach() - sampler
        metrics["approx_kl"] = tokens.sum(estimate_kl(drift.new_zeros(()), drift, "k3"))

        sampler_ratio = self.correction.ratio(tokens, trainer - sampler)
        metrics |= self._sampler_metrics(tokens, sampler_ratio) | mismatch_metrics(tokens, trainer - sampler)
        if self.correction.kind != "none":
            loss = loss * self.correction.weights(sampler_ratio, already_weighed=self._has_sampler_ratio)
        if self.correction.sequence_mask is not None:
            is_masked = self.correction.sequence_mask.is_masked(tokens, trainer - sampler)
            metrics["sequence_masked"] = tokens.sum(is_masked.to(loss.dtype))
            loss = torch.where(is_masked, 0.0, loss)

        if self.kl is not None:
            reference = tokens.value(REF_LOGPROBS)
            metrics["kl"] = tokens.sum(estimate_kl(logprobs.detach(), reference, self.kl.estimator))
            loss = loss + self.kl.coefficient * self.kl.of_tokens(logprobs, reference, log_ratio=log_ratio)
        metrics["entropy"] = tokens.sum((-logprobs if tokens.entropy_T is None else tokens.entropy_T).detach())
        if self.entropy_coefficient > 0:
            loss = loss - self.entropy_coefficient * _entropy(tokens)
        return LossTerms((token_weights(tokens, self.average) * loss).sum(), metrics)

    def _token_losses(self, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        values = (logprobs, log_ratio, advantages, *(getattr(self, name) for name in _SHAPE))
        losses: Tensor = call(self.surrogate.loss, args=self.args, offered=dict(zip(_OFFERED, values, strict=True)))
        if losses.shape != logprobs.shape:
            raise DataError(
                "the surrogate does not return one loss for each token",
                path="algorithm.loss.kind",
                value=tuple(losses.shape),
                rule=f"{tuple(logprobs.shape)}, as its inputs",
                repair="return the loss of each token; the loss averages them",
            )
        return losses

    def _ratio_metrics(self, tokens: TokenView, log_ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        ratio = log_ratio.exp()
        metrics = ratio_metrics(tokens, ratio, name="ratio")
        bounds = self.surrogate.bounds
        if bounds == "none":
            return metrics
        is_low, is_high = ratio < 1.0 - self.clip_low, ratio > 1.0 + self.clip_high
        if bounds == "by_sign":
            is_low, is_high = is_low & (advantages < 0), is_high & (advantages > 0)
        cut = {"clip_low": is_low, "clip_high": is_high}
        if bounds == "by_sign" and self.dual_clip is not None:
            cut["clip_dual"] = (ratio > self.dual_clip) & (advantages < 0)
        return metrics | {name: tokens.sum(where.to(ratio.dtype)) for name, where in cut.items()}

    def _sampler_metrics(self, tokens: TokenView, ratio: Tensor) -> dict[str, Tensor]:
        metrics = ratio_metrics(tokens, ratio, name="sampler_ratio")
        metrics["sampler_ratio_square"] = tokens.sum(ratio.square())
        if self.correction.kind != "none":
            metrics["sampler_ratio_outside"] = tokens.sum(self.correction.is_outside(ratio).to(ratio.dtype))
        return metrics


def token_weights(tokens: TokenView, average: Average) -> Tensor:
    """What each token's loss is multiplied by before it is added up: [T], 0 where a token does not count."""
    if average != "sequence_mean":
        return tokens.weights_T
    sums = tokens.sequence_weights_T
    if sums is None:
        sums = tokens.sequence_sums(tokens.weights_T)[tokens.sequence_index()]
    return torch.where(tokens.counted_T, tokens.weights_T / sums, 0.0)


def divisor(batch: Batch, average: Average, *, length: int | None = None, count_masked: bool = False) -> float:
    """Return what the sum over the whole batch is divided by.

    `sequence_mean` divides by the sequences of which a token counts; with `count_masked` by all sequences, as long as
    anything counts at all. `constant` always divides by all sequences.
    """
    if average == "token_mean":
        return batch.total_weight
    if average == "sequence_mean":
        rows = zip(batch.sequence_numbers, batch.samples(), strict=True)
        num_counted = len({sequence for sequence, sample in rows if bool((sample.loss_weights != 0).any())})
        return float(batch.num_sequences if count_masked and num_counted else num_counted)
    assert length is not None
    return float(batch.num_sequences * length)


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


def policy_loss(
    algorithm: AlgorithmConfig,
    *,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    iterations: int = 1,
    exact_entropy: bool = False,
    **args: Any,
) -> PolicyLoss:
    """Return the policy loss that a configuration describes; `args` are those of its surrogate.

    `max_tokens`, the longest completion, is the length of `average: constant` where the configuration names none.
    `temperature` is the sampler's; at 0 the sampler reports logprobs of temperature 1, and so these are learned from.
    `iterations` is the number of optimizer steps on each batch. `exact_entropy` asks for the exact entropy as a metric
    where there is no bonus for it: cheap on a CPU, not on a GPU.
    """
    kl, loss = algorithm.kl, algorithm.loss
    penalty = KLPenalty(
        kl.coefficient, kl.estimator, weighted=kl.weighted, clamp=kl.clamp, score_gradient=kl.score_gradient
    )
    return PolicyLoss(
        kind=loss.kind,
        args=FrozenDict(args),
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        tau_positive=loss.tau_positive,
        tau_negative=loss.tau_negative,
        average=loss.average,
        length=_length(algorithm, max_tokens) if loss.average == "constant" else None,
        count_masked=loss.count_masked,
        proximal=loss.proximal,
        iterations=iterations,
        correction=correction_of(loss.correction),
        kl=penalty if kl.coefficient > 0 and kl.place == "loss" else None,
        entropy_coefficient=loss.entropy_coefficient,
        exact_entropy=exact_entropy,
        temperature=1.0 if temperature == 0 else temperature,
    )


def _length(algorithm: AlgorithmConfig, max_tokens: int | None) -> int:
    length = algorithm.loss.length if algorithm.loss.length is not None else max_tokens
    if length is None:
        raise ConfigError(
            "`average: constant` does not know the length to divide by",
            path="algorithm.loss.length",
            value=None,
            rule="a number, where generator.sampling.max_tokens is null",
            repair="set algorithm.loss.length or generator.sampling.max_tokens to the longest completion, in tokens",
        )
    return length


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


def _out_of_range(path: str, value: float | str, rule: str) -> ConfigError:
    repairs = {
        "proximal": "use sampler if in doubt",
        "dual_clip": "3 is usual; None turns it off",
        "tau_positive": "1 is usual",
        "tau_negative": "1.05 is usual: negative advantages fade faster",
        "iterations": "give the number of optimizer steps on each batch",
        "temperature": "give the temperature that the tokens were sampled with; 1 for the model's own distribution",
    }
    repair = repairs.get(path, "0.2 is usual; 1 and infinity turn clipping off below and above")
    return ConfigError("a setting of the policy loss is out of range", path=path, value=value, rule=rule, repair=repair)
