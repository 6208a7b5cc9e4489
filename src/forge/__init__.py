"""TorchForge: post-training of language models, as one plain Python program.

The public names are imported when first used, so that `import forge` costs next to nothing and loads neither torch nor
Monarch. One thing is done at once, while it still has an effect: where AMX instructions trap, the libraries behind
torch are kept from using them (`forge._amx`).
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forge import _amx

if TYPE_CHECKING:
    from forge._version import __version__
    from forge.config import GeneratorConfig, GRPOConfig, Sampling
    from forge.errors import ActorFailure
    from forge.generator.actor import Generator
    from forge.observe import Reduce, record_metric
    from forge.rollout.buffer import ReplayBuffer
    from forge.rollout.reward_actor import RewardActor
    from forge.runtime import endpoint, run, shutdown
    from forge.service import ForgeActor, Service
    from forge.trainer.actor import ReferenceModel, Trainer
    from forge.types import Batch, Completion, Episode, Group, Prompt, Sample, Score, StepResult

_HOMES = {
    "ActorFailure": "forge.errors",
    "Batch": "forge.types",
    "Completion": "forge.types",
    "Episode": "forge.types",
    "ForgeActor": "forge.service",
    "GRPOConfig": "forge.config",
    "Generator": "forge.generator.actor",
    "GeneratorConfig": "forge.config",
    "Group": "forge.types",
    "Prompt": "forge.types",
    "Reduce": "forge.observe",
    "ReferenceModel": "forge.trainer.actor",
    "ReplayBuffer": "forge.rollout.buffer",
    "RewardActor": "forge.rollout.reward_actor",
    "Sample": "forge.types",
    "Sampling": "forge.config",
    "Score": "forge.types",
    "Service": "forge.service",
    "StepResult": "forge.types",
    "Trainer": "forge.trainer.actor",
    "endpoint": "forge.runtime",
    "record_metric": "forge.observe",
    "run": "forge.runtime",
    "shutdown": "forge.runtime",
    "__version__": "forge._version",
}

_PACKAGES = (
    *("config", "data", "errors", "generator", "loops", "losses", "models", "observe", "rewards", "rollout"),
    *("runtime", "service", "store", "trainer", "types"),
)

__all__ = [
    "ActorFailure",
    "Batch",
    "Completion",
    "Episode",
    "ForgeActor",
    "GRPOConfig",
    "Generator",
    "GeneratorConfig",
    "Group",
    "Prompt",
    "Reduce",
    "ReferenceModel",
    "ReplayBuffer",
    "RewardActor",
    "Sample",
    "Sampling",
    "Score",
    "Service",
    "StepResult",
    "Trainer",
    "__version__",
    "endpoint",
    "record_metric",
    "run",
    "shutdown",
]

_amx.apply(os.environ)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"forge.{name}")
    home = _HOMES.get(name)
    if home is None:
        hint = "; the tensor store is forge.store: `import forge.store as ts`" if name == "torchstore" else ""
        raise AttributeError(f"module 'forge' has no attribute {name!r}{hint}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
