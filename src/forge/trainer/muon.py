"""Muon on what a rank holds of a model: each matrix is moved along its orthogonalised momentum.

A matrix must be orthogonalised as a whole. torch's Muon on a shard would orthogonalise the shard; here a matrix that is
split over ranks is gathered for its update, one at a time, and each rank keeps its own part. Momentum stays split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from forge.errors import ConfigError
from forge.models.weight_names import EMBEDDING, HEAD
from forge.models.weights import local_box

PATH = "training.optimizer_args"


@dataclass(frozen=True)
class MuonOptions:
    """The arguments of `training.optimizer: muon`.

    Attributes:
        momentum: the decay of the mean of gradients.
        nesterov: whether the update looks one step ahead.
        ns_steps: steps of the Newton-Schulz iteration that orthogonalises.
        adjust_lr_fn: how the rate follows a matrix's shape A x B: `match_rms_adamw` multiplies it by
            0.2 sqrt(max(A, B)), so that updates are as large as AdamW's and one learning rate serves both; `original`
            by sqrt(max(1, A / B)).
        adamw_lr_ratio: the rate of AdamW, which trains all other weights, as a fraction of training.learning_rate.
    """

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    adamw_lr_ratio: float = 1.0

    def __post_init__(self) -> None:
        rules = {
            "momentum": (0 <= self.momentum < 1, "at least 0 and below 1"),
            "ns_steps": (1 <= self.ns_steps < 100, "from 1 to 99"),
            "adamw_lr_ratio": (0 < self.adamw_lr_ratio < math.inf, "above 0, and finite"),
        }
        for name, (is_kept, rule) in rules.items():
            if not is_kept:
                value = getattr(self, name)
                raise ConfigError(
                    f"{name} of Muon is out of range",
                    path=f"{PATH}.{name}",
                    value=value,
                    rule=rule,
                    repair="change it, or remove it for the default",
                )


def is_hidden_matrix(name: str, weight: Tensor) -> bool:
    """Return whether Muon trains a weight: matrices of layers and adapters.

    Not embeddings, the output layer or a scalar head, whose rows are independent; not vectors, nor the experts of a
    layer in one tensor.
    """
    return weight.ndim == 2 and name not in (EMBEDDING, HEAD)


class WholeMatrixMuon(torch.optim.Muon):  # type: ignore[misc]
    """torch's Muon for matrices of which this rank may hold a part. On whole matrices both compute the same bits.

    Args:
        weights: the parameters, DTensors where they are split, by the local parameters that are trained.
        weight_decay: as in torch's.
        options: see there.

    All ranks that share a matrix must make the same steps.
    """

    def __init__(
        self, weights: Mapping[nn.Parameter, nn.Parameter], *, lr: float, weight_decay: float, options: MuonOptions
    ) -> None:
        self._weights = weights
        super().__init__(
            list(weights),
            lr=lr,
            weight_decay=weight_decay,
            momentum=options.momentum,
            nesterov=options.nesterov,
            ns_steps=options.ns_steps,
            adjust_lr_fn=options.adjust_lr_fn,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return None if closure is None else closure()

    def _update(self, local: nn.Parameter, group: Mapping[str, Any]) -> None:
        weight, gradient = self._weights[local], local.grad
        momentum = self.state[local]["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        whole = like(weight, update).full_tensor() if isinstance(weight, DTensor) else update
        coefficients: Sequence[float] = group["ns_coefficients"]
        orthogonal = _zeropower_via_newtonschulz(whole, coefficients, group["ns_steps"], group["eps"])
        own = orthogonal[local_box(weight)] if isinstance(weight, DTensor) else orthogonal
        local.mul_(1 - group["lr"] * group["weight_decay"])
        local.add_(own, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], weight.shape))


def like(weight: Tensor, local: Tensor) -> Tensor:
    """Return a local tensor as a DTensor laid out like a parameter."""
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
