"""The check of `training.optimizer` before a run starts. Nothing is imported for the default."""

from __future__ import annotations

from forge.config.training import TrainingConfig
from forge.registry import OPTIMIZERS


def check_optimizer(config: TrainingConfig) -> None:
    """Raise `ConfigError` if the configured optimizer cannot be made. No step is taken."""
    if config.optimizer == "adamw" and not config.optimizer_args:
        return
    import torch

    from forge.trainer.custom_optimizer import build, built_in_options

    if OPTIMIZERS.is_built_in(config.optimizer):
        built_in_options(config)
    else:
        shapes = {"weight": (2, 2), "bias": (2,)}
        build(config, {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})
