"""Muon's update, which weights it trains, and optimizers by `module:attribute`: what is accepted and refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from forge.config import InvalidConfig, SFTConfig, TrainingConfig, load
from forge.errors import ConfigError
from forge.trainer.muon import MuonOptions, is_hidden_matrix
from forge.trainer.optimizer import BuiltInOptimizer
from forge.trainer.optimizer_check import check_optimizer
from forge.trainer.optimizer_choice import make_optimizer


def weights_of(**shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    maker = torch.Generator().manual_seed(0)
    return {name.replace("__", "."): nn.Parameter(torch.randn(s, generator=maker)) for name, s in shapes.items()}


# ---- Muon's update ---------------------------------------------------------------------------------------------------


def orthogonalised(matrix: NDArray[np.float64], num_steps: int) -> NDArray[np.float64]:
    """The Newton-Schulz iteration of Jordan's post, written down again in float64."""
    x = matrix / max(np.linalg.norm(matrix), 1e-7)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(num_steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_moves_a_matrix_as_the_formula_says(shape: tuple[int, int], adjust: Any) -> None:
    """Over three steps, to bfloat16's rounding of the orthogonalised momentum; and like torch's own to the bit."""
    rate, decay, momentum = 0.02, 0.1, 0.9
    parameters = weights_of(matrix=shape)
    (weight,) = parameters.values()
    theirs = nn.Parameter(weight.detach().clone())
    settings = TrainingConfig(learning_rate=1.0, weight_decay=decay)
    mine = BuiltInOptimizer(parameters, settings, muon=MuonOptions(momentum=momentum, adjust_lr_fn=adjust))
    peer = torch.optim.Muon([theirs], lr=rate, weight_decay=decay, momentum=momentum, adjust_lr_fn=adjust)
    expected, mean = weight.detach().double().numpy().copy(), np.zeros(shape)
    factor = 0.2 * np.sqrt(max(shape)) if adjust == "match_rms_adamw" else np.sqrt(max(1, shape[0] / shape[1]))
    for step in range(3):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        weight.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step(learning_rate=rate)
        peer.step()
        exact = gradient.double().numpy()
        mean = momentum * mean + (1 - momentum) * exact
        update = orthogonalised((1 - momentum) * exact + momentum * mean, 5)
        expected = expected * (1 - rate * decay) - rate * factor * update
    assert torch.equal(weight, theirs)
    moved = np.abs(expected - weights_of(matrix=shape)["matrix"].detach().double().numpy()).max()
    assert np.abs(weight.detach().double().numpy() - expected).max() < 0.02 * moved


def test_muon_trains_hidden_matrices_and_adamw_the_rest() -> None:
    shapes = {"tok_embeddings__weight": (9, 4), "lm_head__weight": (9, 4), "layers__0__w__weight": (4, 4)}
    parameters = weights_of(**shapes, norm__weight=(4,), layers__0__experts=(2, 4, 4))
    assert [name for name, each in parameters.items() if is_hidden_matrix(name, each)] == ["layers.0.w.weight"]
    settings = TrainingConfig(learning_rate=1e-2, weight_decay=0.5)
    optimizer = BuiltInOptimizer(parameters, settings, muon=MuonOptions(adamw_lr_ratio=0.25))
    state = optimizer.state_dict()
    assert set(state["momentum_buffer"]) == {"layers.0.w.weight"}
    assert set(state["exp_avg"]) == set(state["exp_avg_sq"]) == set(parameters) - {"layers.0.w.weight"}
    before = {name: each.detach().clone() for name, each in parameters.items()}
    for each in parameters.values():
        each.grad = torch.zeros_like(each)
    optimizer.step(learning_rate=0.1)
    assert torch.equal(parameters["norm.weight"], before["norm.weight"]), "norms do not decay"
    torch.testing.assert_close(parameters["layers.0.w.weight"].detach(), before["layers.0.w.weight"] * (1 - 0.1 * 0.5))
    torch.testing.assert_close(parameters["lm_head.weight"].detach(), before["lm_head.weight"] * (1 - 0.025 * 0.5))


# ---- Names and arguments ---------------------------------------------------------------------------------------------


def test_every_groups_rate_follows_the_schedule() -> None:
    parameters = weights_of(matrix=(3, 3), vector=(3,))
    before = {name: each.detach().clone() for name, each in parameters.items()}
    settings = TrainingConfig(learning_rate=0.4, optimizer="own_optimizers:half")
    optimizer = make_optimizer(parameters, settings)
    for each in parameters.values():
        each.grad = torch.ones_like(each)
    optimizer.step(learning_rate=0.2)
    torch.testing.assert_close(before["matrix"] - parameters["matrix"], torch.full((3, 3), 0.2))
    torch.testing.assert_close(before["vector"] - parameters["vector"], torch.full((3,), 0.1))


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        (["optimizer=adamx"], "training.optimizer", "must be one of adamw, muon, or `module:attribute`"),
        (["optimizer=muon", "optimizer_dtype=bf16"], "training.optimizer_dtype", "float32 with the optimizer `muon`"),
        (["optimizer=no_such:thing"], "training.optimizer", "cannot be imported"),
        (["optimizer=torch.optim:Adamm"], "training.optimizer", "has no 'Adamm'"),
        (["optimizer=math:pi"], "training.optimizer", "cannot be used as an optimizer: it is of type float"),
        (["optimizer=own_optimizers:nothing"], "training.optimizer", "makes a NoneType, which is not an optimizer"),
        (["optimizer=own_optimizers:first_only"], "training.optimizer", "leaves out 1 parameters, such as bias"),
        (["optimizer_args={beta: 1}"], "training.optimizer_args.beta", "takes no arguments"),
        (["optimizer=muon", "optimizer_args={momentun: 0.9}"], "training.optimizer_args.momentun", "momentum"),
        (["optimizer=muon", "optimizer_args={momentum: 1.0}"], "training.optimizer_args.momentum", "below 1"),
        (["optimizer=muon", "optimizer_args={adjust_lr_fn: x}"], "training.optimizer_args.adjust_lr_fn", "original"),
        (["optimizer=torch.optim:SGD", "optimizer_args={lr: 1.0}"], "training.optimizer_args.lr", "learning_rate"),
        (["optimizer=torch.optim:SGD", "optimizer_args={speed: 1}"], "training.optimizer_args.speed", "arguments are"),
        (["optimizer=torch.optim:SGD", "optimizer_args={momentum: -1.0}"], "training.optimizer_args", "momentum value"),
        (["optimizer=own_optimizers:NoDecay", "weight_decay=0.1"], "training.weight_decay", "no weight decay"),
    ],
)
def test_optimizers_that_are_refused_before_a_run(overrides: list[str], path: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_optimizer(load(SFTConfig, overrides=[f"training.{each}" for each in overrides]).training)
    error = caught.value.problems[0] if isinstance(caught.value, InvalidConfig) else caught.value
    assert error.path == path
    assert says in f"{error} {caught.value}"
    assert error.rule
    assert error.repair


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_optimizers:Forgetful", "cannot resume: a copy with the same states takes another step"),
        ("own_optimizers:Hoarder", "hoard is a builtin_function_or_method"),
        ("torch.optim:LBFGS", "cannot be made: ValueError: LBFGS doesn't support per-parameter options"),
    ],
)
def test_optimizers_that_cannot_resume_are_refused_at_the_start(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        make_optimizer(weights_of(weight=(4, 4)), TrainingConfig(optimizer=name))
    assert says in str(caught.value)
    assert caught.value.rule
    assert caught.value.repair


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "RMSprop", "NAdam"])
def test_optimizers_of_torch_are_accepted(name: str) -> None:
    """Each has shown then that a copy with its states continues to the bit."""
    make_optimizer(weights_of(weight=(4, 4), bias=(4,)), TrainingConfig(optimizer=f"torch.optim:{name}"))
