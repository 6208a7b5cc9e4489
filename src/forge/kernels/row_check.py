"""Whether a matrix product gives a row the same bits in any batch: checked by computing, not by knowing the library.

What is checked is any function (x [R, K], weight [N, K], num_threads) -> [R, N], so that a test can hand in one that
fails. `forge.kernels.cpu_linear` checks its kernel with it before the first use, and `forge doctor` what this machine
computes with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor


class MatrixProduct(Protocol):
    """x @ weight.T with so many threads."""

    def __call__(self, x: Tensor, weight: Tensor, *, num_threads: int) -> Tensor: ...


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """A weight's shape and a number of threads."""

    width: int
    outputs: int
    num_threads: int

    def __str__(self) -> str:
        return f"{self.width}→{self.outputs} with {self.num_threads} thread{'s' if self.num_threads > 1 else ''}"


SHAPES: Final = ((64, 64), (77, 1), (130, 8), (80, 213), (512, 96), (896, 151), (1100, 40), (2048, 40))
"""Widths and outputs: those of small models, odd ones, and those for which a library was seen to fail."""
START_SHAPES: Final = ((77, 1), (400, 50))
"""What is computed whenever the kernel is loaded: a chain and a part of one, tiles that are whole and not."""
_NUM_ROWS: Final = 150
_COUNTS: Final = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128)
_STARTS: Final = (0, 1, 13)
_TOLERANCE: Final = 1e-5


def cases(num_threads: Iterable[int], shapes: Iterable[tuple[int, int]] = SHAPES) -> tuple[Case, ...]:
    """Return every shape with each of these numbers of threads."""
    shapes = tuple(shapes)
    return tuple(Case(*shape, threads) for threads in sorted(set(num_threads)) for shape in shapes)


def dependent_cases(product: MatrixProduct, checked: Iterable[Case]) -> tuple[Case, ...]:
    """Return the cases in which some row has other bits in another batch, or with another number of threads."""
    return tuple(case for case in checked if not _is_independent(product, case))


def problem_of(product: MatrixProduct, *, num_threads: int = 1) -> str | None:
    """Return why this product must not be used; None if its results are right and no row depends on the others."""
    checked = cases((1, num_threads), START_SHAPES)
    for case in checked:
        x, weight = _operands(case)
        found, expected = product(x, weight, num_threads=case.num_threads), x.double() @ weight.double().T
        allowed = _TOLERANCE * (x.double().abs() @ weight.double().abs().T)
        if found.shape != expected.shape or not bool(((found.double() - expected).abs() <= allowed).all()):
            return f"its results are wrong ({case})"
    failed = dependent_cases(product, checked)
    return f"a row depends on the others ({failed[0]})" if failed else None


def _is_independent(product: MatrixProduct, case: Case) -> bool:
    x, weight = _operands(case)
    whole = product(x, weight, num_threads=1)
    if not torch.equal(product(x, weight, num_threads=case.num_threads), whole):
        return False
    return all(
        torch.equal(product(x[rows].clone(), weight, num_threads=case.num_threads), whole[rows]) for rows in _batches()
    )


def _batches() -> Iterator[slice]:
    for count in _COUNTS:
        for start in _STARTS:
            yield slice(start, start + count)


def _operands(case: Case) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(case.width * 7919 + case.outputs)
    x = torch.randn(_NUM_ROWS, case.width, generator=draw)
    return x, torch.randn(case.outputs, case.width, generator=draw)
