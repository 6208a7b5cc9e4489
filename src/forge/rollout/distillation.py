"""On-policy distillation: what a teacher adds to the advantages of sampled tokens.

The student samples, and the teacher says how likely each sampled token is. With t the teacher's logprob of a token and
s that of the policy that sampled it, the token's gain t - s is the negative of the `k1` estimate of the divergence
KL(student || teacher), per token the reverse KL. A policy gradient with the gain as advantage lowers that divergence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from forge.config import DistillationConfig
from forge.errors import DataError
from forge.rollout.advantage import charged, token_kl
from forge.rollout.samples import name_of
from forge.types import Episode, Group


def taught(episode: Episode, section: DistillationConfig, *, number: int) -> Episode:
    """Return an episode whose tokens have the advantage

        reward_coefficient x (the episode's or the token's own) + coefficient x gain

    with each token's own gain, or with `credit: return_to_go` the sum over that token and all later ones.
    """
    own = episode.token_advantages
    earned = (episode.advantage,) * episode.num_tokens if own is None else own
    costs = [section.coefficient * cost for cost in reverse_kl(episode, clamp=section.clamp, number=number)]
    gains = charged(0.0, costs, section.credit)
    values = tuple(section.reward_coefficient * value + gain for value, gain in zip(earned, gains, strict=True))
    mean = math.fsum(values) / len(values) if values else 0.0
    return replace(episode, advantage=mean, token_advantages=values)


def reverse_kl(episode: Episode, *, clamp: float | None, number: int) -> list[float]:
    """Return the estimate of the divergence from the teacher at each of an episode's T tokens."""
    teacher = episode.teacher_logprobs
    if teacher is None or not all(map(math.isfinite, teacher)):
        raise DataError(
            "an episode lacks the teacher's logprobs" if teacher is None else "a logprob of the teacher is not finite",
            path=name_of(episode, number),
            value=None if teacher is None else next(each for each in teacher if not math.isfinite(each)),
            rule="one finite number for each sampled token, with algorithm.distillation.coefficient above 0",
            repair="roll groups out with a teacher" if teacher is None else "check the teacher's weights",
        )
    return token_kl(episode.logprobs, teacher, "k1", clamp=clamp)


def divergence_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean over sampled tokens of the estimated divergence, and of the teacher's -logprob; nothing without
    a teacher."""
    taught_by = [episode for group in groups for episode in group.episodes if episode.teacher_logprobs is not None]
    pairs = [pair for each in taught_by for pair in zip(each.logprobs, each.teacher_logprobs or (), strict=True)]
    if not pairs:
        return {}
    return {
        "distillation/reverse_kl": math.fsum(own - teacher for own, teacher in pairs) / len(pairs),
        "distillation/teacher_nll": math.fsum(-teacher for _, teacher in pairs) / len(pairs),
    }
