"""Tokens to try policy losses on: six whose losses are worked out by hand, and seven random samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forge.losses import LossTerms, TokenView
from forge.types import Batch, Sample

# Two samples of three tokens, the first of each never predicted.
RATIOS = [1.0, 1.5, 0.5, 1.0, 1.1, 0.5]
ADVANTAGES = [9.0, 1.0, 1.0, 9.0, -2.0, -1.0]
WEIGHTS = [0.0, 1.0, 1.0, 0.0, 1.0, 2.0]
# -min(rA, clip(r)A):  -1.2 (cut above), -0.5,         2.2, 0.8 (cut below, weight 2)
TOTAL = -1.2 - 0.5 + 2.2 + 2 * 0.8


def doubles(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def hand_view(**changes: Any) -> TokenView:
    old = doubles([-1.0, -2.0, -0.5, -1.0, -0.3, -0.7])
    made: dict[str, Any] = {
        "logprobs_T": (old + doubles(RATIOS).log()).requires_grad_(),
        "weights_T": doubles(WEIGHTS),
        "lengths": (3, 3),
        "fields": {"advantages": doubles(ADVANTAGES), "old_logprobs": old},
    }
    return TokenView(**(made | changes))


def hand_batch() -> Batch:
    ids = torch.arange(3)
    return Batch.of([Sample(ids, torch.tensor(WEIGHTS[:3])), Sample(ids, torch.tensor(WEIGHTS[3:]))])


def random_views(*, poison: float | None) -> list[TokenView]:
    """Seven samples of one to nine tokens; with `poison` wherever the weight is 0."""
    maker = torch.Generator().manual_seed(3)

    def numbers(length: int) -> torch.Tensor:
        return torch.randn(length, generator=maker, dtype=torch.float64)

    def spoiled(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return values if poison is None else torch.where(weights == 0, poison, values)

    views = []
    for length in (4, 1, 9, 2, 6, 3, 5):
        weights = numbers(length).abs() * (numbers(length) > -0.5)
        weights[0] = 0
        logprobs = -numbers(length).abs()
        fields = {
            "advantages": spoiled(numbers(length), weights),
            "old_logprobs": spoiled(logprobs + 0.2 * numbers(length), weights),
            "ref_logprobs": spoiled(logprobs + 0.2 * numbers(length), weights),
            "proximal_logprobs": spoiled(logprobs + 0.1 * numbers(length), weights),
        }
        entropy = spoiled(numbers(length).abs(), weights)
        leaf = spoiled(logprobs, weights).clone().requires_grad_()
        views.append(TokenView(leaf, weights, (length,), entropy, fields))
    return views


def joined(views: Sequence[TokenView]) -> TokenView:
    def cat(name: str) -> torch.Tensor:
        return torch.cat([getattr(view, name) for view in views])

    fields = {name: torch.cat([view.fields[name] for view in views]) for name in views[0].fields}
    lengths = tuple(length for view in views for length in view.lengths)
    return TokenView(cat("logprobs_T"), cat("weights_T"), lengths, cat("entropy_T"), fields)


def put_together(terms: Sequence[LossTerms]) -> dict[str, torch.Tensor]:
    """As `LossTerms` says that metrics are."""
    found = {}
    for name in terms[0].metrics:
        values = torch.stack([term.metrics[name] for term in terms])
        merge = torch.amax if name.endswith("_max") else torch.amin if name.endswith("_min") else torch.sum
        found[name] = merge(values)
    return found
