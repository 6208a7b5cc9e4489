"""Agents of an episode: the section `episode.agents`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, PathText, broken_rule
from forge.config.endpoints import EndpointConfig

_SOURCES = ("version", "adapter", "checkpoint", "model", "endpoint")


class AgentLimits(ConfigModel):
    """What one agent of an episode may use. The limits of the episode hold for all agents together. Null means no limit
    of its own."""

    max_turns: int | None = Field(default=None, ge=1, description="Completions of this agent.")
    max_tokens: int | None = Field(default=None, ge=1, description="Sampled tokens of this agent, all turns together.")


class RunningBaselineConfig(ConfigModel):
    """The baseline of `advantage: baseline`: the mean reward of earlier batches, of which later ones count more."""

    decay: float = Field(
        default=0.9, ge=0, lt=1, description="How much of the baseline stays when a batch was learned from."
    )
    start: float = Field(default=0.0, description="The baseline of the first batch.")


class AgentConfig(ConfigModel):
    """One agent of an episode. Without `version`, `adapter`, `checkpoint`, `model` and `endpoint` it is the live
    policy: the one that is trained."""

    version: int | None = Field(
        default=None,
        ge=0,
        description="A version of the policy, as this run publishes it: 0 for the initial weights. A run can name the "
        "version that it starts with, and when it is resumed those that it named before.",
    )
    adapter: str | None = Field(
        default=None,
        min_length=1,
        description="A LoRA adapter of `generator.adapters`, which the policy's own generators serve; `base` for the "
        "model without an adapter. Only in a run that trains an `adapter`: otherwise the weights below it change.",
    )
    checkpoint: PathText | None = Field(
        default=None, description="A checkpoint's folder, such as outputs/run/checkpoints/step_100."
    )
    model: PathText | None = Field(default=None, description="The folder of another model.")
    endpoint: EndpointConfig | None = Field(default=None, description="An OpenAI-compatible endpoint.")
    learns: bool | None = Field(
        default=None, description="Whether its turns are trained on; null for yes where it is the live policy."
    )
    advantage: Literal["group", "baseline", "zero_sum"] = Field(
        default="group",
        description="What its reward is compared with. `group`: the same agent in the other episodes of the group, as "
        "`algorithm.advantage` says. `baseline`: a running mean of its own rewards. `zero_sum`: its advantage is the "
        "negative of its only opponent's; rewards must add up to 0.",
    )
    baseline: RunningBaselineConfig = Field(
        default_factory=RunningBaselineConfig, description="The running mean of `advantage: baseline`."
    )
    num_replicas: int = Field(default=1, ge=1, description="Generators of this agent's own model.")
    limits: AgentLimits = Field(default_factory=AgentLimits, description="What this agent may use.")

    @property
    def is_live(self) -> bool:
        """Whether the policy that is trained answers for it."""
        return all(getattr(self, name) is None for name in _SOURCES)

    @property
    def is_trained(self) -> bool:
        """Whether its turns are trained on."""
        return self.is_live if self.learns is None else self.learns

    @property
    def has_own_generators(self) -> bool:
        """Whether generators are started for it."""
        return self.checkpoint is not None or self.model is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(named) > 1:
            rule = f"one of {', '.join(_SOURCES)}, not {' and '.join(named)}"
            raise broken_rule(rule, repair="keep the one that shall answer for this agent", key=named[1])
        if named and self.learns:
            rule = f"false with {named[0]}: only the live policy is trained"
            raise broken_rule(rule, repair=f"remove learns, or remove {named[0]}", key="learns")
        if not self.is_trained and self.advantage != "group":
            rule = "has no effect on an agent that does not learn"
            raise broken_rule(rule, repair="remove it", key="advantage")
        if self.advantage != "baseline" and self.baseline != RunningBaselineConfig():
            raise broken_rule(
                "has no effect without advantage: baseline", repair="remove it, or set advantage", key="baseline"
            )
        if self.num_replicas > 1 and not self.has_own_generators:
            rule = "has no effect on an agent without generators of its own"
            raise broken_rule(rule, repair="remove it; generator.num_replicas is for the policy", key="num_replicas")
        if self.endpoint is not None and self.limits.max_tokens is not None:
            rule = "null with an endpoint: its tokens are not known here"
            raise broken_rule(rule, repair="remove it; limits.max_turns holds there, too", key="limits.max_tokens")
        return self
