"""What workers import, begun while the run still reads its model and data."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

from forge.config import GRPOConfig, SupervisedConfig
from forge.generator.actor import Generator
from forge.runtime.forking import imported_early
from forge.runtime.import_environment import import_environment
from forge.trainer.actor import Trainer
from forge.trainer.handles import is_rank


def early_imports(config: GRPOConfig | SupervisedConfig) -> AbstractContextManager[None]:
    """Start the process that the workers of this host will be forks of, for the block."""
    if is_rank() or config.launcher.kind != "local":
        return nullcontext()
    preload = Trainer._forge_preload()
    if isinstance(config, GRPOConfig):
        preload += Generator._forge_preload(config.generator)
    environment = {**os.environ, **import_environment(config.distributed.num_threads or 1)}
    return imported_early(environment, tuple(dict.fromkeys(preload)))
