"""Reinforcement learning: the sections of `apps/grpo/main.py`, apart from those of prompts and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from forge.config.adapter import AdapterConfig
from forge.config.algorithm import AlgorithmConfig
from forge.config.base import ConfigModel, PathText, broken_rule
from forge.config.critic import CriticConfig, check_critic
from forge.config.curriculum import CurriculumConfig, check_reward_name
from forge.config.episodes import EpisodeConfig
from forge.config.generator import PolicyGeneratorConfig
from forge.config.prompts import EvaluationConfig, PromptsConfig
from forge.config.record import ObserveConfig
from forge.config.recovery import RecoveryConfig
from forge.config.replay import ReplayRecordConfig
from forge.config.rewards import RewardsConfig
from forge.config.schema import ForgeConfig, ReplicatedWorkerConfig, StoreConfig, WorkerConfig
from forge.config.sft import MetricsConfig
from forge.config.teacher import TeacherConfig
from forge.config.training import CheckpointConfig, DistributedConfig, TrainingConfig, check_base_dtype

Placement = Literal["apart", "beside", "turns", "shared"]

GPU_SHARES: Final[Mapping[str, float]] = {"beside": 0.35, "turns": 0.5}
"""Which part of a GPU the generators may take where a trainer uses the same one. The rest is for its weights, gradients
and optimizer, and for activations, which reach their peak in the first step, when the cache is already allocated. With
`turns` the share applies to vLLM only. The native engine has none with `turns` and `shared`: it releases its cache
while the trainer works, and then uses all memory that the trainer does not hold."""


class RolloutConfig(ConfigModel):
    """How completions become batches."""

    old_keys: ClassVar[Mapping[str, str | None]] = {"max_fruitless": "max_no_signal_groups"}

    batch_groups: int = Field(default=8, ge=1, description="Groups (prompts) per step.")
    group_size: int = Field(default=8, ge=1, description="Completions per prompt.")
    staleness: int = Field(
        default=0,
        ge=0,
        description="Maximum number of steps by which the weights that sampled a token may be older than the weights "
        "being trained. 0: generation and training alternate, on the same weights.",
    )
    iterations: int = Field(default=1, ge=1, description="Optimizer steps on each batch.")
    no_signal: Literal["drop", "replace", "keep"] = Field(
        default="drop",
        description="What happens to a group without signal, whose advantages are all 0: dropped from its batch, "
        "replaced by another (dynamic sampling, which also replaces a group whose rewards are equal before shaping), "
        "or kept.",
    )
    signal_reward: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the reward that must differ within a group, such as the one for a right answer: where all "
        "completions have the same value of it, the group has no signal, whatever else distinguishes them. Null for "
        "the weighted sum of all.",
    )
    max_no_signal_groups: int = Field(
        default=1000,
        ge=1,
        description="Consecutive groups without signal, or with failed rewards, after which the run ends.",
    )
    max_in_flight: int | None = Field(
        default=None,
        ge=1,
        description="Groups generated or scored at once; null for as many as the generators have room for, and "
        "with episode.kind up to twice as many.",
    )
    mask_truncated: bool = Field(
        default=False, description="Whether completions cut off by length are excluded from the loss."
    )
    share_prompts: bool = Field(
        default=True,
        description="Whether the prompt of a group goes through the trainer once instead of once per completion, and "
        "the first turns of an episode once instead of once per branch. Gradients do not depend on it.",
    )
    report_wait_s: float = Field(
        default=60.0, gt=0, description="Seconds after which a trainer that waits for a batch logs what it waits for."
    )
    max_task_retries: int = Field(
        default=3, ge=0, description="How often a group is retried after a process that worked on it died."
    )


class ReferenceConfig(ConfigModel):
    """The reference model of the KL penalty. Loaded only with algorithm.kl.coefficient > 0."""

    path: PathText | None = Field(
        default=None,
        description="Folder of the model; null for the policy's initial weights. With an `adapter` and null, the "
        "trainer is the reference itself, without its adapter, and no process is started.",
    )
    num_replicas: int = Field(default=1, ge=1, description="Replicas.")
    num_threads: int | None = Field(default=None, ge=1, description="CPU threads of each replica; null for one.")
    with_gpus: bool | None = Field(
        default=None, description="Whether it gets a GPU; null to use one where there is one."
    )


class GRPOWorkersConfig(ConfigModel):
    """The processes of each worker. Their number and devices are in the sections of the workers."""

    trainer: WorkerConfig = Field(default_factory=WorkerConfig, description="The trainer.")
    critic: WorkerConfig = Field(default_factory=WorkerConfig, description="The critic.")
    generator: ReplicatedWorkerConfig = Field(default_factory=ReplicatedWorkerConfig, description="The generators.")
    rewards: ReplicatedWorkerConfig = Field(default_factory=ReplicatedWorkerConfig, description="What scores.")
    reference: ReplicatedWorkerConfig = Field(
        default_factory=ReplicatedWorkerConfig, description="The reference models."
    )
    judge: ReplicatedWorkerConfig = Field(default_factory=ReplicatedWorkerConfig, description="The judges.")
    episodes: ReplicatedWorkerConfig = Field(
        default_factory=ReplicatedWorkerConfig, description="What runs episodes of several turns."
    )
    reward_model: ReplicatedWorkerConfig = Field(
        default_factory=ReplicatedWorkerConfig, description="The reward models."
    )
    teacher: ReplicatedWorkerConfig = Field(
        default_factory=ReplicatedWorkerConfig, description="The teachers of distillation."
    )


class RecordConfig(ObserveConfig):
    """What is recorded of rollouts."""

    rollouts: Literal["all", "some", "none"] = Field(
        default="all",
        description="Which episodes are written to rollouts/: those of every trained group and every evaluation, of "
        "some, or none. A few groups without signal are written for each step.",
    )
    num_groups: int = Field(default=2, ge=1, description="For `some`: groups per step and per evaluation.")
    trainer_logprobs: bool = Field(
        default=True, description="Whether the trainer's logprobs are recorded next to the sampler's."
    )
    report: bool = Field(default=True, description="Whether report.html is written when the run ends.")
    replay: ReplayRecordConfig = Field(
        default_factory=ReplayRecordConfig, description="What is recorded to replay steps."
    )


class GRPOConfig(ForgeConfig):
    """Reinforcement learning of a policy: GRPO and its family."""

    old_keys: ClassVar[Mapping[str, str | None]] = {
        **{f"generators.{key}": f"generator.{key}" for key in ("num_replicas", "tensor_parallel", "num_threads")},
        "store.verify": "generator.update.verify",
    }

    prompts: PromptsConfig = Field(default_factory=PromptsConfig, description="What the policy is asked.")
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig, description="Which prompts are asked next.")
    rewards: RewardsConfig = Field(default_factory=RewardsConfig, description="What completions are scored by.")
    episode: EpisodeConfig = Field(
        default_factory=EpisodeConfig, description="A program that makes episodes of several turns."
    )
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="From rewards to a loss.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="How completions become batches.")
    generator: PolicyGeneratorConfig = Field(default_factory=PolicyGeneratorConfig, description="What makes tokens.")
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="What the policy is held to.")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="What says how good a state is.")
    teacher: TeacherConfig = Field(default_factory=TeacherConfig, description="What the policy is distilled from.")
    placement: Placement = Field(
        default="apart",
        description="`apart`: trainer and generators run in separate processes, on separate GPUs. `beside`: separate "
        "processes on the same GPU, running concurrently. `turns`: the same, but generators sleep while the "
        "trainer works. `shared`: one process, in which the native engine computes with the trainer's own "
        "weights.",
    )
    adapter: AdapterConfig | None = Field(
        default=None, description="LoRA adapter that is trained instead of the weights; null to train all weights."
    )
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="The optimizer's steps.")
    distributed: DistributedConfig = Field(default_factory=DistributedConfig, description="The trainer's ranks.")
    checkpointing: CheckpointConfig = Field(default_factory=CheckpointConfig, description="What is saved, and when.")
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig, description="What follows when the trainer dies.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="How the policy is judged.")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="Where metrics are written.")
    store: StoreConfig = Field(default_factory=StoreConfig, description="Where published weights are kept.")
    workers: GRPOWorkersConfig = Field(default_factory=GRPOWorkersConfig, description="The processes of each worker.")
    record: RecordConfig = Field(default_factory=RecordConfig, description="What is written down of rollouts.")

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        for key in ("batch_size", "gradient_accumulation_steps"):
            if getattr(self.training, key) != TrainingConfig.model_fields[key].default:
                rule = "has no meaning here: a step learns from rollout.batch_groups groups"
                repair = "remove it, and set rollout.batch_groups; for less memory lower training.microbatch_tokens"
                raise broken_rule(rule, repair=repair, key=f"training.{key}")
        return self

    @model_validator(mode="after")
    def _check_episode(self) -> Self:
        if self.episode.kind is not None and self.rewards.functions:
            rule = "not with episode.kind: the program gives the rewards"
            repair = "remove it, and call it in the program: forge.rewards.exact(task, turn)"
            raise broken_rule(rule, repair=repair, key="rewards.functions")
        return self

    @model_validator(mode="after")
    def _check_reward_names(self) -> Self:
        rollout, known = self.rollout, [function.label for function in self.rewards.functions]
        check_reward_name("curriculum.reward", self.curriculum.reward, known)
        check_reward_name("rollout.signal_reward", rollout.signal_reward, known)
        if rollout.signal_reward is not None and rollout.no_signal == "keep":
            rule = "has no effect with rollout.no_signal keep: such groups are trained on"
            raise broken_rule(rule, repair="remove it, or set no_signal: replace", key="rollout.signal_reward")
        if rollout.signal_reward is not None and rollout.group_size == 1:
            rule = "at least 2 with rollout.signal_reward, which must differ within a group"
            raise broken_rule(rule, repair="raise it, or remove signal_reward", key="rollout.group_size")
        return self

    @model_validator(mode="after")
    def _check_owned(self) -> Self:
        """Refuse keys of sections that other programs share, and that this one sets itself."""
        owned = {
            "training.share_prefixes": (self.training.share_prefixes, False, "rollout.share_prompts"),
            "generator.sampling.n": (self.generator.sampling.n, 1, "rollout.group_size"),
            "generator.sampling.seed": (self.generator.sampling.seed, None, "run.seed"),
        }
        for key, (value, default, owner) in owned.items():
            if value != default:
                raise broken_rule(f"has no meaning here: {owner} decides", repair=f"remove it; set {owner}", key=key)
        return self

    @property
    def _compares_episodes(self) -> bool:
        is_named = self.algorithm.advantage.function in ("baseline", "gigpo")
        return is_named and not self.algorithm.distillation.is_alone

    @property
    def compares_with_itself(self) -> bool:
        """Whether each completion is its group, and the mean of its group its baseline: all advantages are 0."""
        is_mean = self.algorithm.advantage.baseline in ("group_mean", "leave_one_out")
        return self._compares_episodes and is_mean and self.rollout.group_size == 1

    @model_validator(mode="after")
    def _check_comparison(self) -> Self:
        """Refuse what can give no advantage but 0: a completion that is compared with itself alone."""
        advantage, rollout = self.algorithm.advantage, self.rollout
        if any(agent.advantage == "baseline" for agent in self.episode.agents.values()):
            return self  # those of other agents are checked when the program is known
        if self.compares_with_itself:
            rule = (
                f"at least 2 with algorithm.advantage.baseline `{advantage.baseline}`: a completion alone is its own "
            )
            repair = "raise it, or choose an algorithm that compares no groups: algorithm.preset=reinforce_pp"
            raise broken_rule(rule + "baseline", repair=repair, key="rollout.group_size")
        is_alone = self._compares_episodes and rollout.group_size == rollout.batch_groups == 1
        if is_alone and (advantage.baseline == "batch_mean" or advantage.whiten):
            rule = "at least 2 with rollout.group_size 1: the completions of a step are compared with each other"
            raise broken_rule(rule, repair="raise it, or rollout.group_size", key="rollout.batch_groups")
        return self

    @model_validator(mode="after")
    def _check_critic(self) -> Self:
        check_critic(self.critic, algorithm=self.algorithm, training=self.training, agents=self.episode.agents)
        return self

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        teacher, temperature = self.teacher, self.generator.sampling.temperature
        if self.algorithm.distillation.is_used != teacher.is_given:
            if teacher.is_given:
                rule, repair = "has no effect without a teacher's part in advantages", "1 is usual; or remove `teacher`"
                raise broken_rule(rule, repair=repair, key="algorithm.distillation.coefficient")
            rule = "a model's folder (or teacher.endpoint) with algorithm.distillation.coefficient above 0"
            raise broken_rule(rule, repair="name the teacher, or set the coefficient to 0", key="teacher.path")
        if teacher.is_given and temperature not in (0, 1) and not teacher.scores_tempered:
            rule = "1 with this teacher: it scores at temperature 1 only"
            repair = "set 1.0, or teacher.path without an endpoint and without teacher.generator.engine: vllm"
            raise broken_rule(rule, repair=repair, key="generator.sampling.temperature")
        return self

    @model_validator(mode="after")
    def _choose_precision(self) -> Self:
        """Let generators compute in float16 where the trainer does: that is what float16 is for."""
        section = self.generator
        if self.distributed.precision == "float16" and section.precision is None and "dtype" not in section.engine_args:
            object.__setattr__(self, "generator", section.model_copy(update={"precision": "float16"}))
        return self

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        if self.placement == "turns" and self.rollout.staleness > 0:
            rule = "0 with placement `turns`: the policy generates and learns in turns"
            repair = "set placement: shared, beside or apart, or staleness: 0"
            raise broken_rule(rule, repair=repair, key="rollout.staleness")
        if self.placement == "shared" and self.rollout.staleness > 0 and self.generator.update.mode == "drain":
            rule = "keep, recompute or abort with placement `shared` and rollout.staleness above 0: completions in "
            rule += "progress wait while the trainer works, and cannot finish first"
            raise broken_rule(rule, repair="set keep, or rollout.staleness: 0", key="generator.update.mode")
        if self.placement == "shared" and not self.generator.capabilities.shared_weights:
            rule = "with placement `shared` it must compute with the trainer's own weights, as `native` does"
            raise broken_rule(rule, repair="set placement: turns or beside", key="generator.engine")
        if self.placement == "shared" and self.generator.num_replicas > 1:
            rule = "1 with placement `shared`: there is one process"
            raise broken_rule(rule, repair="set placement: apart", key="generator.num_replicas")
        if self.placement != "apart" and self.generator.autoscale is not None:
            rule = f"null with placement `{self.placement}`: generators share the trainer's devices"
            raise broken_rule(rule, repair="remove it, or set placement: apart", key="generator.autoscale")
        return self

    @model_validator(mode="after")
    def _check_adapter(self) -> Self:
        if self.adapter is None:
            return self
        check_base_dtype(self.adapter, self.distributed, self.training)
        if self.model.path is None and (self.placement != "shared" or self.adapter.base_dtype is not None):
            rule = "a folder with `adapter`: trainer and generators load the weights below the adapter from it"
            raise broken_rule(rule, repair="set it, or remove adapter", key="model.path")
        if not self.generator.capabilities.live_adapter:
            rule = "an engine that updates a LoRA adapter as it is trained, such as `native`"
            raise broken_rule(rule, repair="set engine: native, or remove adapter", key="generator.engine")
        if self.base_is_reference and self.algorithm.kl.place == "reward" and self.placement in ("turns", "shared"):
            rule = (
                f"`loss` with placement `{self.placement}` and an adapter: the trainer is its own reference, and "
                "cannot score while generators use the device"
            )
            raise broken_rule(rule, repair="set it to loss, or give reference.path", key="algorithm.kl.place")
        return self

    @property
    def base_is_reference(self) -> bool:
        """Whether the trainer without its adapter is the reference model of the KL penalty."""
        return self.adapter is not None and self.reference.path is None and self.algorithm.kl.coefficient > 0

    @property
    def needs_reference(self) -> bool:
        """Whether there are processes of a reference model."""
        return self.algorithm.kl.coefficient > 0 and not self.base_is_reference

    @property
    def critic_iterations(self) -> int:
        """Optimizer steps of the critic on each batch."""
        return self.critic.iterations or self.rollout.iterations

    @property
    def critic_distributed(self) -> DistributedConfig:
        """The critic's ranks."""
        return self.critic.distributed or self.distributed

    @property
    def gpu_memory_share(self) -> float | None:
        """The part of a GPU's memory that each generator may take: as said, or what the placement leaves to it.

        None where a generator has a GPU of its own, or gives its cache back whenever the trainer works, and nothing was
        said: then it may take what it finds.
        """
        share = None if self.gives_way else GPU_SHARES.get(self.placement)
        if self.generator.gpu_memory_share is not None or share is None:
            return self.generator.gpu_memory_share
        return share / self.generator.num_replicas

    @property
    def gives_way(self) -> bool:
        """Whether the generators' cache is chosen to fill what a trainer at rest leaves of a GPU, and is given back
        while it works."""
        return self.placement in ("turns", "shared") and not self.generator.capabilities.reserves_gpu_share
