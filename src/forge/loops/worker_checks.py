"""What the workers of a run would refuse, checked from the configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from forge.config import (
    EvalConfig,
    GenerationConfig,
    GeneratorConfig,
    GeneratorServiceConfig,
    GRPOConfig,
    ModelConfig,
    PolicyConfig,
    PreferenceConfig,
    RewardsConfig,
    SupervisedConfig,
)
from forge.errors import ConfigError, ForgeError, ModelError
from forge.generator.engine import check_split, engine_class
from forge.loops.reward_models import reward_model_errors
from forge.loops.workers import gpus_beside
from forge.models.locate import resolve
from forge.models.tokenizer import ChatTokenizer
from forge.models.vocabulary import check_same_vocabulary
from forge.observe.log import sink_errors
from forge.runtime.placement import num_usable_gpus, wants_gpus
from forge.trainer.handles import planned_ranks
from forge.trainer.layout import check_layout


def check_workers(config: GRPOConfig) -> None:
    """Raise the first of `grpo_worker_errors`."""
    for error in grpo_worker_errors(config):
        raise error


def check_supervised_workers(config: SupervisedConfig) -> None:
    """Raise the first of `supervised_worker_errors`."""
    for error in supervised_worker_errors(config):
        raise error


def grpo_worker_errors(config: GRPOConfig) -> Iterator[ForgeError]:
    """Yield an error for everything that a worker of this run would refuse as it starts."""
    yield from _placement_errors(config)
    yield from _engine_errors(GeneratorConfig.of(config.model, config.generator, adapter=config.adapter))
    has_reference = config.needs_reference
    if has_reference and config.reference.path is not None:
        yield from _reference_errors(config.model, config.reference.path)
    yield from _reward_model_errors(config.rewards)
    if config.algorithm.has_critic:
        yield from _critic_errors(config)
    asked = {
        "distributed.with_gpus": config.distributed.with_gpus,
        "critic.distributed.with_gpus": config.critic.distributed.with_gpus if config.critic.distributed else None,
        "generator.with_gpus": config.generator.with_gpus,
        "reference.with_gpus": config.reference.with_gpus if has_reference else None,
        "teacher.with_gpus": config.teacher.with_gpus,
        "teacher.generator.with_gpus": config.teacher.generator.with_gpus if config.teacher.generator else None,
        "rewards.reward_model.with_gpus": _reward_model_gpus(config.rewards),
    }
    yield from _gpu_errors(asked, is_local=config.launcher.kind == "local")
    yield from sink_errors(config.metrics)


def _critic_errors(config: GRPOConfig) -> Iterator[ForgeError]:
    """Yield an error for a critic that cannot be started, or not where it is to be."""
    section, distributed = config.critic, config.critic_distributed
    try:
        policy = resolve(config.model).architecture
        critic = resolve(section.model_from(policy)).architecture
        check_layout(distributed, critic, section.training.over(config.training), num_ranks=planned_ranks(distributed))
    except ForgeError as error:
        error.path = "critic.path" if isinstance(error, ModelError) else f"critic.{error.path}"
        yield error
        return
    if (critic.vocab_size or 0) < (policy.vocab_size or 0):
        yield ModelError(
            "the critic does not know all tokens of the policy",
            path="critic.path",
            value=critic.vocab_size,
            rule=f"a vocabulary of at least {policy.vocab_size} tokens, made by the policy's tokenizer",
            repair="start it from a model of the same family",
        )
    ranks, of_trainer = planned_ranks(distributed), planned_ranks(config.distributed)
    if section.placement != "beside" or not wants_gpus(distributed.with_gpus):
        return
    if ranks > of_trainer:
        yield ConfigError(
            "the critic shares the trainer's GPUs, and needs more of them than the trainer has",
            path="critic.distributed",
            value=ranks,
            rule=f"at most {of_trainer} ranks with critic.placement `beside`",
            repair="lower its degrees, or set critic.placement: apart",
        )
    if config.placement == "shared":
        yield ConfigError(
            "the generator takes the memory of the GPU before the critic starts",
            path="critic.placement",
            value="beside",
            rule="`apart` with placement `shared` on a GPU",
            repair="set placement: turns, or critic.placement: apart",
        )


def eval_worker_errors(config: EvalConfig) -> Iterator[ForgeError]:
    """Yield an error for everything that a worker of this evaluation would refuse as it starts."""
    yield from _engine_errors(config.generator)
    yield from _reward_model_errors(config.rewards)
    asked = {
        "generator.with_gpus": config.generator.with_gpus,
        "rewards.reward_model.with_gpus": _reward_model_gpus(config.rewards),
    }
    yield from _gpu_errors(asked, is_local=config.launcher.kind == "local")


def supervised_worker_errors(config: SupervisedConfig) -> Iterator[ForgeError]:
    """Yield an error for everything that a rank of this run would refuse as it starts."""
    asked = {"distributed.with_gpus": config.distributed.with_gpus}
    if isinstance(config, PreferenceConfig):
        if config.reference.path is not None:
            yield from _reference_errors(config.model, config.reference.path)
        if config.has_reference_model:
            asked["reference.with_gpus"] = config.reference.with_gpus
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


def _reward_model_gpus(section: RewardsConfig) -> bool:
    asks = any(function.kind == "reward_model" for function in section.functions)
    return asks and section.reward_model is not None and section.reward_model.with_gpus


def _reward_model_errors(section: RewardsConfig) -> Iterator[ForgeError]:
    """Yield an error for each model behind a reward that cannot be used. A missing section is a problem of rewards."""
    kinds = {function.kind for function in section.functions}
    if "judge" in kinds and section.judge is not None:
        yield from _tensor_parallel_errors(section.judge.generator, path="rewards.judge.generator")
        yield from _engine_errors(section.judge.generator, path="rewards.judge.generator")
        yield from _model_errors("rewards.judge.path", section.judge.path)
    if "reward_model" in kinds and section.reward_model is not None:
        yield from reward_model_errors(section.reward_model)


def _reference_errors(policy: ModelConfig, folder: str) -> Iterator[ForgeError]:
    """Yield an error for a reference model that cannot be loaded, or that reads the policy's tokens as others.

    A reference may have more tokens than the policy. Without a tokenizer in its folder nothing is compared.
    """
    errors = list(_model_errors("reference.path", folder))
    yield from errors
    try:
        own = resolve(policy).folder
    except ForgeError:
        return  # reported with the policy
    if errors or own is None or own.resolve() == Path(folder).resolve():
        return
    try:
        one, other = ChatTokenizer.load(own), ChatTokenizer.load(folder)
    except ModelError:
        return
    if one.vocabulary.items() <= other.vocabulary.items():
        return
    try:
        check_same_vocabulary(one, other, path="reference.path", names=("policy", "reference model"))
    except ConfigError as error:
        yield error


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
