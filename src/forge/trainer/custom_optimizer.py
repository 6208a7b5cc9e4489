"""An optimizer that the configuration names by `module:attribute`, over what a rank holds of a model.

It is a `torch.optim.Optimizer`, which gets two groups of parameters: matrices, which decay, and vectors, which do not.
A weight that the rank holds whole is a plain tensor to it. One that is split over ranks is the DTensor itself, whose
operations compute what they would on the whole weight, or raise. Before the first step the optimizer must show on small
weights that a checkpoint of its states is enough to resume from, to the bit.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge.config import TrainingConfig
from forge.config.problems import InvalidConfig, Problem, argument_problems
from forge.errors import ConfigError
from forge.registry import OPTIMIZERS, call, parameter_names
from forge.trainer.optimizer import weight_groups

PATH: Final = "training.optimizer"
ARGS: Final = "training.optimizer_args"
_OWNED: Final = {
    "lr": "training.learning_rate and training.schedule say it",
    "weight_decay": "training.weight_decay says it: norms and biases are left out",
    "params": "the trainer gives the parameters",
}
_PLAIN: Final = (bool, int, float, str, type(None))
_ROWS, _WIDTH = 64, 128
"""Of the weight that an optimizer is tried on: large enough for those that keep small states in full precision."""


def built_in_options(config: TrainingConfig) -> Any:
    """Return the options of an optimizer of the library."""
    factory = OPTIMIZERS.find(config.optimizer, path=PATH)
    problems = argument_problems(factory, config.optimizer_args, path=ARGS, what=f"`{config.optimizer}`")
    if problems:
        raise InvalidConfig(problems)
    return call(factory, args=config.optimizer_args, offered={})


def build(config: TrainingConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that the configuration names, over parameters.

    Its class or function is called with groups of parameters, with `optimizer_args`, and with those that its signature
    names of `lr`, `betas` and `eps`.
    """
    factory: Callable[..., Any] = OPTIMIZERS.find(config.optimizer, path=PATH)
    args = config.optimizer_args
    offered: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2)}
    if _has_float(factory, "eps"):
        offered["eps"] = config.adam_eps
    problems = [
        Problem(path=f"{ARGS}.{name}", value=args[name], rule=f"not given: {why}", repair="remove it")
        for name, why in _OWNED.items()
        if name in args
    ]
    what = f"the optimizer {config.optimizer}"
    problems += argument_problems(factory, args, path=ARGS, what=what, num_given=1, offered=tuple(offered))
    if problems:
        raise InvalidConfig(problems)
    groups = weight_groups(parameters, weight_decay=config.weight_decay)
    try:
        made: object = call(factory, groups, args=args, offered=offered)
    except ConfigError:
        raise
    except Exception as error:
        raise _unusable(config, f"cannot be made: {type(error).__name__}: {error}", path=ARGS) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise _unusable(config, f"makes a {type(made).__name__}, which is not an optimizer")
    _check_made(config, made, parameters)
    return made


def _has_float(factory: Callable[..., Any], name: str) -> bool:
    if name not in parameter_names(factory):
        return False
    return isinstance(inspect.signature(factory).parameters[name].default, float)


