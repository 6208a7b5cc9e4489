"""The generators of a whole program's configuration, as one service."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from forge.config import GeneratorConfig, PolicyConfig
from forge.errors import ConfigError

if TYPE_CHECKING:
    from forge.generator.actor import Generator
    from forge.service import Service


async def start_policy(config: PolicyConfig) -> Service[Generator]:
    """Start the generators that a configuration describes. Call it inside `async with forge.run(...)`."""
    from forge.generator.actor import Generator
    from forge.generator.engine import engine_class

    section = config.generator
    if section.tensor_parallel > 1 and not engine_class(section.engine).capabilities.tensor_parallel:
        raise ConfigError(
            f"the engine `{section.engine}` runs in one process",
            path="generator.tensor_parallel",
            value=section.tensor_parallel,
            rule="1, unless `engine: vllm`",
            repair="set generator.engine=vllm, or generator.num_replicas instead",
        )
    with_gpus = _wants_gpus(section.with_gpus)
    if with_gpus and config.launcher.kind == "local" and not _num_gpus():
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


def _wants_gpus(chosen: bool | None) -> bool:
    return bool(_num_gpus()) if chosen is None else chosen


def _num_gpus() -> int:
    from forge.runtime.placement import count_gpus, visible_gpus

    return len(visible_gpus(os.environ, count_gpus()))
