"""Preference losses on pairs of a chosen and a rejected answer to one prompt: DPO, IPO, ORPO and SimPO.

A pair is two samples of one sequence. With c and r the sums over an answer's tokens of log p_policy - log p_reference,
c' and r' the means over its tokens of log p_policy, and n the number of its tokens, a pair adds

| name | loss of a pair | reward of an answer |
|---|---|---|
| `dpo` | -log sigmoid(beta (c - r)), or one of its variants | beta c |
| `ipo` | (c / n_c - r / n_r - 1 / (2 beta))² | beta c |
| `orpo` | -beta log sigmoid(log odds(c') - log odds(r')), odds(x) = e^x / (1 - e^x) | beta c' |
| `simpo` | -log sigmoid(beta (c' - r') - gamma) | beta c' |

The loss of a batch is the mean over its pairs, plus `nll_coefficient` times the mean of -log p_policy over the tokens
of chosen answers. Values and gradients are those of TRL 1.16, where a batch is one micro-batch of one process; there a
mean is taken of each micro-batch, here always of the whole batch. `forge.losses.kto` has the loss on single answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.errors import ConfigError, DataError
from forge.losses.base import LossTerms, TokenView, check_field
from forge.losses.policy import REF_LOGPROBS
from forge.losses.reward import CHOSEN
from forge.types import Batch

COMPLETION: Final = "completion"
"""The field that says which tokens of a sample are its answer's: 1 for these, 0 for the prompt's."""
NLL_SCALE: Final = "nll_scale"
"""The field that `PairLoss.complete` adds: pairs of the batch for each token of its chosen answers."""

_PER_PAIR: Final = (
    *("reward_chosen", "reward_rejected", "reward_margin", "accuracy", "ranking_accuracy"),
    *("logprob_chosen", "logprob_rejected"),
)
"""Metrics that are means over pairs."""

PairKind = Literal["dpo", "ipo", "orpo", "simpo"]
Variant = Literal["sigmoid", "hinge", "robust"]
ScoreFunction = Callable[[Batch], "list[Tensor]"]
"""Returns the policy's logprobs of every sample's tokens, without gradients."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a loss on pairs compares: a number for each pair.

    Attributes:
        logprobs: the sum over the answer's tokens of the policy's logprobs.
        ratios: the sum of their differences from the reference's; the logprobs themselves without a reference.
        lengths: tokens of the answer, at least 1.
    """

    logprobs: Tensor
    ratios: Tensor
    lengths: Tensor

    @property
    def means(self) -> Tensor:
        """The mean logprob of a token."""
        return self.logprobs / self.lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss:
    """Makes the chosen answer of a pair more likely than the rejected one; see the table at the top of this module.

    Reads the fields `chosen`, `completion` and, for dpo and ipo, `ref_logprobs`: the reference model's logprob of each
    token. Weights are 1 at the tokens of answers. Where the prompt of a chosen answer has weights too, its tokens are
    in the mean of -log p_policy as well, and nowhere else.

    Metrics: `reward_chosen`, `reward_rejected`, `reward_margin` (their difference), `accuracy` (the part of pairs whose
    chosen answer has the larger reward), `ranking_accuracy` (the part whose chosen answer has the larger mean logprob,
    whatever the reference says), `logprob_chosen`, `logprob_rejected` (sums over tokens for dpo and ipo, means for orpo
    and simpo), and `nll` of chosen answers.

    Attributes:
        kind: which loss.
        beta: how strongly the two answers are pushed apart; see the table.
        variant: the form of dpo: `sigmoid`; `hinge`, max(0, 1 - beta (c - r)); `robust`, the unbiased estimate of
            `sigmoid` where labels are wrong with the probability `label_smoothing`.
        label_smoothing: for dpo (`sigmoid`, as in cDPO, and `robust`) and simpo: how often a label is wrong.
        gamma: the margin that simpo asks for.
        nll_coefficient: weight of the mean of -log p_policy over chosen answers.
    """

    kind: PairKind = "dpo"
    beta: float = 0.1
    variant: Variant = "sigmoid"
    label_smoothing: float = 0.0
    gamma: float = 0.5
    nll_coefficient: float = 0.0

    needs_whole_sequences = True
    needs_entropy = False
    is_nll = False

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                "a setting of the preference loss is out of range",
                path="label_smoothing",
                value=self.label_smoothing,
                rule="at least 0 and below 0.5",
                repair="0 for labels that are right; 0.1 where one in ten is wrong",
            )

    @property
    def needs_reference(self) -> bool:
        """Whether it reads logprobs of a reference model."""
        return self.kind in ("dpo", "ipo")

    @property
    def fields(self) -> tuple[str, ...]:
        reference = (REF_LOGPROBS,) if self.needs_reference else ()
        return (CHOSEN, COMPLETION, *reference, *((NLL_SCALE,) if self.nll_coefficient else ()))

    def complete(self, batch: Batch, score: ScoreFunction) -> Batch:
        """Return the batch with the scale of the tokens' part of the loss, which depends on the whole batch."""
        if not self.nll_coefficient:
            return batch
        scale = num_pairs(batch) / max(1.0, _chosen_weight(batch))
        made = {NLL_SCALE: torch.full_like(batch.loss_weights, scale, dtype=torch.float64)}
        return replace(batch, fields={**batch.fields, **made})

    def normalizer(self, batch: Batch) -> float:
        """Return the number of pairs, after checking that the batch consists of pairs."""
        return float(num_pairs(batch))

    def metric_divisors(self, batch: Batch) -> dict[str, float]:
        """Return what the sums of the metrics are divided by: the number of pairs; for `nll`, of chosen tokens."""
        return {**dict.fromkeys(_PER_PAIR, float(num_pairs(batch))), "nll": _chosen_weight(batch)}

    def __call__(self, tokens: TokenView) -> LossTerms:
        is_chosen, is_answer = tokens.value(CHOSEN), tokens.value(COMPLETION)
        chosen = self._answers(tokens, is_chosen * is_answer)
        rejected = self._answers(tokens, (1 - is_chosen) * is_answer)
        is_here = (tokens.sequence_sums(is_chosen * is_answer) > 0).to(chosen.logprobs.dtype)
        losses = self.pair_losses(chosen, rejected)
        total = (is_here * losses).sum()
        nll = -tokens.sum(is_chosen * tokens.logprobs_T)
        if self.nll_coefficient:
            scale = tokens.value(NLL_SCALE).to(tokens.logprobs_T.dtype)
            total = total - self.nll_coefficient * tokens.sum(scale * is_chosen * tokens.logprobs_T)
        better, worse = (self.beta * self._level(each, each.ratios) for each in (chosen, rejected))
        found = {
            "reward_chosen": better,
            "reward_rejected": worse,
            "reward_margin": better - worse,
            "accuracy": (better > worse).to(losses.dtype),
            "ranking_accuracy": (chosen.means > rejected.means).to(losses.dtype),
            "logprob_chosen": self._level(chosen, chosen.logprobs),
            "logprob_rejected": self._level(rejected, rejected.logprobs),
        }
        metrics = {name: (is_here * values).sum() for name, values in found.items()}
        return LossTerms(total, {**metrics, "nll": nll.detach()})

    def _level(self, answers: Answers, sums: Tensor) -> Tensor:
        """Return what metrics show: sums where there is a reference, else the mean logprob of a token."""
        return (sums if self.needs_reference else answers.means).detach()

    def _answers(self, tokens: TokenView, mask_T: Tensor) -> Answers:
        logprobs = tokens.counted(tokens.logprobs_T)
        sums = tokens.sequence_sums(mask_T * logprobs)
        ratios = sums
        if self.needs_reference:
            ratios = tokens.sequence_sums(torch.where(mask_T != 0, logprobs - tokens.value(REF_LOGPROBS), 0.0))
        return Answers(sums, ratios, tokens.sequence_sums(mask_T).clamp(min=1.0))

    def pair_losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """Return the loss of each pair, without the part of chosen tokens."""
        if self.kind == "dpo":
            return self._dpo(self.beta * (chosen.ratios - rejected.ratios))
        if self.kind == "ipo":
            difference = chosen.ratios / chosen.lengths - rejected.ratios / rejected.lengths
            return torch.square(difference - 1 / (2 * self.beta))
        if self.kind == "orpo":
            return -self.beta * F.logsigmoid(log_odds(chosen.means) - log_odds(rejected.means))
        return self._smoothed(self.beta * (chosen.means - rejected.means) - self.gamma)

    def _dpo(self, margins: Tensor) -> Tensor:
        if self.variant == "hinge":
            return torch.relu(1 - margins)
        if self.variant == "robust":
            smoothing = self.label_smoothing
            loss = smoothing * F.logsigmoid(-margins) - (1 - smoothing) * F.logsigmoid(margins)
            return loss / (1 - 2 * smoothing)
        return self._smoothed(margins)

    def _smoothed(self, margins: Tensor) -> Tensor:
        loss = -F.logsigmoid(margins)
        if not self.label_smoothing:
            return loss
        return (1 - self.label_smoothing) * loss - self.label_smoothing * F.logsigmoid(-margins)


