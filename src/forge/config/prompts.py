"""What the policy is asked, in reinforcement learning and in evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, FrozenDict, PathText, TaskName, broken_rule
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
