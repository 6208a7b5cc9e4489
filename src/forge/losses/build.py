"""From the section `algorithm` of a configuration to a loss."""

from __future__ import annotations

from forge.config.algorithm import AlgorithmConfig
from forge.errors import ConfigError
from forge.losses.correction import Correction
from forge.losses.kl import KLPenalty
from forge.losses.policy import PolicyLoss


def make_loss(
    config: AlgorithmConfig,
    *,
    max_tokens: int | None,
    temperature: float = 1.0,
    iterations: int = 1,
    exact_entropy: bool = False,
) -> PolicyLoss:
    """The policy loss that a configuration describes.

    `max_tokens`, the longest completion, is the length of `average: constant` where the configuration names none.
    `temperature` is the sampler's; at 0 the sampler reports logprobs of temperature 1, and so these are learned from.
    `iterations` is the number of optimizer steps on each batch. `exact_entropy` asks for the exact entropy as a metric
    where there is no bonus for it: cheap on a CPU, not on a GPU.
    """
    kl, loss = config.kl, config.loss
    penalty = KLPenalty(
        kl.coefficient, kl.estimator, weighted=kl.weighted, clamp=kl.clamp, score_gradient=kl.score_gradient
    )
    return PolicyLoss(
        kind=loss.kind,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        average=loss.average,
        length=_length(config, max_tokens) if loss.average == "constant" else None,
        count_masked=loss.count_masked,
        proximal=loss.proximal,
        iterations=iterations,
        correction=Correction(**loss.correction.model_dump()),
        kl=penalty if kl.coefficient > 0 and kl.place == "loss" else None,
        entropy_coefficient=loss.entropy_coefficient,
        exact_entropy=exact_entropy,
        temperature=1.0 if temperature == 0 else temperature,
    )


def _length(config: AlgorithmConfig, max_tokens: int | None) -> int:
    length = config.loss.length if config.loss.length is not None else max_tokens
    if length is None:
        raise ConfigError(
            "`average: constant` does not know the length to divide by",
            path="algorithm.loss.length",
            value=None,
            rule="a number, where generator.sampling.max_tokens is null",
            repair="set algorithm.loss.length or generator.sampling.max_tokens to the longest completion, in tokens",
        )
    return length