def log_odds(logprobs: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of log p. A probability of 1 counts as the next smaller number."""
    below = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    # Which form of log(1 - p) is exact depends on the side of one half.
    log_rest = torch.where(below < -0.6931, torch.log1p(-below.exp()), torch.log(-torch.expm1(below)))
    return below - log_rest


def num_pairs(batch: Batch) -> int:
    """Return the number of pairs in a batch; pairs of which no token counts are left out.

    Raises DataError where a sequence has tokens that count of one answer only.
    """
    chosen, rejected = (answer_tokens(batch, side, by=batch.sequence_numbers) for side in (1, 0))
    broken = torch.nonzero((chosen > 0) != (rejected > 0))
    if broken.numel():
        index = batch.sequence_numbers.index(int(broken[0]))
        missing = "rejected" if float(chosen[broken[0]]) else "chosen"
        raise not_preferences(
            batch, index, f"a pair is a chosen and a rejected sample of one sequence; the {missing} one is missing"
        )
    return int((chosen > 0).sum())


def answer_tokens(batch: Batch, side: int, *, by: tuple[int, ...]) -> Tensor:
    """Return how many tokens of answers count, of one side (1 for chosen): one number for each number in `by`, which
    has one for each sample."""
    for name in (CHOSEN, COMPLETION):
        check_field(name, batch.fields)
        wrong = torch.nonzero((batch.fields[name] != 0) & (batch.fields[name] != 1) & (batch.loss_weights != 0))
        if wrong.numel():
            ends = torch.tensor(batch.lengths).cumsum(0)
            index = int(torch.searchsorted(ends, wrong[0], right=True))
            raise not_preferences(batch, index, f"the field {name!r} is 0 or 1 at tokens that count")
    counts = (batch.loss_weights != 0) & (batch.fields[COMPLETION] == 1) & (batch.fields[CHOSEN] == side)
    index_T = torch.tensor(by).repeat_interleave(torch.tensor(batch.lengths))
    return torch.zeros(max(by) + 1).index_add(0, index_T, counts.float())


def _chosen_weight(batch: Batch) -> float:
    check_field(CHOSEN, batch.fields)
    return float((batch.loss_weights.double() * (batch.fields[CHOSEN] == 1)).sum())


def not_preferences(batch: Batch, index: int, rule: str) -> DataError:
    """Return the error of a sample that does not belong into a batch of preferences."""
    return DataError(
        "the batch does not consist of preferences",
        path=(batch.identities[index] if batch.identities else "") or f"sample {index} of the batch",
        rule=rule,
        repair="make samples with forge.data.PreferenceEncoder, or give each the fields 'chosen' and 'completion'",
    )


def check_positive(path: str, value: float) -> None:
    """Refuse a setting of a preference loss that is not above 0."""
    if not value > 0:
        raise ConfigError(
            "a setting of the preference loss is out of range",
            path=path,
            value=value,
            rule="above 0",
            repair="0.1 is usual, and 2 for simpo",
        )
