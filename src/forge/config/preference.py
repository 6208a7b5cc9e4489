"""Preference optimisation: what `PreferenceConfig` adds to the sections of every supervised run."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, PathText, broken_rule
from forge.config.schema import ReplicatedWorkerConfig
from forge.config.sft import DataConfig, SFTWorkersConfig, SourceConfig, SupervisedConfig, ValidationConfig
from forge.config.training import TrainingConfig

PreferenceFormat = Literal["auto", "preference", "preference_text", "unpaired", "unpaired_text"]
PreferenceKind = Literal["dpo", "ipo", "kto", "orpo", "simpo"]
ReferenceMode = Literal["precomputed", "online", "none"]

_BETAS: Final = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
_OWN_KEYS: Final = {
    "variant": ("dpo",),
    "label_smoothing": ("dpo", "simpo"),
    "gamma": ("simpo",),
    "nll_coefficient": ("dpo", "ipo", "orpo", "simpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Keys of `preference` that some kinds of losses do not read."""


class PreferenceSourceConfig(SourceConfig):
    """One source of preference records."""

    format: PreferenceFormat = Field(  # type: ignore[assignment]
        default="auto",
        description="Record format; `auto` detects it from the keys of the first record. The formats that end in "
        "`_text` are plain text without a chat template.",
    )


class PreferenceDataConfig(DataConfig):
    """Where preference records come from, and how they become tokens."""

    sources: tuple[PreferenceSourceConfig, ...] = Field(
        default=(), description="Where records come from, mixed by weight. Required."
    )
    loss_on: Literal["answers", "all"] | None = Field(  # type: ignore[assignment]
        default=None,
        description="Tokens in the negative log-likelihood of chosen answers (preference.nll_coefficient): `answers`, "
        "or `all` for prompt and answer; null for `all` with orpo, as in TRL, `answers` otherwise. The other terms are "
        "over answers only.",
    )
    packing: bool = Field(
        default=False,
        description="Whether a row of a batch holds as many pairs as fit into training.max_seq_len; false for "
        "batches of exactly training.batch_size pairs. Pairs are packed in the trainer either way.",
    )


class PreferenceValidationConfig(ValidationConfig):
    """Validation during training."""

    sources: tuple[PreferenceSourceConfig, ...] = Field(default=(), description="Separate held-out records.")


class PreferenceTrainingConfig(TrainingConfig):
    """The optimizer's steps on preference records."""

    share_prefixes: bool = Field(
        default=True,
        description="Whether the prefix that the two answers of a pair share goes through the model once. Gradients do "
        "not depend on it. Not with a pipeline.",
    )


