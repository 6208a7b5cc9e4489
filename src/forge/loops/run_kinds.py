"""The kinds of supervised runs: what each adds to the common loop of `forge.loops.supervised`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from forge.config import DistillConfig, PreferenceConfig, RewardTrainingConfig, SFTConfig, SupervisedConfig
from forge.data.formats import CONVERSATIONS, RecordFormats
from forge.data.opening import Loaders, open_loaders
from forge.data.preferences import PREFERENCES, PreferenceEncoder
from forge.data.reward_pairs import RewardPairEncoder
from forge.data.samples import Encoder, SampleEncoder, Tokenizer
from forge.errors import ConfigError
from forge.loops.resuming import LoopName
from forge.loops.stored_teacher import describe_stored, make_distillation_loss, make_taught_encoder
from forge.types import Batch

if TYPE_CHECKING:
    from forge.loops.preflight import PreparedRun
    from forge.losses import AnyLoss, Loss
    from forge.trainer.handles import TrainerHandle

CompleteBatch = Callable[[Batch], Awaitable[Batch]]
"""Returns a batch with the fields that a model besides the trainer's computes."""


async def unchanged(batch: Batch) -> Batch:
    """Return a batch as it is."""
    return batch


@asynccontextmanager
async def no_reference(
    config: SupervisedConfig, prepared: PreparedRun, trainer: TrainerHandle, *, should_stop: Callable[[], bool]
) -> AsyncIterator[CompleteBatch | None]:
    """Yield what leaves batches as they are."""
    yield unchanged


def make_conversation_encoder(config: SupervisedConfig, tokenizer: Tokenizer) -> SampleEncoder:
    """Return what makes one sample of each conversation or text."""
    return Encoder(tokenizer, data=config.data, max_seq_len=config.training.max_seq_len)


def report_all(metrics: Mapping[str, Any], *, is_validation: bool) -> Mapping[str, Any]:
    """Return metrics as they are."""
    return metrics


@dataclass(frozen=True, slots=True)
class RunKind:
    """One kind of supervised run.

    Attributes:
        name: what it is called in messages and in checkpoints.
        logger_name: the logger that its messages go to.
        make_loss: returns the loss that a configuration of this kind asks for.
        validates_metrics: whether a validation reports the loss's metrics besides the loss.
        formats: the formats that its records may have.
        make_encoder: returns what makes samples of its records.
        open_reference: yields what completes batches with another model's logprobs; None if the run is to stop before
            that is ready. It is opened with a trainer whose weights are the initial ones.
        check: refuses what only the number of ranks decides, which is None where the controller starts them.
        describe: returns what a dry run says about it, as pairs of a label and a text.
        summarize: returns what is reported of the loss's metrics, of a training step or of a validation.
    """

    name: LoopName
    logger_name: str
    make_loss: Callable[[Any], AnyLoss]
    validates_metrics: bool = True
    formats: RecordFormats = CONVERSATIONS
    make_encoder: Callable[[Any, Tokenizer], SampleEncoder] = make_conversation_encoder
    open_reference: Callable[..., AbstractAsyncContextManager[CompleteBatch | None]] = no_reference
    check: Callable[[Any, int | None], None] = lambda config, num_ranks: None
    describe: Callable[[Any], list[tuple[str, str]]] = lambda config: []
    summarize: Callable[..., Mapping[str, Any]] = report_all

    @property
    def logger(self) -> logging.Logger:
        return logging.getLogger(self.logger_name)

    def open_loaders(self, config: SupervisedConfig, tokenizer: Tokenizer) -> Loaders:
        """Open the data of a run of this kind."""
        return open_loaders(
            config.data,
            training=config.training,
            tokenizer=tokenizer,
            seed=config.run.seed,
            validation=config.validation,
            encoder=self.make_encoder(config, tokenizer),
            formats=self.formats,
        )


def make_sft_loss(config: SFTConfig) -> Loss:
    """Return the loss that fine-tuning minimizes."""
    from forge.losses.build import build_loss

    return build_loss(config.loss.function, config.loss.args, offered={}, path="loss")


SFT: Final = RunKind("fine-tuning", "forge.sft", make_sft_loss, validates_metrics=False)


def make_preference_loss(config: PreferenceConfig) -> Loss:
    """Return the loss that preference optimisation minimizes."""
    from forge.losses import KTO, PairLoss

    section = config.preference
    if section.kind == "kto":
        return KTO(
            beta=section.chosen_beta,
            desirable_weight=section.desirable_weight,
            undesirable_weight=section.undesirable_weight,
            max_seq_len=config.training.max_seq_len,
        )
    return PairLoss(
        kind=section.kind,
        beta=section.chosen_beta,
        variant=section.variant,
        label_smoothing=section.label_smoothing,
        gamma=section.gamma,
        nll_coefficient=section.chosen_nll_coefficient,
    )


