"""Everything that can be wrong with a run, checked before it starts.

    check_grpo(config)   # or check_supervised(config): raises what the run would raise at its start

No process is started, and no file is written but the tiny model in the user's cache. The loops begin with the same
functions, so a configuration that passes is refused later only for what its workers find out: devices, networks, and
memory that was planned wrong. `forge.loops.dry_run` reports all problems instead of the first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forge.config import GRPOConfig, SupervisedConfig, TrainerConfig
from forge.data import BatchLoader, Loaders
from forge.envs.episode import EpisodeProgram
from forge.errors import DataError
from forge.loops.live_settings import LIVE_KEYS
from forge.loops.planning import GRPOPlan, plan_run
from forge.loops.resuming import check_folders, resumed_state
from forge.loops.run_kinds import RunKind, kind_of
from forge.loops.run_paths import checkpoint_dir, load_tokenizer, run_dir
from forge.loops.runtime_changes import is_continued, with_changes
from forge.loops.worker_checks import check_supervised_workers
from forge.memory import check_at_start
from forge.memory.advice import ACCUMULATION_NOTE
from forge.models.locate import ResolvedModel, resolve
from forge.models.quantized_names import check_library
from forge.trainer.adapter_identity import check_resumed_adapter
from forge.trainer.checkpoint_folder import CheckpointInfo
from forge.trainer.handles import is_rank, planned_ranks
from forge.trainer.layout import check_layout
from forge.trainer.optimizer_check import check_optimizer
from forge.trainer.schedules import rate_factor

if TYPE_CHECKING:
    from forge.losses import AnyLoss


def check_grpo(config: GRPOConfig, *, program: EpisodeProgram | None = None) -> GRPOPlan:
    """Check a run of reinforcement learning, and return what it would do. `program` makes its episodes, if given.

    A run that is resumed continues with the workers and hosts that it had last: see `forge.loops.runtime_changes`.
    """
    plan = plan_run(config, program=program)
    is_resumed = is_continued(config, has_checkpoint=plan.checkpoint is not None)
    changed = with_changes(config, run_dir(config), other_than=LIVE_KEYS) if is_resumed else config
    return plan if changed is config else replace(plan_run(changed, program=program), asked=config)


def check_supervised(config: SupervisedConfig) -> TrainerConfig:
    """Check a supervised run, and return what its trainer would be made from."""
    with prepare_supervised(config) as prepared:
        return prepared.trainer


check_sft = check_supervised
"""The name of `check_supervised` in release 0.1; it will be removed in the next."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A supervised run that was checked.

    Attributes:
        kind: what kind of run it is.
        model: the model that is trained.
        trainer: what the trainer is made from.
        loss: what is minimized.
        loaders: the data, open.
        checkpoint: what the run resumes from; None to start anew.
    """

    kind: RunKind
    model: ResolvedModel
    trainer: TrainerConfig
    loss: AnyLoss
    loaders: Loaders
    checkpoint: CheckpointInfo | None


@contextmanager
def prepare_supervised(config: SupervisedConfig, *, num_ranks: int | None = None) -> Iterator[PreparedRun]:
    """Check a supervised run and open its data, which is closed at the end of the block.

    `num_ranks` says how many ranks the program is started as; None for what the environment says, or for a controller
    that starts the ranks.
    """
    kind = kind_of(config)
    model = resolve(config.model)
    if num_ranks is None and is_rank():
        num_ranks = int(os.environ["WORLD_SIZE"])
    kind.check(config, num_ranks)
    ranks = planned_ranks(config.distributed) if num_ranks is None else num_ranks
    check_layout(config.distributed, model.architecture, config.training, num_ranks=ranks)
    check_library(None if config.adapter is None else config.adapter.base_dtype)
    check_at_start(for_ranks(config, num_ranks), facts=model.architecture, log=kind.logger)
    check_supervised_workers(config)
    check_optimizer(config.training)
    loss = kind.make_loss(config)
    checkpoint = check_folders(config)
    if config.training.gradient_accumulation_steps > 1:
        kind.logger.info("%s", ACCUMULATION_NOTE)
    tokenizer = load_tokenizer(model, chat_template=config.data.chat_template, purpose=kind.name)
    with kind.open_loaders(config, tokenizer) as loaders:
        trainer = _trainer_config(config, model, num_steps=_num_steps(config, loaders.train, kind.logger))
        if trainer.total_steps is not None:
            rate_factor(0, config=config.training, total_steps=trainer.total_steps)  # refuses what cannot be
        _check_validation(loaders.validation)
        if checkpoint is not None:
            loaders.train.load_state_dict(resumed_state(checkpoint, kind.name)["data"])  # refuses other data
            check_resumed_adapter(checkpoint, config.adapter, model.architecture)
        yield PreparedRun(kind, model, trainer, loss, loaders, checkpoint)


def for_ranks(config: SupervisedConfig, num_ranks: int | None) -> SupervisedConfig:
    """Return the configuration with a shard of -1 replaced by what so many ranks make of it; None leaves it open."""
    distributed = config.distributed
    if num_ranks is None or distributed.shard != -1 or distributed.strategy in ("none", "replicate"):
        return config
    resolved = distributed.model_copy(update={"shard": max(1, num_ranks // distributed.num_ranks)})
    return config.model_copy(update={"distributed": resolved})


def _num_steps(config: SupervisedConfig, loader: BatchLoader, log: logging.Logger) -> int | None:
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
        log.info("the data makes about %d steps (estimated from a part of it)", count.total)
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


def _trainer_config(config: SupervisedConfig, model: ResolvedModel, *, num_steps: int | None) -> TrainerConfig:
    return TrainerConfig(
        model=model.architecture,
        adapter=config.adapter,
        training=config.training,
        distributed=config.distributed,
        checkpoint_dir=checkpoint_dir(config),
        checkpointing=config.checkpointing,
        seed=config.run.seed,
        total_steps=num_steps,
    )
