"""What completions are scored by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from forge.config.base import SHORT_DTYPES, ConfigModel, FrozenDict, Name, PathText, RewardName, broken_rule
from forge.config.generator import GeneratorServiceConfig, check_fixed_weights

_USUAL_LIMIT: Final = 4096


class RewardConfig(ConfigModel):
    """One reward: a function of a prompt and a completion."""

    kind: RewardName = Field(
        description="Name of a built-in reward (`forge rewards` lists them), or `package.module:function` of your own.",
    )
    name: Name | None = Field(default=None, description="Name in metrics; null to use the kind.")
    weight: float = Field(default=1.0, description="Factor before the rewards are added up.")
    shaping: bool | None = Field(
        default=None,
        description="Whether it only shapes the reward, as a bonus for brevity does: it counts in the reward, but "
        "`rollout.no_signal: replace` ignores it. Null: true for the kind `length` when there are other rewards.",
    )
    args: Mapping[str, Any] = Field(default_factory=FrozenDict, description="Keyword arguments of the function.")
    timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds for one completion, after which the reward's process is killed."
    )

    @property
    def label(self) -> str:
        """The name in metrics."""
        return self.name or self.kind.rpartition(":")[2]


class OverlongConfig(ConfigModel):
    """Soft penalty for long completions (DAPO): 0 up to `max_tokens - buffer`, then falling to `-penalty`."""

    max_tokens: int = Field(ge=1, description="Length from which the full penalty applies.")
    buffer: int = Field(ge=1, description="Tokens before `max_tokens` over which the penalty grows.")
    penalty: float = Field(default=1.0, ge=0, description="The full penalty.")

    @model_validator(mode="after")
    def _check_buffer(self) -> Self:
        if self.buffer > self.max_tokens:
            raise broken_rule(f"at most max_tokens, which is {self.max_tokens}", repair="lower it", key="buffer")
        return self


class JudgeConfig(ConfigModel):
    """A language model that scores completions, behind its own service; used by the reward `judge`."""

    old_keys: ClassVar[Mapping[str, str | None]] = {
        "num_replicas": "generator.num_replicas",
        "num_threads": "generator.num_threads",
    }

    path: PathText = Field(description="Folder of the model.")
    generator: GeneratorServiceConfig = Field(
        default_factory=GeneratorServiceConfig, description="The engine that runs it."
    )

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        check_fixed_weights(self.generator, what="a judge")
        return self


class RewardModelConfig(ConfigModel):
    """A classifier that scores completions, behind its own service; used by the reward `reward_model`."""

    path: PathText = Field(description="Folder of a Hugging Face model for sequence classification with one label.")
    engine: Literal["native", "vllm", "transformers"] | None = Field(
        default=None,
        description="What runs it. `native`: the training engine, without padding and with shared prompts computed "
        "once. `vllm`: a pooling model of vLLM. `transformers`: any classifier, in padded batches. Null for `native` "
        "where the model's family is supported, `transformers` otherwise.",
    )
    chat_template: PathText | None = Field(
        default=None,
        description="A file with the Jinja chat template that the model was trained with; null for its tokenizer's.",
    )
    num_replicas: int = Field(default=1, ge=1, description="Replicas.")
    batch_size: int = Field(default=8, ge=1, description="For transformers: completions per forward pass.")
    microbatch_tokens: int | None = Field(
        default=None, ge=2, description="For native and vllm: tokens per forward pass; null for max_seq_len."
    )
    max_seq_len: int | None = Field(
        default=None,
        ge=2,
        description="Longest prompt and completion, in tokens; null for the model's limit, up to 4096.",
    )
    precision: Annotated[Literal["float32", "bfloat16"] | None, SHORT_DTYPES] = Field(
        default=None, description="Precision of weights and activations; null for bfloat16 on a GPU, float32 on a CPU."
    )
    with_gpus: bool = Field(default=False, description="Whether each replica gets a GPU.")
    num_threads: int | None = Field(default=None, ge=1, description="CPU threads of each replica; null for one.")

    @property
    def chosen_precision(self) -> Literal["float32", "bfloat16"]:
        """`precision`, or that of the device."""
        return self.precision or ("bfloat16" if self.with_gpus else "float32")

    def limits(self, model_limit: int | None) -> tuple[int, int]:
        """Return the tokens of the longest conversation and of a forward pass, for a model that can read so many."""
        longest = self.max_seq_len or min(model_limit or _USUAL_LIMIT, _USUAL_LIMIT)
        return longest, max(self.microbatch_tokens or 0, longest)

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if self.microbatch_tokens is not None and self.microbatch_tokens < (self.max_seq_len or 0):
            rule = f"at least max_seq_len, which is {self.max_seq_len}: a conversation is never split"
            raise broken_rule(rule, repair="raise it, or lower max_seq_len", key="microbatch_tokens")
        return self


class RewardsConfig(ConfigModel):
    """How completions are scored."""

    functions: tuple[RewardConfig, ...] = Field(
        default=(), description="The rewards, added up with their weights. Required."
    )
    on_error: Literal["zero", "skip", "stop"] = Field(
        default="zero",
        description="What happens when a reward fails or times out: it scores 0, its group is skipped, or the run "
        "stops. Failures are counted in every case.",
    )
    overlong: OverlongConfig | None = Field(default=None, description="Penalty for long completions; null for none.")
    num_replicas: int = Field(default=1, ge=1, description="Replicas of the reward service.")
    num_workers: int = Field(default=1, ge=1, description="Processes per replica that run rewards.")
    judge: JudgeConfig | None = Field(default=None, description="The model behind the reward `judge`; null for none.")
    reward_model: RewardModelConfig | None = Field(
        default=None, description="The model behind the reward `reward_model`; null for none."
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        labels = [function.label for function in self.functions]
        if len(set(labels)) != len(labels):
            rule = "no two rewards may have the same name"
            raise broken_rule(rule, repair="give one of them another `name`", key="functions")
        return self

    @model_validator(mode="after")
    def _check_shaping(self) -> Self:
        if self.functions and not self.task_functions:
            rule = "at least one reward that does not only shape the others"
            raise broken_rule(rule, repair="remove `shaping: true` from one of them", key="functions")
        return self

    @property
    def task_functions(self) -> tuple[RewardConfig, ...]:
        """The rewards that say how well the task was done; the others only shape the sum."""
        task = tuple(each for each in self.functions if not (each.shaping or _is_length(each)))
        return task or tuple(each for each in self.functions if not each.shaping)


def _is_length(function: RewardConfig) -> bool:
    return function.shaping is None and function.kind == "length"
