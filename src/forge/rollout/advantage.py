"""How much better than expected a completion was.

`advantages` turns the rewards of a batch of groups into one number for each completion, in four steps, each an option:

1. *baseline*: what the reward is compared with. 2. *scale*: what the difference is divided by. 3. *whiten*: whether the
results of the batch are moved and scaled to mean 0 and deviation 1. 4. *clip*.

`token_advantages` gives one number for each token instead: between 2 and 3 it discounts the advantage by the tokens
that follow, and takes a cost of each token, the divergence from the reference, from that token's advantage (`charged`).

It is finite whatever the rewards are. Where there is nothing to compare with or to scale by, nothing is made up:

| case | result |
|---|---|
| a group of equal rewards, with its own mean or that of the others as baseline | 0 for all of it |
| a group of one, with its own mean or that of the others as baseline | 0: it is its own baseline |
| a standard deviation of 0, whatever the baseline | the difference is not divided |
| whitening a batch of which all are equal, or of one | 0 for all |

`gae` is what a critic's values make of the rewards of single tokens; `forge.rollout.value_credit` does it for episodes.
Plain Python numbers in float64: a batch has some thousands of rewards at most, and a controller needs no torch for
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, TypeVar

from forge.config.algorithm import AdvantageConfig
from forge.errors import ConfigError, DataError

if TYPE_CHECKING:
    from forge.losses.kl import Estimator

T = TypeVar("T")
Credit = Literal["return_to_go", "token"]

_LARGEST_LOG_R = 60.0


def advantages(
    rewards: Sequence[Sequence[float]],
    config: AdvantageConfig,
    *,
    num_tokens: Sequence[Sequence[int]] | None = None,
) -> list[list[float]]:
    """Return the advantages of all completions of a batch, group by group, in the order of the rewards.

    `num_tokens` says how many tokens of each completion count in the loss: `whiten_over: tokens` needs it.
    """
    found = _compared(rewards, config)
    if config.whiten:
        counts = num_tokens if config.whiten_over == "tokens" else [[1] * len(group) for group in found]
        if counts is None:
            raise DataError(
                "whitening over tokens needs the number of tokens of each completion",
                path="num_tokens",
                value=None,
                rule="one number for each reward with `whiten_over: tokens`",
                repair="give the number of tokens that count in the loss",
            )
        flat = _whitened(_flat(found), config, counts=_flat(counts))
        found = _grouped(flat, like=found)
    return [[_clipped(value, config.clip) for value in group] for group in found]


def token_advantages(
    rewards: Sequence[Sequence[float]],
    config: AdvantageConfig,
    *,
    costs: Sequence[Sequence[Sequence[float]]],
    credit: Credit,
    is_counted: Sequence[Sequence[bool]],
) -> list[list[list[float]]]:
    """Return the advantages of all tokens of a batch, by group and completion, discounted by `config.gamma`.

    `costs` has what each token costs, in units of reward; `credit` says whom it is taken from. `is_counted` says of
    which completions the tokens count in the loss, and so in `whiten`, which here is over tokens.
    """
    _check_costs(costs)
    compared = [value for group in _compared(rewards, config) for value in group]
    tokens = [
        charged(value, cost, credit, gamma=config.gamma) for value, cost in zip(compared, _flat(costs), strict=True)
    ]
    counts = [[int(counted)] * len(each) for each, counted in zip(tokens, _flat(is_counted), strict=True)]
    return _grouped(finish_tokens(tokens, config, counts=counts), like=rewards)


def finish_tokens(
    tokens: Sequence[Sequence[float]], config: AdvantageConfig, *, counts: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the advantages of tokens, by episode, whitened over all that count (1 in `counts`) and clipped, as the
    section says."""
    if config.whiten:
        whitened = iter(_whitened(_flat(tokens), config, counts=_flat(counts)))
        tokens = [[next(whitened) for _ in each] for each in tokens]
    return [[_clipped(value, config.clip) for value in each] for each in tokens]


def charged(advantage: float, costs_T: Sequence[float], credit: Credit, *, gamma: float = 1.0) -> list[float]:
    """Return the advantage of each of T tokens after costs: each pays its own (`token`), or also those of all later
    tokens (`return_to_go`). What comes n tokens later counts gamma to the power n: the advantage, which is earned with
    the last token, and costs of later tokens."""
    last = len(costs_T) - 1
    earned = [advantage * gamma ** (last - token) for token in range(len(costs_T))]
    if credit == "return_to_go":
        to_go = list(accumulate(reversed(costs_T), lambda later, cost: cost + gamma * later))
        costs_T = to_go[::-1]
    return [value - cost for value, cost in zip(earned, costs_T, strict=True)]


def token_kl(
    logprobs: Sequence[float], ref_logprobs: Sequence[float], estimator: Estimator, *, clamp: float | None = None
) -> list[float]:
    """Return the divergence from the reference of each token of a completion.

    The estimates are those of `forge.losses.kl`; in `k3`, a reference that holds a token e^60 times as likely counts as
    that. With `clamp`, an estimate is at most that large, and at least its negative.
    """
    if len(logprobs) != len(ref_logprobs):
        raise DataError(
            "policy and reference do not have logprobs of the same tokens",
            path="ref_logprobs",
            value=len(ref_logprobs),
            rule=f"{len(logprobs)} numbers, one for each token",
            repair="score the sampled tokens, without the prompt",
        )
    log_rs = [reference - own for own, reference in zip(logprobs, ref_logprobs, strict=True)]
    if estimator == "k1":
        found = [-log_r for log_r in log_rs]
    elif estimator == "k2":
        found = [log_r * log_r / 2 for log_r in log_rs]
    else:
        found = [math.expm1(min(log_r, _LARGEST_LOG_R)) - log_r for log_r in log_rs]
    return [_clipped(value, clamp) for value in found]


