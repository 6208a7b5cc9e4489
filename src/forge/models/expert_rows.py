"""Which rows experts take, and how their answers come back to the tokens: by gathering rows, on a GPU.

TorchTitan adds answers to tokens with a deterministic `scatter_add`, which is slow on a GPU: for 512 tokens with 8
experts each and a width of 2,048, its index has eight million entries, in every layer of a decode step. But each token
has exactly as many answers as it was sent to experts, so gathering and adding them gives the same sums up to rounding,
also in a fixed order. Gradients are gathered in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
from torch import Tensor
from torchtitan.models.common import token_dispatcher
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalDispatchMetadata


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the rows of experts come from and go to.

    Attributes:
        order_R: int64, for each row of the experts, which of the T * K pairs of token and expert it is.
        places_TK: int64, the inverse: the row of each pair.
        scores_TK: the weight of each answer.
    """

    order_R: Tensor
    places_TK: Tensor
    scores_TK: Tensor


def routes_of(expert_ids_TK: Tensor, scores_TK: Tensor) -> Routes:
    """Return the routes of tokens to experts. Rows are in the order of experts, and then of tokens."""
    order = torch.argsort(expert_ids_TK.reshape(-1), stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Routes(order, places.view_as(expert_ids_TK), scores_TK)


def to_experts(x_TD: Tensor, routes: Routes) -> Tensor:
    """Return the rows [R, D] of all experts."""
    out: Tensor = _ToExperts.apply(x_TD, routes.order_R, routes.places_TK)
    return out


def to_tokens(rows_RD: Tensor, routes: Routes) -> Tensor:
    """Return for each token the weighted sum [T, D] of its experts' answers, added in float32 and rounded once."""
    out: Tensor = _ToTokens.apply(rows_RD, routes.scores_TK, routes.order_R, routes.places_TK)
    return out


class _ToExperts(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(places_TK)
        return x_TD.index_select(0, order_R // places_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (places_TK,) = ctx.saved_tensors
        return grad_RD[places_TK].sum(1, dtype=torch.float32).to(grad_RD.dtype), None, None


class _ToTokens(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, scores_TK: Tensor, order_R: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RD, scores_TK, order_R, places_TK)
        weighted = rows_RD[places_TK].float() * scores_TK.float().unsqueeze(-1)
        return weighted.sum(1).to(rows_RD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_RD, scores_TK, order_R, places_TK = ctx.saved_tensors
        grad_RD = grad_TD.index_select(0, order_R // places_TK.shape[1]).float()
        of_scores_R = (grad_RD * rows_RD.float()).sum(-1)
        of_rows = grad_RD * scores_TK.reshape(-1).index_select(0, order_R).float().unsqueeze(-1)
        return of_rows.to(rows_RD.dtype), of_scores_R[places_TK].to(scores_TK.dtype), None, None


def add_rows(out_TD: Tensor, index_ND: Tensor, rows_ND: Tensor) -> Tensor:
    """Add rows to those of `out` that the index says, in a fixed order: in place of TorchTitan's operation.

    On a GPU, every row of `out` must be named equally often, as experts on several ranks do.
    """
    if not rows_ND.is_cuda or not len(out_TD):
        added: Tensor = _titans_scatter_add(out_TD, index_ND, rows_ND)
        return added
    places = torch.argsort(index_ND[:, 0], stable=True).view(len(out_TD), -1)
    tokens = index_ND[:, 0].contiguous()
    summed: Tensor = _AddRows.apply(rows_ND, tokens, places)
    return out_TD + summed


class _AddRows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, tokens_N: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_N)
        return rows_ND[places_TK].sum(1, dtype=torch.float32).to(rows_ND.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        (tokens_N,) = ctx.saved_tensors
        return grad_TD.index_select(0, tokens_N), None, None


_titans_scatter_add = token_dispatcher.deterministic_scatter_add
token_dispatcher.deterministic_scatter_add = add_rows  # where experts are on several ranks


class RowDispatcher(AllToAllTokenDispatcher):  # type: ignore[misc]
    """TorchTitan's way of tokens to experts and back, by gathering where all experts are on one GPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):  # type: ignore[misc]
        pass

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Routes | LocalDispatchMetadata]:
        if self.ep_mesh is not None or not x_TD.is_cuda:
            found: tuple[Tensor, Tensor, LocalDispatchMetadata] = super().dispatch(
                x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
            return found
        routes = routes_of(topk_expert_ids_TK, topk_scores_TK)
        return to_experts(x_TD, routes), num_local_tokens_per_expert_E, routes

    def combine(self, routed_output_RD: Tensor, metadata: Routes | LocalDispatchMetadata, x_TD: Tensor) -> Tensor:
        if isinstance(metadata, Routes):
            return to_tokens(routed_output_RD, metadata)
        out: Tensor = super().combine(routed_output_RD, metadata, x_TD)
        return out
