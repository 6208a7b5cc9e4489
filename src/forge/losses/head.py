"""The output layer, a few tokens at a time, so that [tokens x vocabulary] never exists as a whole.

At a vocabulary of 151,936 the float32 logits of 32,768 tokens take 20 GB, and a plain cross-entropy holds several such
tensors. Both functions here hold about two *chunks* of them instead:

- `chunked_logprobs` gives each target's logprob, and the entropy if asked for, to be used in any loss. Its backward
  pass computes the logits a second time, except for those whose gradient found room in a cache.
- `chunked_nll` gives the weighted sum of negative logprobs. As its gradient is known as soon as the logits are, it is
  computed in the forward pass, and nothing is computed twice.

Shapes: N tokens, D the model's width, V the vocabulary (of this rank, where it is split), C the tokens of one chunk.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.errors import ConfigError, DataError, ModelError
from forge.losses.chunks import Found, Gradients, Plan, Workspace, scaled

CHUNK_TOKENS = 1024
CHUNK_TOKENS_CPU = 256
"""On a CPU, larger chunks cost memory and save no time."""


def chunked_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    fp32_logits: bool = False,
    group: Any = None,
    vocab_start: int = 0,
    cache_bytes: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """The logprob of each target under softmax(hidden @ weight.T / temperature), and that distribution's entropy.

    Both results are float32 (float64 if the inputs are) and differentiable with respect to `hidden_ND` and `weight_VD`,
    once. They do not depend on `chunk_tokens` beyond rounding: in float64 on a CPU to 1e-12.

    Args:
        hidden_ND: what the last layer gives, in the weight's dtype. N may be 0.
        weight_VD: the output layer's weight. Its gradient is summed in float32 whatever its dtype is.
        targets_N: int64, each in [0, V). Elsewhere: a DataError on a CPU; a NaN logprob on a GPU, which is not waited
            for.
        chunk_tokens: tokens whose logits exist at once; None for 1024, or 256 on a CPU.
        temperature: what the logits are divided by.
        entropy: whether to compute the entropy, in nats; otherwise the second result is None.
        fp32_logits: sum and keep logits of bfloat16 inputs in float32, where they are otherwise rounded to bfloat16.
            The product of two bfloat16 numbers is exact in float32, so this is what float32 copies of both inputs would
            give, at the speed of bfloat16 on a GPU; TF32 has no part in it. A chunk takes twice the memory; on a CPU
            there is a float32 copy of the weight. Gradients are rounded to the inputs' dtype, as ever.
        group: the process group over which the rows of the weight are split, in any shares. Every rank passes the same
            hidden states and targets, gets the same results, and gets its *own part* of the gradient of
            `hidden_ND`: the sum over the group is the gradient.
        vocab_start: with a group, the token id of this rank's first row.
        cache_bytes: memory in which the gradients of logits may wait for the backward pass, on a GPU and where neither
            a group nor the entropy is asked for. Logits that find room there are computed once, all others twice.
    """
    check_temperature(temperature)
    cache_bytes = cache_bytes if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad) else 0
    chunk = chunk_size(chunk_tokens, hidden_ND)
    plan = Plan(chunk, 1.0 / temperature, entropy, fp32_logits, group, vocab_start, cache_bytes)
    check_inputs(hidden_ND, weight_VD, targets_N, plan)
    logprobs_N, entropy_N = _Logprobs.apply(hidden_ND, weight_VD, targets_N, plan)
    return logprobs_N, entropy_N


def chunked_nll(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    *,
    chunk_tokens: int | None = None,
    fp32_logits: bool = False,
    group: Any = None,
    vocab_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """The sum of `weights_N` times the negative logprobs of the targets, and the logprobs, detached.

    Equals the same sum over `chunked_logprobs`, with three matrix products instead of four: the gradient is computed in
    the forward pass, and only scaled in the backward pass. Where no gradient is wanted (a frozen model,
    `torch.no_grad()`), only the logprobs are computed. Tokens of weight 0 add nothing, whatever their logprob.
    The arguments are those of `chunked_logprobs`; the weights get no gradient.
    """
    plan = Plan(chunk_size(chunk_tokens, hidden_ND), 1.0, False, fp32_logits, group, vocab_start)
    check_inputs(hidden_ND, weight_VD, targets_N, plan)
    if weights_N.shape != targets_N.shape:
        raise wrong_shape("weights_N", weights_N, f"[{targets_N.shape[0]}], one for each target")
    is_on = torch.is_grad_enabled()
    wants = (is_on and hidden_ND.requires_grad, is_on and weight_VD.requires_grad)
    total, logprobs_N = _Nll.apply(hidden_ND, weight_VD, targets_N, weights_N, plan, wants)
    return total, logprobs_N


def _found(space: Workspace, rows: slice, targets: Tensor) -> Found:
    return space.fused(rows, targets, with_gradient=False)[0] if space.is_fused else space.read(rows, targets)


class _Logprobs(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, plan: Plan) -> tuple[Tensor, Tensor | None]:
        space = Workspace(hidden, weight, plan)
        found, cached = space.cached(targets)
        found += [_found(space, rows, targets[rows]) for rows in space.chunks(0 if cached is None else len(cached))]
        logprobs = space.joined([row.logprobs for row in found])
        lse = space.joined([row.lse for row in found])
        entropy = space.joined([row.entropy for row in found]) if plan.entropy else None
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.plan = plan
        ctx.cached = cached  # not a saved tensor: hooks that offload those must not move it
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        space = Workspace(hidden, weight, ctx.plan)
        gradients = Gradients(hidden, weight, ctx.needs_input_grad[:2], is_final=True)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        cached, ctx.cached = ctx.cached, None  # its memory is free for the layers; a second pass computes logits again
        start = 0 if cached is None else len(cached)
        if cached is not None:
            gradients.add(slice(0, start), cached, -ctx.plan.scale * grad_logprobs[:start])
            del cached
        for rows in space.chunks(start):
            if space.is_fused:
                _, gradient = space.fused(rows, targets[rows], with_gradient=True)
                gradients.add(rows, gradient, -ctx.plan.scale * grad_logprobs[rows])
                continue
            space.fill(rows)
            space.rescale(rows, lse[rows])
            if grad_entropy is None:
                found = space.differentiate(rows, targets[rows], grad_logprobs[rows])
            else:
                offset = entropy[rows] - lse[rows]
                found = space.differentiate_both(rows, targets[rows], grad_logprobs[rows], (grad_entropy[rows], offset))
            gradients.add(rows, *found)
        return (*gradients.result(), None, None)


class _Nll(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor,
        plan: Plan,
        wants: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        space = Workspace(hidden, weight, plan)
        gradients = Gradients(hidden, weight, wants, is_final=False)
        weights = weights.to(space.dtype)
        parts = []
        for rows in space.chunks():
            if space.is_fused and any(wants):
                found, gradient = space.fused(rows, targets[rows], with_gradient=True)
                parts.append(found.logprobs)
                gradients.add(rows, gradient, plan.scale * weights[rows])
                continue
            found = _found(space, rows, targets[rows])
            parts.append(found.logprobs)
            if any(wants):
                space.rescale(rows, found.lse)
                gradients.add(rows, *space.differentiate(rows, targets[rows], -weights[rows]))
        logprobs = space.joined(parts)
        ctx.save_for_backward(gradients.hidden, gradients.weight)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(logprobs)
        total = torch.where(weights != 0, weights * logprobs, 0.0).sum().neg()
        return total, logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = scaled(grad_hidden, grad_total, grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = scaled(grad_weight, grad_total, ctx.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that logits cannot be divided by."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ConfigError(
            "the temperature of logprobs must be a positive number",
            path="temperature",
            value=temperature,
            rule="finite and above 0",
            repair="use 1.0, or the temperature that the tokens were sampled with",
        )


def chunk_size(chunk_tokens: int | None, hidden: Tensor) -> int:
    """Return how many tokens' logits exist at once."""
    if chunk_tokens is None:
        return CHUNK_TOKENS if hidden.is_cuda else CHUNK_TOKENS_CPU
    if chunk_tokens < 1:
        raise ConfigError(
            "a chunk of the output layer needs at least one token",
            path="chunk_tokens",
            value=chunk_tokens,
            rule="at least 1",
            repair="leave it out, or give a number such as 1024",
        )
    return chunk_tokens