def completion_kl(
    logprobs: Sequence[float], ref_logprobs: Sequence[float], estimator: Estimator, *, clamp: float | None = None
) -> float:
    """Return the divergence of a completion from the reference, added up over its tokens."""
    return math.fsum(token_kl(logprobs, ref_logprobs, estimator, clamp=clamp))


def gae(
    rewards_T: Sequence[float],
    values_T: Sequence[float],
    *,
    gamma: float,
    lam: float,
    last_value: float = 0.0,
    last_advantage: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Generalised advantage estimates of T tokens (Schulman et al., arXiv 1506.02438), and the returns.

    delta_t = r_t + gamma V_(t+1) - V_t, and A_t = delta_t + gamma lam A_(t+1); the return of a token, which a critic
    learns, is A_t + V_t. `last_value` is the critic's value of what follows the last token: 0 where the completion
    finished, and its value of the cut-off state where that is bootstrapped. Where more tokens follow, `last_value` and
    `last_advantage` are those of the first of them.
    """
    if len(rewards_T) != len(values_T):
        raise DataError(
            "rewards and values are not of the same tokens",
            path="values_T",
            value=len(values_T),
            rule=f"{len(rewards_T)} numbers, one for each reward",
            repair="give the critic's value before each sampled token",
        )
    check_fraction("gamma", gamma)
    check_fraction("lam", lam)
    estimates: list[float] = []
    advantage, following = last_advantage, last_value
    for reward, value in zip(reversed(rewards_T), reversed(values_T), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        estimates.append(advantage)
    estimates.reverse()
    return estimates, [estimate + value for estimate, value in zip(estimates, values_T, strict=True)]


def _compared(rewards: Sequence[Sequence[float]], config: AdvantageConfig) -> list[list[float]]:
    """Baseline and scale for all groups."""
    _check_rewards(rewards)
    every = _flat(rewards)
    batch = (_mean(every), _std(every, config.std_ddof))
    return [_of_group(group, config, batch=batch) for group in rewards]


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
        (reward - baseline) / _divisor(scale, config)
        for reward, baseline, scale in zip(group, baselines, scales, strict=True)
    ]


def _others(group: Sequence[float]) -> list[list[float]]:
    """For each of a group the rest of it; for one alone itself."""
    return [[*group[:index], *group[index + 1 :]] or [reward] for index, reward in enumerate(group)]


def _whitened(values: Sequence[float], config: AdvantageConfig, *, counts: Sequence[int]) -> list[float]:
    """Move and scale values to mean 0 and deviation 1; each counts as often in the two as `counts` says."""
    known = [value for value, count in zip(values, counts, strict=True) if count]
    if not known or min(known) == max(known):
        return [value - known[0] if known else value for value in values]
    total = sum(counts)
    mean = math.fsum(value * count for value, count in zip(values, counts, strict=True)) / total
    squares = math.fsum((value - mean) * (value - mean) * count for value, count in zip(values, counts, strict=True))
    scale = _divisor(math.sqrt(squares / (total - config.std_ddof)), config)
    return [(value - mean) / scale for value in values]


def _divisor(std: float, config: AdvantageConfig) -> float:
    """What a difference is divided by; 1 where the deviation is 0."""
    if std <= 0:
        return 1.0
    if config.epsilon_place == "std":
        return std + config.epsilon
    variance = std * std
    return math.sqrt(variance + config.epsilon if config.epsilon_place == "variance" else max(variance, config.epsilon))


def _clipped(value: float, limit: float | None) -> float:
    return value if limit is None else min(max(value, -limit), limit)


def _flat(groups: Sequence[Sequence[T]]) -> list[T]:
    return [value for group in groups for value in group]


def _grouped(values: Sequence[T], *, like: Sequence[Sequence[object]]) -> list[list[T]]:
    """Values in a row, put into groups of the same sizes as others."""
    each = iter(values)
    return [[next(each) for _ in group] for group in like]


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
                    repair="fix the reward function; return 0 when it cannot score a completion",
                )


def _check_costs(costs: Sequence[Sequence[Sequence[float]]]) -> None:
    for number, group in enumerate(costs):
        for index, tokens in enumerate(group):
            if not all(map(math.isfinite, tokens)):
                raise DataError(
                    "the divergence of a token from the reference is not a finite number",
                    path=f"costs[{number}][{index}]",
                    value=next(cost for cost in tokens if not math.isfinite(cost)),
                    rule="finite",
                    repair="set algorithm.kl.clamp, or check that the reference has the same vocabulary",
                )


def check_fraction(path: str, value: float) -> None:
    """Refuse a factor of the advantage estimates that is not between 0 and 1."""
    if not 0 <= value <= 1:
        raise ConfigError(
            "a factor of the advantage estimates is out of range",
            path=path,
            value=value,
            rule="at least 0 and at most 1",
            repair="1 is usual for gamma, and 0.95 or 1 for lam",
        )
