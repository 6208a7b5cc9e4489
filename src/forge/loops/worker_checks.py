"""What the workers of a run would refuse, checked from the configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from forge.config import (
    EvalConfig,
    GenerationConfig,
    GeneratorServiceConfig,
    GRPOConfig,
    ModelConfig,
    PolicyConfig,
    RewardsConfig,
    SFTConfig,
)
from forge.errors import ConfigError, ForgeError, ModelError
from forge.generator.engine import check_split, engine_class
from forge.loops.workers import gpus_beside
from forge.models.locate import resolve
from forge.observe.log import sink_errors
from forge.runtime.placement import num_usable_gpus, wants_gpus
from forge.trainer.handles import planned_ranks


def check_workers(config: GRPOConfig) -> None:
    """Raise the first of `grpo_worker_errors`."""
    for error in grpo_worker_errors(config):
        raise error


def check_sft_workers(config: SFTConfig) -> None:
    """Raise the first of `sft_worker_errors`."""
    for error in sft_worker_errors(config):
        raise error


def grpo_worker_errors(config: GRPOConfig) -> Iterator[ForgeError]:
    """Yield an error for everything that a worker of this run would refuse as it starts."""
    yield from _placement_errors(config)
    yield from _engine_errors(config.generator)
    has_reference = config.algorithm.kl.coefficient > 0
    if has_reference and config.reference.path is not None:
        yield from _model_errors("reference.path", config.reference.path)
    yield from _reward_model_errors(config.rewards)
    asked = {
        "distributed.with_gpus": config.distributed.with_gpus,
        "generator.with_gpus": config.generator.with_gpus,
        "reference.with_gpus": config.reference.with_gpus if has_reference else None,
    }
    yield from _gpu_errors(asked, is_local=config.launcher.kind == "local")
    yield from sink_errors(config.metrics)


def eval_worker_errors(config: EvalConfig) -> Iterator[ForgeError]:
    """Yield an error for everything that a worker of this evaluation would refuse as it starts."""
    yield from _engine_errors(config.generator)
    yield from _reward_model_errors(config.rewards)
    asked = {"generator.with_gpus": config.generator.with_gpus}
    yield from _gpu_errors(asked, is_local=config.launcher.kind == "local")


def sft_worker_errors(config: SFTConfig) -> Iterator[ForgeError]:
    """Yield an error for everything that a rank of this run would refuse as it starts."""
    asked = {"distributed.with_gpus": config.distributed.with_gpus}
    yield from _gpu_errors(asked, is_local=config.launcher.kind == "local")
    yield from sink_errors(config.metrics)


def policy_worker_errors(config: PolicyConfig) -> Iterator[ForgeError]:
    """Yield an error for everything that a generator of this program would refuse as it starts."""
    yield from _engine_errors(config.generator)
    yield from _tensor_parallel_errors(config.generator)
    yield from _gpu_errors(
        {"generator.with_gpus": config.generator.with_gpus}, is_local=config.launcher.kind == "local"
    )


def _placement_errors(config: GRPOConfig) -> Iterator[ForgeError]:
    yield from _tensor_parallel_errors(config.generator)
    if config.placement == "shared" and config.distributed.num_ranks > 1:
        yield ConfigError(
            "a policy that shares its weights with the native engine has one rank",
            path="distributed",
            value=config.distributed.num_ranks,
            rule="one rank with placement `shared`",
            repair="set placement: turns, beside or apart, or all degrees to 1",
        )
    if config.placement in ("beside", "turns") and wants_gpus(config.distributed.with_gpus):
        ranks = ",".join(str(rank) for rank in range(planned_ranks(config.distributed)))
        try:
            gpus_beside(ranks, tensor_parallel=config.generator.tensor_parallel)
        except ConfigError as error:
            yield error


def _tensor_parallel_errors(section: GeneratorServiceConfig, *, path: str = "generator") -> Iterator[ForgeError]:
    try:
        check_split(section, section.tensor_parallel, path=f"{path}.tensor_parallel")
    except ConfigError as error:
        yield error


def _engine_errors(section: GenerationConfig, *, path: str = "generator") -> Iterator[ForgeError]:
    for error in engine_class(section.engine).config_errors(section):
        error.path = (error.path or path).replace("generator", path, 1)
        yield error


def _reward_model_errors(section: RewardsConfig) -> Iterator[ForgeError]:
    """Yield an error for each model behind a reward that cannot be used. A missing section is a problem of rewards."""
    kinds = {function.kind for function in section.functions}
    if "judge" in kinds and section.judge is not None:
        yield from _tensor_parallel_errors(section.judge.generator, path="rewards.judge.generator")
        yield from _engine_errors(section.judge.generator, path="rewards.judge.generator")
        yield from _model_errors("rewards.judge.path", section.judge.path)
    if "reward_model" in kinds and section.reward_model is not None:
        folder = Path(section.reward_model.path)
        if not (folder / "config.json").is_file():
            yield ModelError(
                "The model's folder cannot be used.",
                path="rewards.reward_model.path",
                value=str(folder),
                rule="must hold a config.json",
                repair="give the folder of a model, such as `forge download` writes it",
            )


def _model_errors(path: str, folder: str) -> Iterator[ForgeError]:
    """Yield an error for a folder without a model of a known family."""
    try:
        resolve(ModelConfig(path=folder))
    except ModelError as error:
        error.path = path
        yield error


def _gpu_errors(asked: dict[str, bool | None], *, is_local: bool) -> Iterator[ForgeError]:
    wanted = [path for path, with_gpus in asked.items() if with_gpus]
    if not wanted or not is_local or num_usable_gpus():
        return
    yield ConfigError(
        "the run needs GPUs, and this machine has no usable ones",
        path=" and ".join(wanted),
        value=True,
        rule="a machine with an NVIDIA GPU and its driver, and CUDA_VISIBLE_DEVICES unset or naming one",
        repair="run it on such a machine (`forge doctor` shows what is found), or add "
        + " ".join(f"{path}=false" for path in wanted),
    )
