"""The loss of reward models: Bradley–Terry on pairs of a chosen and a rejected completion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.errors import DataError
from forge.losses.base import LossTerms, ValueView, check_field
from forge.losses.calibration import bin_names, bin_sums
from forge.types import Batch

CHOSEN = "chosen"
"""The field that says which sample of a pair a token belongs to: 1 for the chosen one, 0 for the rejected one."""
MARGIN = "margin"
"""The field with the margin of a pair, at the tokens of its chosen sample."""
_METRICS: Final = ("accuracy", "reward_margin", "reward_chosen", "reward_rejected", "brier", "reward_square")


@dataclass(frozen=True, slots=True)
class BradleyTerry:
    """Makes the reward of the chosen completion larger than that of the rejected one.

    A pair is two samples of one sequence; one token of each counts, its last, whose value is the completion's reward.
    With rewards c and r and the pair's margin m (0 unless `has_margins`), a pair adds

        -log sigmoid(c - r - m) + centering_coefficient x (c + r)²

    and the loss is the mean over pairs, as in TRL's `RewardTrainer`. The second term keeps rewards near 0: the first
    does not change when a number is added to all of them.

    Metrics: `accuracy` (c > r), `reward_margin` (c - r), `reward_chosen`, `reward_rejected`, `brier`, which is the mean
    of (1 - sigmoid(c - r))², and `reward_square`, the mean of (c² + r²) / 2. With `calibration_bins` there are also
    those that `forge.losses.calibration` makes the calibration from.
    """

    centering_coefficient: float = 0.0
    has_margins: bool = False
    calibration_bins: int = 0

    needs_whole_sequences = True

    @property
    def fields(self) -> tuple[str, ...]:
        return (CHOSEN, MARGIN) if self.has_margins else (CHOSEN,)

    @property
    def values_at(self) -> Literal["before", "after"]:
        return "after"

    def normalizer(self, batch: Batch) -> float:
        """Return the number of pairs, after checking that the batch consists of pairs."""
        check_field(CHOSEN, batch.fields)
        sides: dict[int, list[float]] = {}
        names: dict[int, str] = {}
        for number, sample in zip(batch.sequence_numbers, batch.samples(), strict=True):
            counted = sample.loss_weights != 0
            if bool((sample.loss_weights[counted] != 1).any()):
                raise _not_a_pair(sample.identity, "weights are 1 at the last token of each sample, and 0 elsewhere")
            sides.setdefault(number, []).extend(sample.fields[CHOSEN][counted].tolist())
            names.setdefault(number, sample.identity)
        pairs = {number: found for number, found in sides.items() if found}
        for number, found in pairs.items():
            if sorted(found) != [0.0, 1.0]:
                raise _not_a_pair(names[number], "one token counts in the chosen sample, and one in the rejected one")
        return float(len(pairs))

    def metric_divisors(self, batch: Batch) -> dict[str, float]:
        """Return what the sums of the metrics are divided by: the number of pairs."""
        return dict.fromkeys((*_METRICS, *bin_names(self.calibration_bins)), self.normalizer(batch))

    def __call__(self, tokens: ValueView) -> LossTerms:
        is_chosen = tokens.value(CHOSEN)
        rewards = tokens.counted(tokens.values_T)
        chosen = tokens.sequence_sums(is_chosen * rewards)
        rejected = tokens.sequence_sums((1 - is_chosen) * rewards)
        counts = tokens.sequence_sums(is_chosen * tokens.weights_T)
        margins = tokens.sequence_sums(is_chosen * tokens.value(MARGIN)) if self.has_margins else 0.0
        losses = pair_losses(chosen, rejected, margins, centering_coefficient=self.centering_coefficient)

        metrics = pair_metrics(chosen.detach(), rejected.detach(), counts)
        margin = (chosen - rejected).detach()
        return LossTerms((counts * losses).sum(), metrics | bin_sums(margin, counts, num_bins=self.calibration_bins))


def pair_losses(
    chosen: Tensor, rejected: Tensor, margins: Tensor | float = 0.0, *, centering_coefficient: float = 0.0
) -> Tensor:
    """Return the loss of each pair from the rewards of its two completions; see `BradleyTerry`."""
    losses = -F.logsigmoid(chosen - rejected - margins)
    return losses + centering_coefficient * torch.square(chosen + rejected) if centering_coefficient else losses


def pair_metrics(chosen: Tensor, rejected: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Return the sums over pairs of what `BradleyTerry` reports; `counts` is 1 for a pair that counts, else 0."""
    values = (
        (chosen > rejected).to(chosen.dtype),
        chosen - rejected,
        chosen,
        rejected,
        torch.square(torch.sigmoid(rejected - chosen)),
        (torch.square(chosen) + torch.square(rejected)) / 2,
    )
    return {name: (counts * value).sum() for name, value in zip(_METRICS, values, strict=True)}


def summarize_pairs(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the means over pairs with `reward_mean` and `reward_std` of all rewards in place of `reward_square`."""
    found = {name: value for name, value in metrics.items() if name != _METRICS[-1]}
    if _METRICS[-1] not in metrics:
        return found
    mean = (metrics["reward_chosen"] + metrics["reward_rejected"]) / 2
    return {**found, "reward_mean": mean, "reward_std": math.sqrt(max(metrics[_METRICS[-1]] - mean**2, 0.0))}


def _not_a_pair(identity: str, rule: str) -> DataError:
    return DataError(
        "the samples of a sequence are not a pair of preferences",
        path=identity or "a sample of the batch",
        rule=rule,
        repair="give the chosen and the rejected sample the same `sequence`, and the field 'chosen' 1 and 0",
    )
