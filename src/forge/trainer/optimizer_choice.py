"""From `training.optimizer` to the optimizer of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from forge.config import TrainingConfig
from forge.errors import CheckpointError
from forge.registry import OPTIMIZERS
from forge.trainer.custom_optimizer import CustomOptimizer, built_in_options, check_resumes
from forge.trainer.muon import MuonOptions
from forge.trainer.optimizer import BuiltInOptimizer, Optimizer


def make_optimizer(parameters: Mapping[str, nn.Parameter], config: TrainingConfig) -> Optimizer:
    """Return the optimizer of the parameters that this rank holds. All ranks call it."""
    if not OPTIMIZERS.is_built_in(config.optimizer):
        check_resumes(config, parameters)
        return CustomOptimizer(parameters, config)
    options = built_in_options(config)
    return BuiltInOptimizer(parameters, config, muon=options if isinstance(options, MuonOptions) else None)


def check_same_optimizer(saved: Mapping[str, Any] | None, config: TrainingConfig, *, path: str) -> None:
    """Refuse a checkpoint of another optimizer, whose states mean nothing to this one."""
    name = "adamw" if saved is None else saved["name"]  # checkpoints say it since there is a choice
    if name != config.optimizer:
        raise CheckpointError(
            f"the checkpoint was saved by the optimizer {name}, and this run has {config.optimizer}",
            path="training.optimizer",
            value=config.optimizer,
            rule=f"{name}, to resume from {path}",
            repair="set it, or start a new run from exported weights",
        )
