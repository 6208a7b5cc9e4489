"""What `forge doctor` finds out about products on this processor: whether rows are independent, whether AMX works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge import _amx

if TYPE_CHECKING:
    from torch import Tensor

    from forge.runtime.row_check import Case


@dataclass(frozen=True, slots=True)
class Finding:
    """A result, in words; `repair` says what to do where it is not `ok`."""

    ok: bool
    detail: str
    repair: str = ""


def check_rows() -> Finding:
    """Compute with what trainer and generator compute with, and report for which weights a row depends on its batch."""
    import functools

    import torch

    from forge.runtime import cpu_linear, row_check
    from forge.runtime.placement import count_cpus

    cases = row_check.cases((1, count_cpus()))
    native = cpu_linear.library()
    before = torch.get_num_threads()

    def by_torch(x: Tensor, weight: Tensor, *, num_threads: int) -> Tensor:
        torch.set_num_threads(num_threads)
        return cpu_linear.torch_product(x, weight)

    product = by_torch if native is None else functools.partial(cpu_linear.kernel_product, native)
    try:
        failed = row_check.dependent_cases(product, cases)
    finally:
        torch.set_num_threads(before)
    return describe_rows(failed, num_checked=len(cases), has_kernel=native is not None)


def describe_rows(failed: Sequence[Case], *, num_checked: int, has_kernel: bool) -> Finding:
    """Say what the failed cases cost."""
    if has_kernel and not failed:
        return Finding(
            True, f"independent of their batch by our kernel ({num_checked} cases): sampler = trainer, bit for bit"
        )
    names = ", ".join(str(case) for case in failed)
    lost = "float32 logprobs of sampler and trainer can differ in the last bits, and a seed's tokens can depend on the batch"
    if has_kernel:
        return Finding(False, f"our kernel fails for {names}: {lost}", "report it with the output of forge doctor --json")
    return Finding(
        False,
        f"computed by torch, without our kernel: {lost}" + (f"; a row depends on its batch for {names}" if failed else ""),
        "install gcc, or set CC; unset FORGE_NATIVE",
    )


def describe_amx(verdict: _amx.Verdict) -> Finding:
    """Say what becomes of bfloat16 products."""
    if verdict == "traps":
        limits = " ".join(f"{name}={value}" for name, value in _amx.LIMITS.items())
        return Finding(
            False,
            f"advertised, but its instructions trap. {limits} is set for all processes: bfloat16 products on the CPU use "
            "AVX-512. vLLM on the CPU computes in float32 only",
            "enable AMX for this virtual machine, or hide it; nothing else is lost",
        )
    if verdict == "unknown":
        return Finding(False, "it could not be found out whether AMX works", "run forge doctor outside of a sandbox")
    return Finding(True, "works" if verdict == "works" else "not offered by this processor")
