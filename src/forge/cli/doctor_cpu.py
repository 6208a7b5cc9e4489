"""What `forge doctor` says about products on this processor: whether rows are independent, whether AMX works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge import _amx

if TYPE_CHECKING:
    from forge.kernels.row_check import Case


@dataclass(frozen=True, slots=True)
class Finding:
    """A result, in words; `repair` says what to do where it is not `ok`."""

    ok: bool
    detail: str
    repair: str = ""


def check_rows() -> Finding:
    """Compute with what trainer and generator compute with, and report for which weights a row depends on its batch."""
    from forge.kernels import cpu_linear, row_check
    from forge.runtime.placement import count_cpus

    cases = row_check.cases((1, count_cpus()))
    failed = cpu_linear.dependent_cases(cases)
    return describe_rows(failed, num_checked=len(cases), has_kernel=cpu_linear.library() is not None)


def describe_rows(failed: Sequence[Case], *, num_checked: int, has_kernel: bool) -> Finding:
    """Say what the failed cases cost."""
    if has_kernel and not failed:
        return Finding(
            True, f"independent of their batch by our kernel ({num_checked} cases): sampler = trainer, bit for bit"
        )
    names = ", ".join(str(case) for case in failed)
    lost = (
        "float32 logprobs of sampler and trainer can differ in the last bits, "
        "and the tokens of a seed can depend on the batch"
    )
    if has_kernel:
        repair = "report it with the output of forge doctor --json"
        return Finding(False, f"our kernel fails for {names}: {lost}", repair)
    shapes = f"; a row depends on its batch for {names}" if failed else ""
    return Finding(
        False, f"computed by torch, without our kernel: {lost}{shapes}", "install gcc, or set CC; unset FORGE_NATIVE"
    )


def describe_amx(verdict: _amx.Verdict, environ: Mapping[str, str]) -> Finding:
    """Say what becomes of bfloat16 products."""
    if verdict == "traps":
        limits = " ".join(f"{name}={environ[name]}" for name in _amx.LIMITS if name in environ)
        return Finding(
            False,
            f"advertised, but its instructions trap. All processes have {limits}: bfloat16 products on the CPU do "
            "without it. vLLM on the CPU computes in float32 only",
            "enable AMX for this virtual machine, or hide it; nothing else is lost",
        )
    if verdict == "unknown":
        return Finding(False, "it could not be found out whether AMX works", "run forge doctor outside of a sandbox")
    return Finding(True, "works" if verdict == "works" else "not offered by this processor")
