"""Losses: pure functions on tensors, and the chunked output layer that gives them logprobs."""

from forge.losses.averaging import Average
from forge.losses.base import Loss, LossTerms, TokenView
from forge.losses.build import make_loss
from forge.losses.correction import Correction, effective_samples
from forge.losses.head import chunked_logprobs, chunked_nll
from forge.losses.kl import KLPenalty, estimate_kl
from forge.losses.policy import ClippedPolicy, PolicyLoss
from forge.losses.sft import CrossEntropy
from forge.losses.surrogates import Surrogate, clipped_surrogate
from forge.losses.value import clipped_value_loss

__all__ = [
    "Average",
    "ClippedPolicy",
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
