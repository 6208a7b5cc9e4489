"""A rank that has withdrawn joins nothing any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge.errors import StoreError
from forge.store.records import Begin, Layout
from forge.store.tensors import shards_of
from forge.store.writer import Joiner


class Line:
    """Takes down what it is asked, and answers nothing."""

    is_open = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def request(self, verb: str, wish: Any) -> Any:
        self.asked.append(verb)
        raise AssertionError("nothing is to be asked")


def test_a_rank_that_has_withdrawn_is_refused_without_asking() -> None:
    line = Line()
    joiner = Joiner(SimpleNamespace(line=line))  # type: ignore[arg-type]
    joiner.withdraw()
    layout = Layout.of(("w",), (shards_of(torch.zeros(2), name="w"),))
    with pytest.raises(StoreError, match="gave up before all ranks") as caught:
        joiner.begin(Begin("policy", "weights", 0, rank=1, world_size=2), layout, None)
    assert caught.value.value == "rank 1 of 2"
    assert line.asked == []
