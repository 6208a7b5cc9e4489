"""Norms, rotary embeddings and gates with gradients on a CPU: torch's bits forward, right against float64 backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forge.errors import ModelError
from forge.kernels import cpu_layers
from forge.models.layers import Rotary, RowNorm, gated

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def the_same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def norm_of(width: int) -> RowNorm:
    made = RowNorm(RowNorm.Config(normalized_shape=width, eps=1e-6))
    with torch.no_grad():
        made.weight.copy_(drawn(width, seed=9) + 1)
    return made


def with_gradients(function: Callable[..., Tensor], given: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 70, 256), (1, 33, 4, 64), (1, 300, 2, 24), (5, 137), (1, 0, 16)])
def test_a_norm_has_torchs_bits_and_its_gradient(shape: tuple[int, ...]) -> None:
    norm, x, grad = norm_of(shape[-1]), drawn(*shape), drawn(*shape, seed=1)
    weight = norm.weight.detach()
    leaf = x.clone().requires_grad_()
    out = norm(leaf)
    assert type(out.grad_fn).__name__ == "_NormedBackward"
    assert the_same(out.detach(), F.rms_norm(x, shape[-1:], weight, 1e-6))
    with torch.no_grad():
        assert the_same(norm(x), out)
    found = torch.autograd.grad(out, [leaf, norm.weight], grad)
    known = with_gradients(
        lambda x, weight: F.rms_norm(x, shape[-1:], weight, 1e-6), [x.double(), weight.double()], grad.double()
    )[1:]
    for ours, expected in zip(found, known, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=3e-6 * math.sqrt(max(x.numel(), 1)))


def test_a_gradient_of_a_norms_weight_that_almost_cancels() -> None:
    """200,000 rows: sums are taken in parts, so that rounding does not pile up."""
    x, grad = drawn(200_000, 8), drawn(200_000, 8, seed=1)
    factors = x.square().mean(-1).add_(1e-6).rsqrt_()
    _, found = cpu_layers.norm_gradients(grad, x, factors, torch.ones(8))
    expected = (grad.double() * x.double() * factors.double()[:, None]).sum(0)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-3)


def test_a_norm_in_other_precisions_is_torchs() -> None:
    norm = norm_of(16).double()
    x = drawn(4, 16).double().requires_grad_()
    out = norm(x)
    assert type(out.grad_fn).__name__ != "_NormedBackward"
    assert torch.equal(out, F.rms_norm(x, (16,), norm.weight, 1e-6))


def rotary_of(width: int) -> Rotary:
    made = Rotary(Rotary.Config(dim=width, max_seq_len=50, theta=100.0))
    made.cache = made._precompute_cache()
    return made


@pytest.mark.parametrize(("heads", "width"), [((4, 2), 64), ((3, 1), 6), ((2, 2), 40)])
def test_turning_has_torchs_bits_and_its_gradient(heads: tuple[int, int], width: int) -> None:
    rotary = rotary_of(width)
    positions = torch.randint(50, (1, 150), generator=torch.Generator().manual_seed(2))
    both = [drawn(1, 150, count, width, seed=count) for count in heads]
    grads = [drawn(1, 150, count, width, seed=10 + count) for count in heads]
    table = rotary.cache[positions[0]][None, :, None]
    leaves = [tensor.clone().requires_grad_() for tensor in both]
    turned = rotary(*leaves, positions)
    assert type(turned[0].grad_fn).__name__ == "_RotatedBackward"
    for ours, expected in zip(turned, Rotary.apply_rotary_emb(*both, table), strict=True):
        assert the_same(ours.detach(), expected)
    with torch.no_grad():
        assert all(map(the_same, rotary(*both, positions), turned))
    found = torch.autograd.grad(turned, leaves, grads)
    wide = [tensor.double().requires_grad_() for tensor in both]
    known = torch.autograd.grad(Rotary.apply_rotary_emb(*wide, table), wide, [grad.double() for grad in grads])
    for ours, expected in zip(found, known, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-6)


def test_turning_heads_that_lie_apart() -> None:
    """Heads out of one wide product, and a gradient whose last dimension is not the innermost."""
    rotary, positions = rotary_of(8), torch.arange(30)[None]
    wide = drawn(1, 30, 6, 8).requires_grad_()
    query, key = rotary(wide[:, :, :4], wide[:, :, 4:], positions)
    grads = [drawn(1, 30, 8, count).transpose(2, 3) for count in (4, 2)]
    [found] = torch.autograd.grad((query, key), [wide], grads)
    dense = [part.detach().contiguous().requires_grad_() for part in (wide[:, :, :4], wide[:, :, 4:])]
    alone = torch.autograd.grad(rotary(*dense, positions), dense, [grad.contiguous() for grad in grads])
    assert the_same(found, torch.cat(alone, dim=2))


@pytest.mark.parametrize("position", [-1, 50])
def test_a_position_that_the_model_does_not_have(position: int) -> None:
    query = drawn(1, 2, 2, 8).requires_grad_()
    with pytest.raises(ModelError) as caught:
        rotary_of(8)(query, query, torch.tensor([[3, position]]))
    assert caught.value.path == "positions_L"
    assert position in caught.value.value
    assert "below 50" in (caught.value.rule or "")
    assert caught.value.repair


def test_gradients_of_gates() -> None:
    extremes = torch.tensor([0.0, -0.0, 1e-30, 40.0, -40.0, 87.5, -87.5, 89.0, -89.0, 500.0, -500.0, 1e30, -1e30])
    gate = torch.cat([drawn(20_000) * 4, extremes])
    up, grad = drawn(gate.numel(), seed=1), drawn(gate.numel(), seed=2)
    _, *found = with_gradients(gated, [gate, up], grad)
    _, *known = with_gradients(lambda gate, up: F.silu(gate) * up, [gate.double(), up.double()], grad.double())
    for ours, expected in zip(found, known, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=2e-6)


def every_gradient() -> list[Tensor]:
    norm, rotary = norm_of(64), rotary_of(64)
    x, grad = drawn(1, 700, 4, 64), drawn(1, 700, 4, 64, seed=1)
    positions = (torch.arange(700) % 50)[None]
    leaf = x.clone().requires_grad_()
    normed = torch.autograd.grad(norm(leaf), [leaf, norm.weight], grad)
    turned = torch.autograd.grad(rotary(leaf, leaf, positions), [leaf], [grad, grad])
    return [*normed, *turned, *with_gradients(gated, [x, grad], grad)]


def test_threads_do_not_change_the_bits() -> None:
    one = every_gradient()
    for count in (2, 3):
        torch.set_num_threads(count)
        assert all(map(the_same, every_gradient(), one))


def test_without_the_kernels_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = every_gradient()
    monkeypatch.setattr(cpu_layers, "library", lambda: None)
    for ours, known in zip(every_gradient(), expected, strict=True):
        torch.testing.assert_close(ours, known, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flags", [("-O2",), ("-O3",)], ids=" ".join)
def test_other_processors(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = every_gradient()
    built = cpu_layers.build(((*flags, "-ffp-contract=off"),))
    assert built is not None
    monkeypatch.setattr(cpu_layers, "library", lambda: built)
    for ours, known in zip(every_gradient(), expected, strict=True):
        torch.testing.assert_close(ours, known, rtol=1e-5, atol=1e-4)


def made_rotary(width: int, max_seq_len: int = 64, **stretch: object) -> Rotary:
    made = Rotary.Config(dim=width, max_seq_len=max_seq_len, theta=10_000.0, **stretch).build()
    made.cache = made._precompute_cache()
    return made


@pytest.mark.parametrize("width", [8, 24, 64, 130])
def test_with_and_without_gradients_the_bits_are_the_same(width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    query, key = torch.randn(1, 19, 6, width, generator=draw), torch.randn(1, 19, 2, width, generator=draw)
    positions = torch.randint(0, 64, (1, 19), generator=draw)
    made = made_rotary(width)
    with_gradients = made(query.requires_grad_(), key.requires_grad_(), positions)
    with torch.no_grad():
        without = made(query, key, positions)
    for one, other in zip(with_gradients, without, strict=True):
        assert one.requires_grad
        assert torch.equal(one.detach(), other)


def test_a_head_that_cannot_be_halved_or_has_gaps_is_left_to_torch() -> None:
    assert not cpu_layers.rotates(torch.zeros(1, 1, 7))
    assert not cpu_layers.rotates(torch.zeros(1, 1, 16)[..., ::2])
