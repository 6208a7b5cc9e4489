"""What the workers of a run would refuse, checked from the configuration alone."""

from __future__ import annotations

from pathlib import Path

from forge.config import GRPOConfig, ModelConfig
from forge.errors import ConfigError, ModelError
from forge.generator.vllm.environment import installed_build
from forge.models.locate import check_folder, resolve


def check_workers(config: GRPOConfig) -> None:
    """Refuse a layout that no engine has, an engine that is not installed, and models that are not there."""
    _check_layout(config)
    if config.generator.engine == "vllm":
        installed_build()
    _check_reward_models(config)
    if config.algorithm.kl.coefficient and config.reference.path is not None:
        _check_model(config.reference.path, "reference.path")


def _check_layout(config: GRPOConfig) -> None:
    generators, distributed = config.generators, config.distributed
    if generators.tensor_parallel > 1 and config.generator.engine == "native":
        raise ConfigError(
            "the native engine runs in one process",
            path="generators.tensor_parallel",
            value=generators.tensor_parallel,
            rule="1, unless `engine: vllm`",
            repair="set generator.engine=vllm, or generators.num_replicas instead",
        )
    if config.placement == "shared" and distributed.num_ranks > 1:
        raise ConfigError(
            "a policy that shares its weights with the native engine has one rank",
            path="distributed",
            value=distributed.num_ranks,
            rule="one rank with placement `shared`",
            repair="set placement: turns, beside or apart, or all degrees to 1",
        )


def _check_reward_models(config: GRPOConfig) -> None:
    section = config.rewards
    kinds = {function.kind for function in section.functions}
    for kind, asked in (("judge", section.judge), ("reward_model", section.reward_model)):
        if kind in kinds and asked is None:
            raise ConfigError(
                f"the reward `{kind}` asks a model, and none is configured",
                path=f"rewards.{kind}",
                value=None,
                rule=f"needed by a reward of kind `{kind}`",
                repair=f"set rewards.{kind}.path to the folder of a model",
            )
    if "judge" in kinds and section.judge is not None:
        _check_model(section.judge.path, "rewards.judge.path")
        if section.judge.generator.engine == "vllm":
            installed_build()
    model = section.reward_model
    if "reward_model" in kinds and model is not None and not (Path(model.path) / "config.json").is_file():
        raise _not_a_model("rewards.reward_model.path", model.path, "must hold a config.json")


def _check_model(path: str, key: str) -> None:
    """Refuse a folder without a model of a known family."""
    try:
        check_folder(Path(path))
    except ModelError as error:
        raise _not_a_model(key, path, error.rule) from None
    resolve(ModelConfig(path=path))


def _not_a_model(key: str, path: str, rule: str | None) -> ModelError:
    return ModelError(
        "The model's folder cannot be used.",
        path=key,
        value=path,
        rule=rule,
        repair="give the folder of a model, such as `forge download` writes it",
    )
