"""Tokens that go to experts and back on a GPU: the values of a CPU, the same bits each time, in a recorded step too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge.models.expert_rows import Routes, RowDispatcher, add_rows

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here"),
]

TOKENS, EXPERTS, CHOSEN, WIDTH = 1000, 16, 4, 256


def drawn(seed: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=draw)
    scores, ids = torch.rand(TOKENS, EXPERTS, generator=draw).topk(CHOSEN)
    return x.to(device).requires_grad_(), scores.to(device).detach().requires_grad_(), ids.to(device)


def there_and_back(x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
    dispatcher = RowDispatcher(RowDispatcher.Config(num_experts=EXPERTS, top_k=CHOSEN))
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS) if not torch.cuda.is_current_stream_capturing() else ids
    rows, _, metadata = dispatcher.dispatch(x, scores, ids, counts)
    assert isinstance(metadata, Routes) == x.is_cuda
    expert = ids.flatten().sort(stable=True).values
    return dispatcher.combine(rows * (expert + 1).unsqueeze(1), metadata, x)


def results(device: str) -> list[Tensor]:
    x, scores, ids = drawn(0, device)
    out = there_and_back(x, scores, ids)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (out * weights).sum().backward()
    assert x.grad is not None
    assert scores.grad is not None
    return [out.detach(), x.grad, scores.grad]


def test_values_and_gradients_are_those_of_a_cpu_and_always_the_same() -> None:
    first = results("cuda")
    for found, expected in zip(first, results("cpu"), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    for _ in range(5):
        assert all(map(torch.equal, results("cuda"), first))


@torch.inference_mode()
def test_a_recorded_step_sends_each_token_where_it_belongs_now() -> None:
    buffers = [each.detach().clone() for each in drawn(0, "cuda")]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        there_and_back(*buffers)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = there_and_back(*buffers)
    for seed in (0, 1, 2):
        fresh = drawn(seed, "cuda")
        for buffer, values in zip(buffers, fresh, strict=True):
            buffer.copy_(values)
        graph.replay()
        assert torch.equal(out, there_and_back(*(each.detach() for each in fresh)))


def test_rows_of_several_ranks_are_added_as_on_a_cpu() -> None:
    draw = torch.Generator().manual_seed(3)
    tokens = torch.arange(TOKENS).repeat(CHOSEN)[torch.randperm(TOKENS * CHOSEN, generator=draw)]
    found = []
    for device in ("cuda", "cpu"):
        rows = torch.randn(len(tokens), WIDTH, generator=draw.manual_seed(4)).to(device).requires_grad_()
        index = tokens.to(device).unsqueeze(1).expand(-1, WIDTH)
        out = add_rows(torch.zeros(TOKENS, WIDTH, device=device), index, rows)
        (out * torch.arange(WIDTH, device=device)).sum().backward()
        found.append((out.detach().cpu(), rows.grad.cpu()))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
