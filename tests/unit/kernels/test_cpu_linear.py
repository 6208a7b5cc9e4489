"""The kernel of products: right, and the same bits for a row in any batch, with any threads, however it is compiled."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forge.kernels import cpu_linear, native_build, row_check

pytestmark = pytest.mark.skipif(cpu_linear.build() is None, reason="no compiler for the CPU kernels")
SHAPES = ((1, 1), (8, 16), (64, 48), (100, 13), (192, 49), (257, 130), (384, 96), (385, 6), (1408, 64))
COUNTS = (1, 2, 7, 8, 9, 16, 17, 24, 31, 33, 48, 50, 63, 64, 65, 129, 150)
NATIVE, PORTABLE = native_build.EXACT_FLAG_SETS
BUILDS = {"native": NATIVE, "without AVX-512": (*NATIVE, "-mno-avx512f"), "portable": PORTABLE}


def _flags() -> set[str]:
    text = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    return {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}


@pytest.fixture(params=list(BUILDS))
def multiply(request: pytest.FixtureRequest) -> row_check.MatrixProduct:
    if request.param == "without AVX-512" and "avx512f" not in _flags():
        pytest.skip("this processor has no AVX-512: the build is that of `native`")
    library = cpu_linear.build((BUILDS[request.param],))
    assert library is not None
    return functools.partial(cpu_linear.kernel_product, library)


def _operands(rows: int, width: int, outputs: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows * 7919 + width)
    return torch.randn(rows, width, generator=draw), torch.randn(outputs, width, generator=draw)


@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_results_are_right(multiply: row_check.MatrixProduct, width: int, outputs: int) -> None:
    x, weight = _operands(150, width, outputs)
    found, expected = multiply(x, weight, num_threads=2), x.double() @ weight.double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(multiply: row_check.MatrixProduct, width: int, outputs: int) -> None:
    x, weight = _operands(150, width, outputs)
    whole = multiply(x, weight, num_threads=1)
    for num_threads in (1, 2, 3):
        for count in COUNTS:
            start = 150 - count if count % 2 else 0
            rows = slice(start, start + count)
            assert torch.equal(multiply(x[rows].clone(), weight, num_threads=num_threads), whole[rows]), count


def test_no_case_depends_on_the_batch(multiply: row_check.MatrixProduct) -> None:
    assert row_check.problem_of(multiply, num_threads=2) is None
    assert row_check.dependent_cases(multiply, row_check.cases((1, 2))) == ()


def test_rows_may_lie_apart() -> None:
    x, weight = _operands(20, 96, 40)
    wide = torch.full((20, 200), float("nan"))
    wide[:, 10:106] = x
    whole = cpu_linear.product(x, weight)
    assert torch.equal(cpu_linear.product(wide[:, 10:106], weight), whole)
    assert torch.equal(cpu_linear.product(x.t().contiguous().t(), weight), whole)


def test_a_weight_may_be_transposed() -> None:
    x, weight = _operands(4, 64, 32)
    assert torch.equal(cpu_linear.product(x, weight.t().contiguous().t()), cpu_linear.product(x, weight))


def test_a_result_goes_where_it_is_wanted() -> None:
    x, weight = _operands(9, 64, 32)
    wide = torch.full((12, 40), 7.0)
    out = wide[:9, :32]
    assert cpu_linear.product(x, weight, out_RN=out) is out
    assert torch.equal(wide[:9, :32], cpu_linear.product(x, weight))
    assert (wide[9:] == 7).all()
    assert (wide[:, 32:] == 7).all()


@pytest.mark.parametrize(("rows", "outputs"), [(0, 32), (5, 0)])
def test_nothing_times_something_is_empty(rows: int, outputs: int) -> None:
    """A rank may have no part of the vocabulary."""
    x, weight = _operands(rows, 64, outputs)
    assert cpu_linear.product(x, weight).shape == (rows, outputs)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, weight = _operands(12, 64, 32)
    whole = cpu_linear.product(x, weight)
    x[3] = float("nan")
    spoiled = cpu_linear.product(x, weight)
    assert spoiled[3].isnan().all()
    others = [row for row in range(12) if row != 3]
    assert torch.equal(spoiled[others], whole[others])


@pytest.mark.parametrize(("width", "outputs"), [(64, 32), (33, 6), (77, 1), (64, 6)])
def test_without_the_kernel_torch_computes(width: int, outputs: int) -> None:
    x, weight = _operands(5, width, outputs)
    found = cpu_linear.torch_product(x, weight)
    assert found.shape == (5, outputs)
    torch.testing.assert_close(found, F.linear(x, weight))


def test_without_a_compiler_products_are_still_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    cpu_linear.library.cache_clear()
    try:
        x, weight = _operands(5, 64, 32)
        out = torch.empty(5, 32)
        assert cpu_linear.product(x, weight, out_RN=out) is out
        torch.testing.assert_close(out, F.linear(x, weight))
    finally:
        cpu_linear.library.cache_clear()
    assert "no C compiler" in caplog.text
    assert "logprobs differ in the last bits" in caplog.text
