"""Optimizers that tests name by `module:attribute`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Moves every weight by the rate, in the direction of its momentum. A state is a number, and not a tensor."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), gain: float = 1.0):
        super().__init__(params, {"lr": lr, "betas": betas, "gain": gain, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["total"] = group.get("total", 0) + 1
            for weight in (each for each in group["params"] if each.grad is not None):
                state = self.state[weight]
                if not state:
                    state.update(momentum=torch.zeros_like(weight), count=0)
                state["count"] += 1
                mixed = state["momentum"].lerp(weight.grad, 1 - group["betas"][0])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(
                    torch.sign(mixed) * group["lr"] * group["gain"] / (1 + 1 / (state["count"] + group["total"]))
                )
                state["momentum"].lerp_(weight.grad, 1 - group["betas"][1])


class NoDecay(torch.optim.Optimizer):
    """Has no weight decay."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        pass


class Forgetful(Lion):
    """Counts its steps where no checkpoint looks."""

    num_steps = 0

    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            group["lr"] = group["lr"] / self.num_steps
        super().step(closure)


class Hoarder(torch.optim.SGD):
    """Keeps a function as a state."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["hoard"] = print


def half(params: Any, lr: float) -> torch.optim.Optimizer:
    """Makes an optimizer whose rate for vectors is a half of that for matrices."""
    groups = [{**group, "lr": lr * (1.0 if group["params"][0].ndim > 1 else 0.5)} for group in params]
    return torch.optim.SGD(groups, lr=lr)


def first_only(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params[:1], lr=lr)


def nothing(params: Any) -> None:
    return None
