"""How many rows a matrix product on a CPU needs for each row to get the same bits whatever their number is.

A library of matrix products takes other paths for a few rows than for many, and the last bits differ. Measured with
torch's own (MKL) on AMD: from four rows for each thread on, a row of x @ weight.T has the same bits for any number of
rows and any place among them. On Intel that holds for most shapes only. Where `forge.runtime.cpu_linear` has no kernel,
products are padded to this number, and nothing is promised.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

LEAST_ROWS: Final = 16
ROWS_PER_THREAD: Final = 4
_PLAIN: Final = (torch.Tensor, nn.Parameter)


def row_floor() -> int:
    """The least number of rows with which a row's bits do not depend on their number."""
    num_threads: int = torch.get_num_threads()
    return max(LEAST_ROWS, ROWS_PER_THREAD * num_threads)


def is_rowwise(tensor: Tensor) -> bool:
    """Whether rows of this tensor are kept independent of their number: plain float32 on a CPU, not being compiled."""
    return (
        type(tensor) in _PLAIN and tensor.dtype == torch.float32 and tensor.is_cpu and not torch.compiler.is_compiling()
    )
