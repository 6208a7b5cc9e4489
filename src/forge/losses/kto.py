"""KTO: a preference loss on single answers, each with a label that says whether it is desirable.

With r the sum over an answer's tokens of log p_policy - log p_reference, and kl an estimate of how far the policy has
moved from the reference, an answer adds

    desirable:    desirable_weight   x (1 - sigmoid(beta (r - kl)))
    undesirable:  undesirable_weight x (1 - sigmoid(beta (kl - r)))

and the loss is the mean over answers. As in TRL 1.16, kl is the mean of r over *mismatched* answers, each put behind
the prompt of another sample, at least 0, and without a gradient. In TRL the mean is over one micro-batch of one process
(and the mean of these over processes). Here it is over the whole batch of an optimizer step, so that it depends neither
on micro-batches nor on ranks; with one micro-batch both are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from forge.losses.base import LossTerms, TokenView, check_field
from forge.losses.policy import REF_LOGPROBS
from forge.losses.preference import COMPLETION, ScoreFunction, answer_tokens, check_positive, not_preferences
from forge.losses.reward import CHOSEN
from forge.types import Batch, Sample

MISMATCHED_REF: Final = "mismatched_ref_logprob"
"""The field with the reference's logprob of the whole mismatched answer behind a sample's prompt, at all its tokens."""
KL, BALANCE = "kl", "balance"
"""The fields that `KTO.complete` adds: the estimate, and a sign and weight that make rewards a margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KTO:
    """Makes desirable answers more likely and undesirable ones less; see the top of this module.

    Reads the fields `chosen` (1 for desirable), `completion`, `ref_logprobs`, and `mismatched_ref_logprob`, the
    reference's logprob of the answer of `mismatched(batch)` that belongs to a sample.

    Metrics: `reward_chosen`, `reward_rejected` (beta r, of desirable and of undesirable answers), `reward_margin` (the
    difference of the two means), `accuracy` (the part of answers with r on the right side of kl), `logprob_chosen`,
    `logprob_rejected`, `kl`, and `nll` of desirable answers.

    Attributes:
        beta: how strongly answers are pushed away from the reference.
        desirable_weight, undesirable_weight: weights of the two kinds of answers.
        max_seq_len: where a mismatched sample is cut off; None for nowhere.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    max_seq_len: int | None = None

    needs_entropy = False
    is_nll = False

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)

    @property
    def fields(self) -> tuple[str, ...]:
        return (CHOSEN, COMPLETION, REF_LOGPROBS, KL, BALANCE)

    def mismatched(self, batch: Batch) -> Batch | None:
        """Return the samples that the divergence is estimated on; None for a batch of one sample."""
        return mismatched(batch, max_seq_len=self.max_seq_len)

    def complete(self, batch: Batch, score: ScoreFunction) -> Batch:
        """Return the batch with the estimate of the divergence, for which the policy scores `mismatched(batch)`."""
        desirable, undesirable = self._counts(batch)
        kl, other = 0.0, self.mismatched(batch)
        if other is not None:
            check_field(MISMATCHED_REF, batch.fields)
            starts = torch.tensor((0, *batch.lengths[:-1])).cumsum(0)
            reference = batch.fields[MISMATCHED_REF].index_select(0, starts).double()
            policy = torch.stack(
                [
                    (logprobs.double() * sample.fields[COMPLETION]).sum()
                    for logprobs, sample in zip(score(other), other.samples(), strict=True)
                ]
            )
            kl = max(0.0, float((policy.cpu() - reference).mean()))
        counts = torch.tensor([float(undesirable.sum()), float(desirable.sum())], dtype=torch.float64)
        sides = counts.sum() / counts.clamp(min=1.0) * torch.tensor([-1.0, 1.0], dtype=torch.float64)
        balance = sides[batch.fields[CHOSEN].long()] * float(counts.min() > 0)
        made = {KL: torch.full_like(balance, kl), BALANCE: balance}
        return replace(batch, fields={**batch.fields, **made})

    def normalizer(self, batch: Batch) -> float:
        """Return the number of answers, after checking that each sample is one."""
        return float(sum(each.sum() for each in self._counts(batch)))

    def metric_divisors(self, batch: Batch) -> dict[str, float]:
        """Return what the sums of the metrics are divided by: the number of answers of their kind."""
        desirable, undesirable = (float(each.sum()) for each in self._counts(batch))
        is_desirable = batch.fields[CHOSEN] == 1
        return {
            "reward_chosen": desirable,
            "reward_rejected": undesirable,
            "reward_margin": desirable + undesirable if desirable and undesirable else 0.0,
            "accuracy": desirable + undesirable,
            "logprob_chosen": desirable,
            "logprob_rejected": undesirable,
            "kl": desirable + undesirable,
            "nll": float((batch.loss_weights.double() * is_desirable).sum()),
        }

    def _counts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return for each sample whether it is a desirable answer, and whether it is an undesirable one."""
        if batch.sequences:
            raise not_preferences(batch, 0, "with kto each answer is a sequence of its own")
        numbers = tuple(range(len(batch)))
        desirable, undesirable = (answer_tokens(batch, side, by=numbers) > 0 for side in (1, 0))
        both = torch.nonzero(desirable & undesirable)
        if both.numel():
            raise not_preferences(batch, int(both[0]), "the field 'chosen' is the same at all tokens of a sample")
        return desirable, undesirable

    def __call__(self, tokens: TokenView) -> LossTerms:
        is_answer = tokens.value(COMPLETION)
        logprobs = tokens.counted(tokens.logprobs_T)
        ratios = tokens.sequence_sums(torch.where(is_answer != 0, logprobs - tokens.value(REF_LOGPROBS), 0.0))
        lengths = tokens.sequence_sums(is_answer)

        def per_answer(name: str) -> Tensor:
            """Return a field that is the same at all tokens of an answer."""
            return tokens.sequence_sums(is_answer * tokens.value(name)).to(ratios.dtype) / lengths.clamp(min=1.0)

        is_desirable, kl, balance = per_answer(CHOSEN), per_answer(KL), per_answer(BALANCE)
        is_here = (lengths > 0).to(ratios.dtype)
        signs = 2 * is_desirable - 1
        weights = is_desirable * self.desirable_weight + (1 - is_desirable) * self.undesirable_weight
        losses = weights * (1 - torch.sigmoid(self.beta * signs * (ratios - kl)))
        rewards = self.beta * ratios.detach()
        sums = tokens.sequence_sums(is_answer * logprobs).detach()
        desirable, undesirable = is_here * is_desirable, is_here * (1 - is_desirable)
        found = {
            "reward_chosen": desirable * rewards,
            "reward_rejected": undesirable * rewards,
            "reward_margin": is_here * balance * rewards,
            "accuracy": is_here * (signs * (ratios.detach() - kl) > 0),
            "logprob_chosen": desirable * sums,
            "logprob_rejected": undesirable * sums,
            "kl": is_here * kl,
        }
        metrics = {name: values.sum() for name, values in found.items()}
        nll = -tokens.sum(tokens.value(CHOSEN) * tokens.logprobs_T).detach()
        return LossTerms((is_here * losses).sum(), {**metrics, "nll": nll})


