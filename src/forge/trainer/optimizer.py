"""AdamW and Muon over what a rank holds of a model; and the norm of a gradient.

Everything here works on local tensors. The same on DTensors would take the host longer than it takes the device, which
would stand still meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims

from forge.config import TrainingConfig
from forge.trainer.muon import MuonOptions, WholeMatrixMuon, is_hidden_matrix, like

_STATES = ("exp_avg", "exp_avg_sq")


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

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state.update(_fresh(weight, torch.bfloat16, step_on=torch.device("cpu")))
        state["step"] += 1
        steps = float(state["step"])
        beta1, beta2 = group["betas"]
        gradient = weight.grad.float()
        mean = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].float().lerp_(gradient.square(), 1 - beta2)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        scale = square.div_(1 - beta2**steps).sqrt_().add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(mean.div_(scale).to(weight.dtype), alpha=-group["lr"] / (1 - beta1**steps))


def _fresh(weight: Tensor, dtype: torch.dtype, *, step_on: torch.device) -> dict[str, Tensor]:
    states = {name: torch.zeros_like(weight, dtype=dtype, requires_grad=False) for name in _STATES}
    return {"step": torch.zeros((), dtype=torch.float32, device=step_on), **states}


@dataclass(frozen=True)
class AdamWOptions:
    """The arguments of `training.optimizer: adamw`: none. Its settings are keys of `training`."""


class Optimizer(Protocol):
    """What an engine needs of an optimizer over the parameters that a rank holds."""

    @property
    def has_states(self) -> bool:
        """Whether there are states to save: those of some optimizers come with the first step."""

    def step(self, *, learning_rate: float) -> None:
        """Take a step with the gradients that the parameters have. Every group's rate follows `learning_rate`."""

    def zero_grad(self) -> None:
        """Drop all gradients."""

    def state_dict(self, *, for_loading: bool = False) -> dict[str, Any]:
        """Return the states by parameter, laid out as the parameters are: what a checkpoint holds, for any layout.

        Tensors are the states themselves, so what is loaded into them is used. Other values are to be handed to
        `finish_loading`. With `for_loading` there are states, whether a step was taken or not.
        """

    def finish_loading(self, state: Mapping[str, Any]) -> None:
        """Take what was loaded into a `state_dict`."""


