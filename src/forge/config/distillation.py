"""On-policy distillation: how the teacher's logprobs of sampled tokens become advantages."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, broken_rule


class DistillationConfig(ConfigModel):
    """On-policy distillation: each sampled token gets log p_teacher - log p_student as an advantage, alone or added to
    that of the rewards."""

    coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the teacher's part of an advantage. With 0 no teacher is loaded."
    )
    reward_coefficient: float = Field(
        default=1.0,
        ge=0,
        description="Weight of the part that comes from rewards. 0 for the teacher alone: rewards are then optional, "
        "and only recorded.",
    )
    credit: Literal["token", "return_to_go"] = Field(
        default="token",
        description="Which tokens get a token's log ratio: that token alone, or that token and all before it, which "
        "gives the gradient of the divergence of whole completions at a higher variance.",
    )
    clamp: float | None = Field(
        default=None, gt=0, description="Largest absolute log ratio of a token. Null for no limit."
    )

    @property
    def is_used(self) -> bool:
        """Whether a teacher scores what the policy samples."""
        return self.coefficient > 0

    @property
    def is_alone(self) -> bool:
        """Whether rewards have no part in advantages."""
        return self.is_used and self.reward_coefficient == 0

    @model_validator(mode="after")
    def _check_coefficients(self) -> Self:
        for key in ("reward_coefficient", "credit", "clamp"):
            if not self.is_used and getattr(self, key) != type(self).model_fields[key].default:
                rule = "has no effect with coefficient 0"
                raise broken_rule(rule, repair="remove it, or set algorithm.distillation.coefficient: 1", key=key)
        return self
