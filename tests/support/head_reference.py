"""The plain way to what the chunked head computes, and inputs for both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Case:
    """Leaves that want gradients, with targets and weights."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    weights: Tensor


def make_case(num_tokens: int = 13, *, width: int = 7, vocab: int = 11, dtype: torch.dtype = torch.float64) -> Case:
    maker = torch.Generator().manual_seed(17 * num_tokens + vocab)
    hidden = torch.randn(num_tokens, width, generator=maker, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=maker, dtype=torch.float64)
    targets = torch.randint(0, vocab, (num_tokens,), generator=maker)
    weights = torch.rand(num_tokens, generator=maker, dtype=torch.float64)
    weights[::3] = 0
    if num_tokens > 2:
        targets[0], targets[1] = 0, vocab - 1
    return Case(hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, weights)


def plain_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropy from whole logits."""
    logp = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def gradients_of(total: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    hidden, weight = torch.autograd.grad(total, (case.hidden, case.weight), retain_graph=True)
    return hidden, weight
