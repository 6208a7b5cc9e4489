"""Curricula: the section `curriculum`, and which rewards other sections may name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, CurriculumName, FrozenDict, broken_rule
from forge.errors import did_you_mean

_RULE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "prioritised": ("target", "power", "unseen"),
    "range": ("low", "high"),
    "staged": ("num_stages", "advance_at", "min_groups"),
}
"""The keys that only one rule reads."""


class CurriculumConfig(ConfigModel):
    """Which prompts are asked next, by how often earlier groups of each were solved (its pass rate)."""

    kind: CurriculumName | None = Field(
        default=None,
        description="`prioritised`: prompts whose pass rate is close to `target` come more often. `range`: only "
        "prompts with a pass rate from `low` to `high`, and new ones. `staged`: from easy to hard, by "
        "`difficulty_key`. `module:attribute`: a function of your own that returns the weight of each "
        "prompt. Null: every epoch has each prompt once.",
    )
    args: Mapping[str, Any] = Field(
        default_factory=FrozenDict, description="Keyword arguments of a function of your own."
    )
    explore: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the groups that go through all prompts in turn, whatever the rule says. Every prompt "
        "comes at least once in 2 x prompts / explore groups; with 0, a prompt may never come.",
    )
    reward: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the reward that decides whether a completion is solved; null for the weighted sum of all "
        "that do not only shape the reward.",
    )
    solved_at: float = Field(default=1.0, description="Reward from which a completion counts as solved.")
    decay: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="How much earlier groups of a prompt count in its pass rate, compared with the next one. 0: only "
        "the last group counts; 1: all count the same.",
    )
    target: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="For `prioritised`: the pass rate p with the largest weight, 1. The weight is "
        "((p / target)^target x ((1 - p) / (1 - target))^(1 - target))^(2 power): 4 p (1 - p) for 0.5 and power 1.",
    )
    power: float = Field(default=1.0, gt=0, description="For `prioritised`: the exponent of the weights.")
    unseen: float = Field(
        default=1.0, ge=0, le=1, description="For `prioritised`: the weight of a prompt that was never asked."
    )
    low: float = Field(default=0.05, ge=0, le=1, description="For `range`: the lowest pass rate.")
    high: float = Field(default=0.95, ge=0, le=1, description="For `range`: the highest pass rate.")
    difficulty_key: str | None = Field(
        default=None,
        min_length=1,
        description="For `staged` and functions of your own: the key of the records (a column) that holds a prompt's "
        "difficulty, a number.",
    )
    num_stages: int | None = Field(
        default=None,
        ge=1,
        description="For `staged`: number of stages, each with about as many prompts; null for one per difficulty.",
    )
    advance_at: float = Field(
        default=0.7,
        ge=0,
        le=1,
        description="For `staged`: the pass rate of a stage at which the next one is added.",
    )
    min_groups: int = Field(
        default=10, ge=1, description="For `staged`: the groups of a stage that must count in its pass rate first."
    )

    @model_validator(mode="after")
    def _check_rule(self) -> Self:
        """Refuse keys that the chosen rule does not read, and ranges that hold nothing."""
        is_own = self.kind is not None and ":" in self.kind
        for key in type(self).model_fields:
            owner = next((name for name, keys in _RULE_KEYS.items() if key in keys), None)
            is_read = key == "kind" or (self.kind is not None and owner in (None, self.kind))
            is_read &= is_own or key != "args"
            is_read &= is_own or self.kind == "staged" or key != "difficulty_key"
            if not is_read and getattr(self, key) != type(self).model_fields[key].get_default(
                call_default_factory=True
            ):
                repair = "remove it, or set curriculum.kind" + (f": {owner}" if owner else "")
                raise broken_rule(f"has no effect with curriculum.kind {self.kind or 'null'}", repair=repair, key=key)
        if self.low > self.high:
            rule = f"at most curriculum.high, which is {self.high}: no pass rate is in an empty range"
            raise broken_rule(rule, repair="lower it, or raise high", key="low")
        if self.kind == "staged" and self.difficulty_key is None:
            rule = "needed with curriculum.kind staged: the key of the records that holds a difficulty"
            raise broken_rule(rule, repair="name it, such as level", key="difficulty_key")
        return self


def check_reward_name(path: str, name: str | None, known: Sequence[str]) -> None:
    """Refuse the name of a reward that a run does not compute. `known` is empty where a program names its rewards."""
    if name is not None and known and name not in known:
        repair = did_you_mean(name, known) or "name one of them, or null for the sum"
        raise broken_rule(f"one of the run's rewards: {', '.join(known)}", repair=repair, key=path)
