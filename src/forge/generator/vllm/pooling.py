"""`PoolingScorer`: a reward model on vLLM, whose pooling models give a conversation a number instead of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forge.config.rewards import RewardModelConfig
from forge.errors import ConfigError
from forge.generator.vllm.environment import engine_environment, installed_build


class PoolingScorer:
    """A classifier of any family for which vLLM has a pooling model. The engine runs in this process."""

    def __init__(self, config: RewardModelConfig, *, max_seq_len: int, microbatch_tokens: int) -> None:
        import os

        build = installed_build()
        check_pooling(config)
        with engine_environment(build):
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            from vllm import LLM
            from vllm.inputs import TokensPrompt
            from vllm.pooling_params import PoolingParams

            on_cpu = {"kv_cache_memory_bytes": 2**28} if build == "cpu" else {}
            self._model = LLM(
                model=config.path,
                runner="pooling",
                dtype=config.chosen_precision,
                max_model_len=max_seq_len,
                max_num_batched_tokens=microbatch_tokens,
                enforce_eager=build == "cpu",
                disable_log_stats=True,
                **on_cpu,
            )
        self._prompt: Any = TokensPrompt
        self._params = PoolingParams(use_activation=False)

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each row: the classifier's output, without an activation."""
        prompts = [self._prompt(prompt_token_ids=list(row)) for row in rows]
        outputs = self._model.classify(prompts, pooling_params=self._params, use_tqdm=False)
        return [float(output.outputs.probs[0]) for output in outputs]


def check_pooling(config: RewardModelConfig) -> None:
    """Raise `ConfigError` if vLLM is not installed, or the installed build is for another device."""
    try:
        build = installed_build()
    except ConfigError as error:
        error.path = "rewards.reward_model.engine"
        raise
    if config.with_gpus != (build == "gpu"):
        raise ConfigError(
            "The installed build of vLLM is for another device.",
            path="rewards.reward_model.with_gpus",
            value=config.with_gpus,
            rule=f"{str(build == 'gpu').lower()} with engine: vllm, as the installed vLLM is for the {build.upper()}",
            repair="change it, or choose engine: native",
        )
