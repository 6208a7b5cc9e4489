"""Training of reward models: what `RewardTrainingConfig` adds to the sections of every supervised run."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from forge.config.base import ConfigModel
from forge.config.preference import PreferenceDataConfig, PreferenceSourceConfig, PreferenceTrainingConfig
from forge.config.schema import ModelConfig
from forge.config.sft import SupervisedConfig, ValidationConfig

PairFormat = Literal["auto", "preference", "preference_text"]


class RewardModelModelConfig(ModelConfig):
    """The model that becomes a reward model: a language model, or a classifier with one label."""

    head: Literal["scalar"] = Field(
        default="scalar",
        description="Output layer: one value per token. A folder without one (`score.weight`) gets a new one.",
    )


class RewardSourceConfig(PreferenceSourceConfig):
    """One source of preference pairs."""

    format: PairFormat = Field(
        default="auto",
        description="Record format; `auto` detects it from the keys of the first record. `preference_text` is plain "
        "text without a chat template.",
    )


class RewardDataConfig(PreferenceDataConfig):
    """Where preference pairs come from, and how they become tokens."""

    sources: tuple[RewardSourceConfig, ...] = Field(
        default=(), description="Where pairs come from, mixed by weight. Required."
    )
    loss_on: Literal["answers"] = Field(
        default="answers", description="`answers`: a reward model is trained on the score of a whole answer."
    )
    oversize: Literal["drop", "error"] = Field(
        default="drop",
        description="What happens to a pair with an answer longer than training.max_seq_len; the score of a part of an "
        "answer would be meaningless. Such pairs are counted.",
    )


class RewardValidationConfig(ValidationConfig):
    """Validation during training."""

    sources: tuple[RewardSourceConfig, ...] = Field(default=(), description="Separate held-out pairs.")


class RewardLossConfig(ConfigModel):
    """What training a reward model minimizes: the Bradley–Terry loss of pairs."""

    centering_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Weight of (chosen + rejected)², which keeps rewards near 0; 0.01 is usual where it is used.",
    )
    margins: bool = Field(
        default=True,
        description="Whether the loss asks for a difference of at least the record's `margin`; a record without one "
        "has 0.",
    )
    calibration_bins: int = Field(
        default=10,
        ge=1,
        le=100,
        description="Bins between 0.5 and 1 in which a validation compares the confidence sigmoid(|chosen - rejected|) "
        "with the accuracy.",
    )


class RewardTrainingConfig(SupervisedConfig):
    """Training of a reward model on preference pairs: one configuration for `apps/reward_model/main.py`."""

    model_head: ClassVar[Literal["language", "scalar"]] = "scalar"

    model: RewardModelModelConfig = Field(
        default_factory=RewardModelModelConfig, description="Which model becomes the reward model."
    )
    training: PreferenceTrainingConfig = Field(
        default_factory=PreferenceTrainingConfig, description="The optimizer's steps."
    )
    data: RewardDataConfig = Field(default_factory=RewardDataConfig, description="Where pairs come from.")
    validation: RewardValidationConfig = Field(
        default_factory=RewardValidationConfig, description="How training is judged."
    )
    reward_model: RewardLossConfig = Field(default_factory=RewardLossConfig, description="What is minimized.")
