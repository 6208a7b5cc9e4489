"""Rows of numbers, column by column, that grow at the end and are read while they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_FIRST_CAPACITY: Final = 1024

Array = NDArray[Any]


class Columns:
    """Columns of one length. What `views` returned stays as it was: rows are added behind it, and replaced only as a
    whole."""

    def __init__(self, types: Mapping[str, type[np.generic]]) -> None:
        self._types = types
        self._count = 0
        self._arrays = {name: np.empty(0, kind) for name, kind in types.items()}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name][: self._count]

    def views(self) -> dict[str, Array]:
        """Return the columns as they are now."""
        return {name: array[: self._count] for name, array in self._arrays.items()}

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Add rows, each with one value for every column, in the order of the columns."""
        if not rows:
            return
        end = self._count + len(rows)
        self._reserve(end)
        for (name, kind), values in zip(self._types.items(), zip(*rows, strict=True), strict=True):
            self._arrays[name][self._count : end] = np.array(values, kind)
        self._count = end

    def keep(self, is_kept: Array) -> None:
        """Leave only the rows for which `is_kept` is true."""
        for name, array in self._arrays.items():
            self._arrays[name] = array[: self._count][is_kept]
        self._count = int(is_kept.sum())

    def replace(self, name: str, values: Array) -> None:
        """Put other values into a column."""
        self._arrays[name] = np.asarray(values, self._types[name])

    def _reserve(self, count: int) -> None:
        capacity = len(next(iter(self._arrays.values())))
        if count <= capacity:
            return
        capacity = max(_FIRST_CAPACITY, count, capacity + capacity // 2)
        for name, array in self._arrays.items():
            grown = np.empty(capacity, array.dtype)
            grown[: self._count] = array[: self._count]
            self._arrays[name] = grown
