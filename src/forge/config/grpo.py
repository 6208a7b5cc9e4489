"""Reinforcement learning: the sections of `apps/grpo/main.py`, prompts and evaluation included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from forge.config.algorithm import AlgorithmConfig
from forge.config.base import ConfigModel, FrozenDict, PathText, TaskName, broken_rule
from forge.config.episodes import EpisodeConfig
from forge.config.generator import GeneratorServiceConfig
from forge.config.rewards import RewardsConfig
from forge.config.schema import ForgeConfig, ReplicatedWorkerConfig, StoreConfig, WorkerConfig
from forge.config.sft import MetricsConfig
from forge.config.training import CheckpointConfig, DistributedConfig, TrainingConfig
from forge.errors import did_you_mean

COLUMN_KEYS = ("messages", "prompt", "question", "answer", "system", "role", "content")
"""What a source may have another name for."""


class PromptSourceConfig(ConfigModel):
    """One source of prompts: a file, a dataset of the hub, or a task."""

    path: PathText | None = Field(
        default=None,
        description="A .jsonl, .json or .parquet file (.gz of the first two as well), a pattern such as data/*.jsonl, "
        "or a folder that holds such files or that `datasets` saved.",
    )
    hf_dataset: str | None = Field(
        default=None, min_length=1, description="A dataset of the Hugging Face hub, such as openai/gsm8k."
    )
    hf_config: str | None = Field(default=None, description="Its configuration; null for the default one.")
    split: str = Field(default="train", min_length=1, description="Split of a Hugging Face dataset.")
    task: TaskName | None = Field(
        default=None,
        description="A task that generates prompts from a seed: `arithmetic`, `countdown`, or `reasoning_gym/NAME` "
        "with the extra `reasoning-gym`.",
    )
    task_args: Mapping[str, Any] = Field(
        default_factory=FrozenDict, description="Arguments of the task, such as {level: 2}."
    )
    num_prompts: int | None = Field(
        default=None,
        ge=1,
        description="Prompts that a task generates (null for 1000), or the maximum to read from a file.",
    )
    format: Literal["auto", "plain", "gsm8k"] = Field(
        default="auto",
        description="Record format. `plain`: `messages`, `prompt` or `question`, and `answer`. `gsm8k`: the answer is "
        "the text after `####`. `auto` detects it from the first record.",
    )
    columns: Mapping[str, str] = Field(
        default_factory=FrozenDict,
        description="Column names that differ from the format's, such as {prompt: problem, answer: solution}.",
    )
    seed: int | None = Field(default=None, ge=0, description="Seed of a task; null to derive it from run.seed.")

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if sum(place is not None for place in (self.path, self.hf_dataset, self.task)) != 1:
            raise broken_rule("exactly one of path, hf_dataset and task", repair="remove one, or add one", key="path")
        return self

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        """Refuse keys that would have no effect, and names of columns that nothing asks for."""
        if self.task is None:
            for key in ("task_args", "seed"):
                if getattr(self, key) not in (None, {}):
                    raise broken_rule("only with a task", repair="remove it, or name a task", key=key)
        for key, default in (("columns", {}), ("format", "auto"), ("hf_config", None), ("split", "train")):
            if self.task is not None and getattr(self, key) != default:
                raise broken_rule("only with path or hf_dataset: a task has no records", repair="remove it", key=key)
        for name in self.columns:
            if name not in COLUMN_KEYS:
                repair = did_you_mean(name, COLUMN_KEYS) or "columns maps a key of ours to the name that the source has"
                raise broken_rule(f"its keys are among {', '.join(COLUMN_KEYS)}", repair=repair, key="columns")
        return self


class PromptsConfig(ConfigModel):
    """What the policy is asked."""

    sources: tuple[PromptSourceConfig, ...] = Field(default=(), description="Where prompts come from. Required.")
    system_prompt: str | None = Field(default=None, description="A system message before every prompt.")
    template: str | None = Field(
        default=None, description="Text around every prompt, such as `Solve: {prompt}`; null for the prompt alone."
    )
    chat: bool = Field(
        default=True, description="Whether a prompt becomes a user message; otherwise it is text to continue."
    )
    shuffle: bool = Field(default=True, description="Whether each epoch is shuffled differently.")
    on_bad_record: Literal["error", "skip"] = Field(
        default="error",
        description="What happens to a record that cannot be read: an error that names file and line, or skipped and "
        "counted.",
    )

    @model_validator(mode="after")
    def _check_words(self) -> Self:
        if self.template is not None and "{prompt}" not in self.template:
            repair = "write {prompt} where the prompt belongs, such as `Solve: {prompt}`"
            raise broken_rule("text that contains {prompt}", repair=repair, key="template")
        if self.system_prompt is not None and not self.chat:
            repair = "write it into the template, or set chat: true"
            raise broken_rule("only with chat: text has no system message", repair=repair, key="system_prompt")
        return self


class EvaluationConfig(ConfigModel):
    """Evaluation of the policy on held-out prompts."""

    interval: int | None = Field(default=None, ge=1, description="Steps between two evaluations; null for none.")
    at_start: bool = Field(default=True, description="Whether to evaluate before the first step.")
    at_end: bool = Field(default=True, description="Whether to evaluate after the last step.")
    sources: tuple[PromptSourceConfig, ...] = Field(default=(), description="Separate held-out prompts.")
    fraction: float = Field(
        default=0.0, ge=0, lt=1, description="Fraction of the prompts to hold out, if `sources` is empty."
    )
    max_prompts: int | None = Field(default=None, ge=1, description="Maximum number of prompts; null for all.")
    num_samples: int = Field(default=1, ge=1, description="Completions per prompt (k).")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0 for greedy decoding.")
    solved_at: float = Field(default=1.0, description="Reward from which a completion counts as solved.")
    reward: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the reward that decides whether a completion is solved; null for the weighted sum of all.",
    )

    stop_at: float | None = Field(
        default=None, description="Fraction of completions solved (avg@k) at which the run ends; null to run all steps."
    )

    @property
    def enabled(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.sources) or self.fraction > 0


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
        default=None, description="Folder of the model; null for the policy's initial weights."
    )
    num_replicas: int = Field(default=1, ge=1, description="Replicas.")
    num_threads: int | None = Field(default=None, ge=1, description="CPU threads of each replica; null for one.")
    with_gpus: bool | None = Field(
        default=None, description="Whether it gets a GPU; null to use one where there is one."
    )


class GRPOWorkersConfig(ConfigModel):
    """The processes of each worker. Their number and devices are in the sections of the workers."""

    trainer: WorkerConfig = Field(default_factory=WorkerConfig, description="The trainer.")
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


class RecordConfig(ConfigModel):
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
    trace: bool = Field(default=True, description="Whether trace.json is written, which shows what waited for what.")
    report: bool = Field(default=True, description="Whether report.html is written when the run ends.")


class GRPOConfig(ForgeConfig):
    """Reinforcement learning of a policy: GRPO and its family."""

    old_keys: ClassVar[Mapping[str, str | None]] = {
        **{f"generators.{key}": f"generator.{key}" for key in ("num_replicas", "tensor_parallel", "num_threads")},
        "store.verify": "generator.update.verify",
    }

    prompts: PromptsConfig = Field(default_factory=PromptsConfig, description="What the policy is asked.")
    rewards: RewardsConfig = Field(default_factory=RewardsConfig, description="What completions are scored by.")
    episode: EpisodeConfig = Field(
        default_factory=EpisodeConfig, description="A program that makes episodes of several turns."
    )
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="From rewards to a loss.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="How completions become batches.")
    generator: GeneratorServiceConfig = Field(default_factory=GeneratorServiceConfig, description="What makes tokens.")
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="What the policy is held to.")
    placement: Placement = Field(
        default="apart",
        description="`apart`: trainer and generators run in separate processes, on separate GPUs. `beside`: separate "
        "processes on the same GPU, running concurrently. `turns`: the same, but generators sleep while the "
        "trainer works. `shared`: one process, in which the native engine computes with the trainer's own "
        "weights.",
    )
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="The optimizer's steps.")
    distributed: DistributedConfig = Field(default_factory=DistributedConfig, description="The trainer's ranks.")
    checkpointing: CheckpointConfig = Field(default_factory=CheckpointConfig, description="What is saved, and when.")
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

    @model_validator(mode="after")
    def _check_comparison(self) -> Self:
        """Refuse what can give no advantage but 0: a completion that is compared with itself alone."""
        advantage, rollout = self.algorithm.advantage, self.rollout
        if rollout.group_size > 1 or advantage.function != "baseline":
            return self
        if advantage.baseline in ("group_mean", "leave_one_out"):
            rule = (
                f"at least 2 with algorithm.advantage.baseline `{advantage.baseline}`: a completion alone is its own "
            )
            repair = "raise it, or choose an algorithm that compares no groups: algorithm.preset=reinforce_pp"
            raise broken_rule(rule + "baseline", repair=repair, key="rollout.group_size")
        if rollout.batch_groups == 1 and (advantage.baseline == "batch_mean" or advantage.whiten):
            rule = "at least 2 with rollout.group_size 1: the completions of a step are compared with each other"
            raise broken_rule(rule, repair="raise it, or rollout.group_size", key="rollout.batch_groups")
        return self

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        if self.placement in ("turns", "shared") and self.rollout.staleness > 0:
            rule = f"0 with placement `{self.placement}`: the policy generates and learns in turns"
            repair = "set placement: beside or apart, or staleness: 0"
            raise broken_rule(rule, repair=repair, key="rollout.staleness")
        if self.placement == "shared" and not self.generator.capabilities.shared_weights:
            rule = "with placement `shared` it must compute with the trainer's own weights, as `native` does"
            raise broken_rule(rule, repair="set placement: turns or beside", key="generator.engine")
        if self.placement == "shared" and self.generator.num_replicas > 1:
            rule = "1 with placement `shared`: there is one process"
            raise broken_rule(rule, repair="set placement: apart", key="generator.num_replicas")
        return self

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
