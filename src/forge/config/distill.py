"""Off-policy distillation: what `DistillConfig` adds to the sections of every supervised run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, PathText, broken_rule
from forge.config.schema import ReplicatedWorkerConfig
from forge.config.sft import SFTWorkersConfig, SupervisedConfig
from forge.config.teacher import TeacherConfig


class StoredDistillationConfig(ConfigModel):
    """What is stored of the teacher, and what the student minimizes."""

    store: PathText | None = Field(
        default=None,
        description="Folder of the teacher's logprobs, which `forge distill` writes; null for `teacher_logprobs` in "
        "the run's folder.",
    )
    top_k: int = Field(
        default=64,
        ge=1,
        description="Tokens of the teacher at each place. A run may use fewer than were stored.",
    )
    dtype: Literal["float32", "float16"] = Field(default="float32", description="What logprobs are stored in.")
    kind: Literal["forward_kl", "reverse_kl", "mixed", "jsd"] = Field(
        default="forward_kl",
        description="The divergence between teacher q and student p. `forward_kl`: KL(q, p). `reverse_kl`: KL(p, q). "
        "`mixed`: (1 - beta) KL(q, p) + beta KL(p, q). `jsd`: beta KL(q, m) + (1 - beta) KL(p, m) with "
        "m = beta q + (1 - beta) p.",
    )
    beta: float = Field(default=0.5, gt=0, lt=1, description="The weight in `mixed` and `jsd`.")
    tail: Literal["bucket", "renormalize"] = Field(
        default="bucket",
        description="What becomes of tokens beyond the top k. `bucket`: they are one more outcome, with what is left "
        "of the probability. `renormalize`: they are left out, and the k probabilities divided by their sum.",
    )
    label_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the negative logprob of the data's own tokens, added to the loss."
    )

    @model_validator(mode="after")
    def _check_beta(self) -> Self:
        if self.kind in ("forward_kl", "reverse_kl") and self.beta != type(self).model_fields["beta"].default:
            raise broken_rule(f"left out with kind: {self.kind}", repair="remove it, or set kind: jsd", key="beta")
        if self.tail == "renormalize" and self.top_k == 1:
            rule = "at least 2 with tail: renormalize: one token alone always has probability 1"
            raise broken_rule(rule, repair="raise it, or set tail: bucket", key="top_k")
        return self


class DistillWorkersConfig(SFTWorkersConfig):
    """The processes of each worker. Their number and devices are in `distributed` and `teacher`."""

    teacher: ReplicatedWorkerConfig = Field(
        default_factory=ReplicatedWorkerConfig, description="The teachers, while logprobs are stored."
    )


class DistillConfig(SupervisedConfig):
    """Distillation from stored logprobs of a teacher: one configuration for `forge distill` and
    `apps/distill/main.py`."""

    teacher: TeacherConfig = Field(
        default_factory=TeacherConfig, description="What `forge distill` stores logprobs of. Training does not load it."
    )
    distillation: StoredDistillationConfig = Field(
        default_factory=StoredDistillationConfig, description="What is stored, and what is minimized."
    )
    workers: DistillWorkersConfig = Field(
        default_factory=DistillWorkersConfig, description="The processes of each worker."
    )

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        if self.distributed.pipeline > 1:
            rule = "1: the stages of a pipeline do not give logprobs of a teacher's tokens"
            raise broken_rule(rule, repair="use distributed.shard or distributed.tensor", key="distributed.pipeline")
        return self
