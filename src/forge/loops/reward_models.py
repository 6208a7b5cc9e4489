"""Which engine runs the model behind the reward `reward_model`, and what is wrong with it before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from forge.config import RewardModelConfig, RewardsConfig
from forge.errors import ConfigError, ForgeError, ModelError
from forge.models.hf_config import read_hf_config
from forge.rollout.reward_model import (
    MakeScorer,
    RewardFolder,
    Scorer,
    TransformersScorer,
    check_template,
    read_folder,
)

if TYPE_CHECKING:
    from forge.types import Task


def chosen_engine(config: RewardModelConfig) -> Literal["native", "vllm", "transformers"]:
    """Return what runs a reward model: what the configuration names, or the native engine where it knows the family."""
    if config.engine is not None:
        return config.engine
    try:
        read_hf_config(config.path)
    except ModelError:
        return "transformers"
    return "native"


def scorer_of(config: RewardModelConfig) -> MakeScorer:
    """Return what loads a reward model in the process that runs it."""
    return {"native": _native, "vllm": _vllm, "transformers": TransformersScorer}[chosen_engine(config)]


def _native(folder: RewardFolder) -> Scorer:
    from forge.trainer.scoring import EngineScorer

    return EngineScorer(folder.config, max_seq_len=folder.max_seq_len, microbatch_tokens=folder.microbatch_tokens)


def _vllm(folder: RewardFolder) -> Scorer:
    from forge.generator.vllm.pooling import PoolingScorer

    return PoolingScorer(folder.config, max_seq_len=folder.max_seq_len, microbatch_tokens=folder.microbatch_tokens)


def reward_model_errors(config: RewardModelConfig) -> Iterator[ForgeError]:
    """Yield an error for everything that a process with this reward model would refuse as it starts."""
    try:
        read_folder(config)
        if config.engine == "native":
            read_hf_config(config.path)
        elif config.engine == "vllm":
            from forge.generator.vllm.pooling import check_pooling

            check_pooling(config)
    except (ModelError, ConfigError) as error:
        yield error


def check_prompts(section: RewardsConfig, prompt: Task) -> None:
    """Refuse a reward model whose tokenizer cannot read prompts like this one: every score would fail."""
    asks = any(function.kind == "reward_model" for function in section.functions)
    if asks and section.reward_model is not None and prompt.text is None:
        check_template(read_folder(section.reward_model))
