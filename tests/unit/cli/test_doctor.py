"""What `forge doctor` says about products on a processor, whatever was found."""

from __future__ import annotations

import pytest

from forge._amx import LIMITS
from forge.cli.doctor import check_rows, describe_amx, describe_rows
from forge.kernels import cpu_linear
from forge.kernels.row_check import Case

FAILED = (Case(1100, 40, 2), Case(2048, 40, 2))


def test_rows_that_are_independent() -> None:
    found = describe_rows((), num_checked=16, has_kernel=True)
    assert found.ok
    assert "16 cases" in found.detail
    assert not found.repair


def test_without_the_kernel_it_says_what_is_lost_and_for_which_shapes() -> None:
    found = describe_rows(FAILED, num_checked=16, has_kernel=False)
    assert not found.ok
    assert "1100→40 with 2 threads, 2048→40 with 2 threads" in found.detail
    assert "logprobs of sampler and trainer can differ in the last bits" in found.detail
    assert "install gcc" in found.repair


def test_without_the_kernel_nothing_is_promised_even_where_no_shape_failed() -> None:
    found = describe_rows((), num_checked=16, has_kernel=False)
    assert not found.ok
    assert "differ in the last bits" in found.detail
    assert "depends on its batch for" not in found.detail


def test_a_kernel_that_fails_is_reported() -> None:
    found = describe_rows(FAILED, num_checked=16, has_kernel=True)
    assert not found.ok
    assert found.detail.startswith("our kernel fails for 1100→40 with 2 threads")


def test_rows_are_independent_here() -> None:
    if cpu_linear.library() is None:
        pytest.skip("no compiler for the CPU kernels")
    assert check_rows().ok


def test_amx() -> None:
    assert describe_amx("works", {}).ok
    assert describe_amx("absent", {}).ok
    assert not describe_amx("unknown", {}).ok
    found = describe_amx("traps", LIMITS)
    assert not found.ok
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in found.detail
    assert "vLLM on the CPU computes in float32 only" in found.detail
    assert found.repair
