"""The norm and the gate of a generator on a GPU, against the same in float64.

Where there is no GPU but Triton is installed, `TRITON_INTERPRET=1` runs these in Triton's interpreter, on the CPU. It
cuts bfloat16 off where a GPU rounds, so float16 stands for it there.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from forge.models import gpu_layers
from forge.models.gpu_layers import GpuNorm, add_into, gated, normed

ON_GPU = torch.cuda.is_available()
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if ON_GPU and not IN_INTERPRETER else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not (ON_GPU or IN_INTERPRETER), reason="no NVIDIA GPU is visible here"),
]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(1, 37, 5, 128), (3, 64), (1, 7, 1024), (5, 80), (2, 5120)])
def test_rows_are_divided_by_the_root_of_their_mean_square(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    x = (torch.randn(shape, generator=draw) * 3).to(DEVICE, dtype)
    weight = (torch.rand(shape[-1], generator=draw) + 0.5).to(DEVICE, dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    found = normed(x, weight, 1e-3)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=BOUND[dtype], atol=1e-7)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    weight = torch.ones(64, device=DEVICE)
    together = normed(x, weight, 1e-6)
    for row in (0, 7, 32):
        assert torch.equal(normed(x[row : row + 1], weight, 1e-6), together[row : row + 1])


def test_no_rows_is_no_work() -> None:
    assert normed(torch.empty(0, 64, device=DEVICE), torch.ones(64, device=DEVICE), 1e-6).shape == (0, 64)


@pytest.mark.skipif(DEVICE != "cuda", reason="only a real GPU has this")
def test_the_module_takes_the_kernel_without_gradients_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    module = GpuNorm.Config(normalized_shape=64, eps=1e-6).build().to(DEVICE)
    torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    x = torch.randn(9, 64, device=DEVICE)
    calls = []
    kernel = gpu_layers.normed
    monkeypatch.setattr(gpu_layers, "normed", lambda *args: calls.append(1) or kernel(*args))
    with_gradients = module(x)
    assert with_gradients.requires_grad
    assert not calls
    with torch.no_grad():
        without = module(x)
    assert calls
    torch.testing.assert_close(with_gradients.detach(), without, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(1, 5, 3072), (3, 7), (0, 64)])
def test_a_gate_is_silu_times_up(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    gate, up = ((torch.randn(shape, generator=draw) * 3).to(DEVICE, dtype) for _ in range(2))
    found = gated(gate, up)
    assert found.dtype == dtype
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(found.double(), expected, rtol=2 * BOUND[dtype], atol=1e-6)


def test_gates_with_gradients_or_gaps_are_left_to_torch() -> None:
    gate, up = torch.randn(4, 8, device=DEVICE), torch.randn(4, 8, device=DEVICE)
    assert not gpu_layers.gates(gate, up)
    with torch.no_grad():
        assert gpu_layers.gates(gate, up) is (DEVICE == "cuda")
        assert not gpu_layers.gates(gate.t(), up.t())
        assert not gpu_layers.gates(gate, up[:2])


@pytest.mark.parametrize("shape", [(300, 301), (7,), (65_536,), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_values_are_added_to_wider_sums(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(4)
    sums = torch.randn(shape, generator=draw).to(DEVICE)
    values = torch.randn(shape, generator=draw).to(DEVICE, dtype)
    expected = sums + values.float()
    add_into(sums, values)
    assert torch.equal(sums, expected)


def test_values_with_gaps_are_added_too() -> None:
    sums, values = torch.zeros(400, 400, device=DEVICE), torch.randn(400, 400, device=DEVICE).to(HALF)
    add_into(sums, values.t())
    assert torch.equal(sums, values.t().float())
