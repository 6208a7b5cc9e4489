"""Speed: tokens per second, and peaks of devices."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import pytest

from forge.observe import (
    Throughput,
    device_peak_flops,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_speed_is_that_of_the_last_steps_and_of_all() -> None:
    clock = Clock()
    meter = Throughput(window=2, clock=clock)
    assert meter.tokens_per_s is None
    assert meter.overall_tokens_per_s is None
    for seconds, tokens in [(8.0, 80), (1.0, 100), (1.0, 200)]:
        clock.now_s += seconds
        meter.add(tokens)
    assert meter.tokens_per_s == 150.0
    assert meter.overall_tokens_per_s == 38.0
    assert meter.num_tokens == 380


def test_time_without_a_step_counts_at_the_next_one() -> None:
    clock = Clock()
    meter = Throughput(clock=clock)
    clock.now_s += 1
    meter.add(10)
    clock.now_s += 100
    assert meter.tokens_per_s == 10.0


def test_a_pause_does_not_count_even_when_it_ends_in_an_error() -> None:
    clock = Clock()
    meter = Throughput(clock=clock)
    clock.now_s += 1
    meter.add(10)
    with suppress(KeyError), meter.paused():
        clock.now_s += 50
        raise KeyError
    with meter.paused():
        clock.now_s += 7
    clock.now_s += 1
    meter.add(30)
    assert meter.tokens_per_s == 20.0
    assert meter.overall_tokens_per_s == 20.0


def test_a_window_holds_a_step() -> None:
    with pytest.raises(ValueError, match="at least one step, not 0"):
        Throughput(window=0)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce GTX 1080", None),
        ("AMD EPYC 9654 96-Core Processor", None),
        ("AMD A10-7850K", None),
        ("Intel(R) Xeon(R) Platinum 8481C", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_a_devices_peak_is_known_or_not(name: str, tera: float | None) -> None:
    assert device_peak_flops(name, "bfloat16") == (None if tera is None else pytest.approx(tera * 1e12))


def test_peaks_are_those_of_half_precision() -> None:
    import torch

    for dtype in (torch.bfloat16, "bfloat16", "bfloat16_pure", "float16", torch.float16):
        assert device_peak_flops("NVIDIA H200", dtype) == 989e12
    for dtype in (torch.float32, "float32", "float64"):
        assert device_peak_flops("NVIDIA H200", dtype) is None


def test_the_package_loads_neither_torch_nor_what_sinks_write_with() -> None:
    program = (
        "import sys, forge.observe, forge.testing; "
        "print(sorted({'torch', 'tensorboard', 'wandb', 'tqdm', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert ran.stdout == "[]\n"
