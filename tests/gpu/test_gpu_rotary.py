"""Rotary embeddings on a GPU: one kernel, with the bits of the operations that training uses.

Where there is no GPU but Triton is installed, `TRITON_INTERPRET=1` runs these in Triton's interpreter, on the CPU. It
cuts bfloat16 off where a GPU rounds, so float16 stands for it there.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from forge.models import gpu_layers
from forge.models.layers import Rotary

ON_GPU = torch.cuda.is_available()
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if ON_GPU and not IN_INTERPRETER else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not (ON_GPU or IN_INTERPRETER), reason="no NVIDIA GPU is visible here"),
]


def table_of(width: int, max_seq_len: int = 64) -> Tensor:
    made = Rotary.Config(dim=width, max_seq_len=max_seq_len, theta=10_000.0).build()
    return made._precompute_cache().to(DEVICE)


def plainly(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """By torch's operations, as training does it."""
    return Rotary.apply_rotary_emb(x[None], x[None], table[positions][None, :, None])[0][0]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("width", "num_q", "num_k"), [(128, 16, 8), (64, 6, 2), (80, 5, 1), (8, 1, 3)])
def test_the_bits_are_those_of_training(width: int, num_q: int, num_k: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(width)
    q, k = (torch.randn(19, heads, width, generator=draw).to(DEVICE, dtype) for heads in (num_q, num_k))
    positions = torch.randint(0, 64, (19,), generator=draw).to(DEVICE)
    table = table_of(width)
    found = gpu_layers.rotated(q, k, table, positions)
    for result, given in zip(found, (q, k), strict=True):
        assert result.dtype == dtype
        assert torch.equal(result, plainly(given, table, positions))


def test_heads_and_positions_may_lie_apart() -> None:
    draw = torch.Generator().manual_seed(1)
    wide = torch.randn(9, 5, 40, generator=draw).to(DEVICE)
    q, k = wide[:, 1:4, 4:20], wide[:, ::2, 20:36]
    table, positions = table_of(16), torch.arange(18, device=DEVICE)[::2]
    found = gpu_layers.rotated(q, k, table, positions)
    for result, given in zip(found, (q, k), strict=True):
        assert result.is_contiguous()
        assert torch.equal(result, plainly(given, table, positions))


def test_a_position_that_is_not_in_the_table_makes_nan() -> None:
    q, k = (torch.ones(3, 2, 16, device=DEVICE) for _ in range(2))
    for result in gpu_layers.rotated(q, k, table_of(16), torch.tensor([63, 64, -1], device=DEVICE)):
        assert result[0].isfinite().all()
        assert result[1:].isnan().all()


def test_no_tokens_is_no_work() -> None:
    empty = torch.empty(0, 2, 16, device=DEVICE)
    found = gpu_layers.rotated(empty, empty, table_of(16), torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert [tuple(each.shape) for each in found] == [(0, 2, 16)] * 2


@pytest.mark.skipif(DEVICE != "cuda", reason="only a real GPU has this")
def test_the_model_takes_the_kernel_without_gradients_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Rotary.Config(dim=64, max_seq_len=64, theta=10_000.0).build()
    made.cache = table_of(64)
    q, k = (torch.randn(1, 7, heads, 64, device=DEVICE) for heads in (4, 2))
    positions = torch.arange(7, device=DEVICE)[None]
    calls = []
    kernel = gpu_layers.rotated
    monkeypatch.setattr(gpu_layers, "rotated", lambda *args: calls.append(1) or kernel(*args))
    with_gradients = made(q.requires_grad_(), k.requires_grad_(), positions)
    assert not calls
    with torch.no_grad():
        without = made(q, k, positions)
    assert calls
    for one, other in zip(with_gradients, without, strict=True):
        assert torch.equal(one.detach(), other)
