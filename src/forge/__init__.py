"""TorchForge: post-training of language models, as one plain Python program.

The public names are imported when first used, so that `import forge` costs next to nothing and loads neither torch nor
Monarch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge._version import __version__
    from forge.config import GeneratorConfig, Sampling
    from forge.generator.actor import Generator
    from forge.runtime import endpoint, run, shutdown
    from forge.service import ForgeActor, Service
    from forge.trainer.actor import Trainer
    from forge.types import Batch, Completion, Sample, StepResult

_HOMES = {
    "Batch": "forge.types",
    "Completion": "forge.types",
    "ForgeActor": "forge.service",
    "Generator": "forge.generator.actor",
    "GeneratorConfig": "forge.config",
    "Sample": "forge.types",
    "Sampling": "forge.config",
    "Service": "forge.service",
    "StepResult": "forge.types",
    "Trainer": "forge.trainer.actor",
    "endpoint": "forge.runtime",
    "run": "forge.runtime",
    "shutdown": "forge.runtime",
    "__version__": "forge._version",
}

_PACKAGES = (
    *("config", "data", "errors", "generator", "loops", "losses", "models", "observe", "runtime", "service", "store"),
    *("trainer", "types"),
)

__all__ = [
    "Batch",
    "Completion",
    "ForgeActor",
    "Generator",
    "GeneratorConfig",
    "Sample",
    "Sampling",
    "Service",
    "StepResult",
    "Trainer",
    "__version__",
    "endpoint",
    "run",
    "shutdown",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"forge.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'forge' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
