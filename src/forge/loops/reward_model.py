"""Training of a reward model: the loop of `forge.loops.supervised` on preference pairs, with the Bradley–Terry loss."""

from __future__ import annotations

from collections.abc import Callable

from forge.config import RewardTrainingConfig
from forge.loops.supervised import SupervisedResult, run_supervised
from forge.observe.clock import monotonic_s

RewardModelResult = SupervisedResult


async def run_reward_model(
    config: RewardTrainingConfig, *, clock: Callable[[], float] = monotonic_s
) -> RewardModelResult:
    """Train a reward model as a configuration says. In every rank of `forge run --nproc_per_node`, or once as the
    controller.

    The result's `validation_metrics` have the accuracy and the calibration on held-out pairs, and its `export` is a
    classifier of `transformers` that `rewards.reward_model.path` takes. Signals are as for `run_sft`.
    """
    return await run_supervised(config, clock=clock)
