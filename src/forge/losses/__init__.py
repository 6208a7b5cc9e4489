"""Losses: pure functions on tensors, and the chunked output layer that gives them logprobs."""

from forge.losses.base import AnyLoss, CrossEntropy, Loss, LossTerms, TokenView, ValueLoss, ValueView
from forge.losses.build import make_loss
from forge.losses.candidates import chunked_candidates, chunked_top
from forge.losses.correction import Correction, effective_samples
from forge.losses.distillation import TeacherDivergence
from forge.losses.head import chunked_logprobs, chunked_nll
from forge.losses.kl import KLPenalty, estimate_kl
from forge.losses.kto import KTO
from forge.losses.policy import Average, PolicyLoss
from forge.losses.preference import PairLoss
from forge.losses.reward import BradleyTerry
from forge.losses.surrogates import Surrogate, clipped_surrogate, clipped_value_loss
from forge.losses.value import CriticLoss

__all__ = [
    "KTO",
    "AnyLoss",
    "Average",
    "BradleyTerry",
    "Correction",
    "CriticLoss",
    "CrossEntropy",
    "KLPenalty",
    "Loss",
    "LossTerms",
    "PairLoss",
    "PolicyLoss",
    "Surrogate",
    "TeacherDivergence",
    "TokenView",
    "ValueLoss",
    "ValueView",
    "chunked_candidates",
    "chunked_logprobs",
    "chunked_nll",
    "chunked_top",
    "clipped_surrogate",
    "clipped_value_loss",
    "effective_samples",
    "estimate_kl",
    "make_loss",
]
