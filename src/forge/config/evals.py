"""Evaluation: the configuration of `forge eval`."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, Name, PathText, broken_rule
from forge.config.endpoints import EndpointConfig
from forge.config.episodes import EpisodeConfig
from forge.config.generator import GeneratorServiceConfig
from forge.config.prompts import PromptsConfig
from forge.config.rewards import RewardsConfig
from forge.config.schema import ForgeConfig, ModelConfig, ReplicatedWorkerConfig, RunConfig


class EvalSection(ConfigModel):
    """What is evaluated, how often, and what counts as solved."""

    run: PathText | None = Field(
        default=None,
        description="Folder of a run whose checkpoint is evaluated. The run's configuration gives the defaults of all "
        "other keys. Null to evaluate the model of the section `model`.",
    )
    step: int | None = Field(
        default=None, ge=0, description="Step of the run's checkpoint; null for the newest one. Only with `run`."
    )
    endpoint: EndpointConfig | None = Field(
        default=None, description="An endpoint to evaluate; null to start generators."
    )
    num_samples: int = Field(default=1, ge=1, description="Samples per task (n).")
    num_tasks: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of tasks; null for all. With prompts.shuffle a random choice by run.seed, "
        "otherwise the first ones.",
    )
    heldout_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Evaluate only this fraction of the prompts: those that a run with the same prompts and run.seed "
        "holds out with this evaluation.fraction. 0 for all prompts.",
    )
    max_concurrent: int | None = Field(
        default=None,
        ge=1,
        description="Samples in progress at once; null for as many as the generators run at once, and 64 at an "
        "endpoint.",
    )
    solved_at: float = Field(default=1.0, description="Reward from which a sample counts as solved.")
    reward: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the reward that decides whether a sample is solved; null for the whole reward.",
    )
    pass_at: tuple[int, ...] = Field(default=(), description="The k of pass@k; empty for 1, 2, 4, … up to num_samples.")
    confidence: float = Field(default=0.95, gt=0, lt=1, description="Level of the confidence intervals.")
    allow_missing: bool = Field(
        default=False,
        description="Whether tasks that could not be completed because of faults leave the exit code at 0.",
    )

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.step is not None and self.run is None:
            raise broken_rule("only with eval.run", repair="name the run, or remove it", key="step")
        if self.run is not None and self.endpoint is not None:
            rule = "not with eval.run: one model is evaluated at a time"
            raise broken_rule(rule, repair="remove one of the two", key="endpoint")
        return self

    @model_validator(mode="after")
    def _check_pass_at(self) -> Self:
        if any(not 1 <= k <= self.num_samples for k in self.pass_at) or len(set(self.pass_at)) < len(self.pass_at):
            rule = f"different whole numbers from 1 to num_samples, which is {self.num_samples}"
            raise broken_rule(rule, repair="raise num_samples, or leave the larger ones out", key="pass_at")
        return self

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k, in order."""
        powers = {2**power for power in range(self.num_samples.bit_length())} | {self.num_samples}
        return tuple(sorted(self.pass_at or powers))


class EvalWorkersConfig(ConfigModel):
    """The processes of each worker. Their number and devices are in the sections of the workers."""

    generator: ReplicatedWorkerConfig = Field(default_factory=ReplicatedWorkerConfig, description="The generators.")
    episodes: ReplicatedWorkerConfig = Field(
        default_factory=ReplicatedWorkerConfig, description="What runs episodes of several turns."
    )
    rewards: ReplicatedWorkerConfig = Field(default_factory=ReplicatedWorkerConfig, description="What scores.")
    judge: ReplicatedWorkerConfig = Field(default_factory=ReplicatedWorkerConfig, description="The judges.")
    reward_model: ReplicatedWorkerConfig = Field(
        default_factory=ReplicatedWorkerConfig, description="The reward models."
    )


class EvalRunConfig(RunConfig):
    """What the evaluation is called and where it writes."""

    name: Name = Field(default="eval", description="Name of the evaluation, and of its folder.")


class EvalConfig(ForgeConfig):
    """An evaluation: `forge eval` and `forge.evaluate`."""

    run: EvalRunConfig = Field(
        default_factory=EvalRunConfig, description="What the evaluation is called, and its seed."
    )
    eval: EvalSection = Field(default_factory=EvalSection, description="What is evaluated, and how often.")
    prompts: PromptsConfig = Field(default_factory=PromptsConfig, description="The tasks.")
    rewards: RewardsConfig = Field(default_factory=RewardsConfig, description="What completions are scored by.")
    episode: EpisodeConfig = Field(
        default_factory=EpisodeConfig, description="A program that makes episodes of several turns."
    )
    generator: GeneratorServiceConfig = Field(default_factory=GeneratorServiceConfig, description="What makes tokens.")
    workers: EvalWorkersConfig = Field(default_factory=EvalWorkersConfig, description="The processes of each worker.")

    @model_validator(mode="after")
    def _check_scoring(self) -> Self:
        if self.episode.kind is not None and self.rewards.functions:
            rule = "not with episode.kind: the program gives the rewards"
            raise broken_rule(rule, repair="remove it, and call it in the program", key="rewards.functions")
        if self.episode.group_reward is not None:
            rule = "has no meaning here: the samples of a task are scored one by one"
            raise broken_rule(rule, repair="remove it", key="episode.group_reward")
        return self

    @model_validator(mode="after")
    def _check_owned(self) -> Self:
        """Refuse keys that this program sets itself, or that have no effect on weights that do not change."""
        generator, fields = self.generator, GeneratorServiceConfig.model_fields
        if generator.sampling.n != 1:
            repair = "remove it; set eval.num_samples"
            raise broken_rule(
                "has no meaning here: eval.num_samples decides", repair=repair, key="generator.sampling.n"
            )
        if generator.sampling.seed is not None:
            repair = "remove it; set run.seed"
            raise broken_rule("has no meaning here: run.seed decides", repair=repair, key="generator.sampling.seed")
        for key in ("weights", "update", "canary"):
            if getattr(generator, key) != fields[key].get_default(call_default_factory=True):
                rule = "has no meaning here: the weights do not change"
                raise broken_rule(rule, repair="remove it", key=f"generator.{key}")
        return self

    @model_validator(mode="after")
    def _check_endpoint(self) -> Self:
        """Refuse keys of a model and of generators where an endpoint answers."""
        if self.eval.endpoint is None:
            return self
        if self.model != ModelConfig():
            rule = "not with eval.endpoint: its server has the model"
            repair = "remove it; eval.endpoint.model is the name of the model there"
            raise broken_rule(rule, repair=repair, key="model")
        for key, field in GeneratorServiceConfig.model_fields.items():
            if key != "sampling" and getattr(self.generator, key) != field.get_default(call_default_factory=True):
                rule = "has no effect with eval.endpoint: no generator is started"
                raise broken_rule(rule, repair="remove it", key=f"generator.{key}")
        return self
