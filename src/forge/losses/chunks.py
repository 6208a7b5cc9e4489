"""One chunk of tokens in the output layer: logits, probabilities and gradients, in buffers that are used again.

Shapes: V the vocabulary (of this rank, where it is split), D the model's width, C the tokens of one chunk.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from forge.kernels import cpu_linear
from forge.kernels.cpu_linear import is_rowwise

_BLOCK_ROWS = 1024  # of the weight's gradient on a CPU: one block of it stays in the cache


@dataclass(frozen=True, slots=True)
class Plan:
    """How a call of `forge.losses.head` is to be done; its functions explain each."""

    chunk_tokens: int
    scale: float
    entropy: bool
    fp32_logits: bool
    group: Any
    vocab_start: int
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What is known about the tokens of one chunk, each [C]."""

    logprobs: Tensor
    lse: Tensor
    entropy: Tensor | None


class Workspace:
    """The buffers of one chunk: its logits, and its probabilities, which turn into the gradient of the logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, plan: Plan) -> None:
        self._hidden, self._weight, self._plan = hidden, weight, plan
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self._is_narrow = weight.dtype != self.dtype
        self._wide_weight = weight.to(self.dtype) if plan.fp32_logits and not weight.is_cuda else weight
        self._is_rowwise = is_rowwise(self._wide_weight) and (self._is_narrow or is_rowwise(hidden))
        self._shape = (min(plan.chunk_tokens, hidden.shape[0]), weight.shape[0])
        self._product_dtype = self.dtype if plan.fp32_logits else weight.dtype
        self._buffers: dict[str, Tensor] = {}

    def chunks(self, start: int = 0) -> list[slice]:
        """Return the chunks of all tokens, or of those from `start` on."""
        step, end = self._plan.chunk_tokens, self._hidden.shape[0]
        return [slice(first, min(first + step, end)) for first in range(start, end, step)]

    def joined(self, parts: list[Any]) -> Tensor:
        return torch.cat(parts) if parts else torch.zeros(0, dtype=self.dtype, device=self._weight.device)

    def _buffer(self, name: str, dtype: torch.dtype, count: int) -> Tensor:
        """Return the first rows of a buffer of one chunk, which is there from its first use on."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._shape, dtype=dtype, device=self._weight.device)
        return self._buffers[name][:count]

    def _logits(self, count: int) -> Tensor:
        return self._buffer("logits", self._product_dtype, count)

    def _gradient(self, count: int) -> Tensor:
        """Return where a gradient goes in the weight's dtype: where the logits are, if they have it too."""
        is_same = self._product_dtype == self._weight.dtype
        return self._logits(count) if is_same else self._buffer("gradient", self._weight.dtype, count)

    def _views(self, rows: slice) -> tuple[Tensor, Tensor]:
        count = rows.stop - rows.start
        return self._logits(count), self._buffer("probabilities", self.dtype, count)

    @property
    def is_fused(self) -> bool:
        """Whether one kernel does what `read` and `differentiate` do; it supports neither groups nor entropies."""
        is_plain = self._plan.group is None and not self._plan.entropy
        return is_plain and _fits_kernel(self._weight, self._product_dtype)

    def fused(self, rows: slice, targets: Tensor, *, with_gradient: bool) -> tuple[Found, Tensor]:
        """Logprobs by one kernel; and p - 1[target] in the weight's dtype, if the gradient is asked for."""
        logits = self._product(rows)
        gradient = self._gradient(len(logits)) if with_gradient else None
        logprobs, lse = _target_logprobs(logits, targets, gradient)
        return Found(logprobs, lse, None), logits if gradient is None else gradient

    def cached(self, targets: Tensor) -> tuple[list[Found], Tensor | None]:
        """The logprobs of as many of the first tokens as the cache has room for, and their p - 1[target].

        None, and nothing found, without the kernel or the room.
        """
        weight = self._weight
        room = self._plan.cache_bytes // max(1, weight.shape[0] * weight.itemsize) if self.is_fused else 0
        end = min(room, self._hidden.shape[0])
        if end == 0:
            return [], None
        kept = torch.empty(end, weight.shape[0], dtype=weight.dtype, device=weight.device)
        found = []
        step = end if self._product_dtype == weight.dtype else self._plan.chunk_tokens
        for start in range(0, end, step):
            rows = slice(start, min(start + step, end))
            logits = self._product(rows, out=kept if self._product_dtype == weight.dtype else None)
            found.append(Found(*_target_logprobs(logits, targets[rows], kept[rows]), None))
        return found, kept

    def _product(self, rows: slice, *, out: Tensor | None = None) -> Tensor:
        logits = self._logits(rows.stop - rows.start) if out is None else out
        hidden, scale = self._hidden[rows], self._plan.scale
        if self._is_rowwise:
            # The bits do not depend on the number of rows, nor on whether the scale is applied here or later.
            cpu_linear.product(hidden.to(self.dtype), self._wide_weight, out_RN=logits)
            if scale != 1.0:
                logits.mul_(scale)
        elif not (self._is_narrow and self._plan.fp32_logits):
            logits.addmm_(hidden, self._weight.t(), beta=0, alpha=scale)
        elif hidden.is_cuda:
            torch.mm(hidden, self._weight.t(), out_dtype=self.dtype, out=logits)
            logits.mul_(scale)
        else:
            logits.addmm_(hidden.to(self.dtype), self._wide_weight.t(), beta=0, alpha=scale)
        return logits

    def fill(self, rows: slice) -> None:
        """Compute the logits of a chunk, and the probabilities among this rank's rows of the weight."""
        self._product(rows)
        logits, probs = self._views(rows)
        torch.softmax(logits, dim=-1, dtype=self.dtype, out=probs)

    def read(self, rows: slice, targets: Tensor) -> Found:
        """Fill, and find out about the targets; with a group, over all its ranks."""
        self.fill(rows)
        logits, probs = self._views(rows)
        lse = self._own_lse(rows)
        target_logits, hits = self._at_targets(logits, targets)
        sums = [target_logits, hits]
        if self._plan.entropy:
            sums.append(probs.mul_(logits).sum(-1))  # the probabilities are not needed any more
        if self._plan.group is not None:
            lse, sums = self._over_ranks(lse, sums)
        logprobs = torch.where(sums[1] > 0, sums[0] - lse, math.nan)
        return Found(logprobs, lse, lse - sums[2] if self._plan.entropy else None)

    def _own_lse(self, rows: slice) -> Tensor:
        logits, probs = self._views(rows)
        if logits.shape[1] == 0:
            return torch.full((logits.shape[0],), -math.inf, dtype=self.dtype, device=logits.device)
        return _lse(logits, probs)

    def _at_targets(self, values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The value at each target, or 0 where another rank has it; and 1.0 where this one has it."""
        index, hits = self._own(targets)
        if values.shape[1] == 0:
            return hits.clone(), hits
        found = values.gather(1, index[:, None]).squeeze(1).to(self.dtype)
        return torch.where(hits > 0, found, 0.0), hits

    def _own(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        last = self._weight.shape[0] - 1
        index = targets - self._plan.vocab_start
        hits = ((index >= 0) & (index <= last)).to(self.dtype)
        return index.clamp(0, max(last, 0)), hits

    def _over_ranks(self, lse: Tensor, sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        import torch.distributed as dist

        top = lse.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self._plan.group)
        share = (lse - top).exp()
        parts = torch.stack([share, *sums[:2], *(share * part for part in sums[2:])])
        dist.all_reduce(parts, op=dist.ReduceOp.SUM, group=self._plan.group)
        return top + parts[0].log(), [parts[1], parts[2], *(part / parts[0] for part in parts[3:])]

    def read_candidates(self, rows: slice, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Fill, and return the logprobs of candidates [C, K] and the logsumexp [C]; with a group, over all ranks."""
        self.fill(rows)
        logits, _ = self._views(rows)
        lse = self._own_lse(rows)
        index, hits = self._own(candidates)
        values = logits.gather(1, index).to(self.dtype) if logits.shape[1] else torch.zeros_like(hits)
        values = torch.where(hits > 0, values, 0.0)
        if self._plan.group is not None:
            import torch.distributed as dist

            top = lse.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self._plan.group)
            parts = torch.cat([(lse - top).exp()[:, None], values, hits], dim=1)
            dist.all_reduce(parts, op=dist.ReduceOp.SUM, group=self._plan.group)
            total, values, hits = parts.split([1, values.shape[1], hits.shape[1]], dim=1)
            lse = top + total[:, 0].log()
        return torch.where(hits > 0, values - lse[:, None], math.nan), lse

    def differentiate_candidates(self, rows: slice, candidates: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the product for gradients of candidates' logprobs [C, K], in the form of `differentiate`."""
        _, probs = self._views(rows)
        probs.mul_(grads.sum(-1, keepdim=True))
        if probs.shape[1] > 0:
            index, hits = self._own(candidates)
            probs.scatter_add_(1, index, -grads * hits)
        return self._rounded(rows), torch.full_like(grads[:, 0], -self._plan.scale)

    def top(self, rows: slice, k: int) -> tuple[Tensor, Tensor]:
        """Fill, and return the logprobs and the ids of the k likeliest tokens [C, k], the likeliest first."""
        self.fill(rows)
        logits, _ = self._views(rows)
        values, ids = logits.topk(k, dim=-1)
        return values.to(self.dtype) - self._own_lse(rows)[:, None], ids

    def rescale(self, rows: slice, lse: Tensor) -> None:
        """Make probabilities among this rank's rows into those among the whole vocabulary."""
        if self._plan.group is not None:
            self._views(rows)[1].mul_((self._own_lse(rows) - lse).exp()[:, None])

    def differentiate(self, rows: slice, targets: Tensor, grad_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the product, grad * (1[target] - p), as p - 1[target] [C, V] and a factor for each row [C].

        The factor goes to the narrower sides of the products that follow, which spares a pass over the vocabulary.
        """
        _, probs = self._views(rows)
        self._add_at_targets(probs, targets, torch.full_like(grad_logprobs, -1.0))
        return self._rounded(rows), -self._plan.scale * grad_logprobs

    def differentiate_both(
        self, rows: slice, targets: Tensor, grad_logprobs: Tensor, of_entropy: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The same with the entropy's gradient, -grad_entropy * p * (logp + entropy); logp is x - lse."""
        logits, probs = self._views(rows)
        grad_entropy, offset = of_entropy
        factor = logits.to(self.dtype).add_(offset[:, None])  # in place unless logits are narrow
        factor.mul_(grad_entropy[:, None]).add_(grad_logprobs[:, None])
        probs.mul_(factor)
        self._add_at_targets(probs, targets, -grad_logprobs)
        return self._rounded(rows), torch.full_like(grad_logprobs, -self._plan.scale)

    def _add_at_targets(self, values: Tensor, targets: Tensor, amounts: Tensor) -> None:
        if values.shape[1] > 0:
            index, hits = self._own(targets)
            values.scatter_add_(1, index[:, None], (amounts * hits)[:, None])

    def _rounded(self, rows: slice) -> Tensor:
        # To the weight's dtype only now, so that p - 1 of a sure token keeps its digits.
        _, probs = self._views(rows)
        return self._gradient(len(probs)).copy_(probs) if self._is_narrow else probs


def _lse(logits_CV: Tensor, probs_CV: Tensor) -> Tensor:
    # The largest logit's probability is 1 / sum(exp(x - max)), and never rounds to 0.
    return logits_CV.amax(-1).to(probs_CV.dtype) - probs_CV.amax(-1).log()


class Gradients:
    """The gradients of hidden and weight, as far as they are wanted, as chunks come in.

    With `is_final` nothing is multiplied to them afterwards, and the sum of one chunk may be in the weight's dtype.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, wants: tuple[bool, bool], *, is_final: bool) -> None:
        self._hidden, self._weight = hidden, weight
        self._dtype = torch.promote_types(weight.dtype, torch.float32)
        self._wants_weight, self._is_final = wants[1], is_final
        self.hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=weight.device) if wants[0] else None
        self._sum: Tensor | None = None

    def add(self, rows: slice, gradient_CV: Tensor, factor_C: Tensor) -> None:
        """Take in a chunk whose gradient of the product is `factor_C[:, None] * gradient_CV`."""
        if self.hidden is not None:
            torch.mm(gradient_CV, self._weight, out=self.hidden[rows])
            self.hidden[rows].mul_(factor_C[:, None])
        if not self._wants_weight:
            return
        hidden = (self._hidden[rows] * factor_C[:, None]).to(self._hidden.dtype)
        if self._is_final and hidden.is_cuda and len(hidden) == len(self._hidden):
            self._sum = torch.mm(gradient_CV.t(), hidden)
            return
        total = self._sum = self._zeros() if self._sum is None else self._sum
        if total.dtype == hidden.dtype:
            total.addmm_(gradient_CV.t(), hidden)
        elif total.is_cuda:
            torch.addmm(total, gradient_CV.t(), hidden, out_dtype=self._dtype, out=total)
        else:
            for start in range(0, total.shape[0], _BLOCK_ROWS):
                block = slice(start, start + _BLOCK_ROWS)
                total[block].add_(torch.mm(gradient_CV[:, block].t(), hidden))

    def _zeros(self) -> Tensor:
        return torch.zeros(self._weight.shape, dtype=self._dtype, device=self._weight.device)

    @property
    def weight(self) -> Tensor | None:
        """The sum over all chunks, in float32 or wider unless there was one chunk and it is final."""
        if not self._wants_weight:
            return None
        return self._zeros() if self._sum is None else self._sum

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Return both in the dtypes of their tensors; None for what is not wanted."""
        return self.hidden, None if (found := self.weight) is None else found.to(self._weight.dtype)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient that was computed ahead, times what arrives in the backward pass.

    In place where the graph ends with this pass: the moment is that of a training step's largest memory, and a second
    copy of the output layer would add to it.
    """
    is_last = not torch._C._autograd._get_current_graph_task_keep_graph()
    return (gradient.mul_(factor) if is_last else gradient * factor).to(dtype)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _fits_kernel(weight_VD: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the Triton kernel can take logits of a dtype: on a GPU, in a precision that float32 holds."""
    return bool(weight_VD.is_cuda) and dtype != torch.float64 and weight_VD.shape[0] > 0 and _has_triton()


def _target_logprobs(logits_CV: Tensor, targets_C: Tensor, gradient_CV: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the logprobs of targets and the logsumexp of each row, float32 [C], in one pass on a GPU.

    `gradient_CV`, if given, then holds p - 1[target], rounded to its dtype once; it may be `logits_CV` itself. A target
    outside the vocabulary has a NaN logprob.
    """
    from forge.losses.head_program import target_logprobs

    logprobs, lse = (torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device) for _ in range(2))
    if len(logits_CV):
        target = logits_CV if gradient_CV is None else gradient_CV
        with torch.cuda.device(logits_CV.device):
            target_logprobs[(len(logits_CV),)](
                logits_CV,
                logits_CV.stride(0),
                targets_C,
                logprobs,
                lse,
                target,
                target.stride(0),
                logits_CV.shape[1],
                GRADIENT=gradient_CV is not None,
                BLOCK=4096,
                num_warps=16,
            )
    return logprobs, lse