def check_inputs(
    hidden: Tensor, weight: Tensor, targets: Tensor, plan: Plan, *, every_target: Tensor | None = None
) -> None:
    """Refuse tensors that do not belong together, and on a CPU targets outside the vocabulary.

    `every_target` are more targets than one for each place.
    """
    if hidden.dim() != 2:
        raise wrong_shape("hidden_ND", hidden, "[N, D]", repair="flatten the tokens: hidden.flatten(0, -2)")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise wrong_shape("weight_VD", weight, f"[V, {hidden.shape[1]}], as wide as the hidden states")
    if targets.shape != hidden.shape[:1]:
        raise wrong_shape("targets_N", targets, f"[{hidden.shape[0]}], one for each row of the hidden states")
    if hidden.dtype != weight.dtype or not hidden.dtype.is_floating_point:
        raise ModelError(
            f"the hidden states are {hidden.dtype} and the output layer is {weight.dtype}",
            path="weight_VD",
            value=str(weight.dtype),
            rule="one floating-point dtype for both",
            repair="convert one of them with .to()",
        )
    if plan.group is None and plan.vocab_start != 0:
        raise ConfigError(
            "a part of the vocabulary was given without the group that has the rest",
            path="vocab_start",
            value=plan.vocab_start,
            rule="0 without a group",
            repair="pass group=, or leave vocab_start out",
        )
    if not targets.is_cuda:
        _check_targets(targets if every_target is None else every_target.flatten(), weight, plan)


def _check_targets(targets: Tensor, weight: Tensor, plan: Plan) -> None:
    end = torch.tensor(plan.vocab_start + weight.shape[0])
    if plan.group is not None:
        import torch.distributed as dist

        dist.all_reduce(end, op=dist.ReduceOp.MAX, group=plan.group)
    outside = ((targets < 0) | (targets >= end)).nonzero()
    if len(outside):
        place = int(outside[0])
        raise DataError(
            f"token {place} of {len(targets)} is not in the vocabulary ({len(outside)} such tokens)",
            path=f"targets_N[{place}]",
            value=int(targets[place]),
            rule=f"at least 0 and below {int(end)}, the rows of the output layer",
            repair="use the tokenizer of this model; give tokens that do not count weight 0 and a valid id",
        )


def wrong_shape(
    path: str, tensor: Tensor, rule: str, *, repair: str = "pass tensors that belong together"
) -> ModelError:
    """Return the error for a tensor of the wrong shape."""
    message = f"{path} has the wrong shape for the output layer"
    return ModelError(message, path=path, value=tuple(tensor.shape), rule=rule, repair=repair)