class BuiltInOptimizer:
    """AdamW over the parameters that this rank holds, by name; with `muon`, Muon over its hidden matrices.

    Matrices decay, norms do not. The states exist from the start, so that a checkpoint can be loaded into them.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: TrainingConfig, *, muon: MuonOptions | None = None
    ) -> None:
        self._parameters = dict(parameters)
        self._local = {name: nn.Parameter(_local(weight.data)) for name, weight in parameters.items()}
        self._adamw_ratio = 1.0 if muon is None else muon.adamw_lr_ratio
        hidden = [name for name, each in parameters.items() if muon is not None and is_hidden_matrix(name, each)]
        self._by_muon = dict.fromkeys(hidden)
        self._muon: WholeMatrixMuon | None = None
        if muon is not None and hidden:
            weights = {self._local[name]: self._parameters[name] for name in hidden}
            self._muon = WholeMatrixMuon(
                weights, lr=config.learning_rate, weight_decay=config.weight_decay, options=muon
            )
            for local in weights:
                self._muon.state[local] = {"momentum_buffer": torch.zeros_like(local, requires_grad=False)}
        self._adamw = self._make_adamw(config)

    def _make_adamw(self, config: TrainingConfig) -> torch.optim.Optimizer | None:
        half = config.optimizer_dtype == "bfloat16"
        names = [name for name in self._parameters if name not in self._by_muon]
        groups = weight_groups({name: self._local[name] for name in names}, weight_decay=config.weight_decay)
        if not groups:
            return None
        chosen: dict[str, Any] = {
            "lr": config.learning_rate,
            "betas": (config.beta1, config.beta2),
            "eps": config.adam_eps,
        }
        adamw = HalfStateAdamW(groups, **chosen) if half else torch.optim.AdamW(groups, fused=True, **chosen)
        for name in names:
            weight = self._local[name]
            dtype = torch.bfloat16 if half else weight.dtype
            adamw.state[weight] = _fresh(weight, dtype, step_on=torch.device("cpu") if half else weight.device)
        return adamw

    @property
    def has_states(self) -> bool:
        return True

    def step(self, *, learning_rate: float) -> None:
        for name, weight in self._parameters.items():
            local = self._local[name]
            local.data = _local(weight.data)
            local.grad = None if weight.grad is None else _local(weight.grad)
        for optimizer, ratio in ((self._adamw, self._adamw_ratio), (self._muon, 1.0)):
            if optimizer is not None:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * ratio
                optimizer.step()

    def zero_grad(self) -> None:
        for name, weight in self._parameters.items():
            weight.grad = self._local[name].grad = None

    def state_dict(self, *, for_loading: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = {"num_steps": 0}
        for optimizer, kinds in ((self._adamw, _STATES), (self._muon, ("momentum_buffer",))):
            states = {} if optimizer is None else optimizer.state
            named = {name: states[local] for name, local in self._local.items() if local in states}
            for kind in kinds if named else ():
                found[kind] = {name: like(self._parameters[name], state[kind]) for name, state in named.items()}
            steps = [int(state["step"]) for state in named.values() if "step" in state]
            found["num_steps"] = max([found["num_steps"], *steps])
        return found

    def finish_loading(self, state: Mapping[str, Any]) -> None:
        for own in () if self._adamw is None else self._adamw.state.values():
            own["step"].fill_(state["num_steps"])


def weight_groups(parameters: Mapping[str, nn.Parameter], *, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameters as groups: matrices, which decay, and vectors (norms, biases), which do not."""
    matrices, vectors = ([each for each in parameters.values() if (each.ndim > 1) is kind] for kind in (True, False))
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _local(tensor: Tensor) -> Tensor:
    return cast(Tensor, tensor._local_tensor) if isinstance(tensor, DTensor) else tensor


# ---- The norm of a gradient --------------------------------------------------------------------------------------


def gradient_norm(parameters: Iterable[nn.Parameter], dims: ParallelDims) -> Tensor:
    """Return the norm of the gradient over all ranks, not waited for. Afterwards all gradients are sums.

    Each way in which parameters are split over ranks takes one question to the others.
    """
    groups: dict[tuple[int, tuple[int, ...]], tuple[DeviceMesh | None, list[Tensor]]] = {}
    device = torch.device("cpu")
    for parameter in parameters:
        device = parameter.device
        if parameter.grad is not None:
            parameter.grad = _summed(parameter.grad, parameter)
            mesh, split = _splits(parameter.grad)
            groups.setdefault((id(mesh), split), (mesh, []))[1].append(_local(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (_, split), (mesh, gradients) in groups.items():
        wide = torch.promote_types(gradients[0].dtype, torch.float32)  # a norm in bfloat16 would have three digits
        squares = torch.stack(torch._foreach_norm(gradients, 2, wide)).double().square().sum()
        for dim in split:
            assert mesh is not None
            dist.all_reduce(squares, group=mesh.get_group(dim))
        total += squares
    if dims.pp_enabled:
        dist.all_reduce(total, group=dims.get_mesh("pp").get_group())
    return total.sqrt()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients."""
    torch._foreach_mul_([_local(parameter.grad) for parameter in parameters if parameter.grad is not None], factor)


def _summed(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return a gradient laid out as its weight.

    Tensor parallel ranks each have a part of the sum for weights that all of them hold; and where they do not split the
    rows, autograd may leave them the whole gradient of a weight of which each holds a part.
    """
    if not isinstance(gradient, DTensor) or gradient.placements == weight.placements:
        return gradient
    return gradient.redistribute(placements=weight.placements)


def _splits(gradient: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Return over which dimensions of which mesh a gradient is split."""
    if not isinstance(gradient, DTensor):
        return None, ()
    placements = enumerate(gradient.placements)
    return gradient.device_mesh, tuple(dim for dim, placement in placements if not placement.is_replicate())
