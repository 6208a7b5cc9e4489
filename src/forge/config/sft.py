"""The sections of supervised runs, whose data is files: data, validation and metrics; and supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from forge.config.adapter import AdapterConfig
from forge.config.base import ConfigModel, FrozenDict, LossName, Name, PathText, SinkName, broken_rule
from forge.config.record import ObserveConfig
from forge.config.recovery import RecoveryConfig
from forge.config.schema import ForgeConfig, WorkerConfig
from forge.config.training import CheckpointConfig, DistributedConfig, TrainingConfig, check_base_dtype

Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_response", "text"]


class SourceConfig(ConfigModel):
    """One source of samples."""

    path: PathText | None = Field(
        default=None,
        description="A .jsonl, .json or .parquet file (.gz of the first two as well), a pattern such as data/*.jsonl, "
        "or a folder that holds such files or that `datasets` saved.",
    )
    hf_dataset: str | None = Field(
        default=None, min_length=1, description="A dataset of the Hugging Face hub, such as owner/name."
    )
    hf_config: str | None = Field(default=None, description="Its configuration; null for the default one.")
    split: str = Field(default="train", min_length=1, description="Split of a Hugging Face dataset.")
    format: Format = Field(
        default="auto", description="Record format; `auto` detects it from the keys of the first record."
    )
    columns: Mapping[str, str] = Field(
        default_factory=FrozenDict,
        description="Column names that differ from the format's, such as {prompt: question, response: answer}.",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        description="Passes per epoch: 2 for two passes, 0.5 for half of it, another half each epoch. With "
        "data.streaming: sampling weight relative to the other sources.",
    )

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if (self.path is None) == (self.hf_dataset is None):
            raise broken_rule("exactly one of path and hf_dataset", repair="remove one, or add one", key="path")
        return self


class DataConfig(ConfigModel):
    """Where samples come from, and how they become tokens."""

    sources: tuple[SourceConfig, ...] = Field(
        default=(), description="Where samples come from, mixed by weight. Required."
    )
    loss_on: Literal["answers", "all"] = Field(
        default="answers", description="Which tokens count: only the assistant's, or all but the first."
    )
    system_prompt: str | None = Field(
        default=None, description="A system message to put before conversations that have none."
    )
    chat_template: PathText | None = Field(
        default=None, description="A file with a Jinja chat template; null for the tokenizer's own."
    )
    packing: bool = Field(
        default=True, description="Whether a row holds as many samples as fit into training.max_seq_len."
    )
    pack_lookahead: int = Field(
        default=256, ge=1, description="Number of samples from which the packer chooses the best fit."
    )
    oversize: Literal["drop", "truncate", "error"] = Field(
        default="drop",
        description="What happens to a sample longer than training.max_seq_len. Such samples are counted.",
    )
    on_bad_record: Literal["error", "skip"] = Field(
        default="error",
        description="What happens to a record that cannot be read: an error that names file and line, or skipped and "
        "counted.",
    )
    shuffle: bool = Field(default=True, description="Whether each epoch is shuffled differently.")
    streaming: bool = Field(
        default=False, description="Whether files are read as they come instead of being indexed first."
    )
    shuffle_buffer: int = Field(
        default=10_000,
        ge=1,
        description="For streaming: number of buffered samples from which the next one is sampled.",
    )


class ValidationConfig(ConfigModel):
    """Validation during training."""

    interval: int | None = Field(
        default=None, ge=1, description="Optimizer steps between two validations; null for none but the last."
    )
    sources: tuple[SourceConfig, ...] = Field(default=(), description="Separate held-out samples.")
    fraction: float = Field(
        default=0.0, ge=0, lt=1, description="Fraction of the training samples to hold out, if `sources` is empty."
    )
    max_samples: int | None = Field(default=None, ge=1, description="Maximum number of samples; null for all.")

    @property
    def enabled(self) -> bool:
        """Whether there is anything to validate on."""
        return bool(self.sources) or self.fraction > 0


class LossConfig(ConfigModel):
    """What fine-tuning minimizes."""

    function: LossName = Field(
        default="cross_entropy", description="Which loss: `cross_entropy`, or `module:attribute` of your own."
    )
    args: Mapping[str, Any] = Field(default_factory=FrozenDict, description="Keyword arguments of a loss of your own.")


class SinkConfig(ConfigModel):
    """One more place that metrics are written to."""

    kind: SinkName = Field(description="`jsonl`, `tensorboard`, `wandb`, or `module:attribute` of your own.")
    name: Name | None = Field(default=None, description="Name in messages; null for the kind's.")
    args: Mapping[str, Any] = Field(default_factory=FrozenDict, description="Keyword arguments of the class.")

    @property
    def label(self) -> str:
        """The name in messages."""
        return self.name or self.kind.rpartition(":")[2]


class MetricsConfig(ConfigModel):
    """Where metrics are written."""

    old_keys: ClassVar[Mapping[str, str | None]] = {"wandb_project": "project"}

    log_interval: int = Field(default=10, ge=1, description="Optimizer steps between two lines on the console.")
    console: Literal["step", "episode"] = Field(
        default="step",
        description="Lines on the console. `step`: such as `Step 3/100`, no wider than the terminal. `episode`: such "
        "as `Episode 3` and `Epoch 1/10`, of any length, for tools that read them so.",
    )
    progress: bool | None = Field(
        default=None,
        description="Whether progress is shown: null for a panel on a terminal, charts in a notebook, and lines while "
        "the run starts elsewhere; false for nothing; true for a bar where there is no terminal.",
    )
    jsonl: bool = Field(default=True, description="Whether every step is written to metrics.jsonl.")
    tensorboard: bool = Field(default=True, description="Whether TensorBoard files are written.")
    wandb: bool = Field(default=False, description="Whether metrics go to Weights & Biases; needs the extra `wandb`.")
    project: str = Field(
        default="torchforge",
        min_length=1,
        description="Project in Weights & Biases and trackio, experiment in MLflow.",
    )
    samples: int = Field(
        default=8, ge=0, le=100, description="Rollouts in each table that a tracker with tables gets; 0 for none."
    )
    sample_interval: int = Field(
        default=50,
        ge=1,
        description="Steps between two tables of rollouts. Each evaluation makes a table of its own.",
    )
    sinks: tuple[SinkConfig, ...] = Field(
        default=(), description="More sinks: `mlflow`, `trackio`, or one of your own."
    )

    @property
    def enabled_sinks(self) -> tuple[SinkConfig, ...]:
        """The sinks besides the console: those that are switched on by a key of their own, then `sinks`."""
        own = {"jsonl": self.jsonl, "tensorboard": self.tensorboard, "wandb": self.wandb}
        return (*(SinkConfig(kind=kind) for kind, is_on in own.items() if is_on), *self.sinks)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        labels = ["console", *(sink.label for sink in self.enabled_sinks)]
        if len(set(labels)) != len(labels):
            rule = f"every sink has a name of its own; there are {', '.join(labels)}"
            raise broken_rule(rule, repair="give one of them another `name`", key="sinks")
        return self


class SFTWorkersConfig(ConfigModel):
    """The processes of each worker. Their number and devices are in `distributed`."""

    trainer: WorkerConfig = Field(default_factory=WorkerConfig, description="The trainer.")


class SupervisedConfig(ForgeConfig):
    """What every supervised run has: a run whose data is files, and whose loop is `forge.loops.supervised`."""

    adapter: AdapterConfig | None = Field(
        default=None, description="LoRA adapter that is trained instead of the weights; null to train all weights."
    )
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="The optimizer's steps.")
    distributed: DistributedConfig = Field(default_factory=DistributedConfig, description="The layout over ranks.")
    checkpointing: CheckpointConfig = Field(default_factory=CheckpointConfig, description="What is saved, and when.")
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig, description="What follows when the trainer dies.")
    data: DataConfig = Field(default_factory=DataConfig, description="Where samples come from.")
    validation: ValidationConfig = Field(default_factory=ValidationConfig, description="How training is judged.")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="Where metrics are written.")
    workers: SFTWorkersConfig = Field(default_factory=SFTWorkersConfig, description="The processes of each worker.")
    record: ObserveConfig = Field(default_factory=ObserveConfig, description="What is written down of processes.")

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        if self.data.streaming and self.validation.fraction > 0:
            rule = "0 with data.streaming: a stream has no known length to take a part of"
            raise broken_rule(rule, repair="give validation.sources", key="validation.fraction")
        return self

    @model_validator(mode="after")
    def _check_base(self) -> Self:
        check_base_dtype(self.adapter, self.distributed, self.training)
        return self


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning: one configuration for `apps/sft/main.py`."""

    loss: LossConfig = Field(default_factory=LossConfig, description="What is minimized.")
