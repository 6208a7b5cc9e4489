"""AdamW over the parts of a model, its states in float32 or bfloat16, and the norm of a gradient over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_distributed

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
    """Scale the gradient to at most `max_norm` and return the norm that it had, over all ranks."""
    norm = titan_distributed.clip_grad_norm_(
        [parameter for part in parts for parameter in part.parameters()],
        float("inf") if max_norm is None else max_norm,
        foreach=True,
        pp_mesh=dims.get_optional_mesh("pp"),
        ep_enabled=dims.ep_enabled,
    )
    return float(norm)
