"""The generators of a whole program's configuration, as one service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge.config import GeneratorConfig, PolicyConfig
from forge.errors import ConfigError
from forge.generator.limits import check_split
from forge.runtime.placement import num_usable_gpus, wants_gpus

if TYPE_CHECKING:
    from forge.generator.actor import Generator
    from forge.service import Service


async def start_policy(config: PolicyConfig) -> Service[Generator]:
    """Start the generators that a configuration describes. Call it inside `async with forge.run(...)`."""
    from forge.generator.actor import Generator

    section = config.generator
    check_split(section, section.tensor_parallel, path="generator.tensor_parallel")
    with_gpus = wants_gpus(section.with_gpus)
    if with_gpus and config.launcher.kind == "local" and not num_usable_gpus():
        raise ConfigError(
            "the configuration asks for a GPU, and this machine has none",
            path="generator.with_gpus",
            value=True,
            rule="true only where there is a GPU (nvidia-smi lists them, CUDA_VISIBLE_DEVICES hides them)",
            repair="run it on a machine with a GPU; or set generator.with_gpus=false, for a model that a CPU can run",
        )
    options = Generator.options(
        procs=section.tensor_parallel,
        num_replicas=section.num_replicas,
        num_threads=section.num_threads,
        with_gpus=with_gpus,
        **config.workers.generator.options(),
    )
    return await options.as_service(GeneratorConfig.of(config.model, section))
