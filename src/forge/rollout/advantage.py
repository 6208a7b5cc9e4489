"""How much better than expected a completion was.

`advantages` turns the rewards of a batch of groups into one number for each completion, in four steps, each an option:

1. *baseline*: what the reward is compared with. 2. *scale*: what the difference is divided by. 3. *whiten*: whether the
results of the batch are moved and scaled to mean 0 and deviation 1. 4. *clip*.

It is finite whatever the rewards are. Where there is nothing to compare with or to scale by, nothing is made up:

| case | result |
|---|---|
| a group of equal rewards, with its own mean or that of the others as baseline | 0 for all of it |
| a group of one, with its own mean or that of the others as baseline | 0: it is its own baseline |
| a standard deviation of 0, whatever the baseline | the difference is not divided |
| whitening a batch of which all are equal, or of one | 0 for all |

`gae` is what a critic's values make of the rewards of single tokens. Plain Python numbers in float64: a batch has some
thousands of rewards at most, and a controller needs no torch for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from forge.config.algorithm import AdvantageConfig
from forge.errors import ConfigError, DataError

if TYPE_CHECKING:
    from forge.losses.kl import Estimator

_LARGEST_LOG_R = 60.0


def advantages(rewards: Sequence[Sequence[float]], config: AdvantageConfig) -> list[list[float]]:
    """The advantages of all completions of a batch, group by group, in the order of the rewards."""
    _check_rewards(rewards)
    every = [reward for group in rewards for reward in group]
    batch = (_mean(every), _std(every, config.std_ddof))
    found = [_of_group(group, config, batch=batch) for group in rewards]
    if config.whiten:
        found = _whitened(found, config)
    if config.clip is not None:
        found = [[min(max(value, -config.clip), config.clip) for value in group] for group in found]
    return found


def completion_kl(logprobs: Sequence[float], ref_logprobs: Sequence[float], estimator: Estimator) -> float:
    """The divergence of a completion from the reference, added up over its tokens: what is taken from its reward.

    The estimates are those of `forge.losses.kl`; in `k3`, a reference that holds a token e^60 times as likely counts as
    that.
    """
    if len(logprobs) != len(ref_logprobs):
        raise DataError(
            "policy and reference do not have logprobs of the same tokens",
            path="ref_logprobs",
            value=len(ref_logprobs),
            rule=f"{len(logprobs)} numbers, one for each token",
            repair="score the tokens that were drawn, without the prompt",
        )
    log_rs = [reference - own for own, reference in zip(logprobs, ref_logprobs, strict=True)]
    if estimator == "k1":
        return -math.fsum(log_rs)
    if estimator == "k2":
        return math.fsum(log_r * log_r for log_r in log_rs) / 2
    return math.fsum(math.expm1(min(log_r, _LARGEST_LOG_R)) - log_r for log_r in log_rs)


def gae(
    rewards_T: Sequence[float], values_T: Sequence[float], *, gamma: float, lam: float, last_value: float = 0.0
) -> tuple[list[float], list[float]]:
    """Generalised advantage estimates of T tokens (Schulman et al., arXiv 1506.02438), and the returns.

    delta_t = r_t + gamma V_(t+1) - V_t, and A_t = delta_t + gamma lam A_(t+1); the return of a token, which a critic
    learns, is A_t + V_t. `last_value` is the critic's value of what follows the last token: 0 where the completion
    ended by itself, and its value of the cut-off state where it was cut off by length.
    """
    if len(rewards_T) != len(values_T):
        raise DataError(
            "rewards and values are not of the same tokens",
            path="values_T",
            value=len(values_T),
            rule=f"{len(rewards_T)} numbers, one for each reward",
            repair="give the critic's value before each token that was drawn",
        )
    _check_fraction("gamma", gamma)
    _check_fraction("lam", lam)
    estimates: list[float] = []
    advantage, following = 0.0, last_value
    for reward, value in zip(reversed(rewards_T), reversed(values_T), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        estimates.append(advantage)
    estimates.reverse()
    return estimates, [estimate + value for estimate, value in zip(estimates, values_T, strict=True)]


def _of_group(group: Sequence[float], config: AdvantageConfig, *, batch: tuple[float, float]) -> list[float]:
    """Baseline and scale; `batch` is the mean and the deviation of all rewards."""
    baselines = {
        "group_mean": lambda: [_mean(group)] * len(group),
        "leave_one_out": lambda: [_mean(others) for others in _others(group)],
        "batch_mean": lambda: [batch[0]] * len(group),
        "none": lambda: [0.0] * len(group),
    }[config.baseline]()
    scales = {
        "group_std": lambda: [_std(group, config.std_ddof)] * len(group),
        "others_std": lambda: [_std(others, config.std_ddof) for others in _others(group)],
        "batch_std": lambda: [batch[1]] * len(group),
        "none": lambda: [0.0] * len(group),
    }[config.scale]()
    return [
        (reward - baseline) / (scale + config.epsilon) if scale > 0 else reward - baseline
        for reward, baseline, scale in zip(group, baselines, scales, strict=True)
    ]


def _others(group: Sequence[float]) -> list[list[float]]:
    """For each of a group the rest of it; for one alone itself."""
    return [[*group[:index], *group[index + 1 :]] or [reward] for index, reward in enumerate(group)]


def _whitened(found: list[list[float]], config: AdvantageConfig) -> list[list[float]]:
    batch = [value for group in found for value in group]
    mean, std = _mean(batch), _std(batch, config.std_ddof)
    scale = std + config.epsilon if std > 0 else 1.0
    return [[(value - mean) / scale for value in group] for group in found]


def _mean(values: Sequence[float]) -> float:
    """The mean; of equal values exactly their value, so that a group without signal has advantages of exactly 0."""
    if not values or min(values) == max(values):
        return values[0] if values else 0.0
    return math.fsum(values) / len(values)


def _std(values: Sequence[float], ddof: Literal[0, 1]) -> float:
    """The standard deviation; exactly 0 of equal values, and of one."""
    mean = _mean(values)
    squares = math.fsum((value - mean) * (value - mean) for value in values)
    return math.sqrt(squares / (len(values) - ddof)) if len(values) > 1 else 0.0


def _check_rewards(rewards: Sequence[Sequence[float]]) -> None:
    for number, group in enumerate(rewards):
        if not group:
            raise DataError(
                "a group has no completion",
                path=f"rewards[{number}]",
                value=(),
                rule="at least one reward",
                repair="leave empty groups out",
            )
        for index, reward in enumerate(group):
            if not math.isfinite(reward):
                raise DataError(
                    "a reward is not a finite number",
                    path=f"rewards[{number}][{index}]",
                    value=reward,
                    rule="finite",
                    repair="mend the reward function; a reward that cannot tell gives 0",
                )


def _check_fraction(path: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(
            "a factor of the advantage estimates is out of range",
            path=path,
            value=value,
            rule="at least 0 and at most 1",
            repair="1 is usual for gamma, and 0.95 or 1 for lam",
        )
