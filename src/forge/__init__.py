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
from forge._lazy import lazy_names

if TYPE_CHECKING:
    from forge._version import __version__
    from forge.config import EvalConfig, GeneratorConfig, GRPOConfig, Sampling
    from forge.envs.agent import Agent
    from forge.envs.environment import Env, Observation, episode_from_env
    from forge.envs.episode import episode
    from forge.envs.limits import Fault
    from forge.envs.sandbox import sandbox
    from forge.envs.tools import Tool, tool
    from forge.errors import ActorFailure
    from forge.generator.actor import Generator
    from forge.loops.evals.running import evaluate
    from forge.observe import Reduce, record_metric
    from forge.rollout.buffer import ReplayBuffer
    from forge.rollout.reward_actor import RewardActor
    from forge.runtime import endpoint, run, shutdown
    from forge.service import ForgeActor, Service
    from forge.trainer.actor import ReferenceModel, Trainer
    from forge.types import Batch, Completion, Episode, Group, Sample, Score, StepResult, Task, Turn

_PACKAGES = (
    *("config", "data", "envs", "errors", "generator", "loops", "losses", "models", "observe", "rewards", "rollout"),
    *("runtime", "service", "store", "trainer", "types"),
)

__all__ = [
    "ActorFailure",
    "Agent",
    "Batch",
    "Completion",
    "Env",
    "Episode",
    "EvalConfig",
    "Fault",
    "ForgeActor",
    "GRPOConfig",
    "Generator",
    "GeneratorConfig",
    "Group",
    "Observation",
    "Reduce",
    "ReferenceModel",
    "ReplayBuffer",
    "RewardActor",
    "Sample",
    "Sampling",
    "Score",
    "Service",
    "StepResult",
    "Task",
    "Tool",
    "Trainer",
    "Turn",
    "__version__",
    "endpoint",
    "episode",
    "episode_from_env",
    "evaluate",
    "record_metric",
    "run",
    "sandbox",
    "shutdown",
    "tool",
]

_amx.apply(os.environ)


_lazy = lazy_names(
    __name__,
    {
        "forge.errors": "ActorFailure",
        "forge.envs.agent": "Agent",
        "forge.envs.environment": "Env Observation episode_from_env",
        "forge.envs.episode": "episode",
        "forge.envs.limits": "Fault",
        "forge.envs.sandbox": "sandbox",
        "forge.envs.tools": "Tool tool",
        "forge.types": "Batch Completion Episode Group Sample Score StepResult Task Turn",
        "forge.service": "ForgeActor Service",
        "forge.config": "EvalConfig GRPOConfig GeneratorConfig Sampling",
        "forge.loops.evals": "evaluate",
        "forge.generator.actor": "Generator",
        "forge.observe": "Reduce record_metric",
        "forge.trainer.actor": "ReferenceModel Trainer",
        "forge.rollout.buffer": "ReplayBuffer",
        "forge.rollout.reward_actor": "RewardActor",
        "forge.runtime": "endpoint run shutdown",
        "forge._version": "__version__",
    },
)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"forge.{name}")
    if name == "torchstore":
        raise AttributeError("module 'forge' has no attribute 'torchstore': write `import forge.store as ts`")
    return _lazy(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
