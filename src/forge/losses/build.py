"""From the name of a loss in a configuration to the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.config.algorithm import AlgorithmConfig
from forge.config.problems import InvalidConfig, argument_problems
from forge.errors import ConfigError
from forge.losses.base import Loss
from forge.registry import LOSSES, call


def make_loss(
    config: AlgorithmConfig,
    *,
    max_tokens: int | None,
    temperature: float = 1.0,
    iterations: int = 1,
    exact_entropy: bool = False,
) -> Loss:
    """Return the loss that the section `algorithm` describes.

    The class or function that makes it is called with the section's `args`, and with those that its signature names of
    `algorithm` (the section), `max_tokens` (of the longest completion), `temperature` (the sampler's), `iterations`
    (optimizer steps on each batch) and `exact_entropy` (whether the metric `entropy` is to be exact).
    """
    offered = {
        "algorithm": config,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "iterations": iterations,
        "exact_entropy": exact_entropy,
    }
    loss = build_loss(config.loss.function, config.loss.args, offered=offered, path="algorithm.loss")
    check_loss(loss, temperature=temperature)
    return loss


def build_loss(name: str, args: Mapping[str, Any], *, offered: Mapping[str, Any], path: str) -> Loss:
    """Return a loss by its name. `path` is the section that names it, for errors."""
    factory = LOSSES.find(name, path=f"{path}.function")
    problems = argument_problems(factory, args, path=f"{path}.args", what="the loss", offered=tuple(offered))
    if problems:
        raise InvalidConfig(problems)
    try:
        loss: object = call(factory, args=args, offered=offered)
    except ConfigError as error:
        if error.path is not None and not error.path.startswith(path):
            error.path = f"{path}.{error.path}"
        raise
    if not isinstance(loss, Loss):
        missing = [member for member in _MEMBERS if not hasattr(loss, member)]
        raise ConfigError(
            f"{name} does not make a loss: {type(loss).__name__} has no {', '.join(missing)}",
            path=f"{path}.function",
            value=name,
            rule="must be a class or function that returns a forge.losses.Loss",
            repair="add the members that are missing",
        )
    return loss


_MEMBERS = ("fields", "needs_entropy", "is_nll", "normalizer", "__call__")


def check_loss(loss: Loss, *, temperature: float) -> None:
    """Refuse a loss that does not know the sampler's temperature: its logprobs would be of another distribution."""
    if temperature not in (0, 1) and not hasattr(loss, "temperature"):
        raise ConfigError(
            "the loss does not know the temperature that tokens are sampled with",
            path="generator.sampling.temperature",
            value=temperature,
            rule="1 with a loss that has no attribute `temperature`",
            repair="give the loss an argument and an attribute `temperature`, or set 1.0",
        )
