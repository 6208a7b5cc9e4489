"""Everything that can be wrong with a run, checked before it starts.

    check_grpo(config)   # or check_sft(config): raises what `run_grpo` or `run_sft` would raise at the start

No process is started, and no file is written but the tiny model in the user's cache. The loops begin with the same
functions, so a configuration that passes is refused later only for what its workers find out: devices, networks, and
memory that was planned wrong. `forge.loops.dry_run` reports all problems instead of the first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.config import GRPOConfig, SFTConfig, TrainerConfig
from forge.data import BatchLoader, Loaders, open_loaders
from forge.envs.episode import EpisodeProgram
from forge.errors import DataError
from forge.loops.planning import GRPOPlan, plan_run
from forge.loops.resuming import check_folders, resumed_state
from forge.loops.run_paths import checkpoint_dir, load_tokenizer
from forge.loops.worker_checks import check_sft_workers
from forge.memory import check_at_start
from forge.memory.resolved import ACCUMULATION_NOTE
from forge.models.locate import ResolvedModel, resolve
from forge.trainer.checkpoint_folder import CheckpointInfo
from forge.trainer.handles import is_rank, planned_ranks
from forge.trainer.layout import check_layout
from forge.trainer.schedules import rate_factor

if TYPE_CHECKING:
    from forge.losses import Loss

_log = logging.getLogger("forge.sft")


def check_grpo(config: GRPOConfig, *, program: EpisodeProgram | None = None) -> GRPOPlan:
    """Check a run of reinforcement learning, and return what it would do. `program` makes its episodes, if given."""
    return plan_run(config, program=program)


def check_sft(config: SFTConfig) -> TrainerConfig:
    """Check a fine-tuning run, and return what its trainer would be made from."""
    with prepare_sft(config) as prepared:
        return prepared.trainer


@dataclass(frozen=True, slots=True)
class PreparedSFT:
    """A fine-tuning run that was checked.

    Attributes:
        model: the model that is fine-tuned.
        trainer: what the trainer is made from.
        loss: what is minimized.
        loaders: the data, open.
        checkpoint: what the run resumes from; None to start anew.
    """

    model: ResolvedModel
    trainer: TrainerConfig
    loss: Loss
    loaders: Loaders
    checkpoint: CheckpointInfo | None


@contextmanager
def prepare_sft(config: SFTConfig, *, num_ranks: int | None = None) -> Iterator[PreparedSFT]:
    """Check a fine-tuning run and open its data, which is closed at the end of the block.

    `num_ranks` says how many ranks the program is started as; None for what the environment says, or for a controller
    that starts the ranks.
    """
    model = resolve(config.model)
    if num_ranks is None and is_rank():
        num_ranks = int(os.environ["WORLD_SIZE"])
    ranks = planned_ranks(config.distributed) if num_ranks is None else num_ranks
    check_layout(config.distributed, model.architecture, config.training, num_ranks=ranks)
    check_at_start(for_ranks(config, num_ranks), facts=model.architecture, log=_log)
    check_sft_workers(config)
    loss = make_sft_loss(config)
    checkpoint = check_folders(config)
    if config.training.gradient_accumulation_steps > 1:
        _log.info("%s", ACCUMULATION_NOTE)
    tokenizer = load_tokenizer(model, chat_template=config.data.chat_template, purpose="fine-tuning")
    with open_loaders(
        config.data,
        training=config.training,
        tokenizer=tokenizer,
        seed=config.run.seed,
        validation=config.validation,
    ) as loaders:
        trainer = _trainer_config(config, model, num_steps=_num_steps(config, loaders.train))
        if trainer.total_steps is not None:
            rate_factor(0, config=config.training, total_steps=trainer.total_steps)  # refuses what cannot be
        _check_validation(loaders.validation)
        if checkpoint is not None:
            loaders.train.load_state_dict(resumed_state(checkpoint, "fine-tuning")["data"])  # refuses other data
        yield PreparedSFT(model, trainer, loss, loaders, checkpoint)


def make_sft_loss(config: SFTConfig) -> Loss:
    """Return the loss that fine-tuning minimizes."""
    from forge.losses.build import build_loss

    return build_loss(config.loss.function, config.loss.args, offered={}, path="loss")


def for_ranks(config: SFTConfig, num_ranks: int | None) -> SFTConfig:
    """Return the configuration with a shard of -1 replaced by what so many ranks make of it; None leaves it open."""
    distributed = config.distributed
    if num_ranks is None or distributed.shard != -1 or distributed.strategy in ("none", "replicate"):
        return config
    resolved = distributed.model_copy(update={"shard": max(1, num_ranks // distributed.num_ranks)})
    return config.model_copy(update={"distributed": resolved})


def _num_steps(config: SFTConfig, loader: BatchLoader) -> int | None:
    """How many optimizer steps there will be, which is what the learning rate's schedule runs over."""
    most = config.training.max_steps
    if most is not None and config.data.streaming:
        return most
    count = loader.count_batches()
    if count is None:
        return most
    if count.total == 0:
        next(loader)  # refuses, and says what became of the records
    if not count.exact:
        _log.info("the data makes about %d steps (estimated from a part of it)", count.total)
    return count.total if most is None else min(most, count.total)


def _check_validation(loader: BatchLoader | None) -> None:
    """Read the held-out samples once: what is wrong with them must not end a run after hours of training."""
    count = None if loader is None else loader.count_batches()
    if loader is None or count is None or count.total:
        return
    try:
        next(loader)
    except DataError as error:
        raise DataError(
            "there is no sample to validate on",
            path="validation",
            value=error.value,
            rule=error.rule,
            repair=f"{error.repair}; or give other validation.sources",
        ) from None
    loader.rewind()


def _trainer_config(config: SFTConfig, model: ResolvedModel, *, num_steps: int | None) -> TrainerConfig:
    return TrainerConfig(
        model=model.architecture,
        training=config.training,
        distributed=config.distributed,
        checkpoint_dir=checkpoint_dir(config),
        checkpointing=config.checkpointing,
        seed=config.run.seed,
        total_steps=num_steps,
    )
