"""The kernel draws the tokens that torch's operations draw."""

from __future__ import annotations

import math

import pytest
import torch

from forge.generator.native.sampler import _pick_by_torch
from forge.kernels import cpu_sampling
from forge.kernels.cpu_sampling import sample_tokens, single_thread

pytestmark = pytest.mark.skipif(cpu_sampling.library() is None, reason="no compiler for the CPU kernels")


@pytest.mark.parametrize("vocabulary", [128, 2048, 50304])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_tokens_are_those_of_torch(vocabulary: int, spread: float) -> None:
    draw = torch.Generator().manual_seed(vocabulary)
    probs = torch.softmax(spread * torch.randn(40, vocabulary, generator=draw), dim=-1)
    for _ in range(5):
        uniforms = torch.rand(40, dtype=torch.float64, generator=draw)
        assert torch.equal(sample_tokens(probs, uniforms), _pick_by_torch(probs, uniforms))
    for edge in (0.0, math.nextafter(1.0, 0.0)):
        uniforms = torch.full((40,), edge, dtype=torch.float64)
        assert torch.equal(sample_tokens(probs, uniforms), _pick_by_torch(probs, uniforms))


def test_tokens_without_a_probability_are_never_drawn() -> None:
    probs = torch.zeros(500, 384)
    probs[:, 131], probs[:, 383] = 0.25, 0.75
    uniforms = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = sample_tokens(probs, uniforms)
    assert torch.equal(found, torch.where(uniforms < 0.25, 131, 383))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_what_is_not_a_distribution_gives_a_token_all_the_same(value: float) -> None:
    uniforms = torch.tensor([0.0, 0.5, 0.999], dtype=torch.float64)
    assert sample_tokens(torch.full((3, 256), value), uniforms).tolist() == [0, 0, 0]
    half = torch.full((3, 256), 1 / 256)
    half[:, 200] = value
    assert all(0 <= token < 256 for token in sample_tokens(half, uniforms).tolist())


def test_rows_with_gaps_are_left_to_torch() -> None:
    assert sample_tokens(torch.ones(4, 512)[:, :256], torch.zeros(4, dtype=torch.float64)) is None


def _threads_of_products() -> str:
    return torch.__config__.parallel_info().partition("mkl_get_max_threads")[2].splitlines()[0]


def test_a_thread_can_be_alone_for_a_while() -> None:
    """Others keep their numbers, and so does the library of products."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0))
        shared, products = torch.softmax(x, dim=-1), _threads_of_products()
        with single_thread():
            assert torch.get_num_threads() == 1
            assert torch.equal(torch.softmax(x, dim=-1), shared)
            assert _threads_of_products() == products
        assert torch.get_num_threads() == 2
        with pytest.raises(KeyError), single_thread():
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
