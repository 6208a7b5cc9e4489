"""Tokens that go to experts and back by gathering rows, against TorchTitan's way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge.models.expert_rows import (
    Routes,
    RowDispatcher,
    _AddRows,
    _titans_scatter_add,
    routes_of,
    to_experts,
    to_tokens,
)

TOKENS, EXPERTS, CHOSEN, WIDTH = 37, 6, 3, 24


def drawn(seed: int, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the experts of each, and the weights of those."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=draw, dtype=torch.float64)
    scores, ids = torch.rand(TOKENS, EXPERTS, generator=draw, dtype=torch.float64).topk(CHOSEN)
    ids = ids.gather(1, torch.rand(TOKENS, CHOSEN, generator=draw).argsort(1))
    return x.to(dtype).requires_grad_(), scores.to(dtype).detach().requires_grad_(), ids


def through_titan(x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
    dispatcher = RowDispatcher(RowDispatcher.Config(num_experts=EXPERTS, top_k=CHOSEN))
    rows, _, metadata = dispatcher.dispatch(x, scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
    assert not isinstance(metadata, Routes), "on a CPU it is TorchTitan's"
    return dispatcher.combine(answers(rows, ids), metadata, x)


def answers(rows: Tensor, ids: Tensor) -> Tensor:
    """What experts make of their rows: each something else."""
    expert = ids.flatten().sort(stable=True).values.to(rows.dtype)
    return rows * (expert + 1).unsqueeze(1) + rows.roll(1, dims=1).square()


def by_gathering(x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
    routes = routes_of(ids, scores)
    return to_tokens(answers(to_experts(x, routes), ids), routes)


@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients_are_titans(seed: int) -> None:
    found, expected = [], []
    for way, results in ((by_gathering, found), (through_titan, expected)):
        x, scores, ids = drawn(seed, dtype=torch.float32)
        out = way(x, scores, ids)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
        (out * weights).sum().backward()
        results += [out.detach(), x.grad, scores.grad]
    for ours, titans in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, titans, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_values() -> None:
    x, scores, ids = drawn(5)
    routes = routes_of(ids, scores)
    assert torch.autograd.gradcheck(lambda rows: to_experts(rows, routes), (x,))
    rows = to_experts(x, routes).detach().requires_grad_()

    def answer(rows: Tensor, scores: Tensor) -> Tensor:
        return to_tokens(rows, Routes(routes.order_R, routes.places_TK, scores))

    # The sums are float32 by contract, so steps and bounds are those of float32.
    assert torch.autograd.gradcheck(answer, (rows, scores), eps=1e-2, atol=1e-3, rtol=1e-3)


def test_rows_are_in_the_order_of_experts_and_then_of_tokens() -> None:
    _, scores, ids = drawn(1)
    routes = routes_of(ids, scores)
    pairs = [(int(ids.flatten()[pair]), int(pair) // CHOSEN) for pair in routes.order_R]
    assert pairs == sorted(pairs)
    assert torch.equal(routes.order_R[routes.places_TK.flatten()], torch.arange(TOKENS * CHOSEN))


def test_sums_in_bfloat16_are_rounded_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    routes = routes_of(torch.tensor([[0, 1, 2]]), torch.ones(1, 3))
    assert to_tokens(rows, routes).item() == 258.0, "added one by one in bfloat16 it would be 256"


def test_added_rows_are_titans() -> None:
    """What experts on several ranks do last."""
    draw = torch.Generator().manual_seed(2)
    tokens = torch.arange(TOKENS).repeat(CHOSEN)[torch.randperm(TOKENS * CHOSEN, generator=draw)]
    results = []
    for is_ours in (True, False):
        rows = torch.randn(len(tokens), WIDTH, generator=draw.manual_seed(3)).requires_grad_()
        if is_ours:
            out = _AddRows.apply(rows, tokens, torch.argsort(tokens, stable=True).view(TOKENS, -1))
        else:
            out = _titans_scatter_add(torch.zeros(TOKENS, WIDTH), tokens.unsqueeze(1).expand(-1, WIDTH), rows)
        (out * torch.arange(WIDTH)).sum().backward()
        results.append((out.detach(), rows.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
