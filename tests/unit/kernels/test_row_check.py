"""What is decided from the results of a product, which are handed in here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge.kernels import row_check
from forge.kernels.row_check import Case, cases, dependent_cases, problem_of

pytestmark = pytest.mark.usefixtures("one_thread")
CASES = cases((1, 2))


def exact(x: Tensor, weight: Tensor, *, num_threads: int) -> Tensor:
    """One term after the other, element by element: what no batch can change."""
    found = torch.zeros(len(x), len(weight))
    for terms, factors in zip(x.t()[:, :, None], weight.t()[:, None], strict=True):
        found += terms * factors
    return found


def one_term(x: Tensor, weight: Tensor, *, num_threads: int) -> Tensor:
    """No product, but a function of each row, and quick."""
    return x[:, :1] * weight[:, 0]


def nudged(found: Tensor) -> Tensor:
    return torch.nextafter(found, found + 1)


def test_a_product_by_rows_passes() -> None:
    assert dependent_cases(one_term, CASES) == ()
    assert problem_of(exact) is None
    assert problem_of(exact, num_threads=8) is None


def test_cases_are_every_shape_with_each_number_of_threads() -> None:
    assert len(CASES) == 2 * len(row_check.SHAPES)
    assert {(case.width, case.outputs) for case in CASES} == set(row_check.SHAPES)
    assert {(1100, 40), (2048, 40), (896, 151)} <= set(row_check.SHAPES)
    assert cases((4, 4), [(8, 16)]) == (Case(8, 16, 4),)


def test_a_last_bit_that_depends_on_the_number_of_rows_is_found() -> None:
    """As one library does from 16 rows on, for some shapes, with two threads."""

    def product(x: Tensor, weight: Tensor, *, num_threads: int) -> Tensor:
        found = one_term(x, weight, num_threads=num_threads)
        is_odd = num_threads == 2 and weight.shape == (40, 1100) and len(x) >= 16
        return nudged(found) if is_odd else found

    assert dependent_cases(product, CASES) == (Case(1100, 40, 2),)
    assert str(Case(1100, 40, 2)) == "1100→40 with 2 threads"


def test_a_last_bit_that_depends_on_the_place_is_found() -> None:
    """Where threads share rows out, the first row of a part is computed differently."""

    def product(x: Tensor, weight: Tensor, *, num_threads: int) -> Tensor:
        found = one_term(x, weight, num_threads=num_threads)
        if num_threads == 2 and len(weight) == 213:
            found[len(x) // 2] = nudged(found[len(x) // 2])
        return found

    assert dependent_cases(product, CASES) == (Case(80, 213, 2),)


def test_a_last_bit_that_depends_on_the_number_of_threads_is_found() -> None:
    """A generator with one thread and a trainer with two have to agree as well."""

    def product(x: Tensor, weight: Tensor, *, num_threads: int) -> Tensor:
        found = exact(x, weight, num_threads=num_threads)
        return nudged(found) if num_threads == 2 else found

    assert dependent_cases(product, cases((1, 2), [(8, 16)])) == (Case(8, 16, 2),)
    assert problem_of(product) is None
    assert problem_of(product, num_threads=2) == "a row depends on the others (77→1 with 2 threads)"


def test_wrong_results_are_found() -> None:
    def doubled(x: Tensor, weight: Tensor, *, num_threads: int) -> Tensor:
        return 2 * exact(x, weight, num_threads=num_threads)

    def spoiled(x: Tensor, weight: Tensor, *, num_threads: int) -> Tensor:
        found = exact(x, weight, num_threads=num_threads)
        found[0, 0] = float("nan")
        return found

    def short(x: Tensor, weight: Tensor, *, num_threads: int) -> Tensor:
        return exact(x[1:], weight, num_threads=num_threads)

    for product in (doubled, spoiled, short):
        assert problem_of(product) == "its results are wrong (77→1 with 1 thread)"
