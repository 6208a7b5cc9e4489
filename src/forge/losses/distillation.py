"""The loss of off-policy distillation: the divergence of a student from a teacher whose top-k logprobs were stored.

At each place the teacher's K likeliest tokens have probabilities q_1 … q_K, and the student gives the same tokens
p_1 … p_K. What the others have in sum is q_0 = 1 - q_1 - … - q_K, and p_0 likewise. `tail` says what becomes of it:

| tail | the outcomes that are compared |
|---|---|
| `bucket` | the K tokens, and all others as one outcome with q_0 and p_0 |
| `renormalize` | the K tokens alone; both distributions are divided by their sum over them |

With `bucket` the divergence is at most that over the whole vocabulary, and equal to it where K is the whole
vocabulary. Its gradient also says how much probability belongs outside the K tokens; that of `renormalize` does not.

| kind | the divergence, with m = beta q + (1 - beta) p |
|---|---|
| `forward_kl` | KL(q ‖ p): the student covers what the teacher does |
| `reverse_kl` | KL(p ‖ q): the student keeps to what the teacher holds likely |
| `mixed` | (1 - beta) KL(q ‖ p) + beta KL(p ‖ q) |
| `jsd` | beta KL(q ‖ m) + (1 - beta) KL(p ‖ m), the generalised Jensen–Shannon divergence (GKD, arXiv 2306.13649) |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from forge.errors import ConfigError, DataError
from forge.losses.base import LossTerms, TokenView, check_field
from forge.losses.kl import check_coefficient
from forge.types import Batch

TEACHER_IDS, TEACHER_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""Fields of a batch: the teacher's likeliest tokens at each place, int [T, K], and their logprobs [T, K]."""
Divergence = Literal["forward_kl", "reverse_kl", "mixed", "jsd"]
Tail = Literal["bucket", "renormalize"]
LEAST_TAIL: Final = 1e-6
"""The smallest probability of the tail, of both: below it float32 cannot tell a sum of probabilities from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherDivergence:
    """Makes a student's distribution like a teacher's, over the teacher's stored top-k tokens.

    The loss of a batch is the mean over tokens, by weight, of the divergence plus `label_coefficient` times the
    negative logprob of the token that the data has. Metrics: `divergence`, `nll` (of the data's tokens), `teacher_tail`
    (q_0).

    Attributes:
        kind, beta, tail: see the tables at the top of this module. `forward_kl` and `reverse_kl` do not read `beta`.
        label_coefficient: weight of the data's own tokens.
    """

    kind: Divergence = "forward_kl"
    beta: float = 0.5
    tail: Tail = "bucket"
    label_coefficient: float = 0.0

    def __post_init__(self) -> None:
        for path, value, known in (("kind", self.kind, Divergence), ("tail", self.tail, Tail)):
            if value not in get_args(known):
                rule = f"one of {', '.join(get_args(known))}"
                raise ConfigError(
                    "this divergence is not known", path=path, value=value, rule=rule, repair="use one of them"
                )
        if not 0 < self.beta < 1:
            raise ConfigError(
                "the weight between teacher and student is out of range",
                path="beta",
                value=self.beta,
                rule="above 0 and below 1",
                repair="0.5 is usual; forward_kl and reverse_kl are the two ends",
            )
        check_coefficient("label_coefficient", self.label_coefficient)

    @property
    def fields(self) -> tuple[str, ...]:
        return (TEACHER_IDS, TEACHER_LOGPROBS)

    @property
    def candidates(self) -> str:
        """The field with the tokens whose logprobs `TokenView.candidate_logprobs_TK` has."""
        return TEACHER_IDS

    @property
    def needs_entropy(self) -> bool:
        return False

    @property
    def is_nll(self) -> bool:
        return False

    def normalizer(self, batch: Batch) -> float:
        return batch.total_weight

    def __call__(self, tokens: TokenView) -> LossTerms:
        check_field(TEACHER_LOGPROBS, tokens.fields)
        student = tokens.candidate_logprobs_TK
        if student is None:
            raise DataError(
                "the loss was called without the student's logprobs of the teacher's tokens",
                path="candidate_logprobs_TK",
                value=None,
                rule="needed by a loss that names `candidates`",
                repair="train with an engine of this release",
            )
        counted, even = tokens.counted_T[:, None], -math.log(student.shape[1] + 1)
        teacher = torch.where(counted, tokens.fields[TEACHER_LOGPROBS].to(student.dtype), even)
        student = torch.where(counted, student, even)
        own, other = outcomes(student, tail=self.tail), outcomes(teacher, tail=self.tail)
        found = divergences(other, own, kind=self.kind, beta=self.beta)
        nll = -tokens.counted(tokens.logprobs_T)
        loss = found + self.label_coefficient * nll if self.label_coefficient else found
        metrics = {"divergence": found, "nll": nll, "teacher_tail": _tail_mass(teacher)}
        return LossTerms(tokens.sum(loss), {name: tokens.sum(value.detach()) for name, value in metrics.items()})


def outcomes(logprobs_TK: Tensor, *, tail: Tail) -> Tensor:
    """Return the logprobs of what is compared: [T, K + 1] with the tail as the last, or [T, K] that sum to 1."""
    if tail == "renormalize":
        return logprobs_TK - logprobs_TK.logsumexp(-1, keepdim=True)
    return torch.cat([logprobs_TK, _tail_mass(logprobs_TK).log()[:, None]], dim=-1)


def _tail_mass(logprobs_TK: Tensor) -> Tensor:
    return -torch.expm1(logprobs_TK.logsumexp(-1).clamp(max=math.log1p(-LEAST_TAIL)))


def divergences(teacher: Tensor, student: Tensor, *, kind: Divergence, beta: float = 0.5) -> Tensor:
    """Return the divergence of each place from logprobs of the same outcomes [T, O]; see the table of this module."""
    if kind == "jsd":
        mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
        return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)
    if kind == "forward_kl":
        return _kl(teacher, student)
    if kind == "reverse_kl":
        return _kl(student, teacher)
    return (1 - beta) * _kl(teacher, student) + beta * _kl(student, teacher)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
