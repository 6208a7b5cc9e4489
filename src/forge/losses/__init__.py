"""Losses: pure functions on tensors, and the chunked output layer that gives them logprobs."""

from forge.losses.averaging import Average
from forge.losses.base import Loss, LossTerms, TokenView
from forge.losses.head import chunked_logprobs, chunked_nll
from forge.losses.kl import KLPenalty, estimate_kl
from forge.losses.policy import ClippedPolicy, clipped_surrogate
from forge.losses.sft import CrossEntropy

__all__ = [
    "Average",
    "ClippedPolicy",
    "CrossEntropy",
    "KLPenalty",
    "Loss",
    "LossTerms",
    "TokenView",
    "chunked_logprobs",
    "chunked_nll",
    "clipped_surrogate",
    "estimate_kl",
]
