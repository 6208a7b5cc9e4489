"""The logprobs of several candidate tokens at each place, and which tokens are the likeliest: for distillation.

As in `forge.losses.head`, logits exist for one chunk of tokens at a time. A loss over the K candidates of a teacher
needs K logprobs of each place, and the rest of the distribution as one number, which follows from them. So the
vocabulary is never kept for more than a chunk, and the memory of a row grows with K and not with the vocabulary.

Shapes: N places, K candidates, D the model's width, V the vocabulary (of this rank, where it is split).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.errors import ConfigError, ModelError
from forge.losses.chunks import Gradients, Plan, Workspace
from forge.losses.head import check_inputs, chunk_size, wrong_shape


def chunked_candidates(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    candidates_NK: Tensor,
    *,
    chunk_tokens: int | None = None,
    fp32_logits: bool = False,
    group: Any = None,
    vocab_start: int = 0,
) -> Tensor:
    """Return the logprobs of the candidates under softmax(hidden @ weight.T): [N, K], float32 or wider.

    Differentiable with respect to `hidden_ND` and `weight_VD`, once; the backward pass computes logits a second time. A
    token may be a candidate several times. The arguments are those of `forge.losses.head.chunked_logprobs`.
    """
    if candidates_NK.dim() != 2 or candidates_NK.shape[0] != hidden_ND.shape[0] or candidates_NK.shape[1] < 1:
        raise wrong_shape("candidates_NK", candidates_NK, f"[{hidden_ND.shape[0]}, K], with at least one candidate")
    plan = Plan(chunk_size(chunk_tokens, hidden_ND), 1.0, False, fp32_logits, group, vocab_start)
    check_inputs(hidden_ND, weight_VD, candidates_NK[:, 0], plan, every_target=candidates_NK)
    found: Tensor = _Candidates.apply(hidden_ND, weight_VD, candidates_NK, plan)
    return found


@torch.no_grad()
def chunked_top(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    k: int,
    *,
    chunk_tokens: int | None = None,
    fp32_logits: bool = False,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens of each place, the likeliest first: logprobs [N, k] and ids [N, k]. No gradient."""
    if group is not None:
        raise ModelError(
            "the likeliest tokens cannot be found where the vocabulary is split over ranks",
            path="distributed.tensor",
            value="more than 1",
            rule="1 where a model gives its likeliest tokens",
            repair="score with teacher.generator.engine: vllm, which splits a model over GPUs",
        )
    if not 1 <= k <= weight_VD.shape[0]:
        raise ConfigError(
            "there are not so many tokens",
            path="k",
            value=k,
            rule=f"from 1 to {weight_VD.shape[0]}, the rows of the output layer",
            repair="ask for fewer",
        )
    plan = Plan(chunk_size(chunk_tokens, hidden_ND), 1.0, False, fp32_logits, None, 0)
    space = Workspace(hidden_ND, weight_VD, plan)
    parts = [space.top(rows, k) for rows in space.chunks()]
    if not parts:
        return space.joined([]).new_zeros(0, k), torch.zeros(0, k, dtype=torch.int64, device=weight_VD.device)
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([ids for _, ids in parts])


class _Candidates(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, candidates: Tensor, plan: Plan) -> Tensor:
        space = Workspace(hidden, weight, plan)
        found = [space.read_candidates(rows, candidates[rows]) for rows in space.chunks()]
        lse = space.joined([each for _, each in found])
        ctx.save_for_backward(hidden, weight, candidates, lse)
        ctx.plan = plan
        return torch.cat([each for each, _ in found]) if found else lse.new_zeros(candidates.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, candidates, lse = ctx.saved_tensors
        space = Workspace(hidden, weight, ctx.plan)
        gradients = Gradients(hidden, weight, ctx.needs_input_grad[:2], is_final=True)
        for rows in space.chunks():
            space.fill(rows)
            space.rescale(rows, lse[rows])
            gradients.add(rows, *space.differentiate_candidates(rows, candidates[rows], grad_logprobs[rows]))
        return (*gradients.result(), None, None)
