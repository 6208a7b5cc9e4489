"""The critic: the section `critic` of a reinforcement learning run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from forge.config.agents import AgentConfig
from forge.config.algorithm import AlgorithmConfig
from forge.config.base import SHORT_DTYPES, ConfigModel, PathText, broken_rule
from forge.config.schema import ModelConfig
from forge.config.training import DistributedConfig, TrainingConfig


class CriticTrainingConfig(ConfigModel):
    """The critic's optimizer steps, where they differ from the policy's. Null for what the section `training` says."""

    learning_rate: float | None = Field(default=None, gt=0, description="Highest learning rate of the schedule.")
    schedule: Literal["constant", "linear", "cosine", "wsd"] | None = Field(
        default=None, description="Shape of the learning rate after the warm-up."
    )
    weight_decay: float | None = Field(default=None, ge=0, description="Weight decay.")
    max_grad_norm: float | None = Field(default=None, gt=0, description="Norm to which a larger gradient is scaled.")
    microbatch_tokens: int | None = Field(
        default=None, ge=2, description="Tokens that one rank runs through the critic at once."
    )
    activation_checkpointing: Literal["none", "selective", "full"] | None = Field(
        default=None, description="What the backward pass recomputes."
    )
    optimizer_dtype: Annotated[Literal["float32", "bfloat16"] | None, SHORT_DTYPES] = Field(
        default=None, description="Precision of AdamW's two states."
    )

    def over(self, training: TrainingConfig) -> TrainingConfig:
        """Return the section `training` with what this section says instead."""
        return training.model_copy(update={name: value for name, value in self if value is not None})


class CriticConfig(ConfigModel):
    """The critic: a model of its own that says what a state is worth. Used with algorithm.advantage.function `gae`."""

    path: PathText | None = Field(
        default=None,
        description="Folder of the model that it starts from; null for the policy's initial weights. A folder without "
        "a scalar head (`score.weight`) gets a new one.",
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="First steps of the run, in which the critic learns and the policy does not."
    )
    value_clip: float | None = Field(
        default=0.2,
        gt=0,
        description="How far from the value before the first update on a batch the loss rewards a move towards the "
        "return; null for no limit. Without effect with one iteration.",
    )
    iterations: int | None = Field(
        default=None, ge=1, description="Optimizer steps of the critic on each batch; null for rollout.iterations."
    )
    training: CriticTrainingConfig = Field(
        default_factory=CriticTrainingConfig, description="Its optimizer steps, where they differ from the policy's."
    )
    distributed: DistributedConfig | None = Field(
        default=None, description="Its ranks; null for as many as the trainer has, laid out as they are."
    )
    placement: Literal["beside", "apart"] = Field(
        default="beside",
        description="`beside`: its processes use the trainer's GPUs; they never compute at the same time. `apart`: it "
        "has GPUs of its own.",
    )

    def model_from(self, policy: ModelConfig) -> ModelConfig:
        """Return the model that it starts from; `policy` is the policy's."""
        if self.path is None:
            return policy.model_copy(update={"head": "scalar"})
        return ModelConfig(path=self.path, head="scalar")

    @property
    def chosen_keys(self) -> tuple[str, ...]:
        """The keys that have another value than the default."""
        fields = type(self).model_fields
        return tuple(key for key in fields if getattr(self, key) != fields[key].get_default(call_default_factory=True))


def check_critic(
    section: CriticConfig, *, algorithm: AlgorithmConfig, training: TrainingConfig, agents: Mapping[str, AgentConfig]
) -> None:
    """Refuse what has no effect or no meaning with the other sections of a run."""
    most, own = training.max_steps, section.training
    if section.chosen_keys and not algorithm.has_critic:
        rule = f"no effect with algorithm.advantage.function `{algorithm.advantage.function}`"
        repair = "remove it, or set algorithm.preset: ppo"
        raise broken_rule(rule, repair=repair, key=f"critic.{section.chosen_keys[0]}")
    if algorithm.has_critic and algorithm.distillation.is_alone:
        rule = "above 0 with algorithm.advantage.function `gae`: a critic learns from rewards"
        repair = "raise it, or remove algorithm.advantage.function and algorithm.preset"
        raise broken_rule(rule, repair=repair, key="algorithm.distillation.reward_coefficient")
    if most is not None and section.warmup_steps >= most:
        rule = f"less than training.max_steps, which is {most}: the policy learns in the steps after the warm-up"
        raise broken_rule(rule, repair="lower it, or raise training.max_steps", key="critic.warmup_steps")
    if own.microbatch_tokens is not None and own.microbatch_tokens < training.max_seq_len:
        rule = f"at least training.max_seq_len, which is {training.max_seq_len}: a sample is never split"
        raise broken_rule(rule, repair="raise it", key="critic.training.microbatch_tokens")
    if own.optimizer_dtype == "bfloat16" and training.beta2 > 0.99:
        rule = f"float32 with training.beta2 {training.beta2:g}, which is more than 0.99"
        raise broken_rule(rule, repair="remove it, or lower training.beta2", key="critic.training.optimizer_dtype")
    for name, agent in agents.items() if algorithm.has_critic else ():
        if agent.advantage != "group":
            rule = "`group` with algorithm.advantage.function `gae`: the critic's values are the baseline"
            raise broken_rule(rule, repair="remove it", key=f"episode.agents.{name}.advantage")
