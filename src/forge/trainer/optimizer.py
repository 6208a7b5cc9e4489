"""AdamW over the parts of a model, its states in float32 or bfloat16, and the norm of a gradient over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.distributed import ParallelDims

from forge.config import TrainingConfig

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class HalfStateAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """AdamW whose two states are kept in bfloat16 and worked with in float32.

    The states are rounded to the nearest, so each step must move them by more than bfloat16 resolves: the second
    moment's decay may be at most 0.99, which the configuration checks.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return None if closure is None else closure()

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        weight, gradient, kept_mean, kept_square = (
            tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for tensor in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        )
        gradient = gradient.float()
        mean = kept_mean.float().lerp_(gradient, 1 - beta1)
        square = kept_square.float().lerp_(gradient.square(), 1 - beta2)
        kept_mean.copy_(mean)
        kept_square.copy_(square)
        steps = float(state["step"])
        scale = square.div_(1 - beta2**steps).sqrt_().add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(mean.div_(scale).to(weight.dtype), alpha=-group["lr"] / (1 - beta1**steps))


class Optimizers:
    """One AdamW for each part that this rank holds, seen as one."""

    def __init__(self, parts: Sequence[nn.Module], config: TrainingConfig) -> None:
        self._parts = list(parts)
        self._each = [_adamw(part, config) for part in parts]

    def step(self, *, learning_rate: float) -> None:
        for optimizer in self._each:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._each:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """States by the name of the parameter, so that a checkpoint fits any layout."""
        merged: dict[str, Any] = {}
        for part, optimizer in zip(self._parts, self._each, strict=True):
            merged |= get_optimizer_state_dict(part, optimizer, options=_FLAT)
        return merged

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, optimizer in zip(self._parts, self._each, strict=True):
            set_optimizer_state_dict(part, optimizer, state, options=_FLAT)


def _adamw(part: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in part.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in part.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    betas = (config.beta1, config.beta2)
    if config.optimizer_dtype == "bfloat16":
        return HalfStateAdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_eps)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_eps, fused=True)


def clip_gradients(parts: Sequence[nn.Module], dims: ParallelDims, *, max_norm: float | None) -> float:
    """Scale the gradient to at most `max_norm` and return the norm that it had, over all ranks.

    Works on what each rank holds, and asks the others once for each way in which parameters are split: the same on
    DTensors would take longer than the optimizer's step.
    """
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for part in parts:
        for parameter in part.parameters():
            if parameter.grad is not None:
                parameter.grad = _summed(parameter.grad)
                split_over, gradient = _local(parameter.grad)
                groups.setdefault(split_over, []).append(gradient)
    device = next(parts[0].parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (mesh, split_dims), gradients in groups.items():
        squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        for dim in split_dims:
            assert mesh is not None
            dist.all_reduce(squares, group=mesh.get_group(dim))
        total += squares
    if dims.pp_enabled:
        dist.all_reduce(total, group=dims.get_mesh("pp").get_group())
    norm = float(total.sqrt())
    if max_norm is not None and norm > max_norm:
        for gradients in groups.values():
            torch._foreach_mul_(gradients, max_norm / norm)
    return norm


def _summed(gradient: Tensor) -> Tensor:
    """Tensor parallel ranks each have a part of the sum for weights that all of them hold."""
    if not isinstance(gradient, DTensor) or not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    return gradient.redistribute(placements=whole)


def _local(gradient: Tensor) -> tuple[tuple[DeviceMesh | None, tuple[int, ...]], Tensor]:
    """What this rank holds of a gradient, and over which dimensions of which mesh it is split."""
    if not isinstance(gradient, DTensor):
        return (None, ()), gradient
    split = tuple(dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return (gradient.device_mesh, split), gradient.to_local()