def mismatched(batch: Batch, *, max_seq_len: int | None = None) -> Batch | None:
    """Return each sample's prompt with the answer of another sample behind it; None where there is no other.

    Answers move on by one sample, and the last one to the first, as in TRL; where that puts an answer behind its own
    prompt, because several samples have it, they all move on by more. So every answer is there once.
    """
    if len(batch) < 2:
        return None
    check_field(COMPLETION, batch.fields)
    samples = list(batch.samples())
    starts = [int((sample.fields[COMPLETION] != 0).float().argmax()) for sample in samples]
    prompts = [sample.token_ids[:start].numpy().tobytes() for sample, start in zip(samples, starts, strict=True)]
    shift, made = _shift(prompts), []
    for index, (sample, start) in enumerate(zip(samples, starts, strict=True)):
        other = index - shift
        answer, answer_start = samples[other], starts[other]
        tokens = torch.cat([sample.token_ids[:start], answer.token_ids[answer_start:]])[:max_seq_len]
        mask = torch.cat([torch.zeros(start), answer.fields[COMPLETION][answer_start:]])[:max_seq_len]
        mask[0] = 0.0  # nothing predicts it
        made.append(Sample(tokens, mask, {COMPLETION: mask}, f"{sample.identity}, answer of {answer.identity}"))
    return Batch.of(made)


def _shift(prompts: Sequence[bytes]) -> int:
    """Return by how many samples answers move on: the least at which the fewest come behind their own prompts."""

    def num_alike(shift: int) -> int:
        return sum(prompt == prompts[index - shift] for index, prompt in enumerate(prompts))

    best, fewest = 1, num_alike(1)
    for shift in range(2, len(prompts)):
        if fewest == 0:
            break
        if (found := num_alike(shift)) < fewest:
            best, fewest = shift, found
    return best