def make_preference_encoder(config: PreferenceConfig, tokenizer: Tokenizer) -> SampleEncoder:
    """Return what makes the samples of preference records: pairs, or single answers for KTO."""
    data = config.data.model_copy(update={"loss_on": config.chosen_loss_on})
    paired = config.preference.is_paired
    return PreferenceEncoder(tokenizer, data=data, max_seq_len=config.training.max_seq_len, paired=paired)


@asynccontextmanager
async def open_preference_reference(
    config: PreferenceConfig, prepared: PreparedRun, trainer: TrainerHandle, *, should_stop: Callable[[], bool]
) -> AsyncIterator[CompleteBatch | None]:
    """Yield what gives batches the reference model's logprobs; see `forge.loops.reference_logprobs`."""
    from forge.loops.reference_logprobs import open_reference

    async with open_reference(config, prepared, trainer, should_stop=should_stop) as complete:
        yield complete


def check_preference_ranks(config: PreferenceConfig, num_ranks: int | None) -> None:
    """Refuse a reference that ranks started from outside cannot have: one engine is in each of their processes."""
    if num_ranks is None or (not config.has_reference_model and config.reference.path is None):
        return
    key = "mode" if config.has_reference_model else "path"
    raise ConfigError(
        "a reference model in processes of its own needs the controller",
        path=f"reference.{key}",
        value=getattr(config.reference, key),
        rule="left out where the program is started once per rank, as with --nproc_per_node",
        repair=f"leave --nproc_per_node out and set distributed.shard={num_ranks}: one program starts all ranks then",
    )


def describe_preference(config: PreferenceConfig) -> list[tuple[str, str]]:
    """Return what a dry run says about the loss and the reference."""
    loss = config.preference
    of = "the policy's initial weights" if config.reference.path is None else config.reference.path
    how = {
        "precomputed": f"{of}; logprobs are computed in a pass over the data before the first step, and kept",
        "online": "the policy without its adapter" if config.is_own_base else f"{of}, in processes of its own",
        "none": f"none: {loss.kind} needs none",
    }
    return [("loss", f"{loss.kind}, beta {loss.chosen_beta:g}"), ("reference", how[config.reference_mode])]


PREFERENCE: Final = RunKind(
    "preference optimisation",
    "forge.preference",
    make_preference_loss,
    formats=PREFERENCES,
    make_encoder=make_preference_encoder,
    open_reference=open_preference_reference,
    check=check_preference_ranks,
    describe=describe_preference,
)


def make_reward_loss(config: RewardTrainingConfig) -> AnyLoss:
    """Return the loss that training a reward model minimizes."""
    from forge.losses import BradleyTerry

    section = config.reward_model
    return BradleyTerry(section.centering_coefficient, section.margins, section.calibration_bins)


def make_reward_encoder(config: RewardTrainingConfig, tokenizer: Any) -> SampleEncoder:
    """Return what makes two samples of each preference pair, as a reward model reads them."""
    longest, margin = config.training.max_seq_len, config.reward_model.margins
    return RewardPairEncoder(tokenizer, data=config.data, max_seq_len=longest, margin=margin)


def summarize_rewards(metrics: Mapping[str, Any], *, is_validation: bool) -> Mapping[str, Any]:
    """Return the metrics of a reward model; a validation has its calibration among them."""
    from forge.losses.calibration import calibration, without_bins
    from forge.losses.reward import summarize_pairs

    return summarize_pairs(calibration(metrics) if is_validation else without_bins(metrics))


REWARD_MODEL: Final = RunKind(
    "reward-model training",
    "forge.reward_model",
    make_reward_loss,
    formats=PREFERENCES,
    make_encoder=make_reward_encoder,
    summarize=summarize_rewards,
)

DISTILLATION: Final = RunKind(
    "distillation",
    "forge.distill",
    make_distillation_loss,
    make_encoder=make_taught_encoder,
    describe=describe_stored,
)


def kind_of(config: SupervisedConfig) -> RunKind:
    """Return the kind of a supervised run, by the class of its configuration."""
    if isinstance(config, SFTConfig):
        return SFT
    if isinstance(config, PreferenceConfig):
        return PREFERENCE
    if isinstance(config, RewardTrainingConfig):
        return REWARD_MODEL
    if isinstance(config, DistillConfig):
        return DISTILLATION
    raise TypeError(f"{type(config).__name__} is not the configuration of a supervised run")