def _check_made(config: TrainingConfig, made: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    trained = {id(each) for group in made.param_groups for each in group["params"]}
    missing = [name for name, each in parameters.items() if id(each) not in trained]
    if missing:
        raise _unusable(config, f"leaves out {len(missing)} parameters, such as {missing[0]}")
    if config.weight_decay > 0 and "weight_decay" not in made.defaults:
        raise ConfigError(
            f"the optimizer {config.optimizer} has no weight decay",
            path="training.weight_decay",
            value=config.weight_decay,
            rule="0 with an optimizer that has no `weight_decay`",
            repair="remove it, or choose another optimizer",
        )


def _unusable(config: TrainingConfig, what: str, *, path: str = PATH) -> ConfigError:
    return ConfigError(
        f"the optimizer {config.optimizer} {what}",
        path=path,
        value=config.optimizer if path == PATH else dict(config.optimizer_args),
        rule="must make a torch.optim.Optimizer from groups of parameters, whose step() takes no closure and whose "
        "states are tensors and numbers that a checkpoint holds",
        repair="correct it or its arguments, or set training.optimizer to adamw or muon",
    )


class CustomOptimizer:
    """An optimizer by `module:attribute`; see `forge.trainer.optimizer.Optimizer` for what its methods do."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainingConfig) -> None:
        self._config, self._parameters = config, dict(parameters)
        self._trained = {name: _whole_or_split(weight) for name, weight in parameters.items()}
        self._optimizer = build(config, self._trained)
        rates = [float(group["lr"]) / config.learning_rate for group in self._optimizer.param_groups]
        self._ratios = [1.0 if math.isclose(rate, 1.0, rel_tol=1e-6) else rate for rate in rates]

    @property
    def has_states(self) -> bool:
        return bool(self._optimizer.state)

    def step(self, *, learning_rate: float) -> None:
        for name, weight in self._parameters.items():
            trained = self._trained[name]
            if trained is not weight:
                trained.data = _local(weight.data)
                trained.grad = None if weight.grad is None else _local(weight.grad)
        self._set_rate(learning_rate)
        self._optimizer.step()

    def _set_rate(self, learning_rate: float) -> None:
        for group, ratio in zip(self._optimizer.param_groups, self._ratios, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(learning_rate * ratio)
            else:
                group["lr"] = learning_rate * ratio

    def zero_grad(self) -> None:
        for name, weight in self._parameters.items():
            weight.grad = self._trained[name].grad = None

    def state_dict(self, *, for_loading: bool = False) -> dict[str, Any]:
        if for_loading and not self.has_states:
            self._make_states()
        groups = {
            str(index): {key: value for key, value in group.items() if key not in ("params", "lr")}
            for index, group in enumerate(self._optimizer.param_groups)
        }
        found: dict[str, Any] = {"groups": groups}
        states = {
            name: self._saved(self._optimizer.state[each], name=name, is_split=isinstance(each, DTensor))
            for name, each in self._trained.items()
            if self._optimizer.state.get(each)
        }
        return found | ({"states": states} if states else {})

    def _make_states(self) -> None:
        """Take a step with gradients and rates of 0, which leaves weights alone and makes the states.

        What it writes into them is overwritten by what is loaded.
        """
        self.zero_grad()
        for trained in self._trained.values():
            trained.grad = torch.zeros_like(trained)
        self._set_rate(0.0)
        self._optimizer.step()
        self.zero_grad()

    def _saved(self, state: Mapping[str, Any], *, name: str, is_split: bool) -> dict[str, Any]:
        """Return the state of a weight as a checkpoint takes it: tensors of torch's own kinds, and plain values."""
        found: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, Mapping):
                found[key] = self._saved(value, name=name, is_split=is_split)
            elif not isinstance(value, Tensor):
                if not _is_plain(value):
                    raise self._not_saved(name, f"{key} is a {type(value).__name__}")
                found[key] = value
            elif isinstance(value, DTensor) and not _inner(value.to_local()):
                found[key] = value
            elif is_split and value.numel() > 1:
                raise self._not_saved(name, f"{key} is not laid out over ranks as the weight is")
            elif inner := _inner(value):
                found[key] = inner
            else:
                found[key] = value
        return found

    def _not_saved(self, name: str, what: str) -> ConfigError:
        return _unusable(self._config, f"has a state of {name} that no checkpoint can hold: {what}")

    def finish_loading(self, state: Mapping[str, Any]) -> None:
        for name, loaded in state.get("states", {}).items():
            _put_back(self._optimizer.state[self._trained[name]], loaded)
        for index, loaded in state["groups"].items():
            _put_back(self._optimizer.param_groups[int(index)], loaded)


