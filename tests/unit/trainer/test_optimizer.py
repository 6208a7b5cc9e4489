"""AdamW with its states in float32 and in bfloat16, the groups of parameters, and the rates that a step uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from forge.config import TrainingConfig
from forge.trainer.optimizer import BuiltInOptimizer, HalfStateAdamW, gradient_norm
from forge.trainer.schedules import rate_factor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        maker = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(6, 5, generator=maker))
        self.cube = nn.Parameter(torch.randn(2, 3, 4, generator=maker))
        self.vector = nn.Parameter(torch.randn(5, generator=maker))
        self.unused = nn.Parameter(torch.randn(3, 3, generator=maker))


def gradients(step: int) -> dict[str, Tensor]:
    """Gradients with a mean and some noise, each of another size."""
    maker = torch.Generator().manual_seed(100 + step)
    shapes = {"matrix": (6, 5), "cube": (2, 3, 4), "vector": (5,)}
    return {
        name: 10.0**-place * (1 + 0.3 * torch.randn(shape, generator=maker))
        for place, (name, shape) in enumerate(shapes.items())
    }


def give(model: Model, step: int, *, dtype: torch.dtype = torch.float32) -> None:
    for name, gradient in gradients(step).items():
        getattr(model, name).grad = gradient.to(dtype)


def groups(model: Model, decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [model.matrix, model.cube, model.unused], "weight_decay": decay},
        {"params": [model.vector], "weight_decay": 0.0},
    ]


def config(**options: Any) -> TrainingConfig:
    return TrainingConfig(**{"learning_rate": 1e-2, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, **options})


pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_first_step_with_half_states_is_that_of_adamw() -> None:
    """States are worked with in float32 before they are rounded, so the first step does not feel the rounding."""
    mine, theirs = Model(), Model()
    give(mine, 0)
    give(theirs, 0)
    half = HalfStateAdamW(groups(mine, 0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    half.step()
    torch.optim.AdamW(groups(theirs, 0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8).step()
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(getattr(mine, name), weight, rtol=1e-6, atol=1e-7)
    assert half.state[mine.matrix]["exp_avg"].dtype == torch.bfloat16
    assert half.state[mine.matrix]["exp_avg_sq"].dtype == torch.bfloat16
    assert mine.unused not in half.state
    assert torch.equal(mine.unused, Model().unused), "what has no gradient stays, decay or not"


def test_half_states_stay_close_over_many_steps() -> None:
    """bfloat16 resolves 1 part in 256, and errors of the two states do not add up: the way is the same to 1%."""
    mine, theirs, start = Model(), Model(), Model()
    half = HalfStateAdamW(groups(mine, 0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    whole = torch.optim.AdamW(groups(theirs, 0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(60):
        give(mine, step)
        give(theirs, step)
        half.step()
        whole.step()
    for name in gradients(0):
        way = (getattr(theirs, name) - getattr(start, name)).norm()
        assert (getattr(mine, name) - getattr(theirs, name)).norm() <= 0.01 * way, name
        assert not torch.equal(getattr(mine, name), getattr(theirs, name))


def test_half_states_move_weights_of_any_dtype() -> None:
    model = Model().bfloat16()
    give(model, 0, dtype=torch.bfloat16)
    before = model.matrix.detach().clone()
    HalfStateAdamW(groups(model, 0.0), lr=0.1, betas=(0.9, 0.95), eps=1e-8).step()
    assert model.matrix.dtype == torch.bfloat16
    torch.testing.assert_close(before - model.matrix, torch.full_like(before, 0.1), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_matrices_decay_and_vectors_do_not(states: str) -> None:
    model = Model()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = BuiltInOptimizer(dict(model.named_parameters()), config(optimizer_dtype=states))
    for parameter in (model.matrix, model.cube, model.vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(learning_rate=0.5)
    for name in ("matrix", "cube"):
        torch.testing.assert_close(getattr(model, name).detach(), before[name] * (1 - 0.5 * 0.1))
    assert torch.equal(model.vector, before["vector"])
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_a_step_uses_the_rate_it_is_given(schedule: str, states: str) -> None:
    """With the same gradient at every step AdamW moves each weight by the rate, so the rates can be read off."""
    settings = config(schedule=schedule, warmup_steps=2, weight_decay=0.0, optimizer_dtype=states, min_lr_ratio=0.1)
    model = Model()
    optimizer = BuiltInOptimizer(dict(model.named_parameters()), settings)
    for step in range(8):
        before = model.vector.detach().clone()
        rate = settings.learning_rate * rate_factor(step, config=settings, total_steps=8)
        give(model, 0)
        model.vector.grad = torch.ones(5)
        optimizer.step(learning_rate=rate)
        torch.testing.assert_close(before - model.vector, torch.full((5,), rate), rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_states_go_by_name_into_another_optimizer(states: str) -> None:
    """What is loaded into the states is what the next step uses, in the dtype that they have."""
    model, other = Model(), Model()
    one, another = (
        BuiltInOptimizer(dict(each.named_parameters()), config(optimizer_dtype=states)) for each in (model, other)
    )
    for step in range(3):
        give(model, step)
        one.step(learning_rate=1e-2)
    saved, fresh = one.state_dict(), another.state_dict()
    assert (saved["num_steps"], fresh["num_steps"]) == (3, 0)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert saved[kind].keys() == dict(model.named_parameters()).keys()
        for name, state in saved[kind].items():
            assert state.dtype == fresh[kind][name].dtype == getattr(torch, states)
            fresh[kind][name].copy_(state)
    another.finish_loading({"num_steps": saved["num_steps"]})
    other.load_state_dict(model.state_dict())
    for each, optimizer in ((model, one), (other, another)):
        give(each, 7)
        optimizer.step(learning_rate=1e-2)
    for name, weight in model.named_parameters():
        assert torch.equal(getattr(other, name), weight), name


def test_half_states_need_a_second_decay_that_they_resolve() -> None:
    with pytest.raises(ValueError, match=r"at most 0\.99"):
        config(optimizer_dtype="bfloat16", beta2=0.999)


def test_the_norm_of_narrow_gradients_keeps_its_digits() -> None:
    """Clipping divides by it: in bfloat16 it would be off by up to 0.2%."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (7, 100, 333)]
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).bfloat16()
    expected = torch.cat([weight.grad.double() for weight in weights if weight.grad is not None]).norm()
    norm = gradient_norm(weights, cast(Any, SimpleNamespace(pp_enabled=False)))
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
