"""Losses: pure functions on tensors, and the chunked output layer that gives them logprobs."""

from forge.losses.base import CrossEntropy, Loss, LossTerms, TokenView
from forge.losses.build import make_loss
from forge.losses.correction import Correction, effective_samples
from forge.losses.head import chunked_logprobs, chunked_nll
from forge.losses.kl import KLPenalty, estimate_kl
from forge.losses.policy import Average, PolicyLoss
from forge.losses.surrogates import Surrogate, clipped_surrogate, clipped_value_loss

__all__ = [
    "Average",
    "Correction",
    "CrossEntropy",
    "KLPenalty",
    "Loss",
    "LossTerms",
    "PolicyLoss",
    "Surrogate",
    "TokenView",
    "chunked_logprobs",
    "chunked_nll",
    "clipped_surrogate",
    "clipped_value_loss",
    "effective_samples",
    "estimate_kl",
    "make_loss",
]