def _put_back(target: Any, loaded: Mapping[str, Any]) -> None:
    """Put values that are not tensors where they were; tensors were loaded in place."""
    for key, value in loaded.items():
        if isinstance(value, Mapping):
            if isinstance(target[key], Mapping):
                _put_back(target[key], value)
        elif not isinstance(value, Tensor):
            target[key] = value


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(each) for each in value)
    return isinstance(value, _PLAIN)


def _inner(value: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a tensor of another library, such as a quantised one, consists of; empty for others."""
    if isinstance(value, DTensor) or not hasattr(value, "__tensor_flatten__"):
        return {}
    names, _ = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}


def _whole_or_split(weight: nn.Parameter) -> nn.Parameter:
    """Return a weight that this rank holds whole as a plain parameter in the same memory, and any other as it is."""
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        if any(mesh.size(dim) > 1 and not each.is_replicate() for dim, each in enumerate(weight.placements)):
            return weight
    return nn.Parameter(_local(weight.data))


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local


# ---- The trial -------------------------------------------------------------------------------------------------------


def check_resumes(config: TrainingConfig, parameters: Mapping[str, nn.Parameter]) -> None:
    """Take steps on small weights, and check that another optimizer continues from the saved states with equal bits.

    The small weights are of the dtype and on the device of the real ones, and split as they are. All ranks call it.
    """
    split = next((each for each in parameters.values() if isinstance(_whole_or_split(each), DTensor)), None)
    sample = next(iter(parameters.values()), None) if split is None else split
    if sample is None:
        return
    devices = [sample.device] if sample.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        first, second = _trial_weights(sample), _trial_weights(sample)
        try:
            one, other = CustomOptimizer(first, config), CustomOptimizer(second, config)
            for step in (1, 2):
                _trial_step(one, first, config, step=step)
            with torch.no_grad():
                for name, weight in first.items():
                    second[name].copy_(weight)
            state = other.state_dict(for_loading=True)
            _copy_states(state, one.state_dict())
            other.finish_loading(state)
            for each, weights in ((one, first), (other, second)):
                _trial_step(each, weights, config, step=3)
        except ConfigError:
            raise
        except Exception as error:
            raise _unusable(config, f"fails in a step: {type(error).__name__}: {error}") from error
    if not all(torch.equal(_local(first[name]), _local(second[name])) for name in first):
        raise _unusable(config, "cannot resume: a copy with the same states takes another step")


def _trial_weights(sample: Tensor) -> dict[str, nn.Parameter]:
    maker = torch.Generator().manual_seed(0)
    rows = _ROWS * (sample.device_mesh.size() if isinstance(sample, DTensor) else 1)
    found = {}
    for name, shape in (("weight", (rows, _WIDTH)), ("bias", (rows,))):
        value = torch.randn(shape, generator=maker).to(sample.device, sample.dtype)
        if isinstance(sample, DTensor):
            placements = [Shard(0) if each.is_shard() else each for each in sample.placements]
            value = distribute_tensor(value, sample.device_mesh, placements, src_data_rank=None)
        found[name] = nn.Parameter(value)
    return found


def _trial_step(
    optimizer: CustomOptimizer, weights: Mapping[str, nn.Parameter], config: TrainingConfig, *, step: int
) -> None:
    torch.manual_seed(step)
    for place, weight in enumerate(weights.values()):
        weight.grad = torch.sin(weight.detach() * (step + 2 * place))
    optimizer.step(learning_rate=config.learning_rate)
    optimizer.zero_grad()


def _copy_states(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Do what loading a checkpoint does: tensors in place, other values by replacing them."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            _copy_states(target[key], value)
        elif isinstance(value, Tensor):
            with torch.no_grad():
                target[key].copy_(value)
        else:
            target[key] = copy.deepcopy(value)
