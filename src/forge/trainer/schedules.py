"""How the learning rate goes: a warm-up, then one of four shapes. Pure arithmetic."""

from __future__ import annotations

import math

from forge.config.training import TrainingConfig
from forge.errors import ConfigError


def rate_factor_at(step: int, *, config: TrainingConfig, total_steps: int | None) -> float:
    """Return `rate_factor`; where the number of steps is not known, a constant rate after a warm-up."""
    if total_steps is not None:
        return rate_factor(step, config=config, total_steps=total_steps)
    return min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0


def check_schedule(config: TrainingConfig, *, total_steps: int | None) -> None:
    """Refuse a schedule that needs to know how many steps there are."""
    if total_steps is None and config.schedule != "constant":
        raise ConfigError(
            "the learning rate's schedule needs to know how many steps there will be",
            path="training.max_steps",
            value=None,
            rule=f"a number, for the schedule `{config.schedule}`",
            repair="set it, or set training.schedule=constant",
        )


def rate_factor(step: int, *, config: TrainingConfig, total_steps: int) -> float:
    """Return the part of `config.learning_rate` that the optimizer step number `step` uses, counted from 0.

    The warm-up rises in equal parts and never uses 0: of W steps, step s uses (s + 1) / W. After it a decay goes from
    1, at its first step, to `min_lr_ratio`, which is reached at `total_steps`: the last step still learns, and whatever
    comes after `total_steps` stays at the end value. `constant` stays at 1. `wsd` stays at 1 and falls in a straight
    line over the last `decay_ratio` of all steps, or over all steps after the warm-up where those are fewer.
    """
    warmup = _num_warmup_steps(config, total_steps=total_steps)
    if step < 0:
        raise ConfigError("A step is counted from 0.", path="step", value=step, rule="at least 0")
    if step < min(warmup, total_steps):
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    start = warmup
    if config.schedule == "wsd":
        start = max(warmup, total_steps - max(1, round(config.decay_ratio * total_steps)))
    remaining = 1 - _progress(step, start=start, end=total_steps)
    if config.schedule == "cosine":
        remaining = (1 - math.cos(math.pi * remaining)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining


def _num_warmup_steps(config: TrainingConfig, *, total_steps: int) -> int:
    if total_steps < 1:
        raise ConfigError(
            "A schedule needs to know how many steps there are.",
            path="total_steps",
            value=total_steps,
            rule="at least 1",
            repair="set training.max_steps, or give data that makes at least one step",
        )
    if config.warmup_steps is None:
        return math.ceil(total_steps * config.warmup_ratio)
    if config.warmup_steps > total_steps:
        raise ConfigError(
            "The warm-up is longer than the whole training, so the learning rate would never reach its maximum.",
            path="training.warmup_steps",
            value=config.warmup_steps,
            rule=f"at most the number of steps, which is {total_steps}",
            repair="lower it, or remove it to use training.warmup_ratio",
        )
    return config.warmup_steps


def _progress(step: int, *, start: int, end: int) -> float:
    """Return how far `step` is between `start` and `end`, from 0 to 1."""
    if step >= end:
        return 1.0
    return max(0.0, (step - start) / (end - start))


def is_due(step: int, interval: int | None) -> bool:
    """Whether what happens every so many steps happens after this one; never where there is no interval."""
    return interval is not None and step > 0 and step % interval == 0