class PreferenceLossConfig(ConfigModel):
    """What preference optimisation minimizes."""

    kind: PreferenceKind = Field(default="dpo", description="The loss; `kto` is the one for records with a label.")
    beta: float | None = Field(
        default=None,
        gt=0,
        description="Strength of the preference term; null for the usual value: 2.0 for simpo, 0.1 otherwise.",
    )
    variant: Literal["sigmoid", "hinge", "robust"] = Field(default="sigmoid", description="For dpo: form of the loss.")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="For dpo and simpo: probability that a label is wrong (cDPO)."
    )
    gamma: float = Field(default=0.5, ge=0, description="For simpo: target margin between the two rewards.")
    nll_coefficient: float | None = Field(
        default=None,
        ge=0,
        description="Weight of the negative log-likelihood of chosen answers; null for 1.0 with orpo, 0 otherwise.",
    )
    desirable_weight: float = Field(default=1.0, ge=0, description="For kto: weight of desirable answers.")
    undesirable_weight: float = Field(default=1.0, ge=0, description="For kto: weight of undesirable answers.")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads logprobs of a reference model."""
        return self.kind in ("dpo", "ipo", "kto")

    @property
    def is_paired(self) -> bool:
        """Whether the loss compares two answers to one prompt."""
        return self.kind != "kto"

    @property
    def chosen_beta(self) -> float:
        """`beta`, or the usual value of this kind of loss."""
        return _BETAS[self.kind] if self.beta is None else self.beta

    @property
    def chosen_nll_coefficient(self) -> float:
        """`nll_coefficient`, or the usual value of this kind of loss."""
        return float(self.kind == "orpo") if self.nll_coefficient is None else self.nll_coefficient

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        for key, kinds in _OWN_KEYS.items():
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if is_set and self.kind not in kinds:
                rule = f"left out with kind: {self.kind}; only {', '.join(kinds)} read it"
                raise broken_rule(rule, repair="remove it, or choose another kind", key=key)
        if self.variant == "hinge" and self.label_smoothing:
            raise broken_rule("0 with variant: hinge", repair="use variant: sigmoid", key="label_smoothing")
        return self


class PreferenceReferenceConfig(ConfigModel):
    """The reference model: what the policy is compared with."""

    mode: ReferenceMode | None = Field(
        default=None,
        description="`precomputed`: its logprobs are computed in a pass before training and kept beside the run; "
        "`online`: it runs in processes of its own beside the trainer, or is the trainer without its new adapter; "
        "`none`: for losses without a reference. Null for `precomputed` where the loss reads a reference, `none` "
        "otherwise.",
    )
    path: PathText | None = Field(
        default=None, description="Folder of the model; null for the policy's initial weights."
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads of a process of its own; null for one."
    )
    with_gpus: bool | None = Field(
        default=None, description="Whether a process of its own gets a GPU; null to use one where there is one."
    )


class PreferenceWorkersConfig(SFTWorkersConfig):
    """The processes of each worker. Their number and devices are in `distributed` and `reference`."""

    reference: ReplicatedWorkerConfig = Field(
        default_factory=ReplicatedWorkerConfig, description="The reference model."
    )


class PreferenceConfig(SupervisedConfig):
    """Preference optimisation: one configuration for `apps/dpo/main.py`."""

    training: PreferenceTrainingConfig = Field(
        default_factory=PreferenceTrainingConfig, description="The optimizer's steps."
    )
    data: PreferenceDataConfig = Field(default_factory=PreferenceDataConfig, description="Where records come from.")
    validation: PreferenceValidationConfig = Field(
        default_factory=PreferenceValidationConfig, description="How training is judged."
    )
    workers: PreferenceWorkersConfig = Field(
        default_factory=PreferenceWorkersConfig, description="The processes of each worker."
    )
    preference: PreferenceLossConfig = Field(default_factory=PreferenceLossConfig, description="What is minimized.")
    reference: PreferenceReferenceConfig = Field(
        default_factory=PreferenceReferenceConfig, description="What the policy is compared with."
    )

    @property
    def chosen_loss_on(self) -> Literal["answers", "all"]:
        """`data.loss_on`, or what is usual for this kind of loss."""
        if self.data.loss_on is not None:
            return self.data.loss_on
        return "all" if self.preference.kind == "orpo" and self.preference.chosen_nll_coefficient else "answers"

    @property
    def reference_mode(self) -> ReferenceMode:
        """Where logprobs of the reference model come from."""
        if self.reference.mode is not None:
            return self.reference.mode
        return "precomputed" if self.preference.needs_reference else "none"

    @property
    def has_reference_model(self) -> bool:
        """Whether a reference model runs in processes of its own while training runs."""
        return self.reference_mode == "online" and not self.is_own_base

    @property
    def is_own_base(self) -> bool:
        """Whether the reference is the policy without its adapter, which is new: both are in one model."""
        is_new = self.adapter is not None and self.adapter.path is None
        return is_new and self.reference_mode == "online" and self.reference.path is None

    @model_validator(mode="after")
    def _check_preference(self) -> Self:
        loss = self.preference
        if loss.needs_reference == (self.reference_mode == "none"):
            need = "precomputed or online" if loss.needs_reference else "none"
            rule = f"{need} with preference.kind: {loss.kind}"
            raise broken_rule(rule, repair="leave it out", key="reference.mode")
        if self.reference.path is not None and not loss.needs_reference:
            rule = f"null with preference.kind: {loss.kind}, which has no reference model"
            raise broken_rule(rule, repair="remove it", key="reference.path")
        if self.data.loss_on == "all" and not loss.chosen_nll_coefficient:
            rule = "answers, unless preference.nll_coefficient is above 0: nothing else is over the prompt"
            raise broken_rule(rule, repair="remove it, or set preference.nll_coefficient", key="data.loss_on")
        if loss.kind == "kto" and self.training.batch_size * self.training.gradient_accumulation_steps < 2:
            rule = "at least 2 with preference.kind: kto, whose KL estimate puts answers behind other prompts"
            raise broken_rule(rule, repair="raise it", key="training.batch_size")
        return self
