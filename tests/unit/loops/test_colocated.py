"""One process for trainer and generator: when they can compute with the same tensors."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge.config import GeneratorConfig
from forge.loops.colocated import SharedPolicy, can_share


@pytest.mark.parametrize(
    ("kept_in", "fields", "expected"),
    [
        (torch.float32, {}, True),
        (torch.float32, {"precision": "float32"}, True),
        (torch.bfloat16, {"precision": "bfloat16"}, True),
        (torch.float32, {"precision": "bfloat16"}, False),
        (torch.bfloat16, {}, False),
        (torch.float32, {"with_gpus": True, "precision": "float32"}, False),
    ],
)
def test_weights_are_shared_in_one_precision_on_one_device(
    kept_in: torch.dtype, fields: dict[str, Any], expected: bool
) -> None:
    parameters = {"weight": torch.zeros(2, dtype=kept_in), "norm.weight": torch.zeros(1, dtype=kept_in)}
    assert can_share(GeneratorConfig(**fields), parameters) is expected


def test_one_parameter_of_another_precision_is_enough() -> None:
    parameters = {"weight": torch.zeros(2), "norm.weight": torch.zeros(1, dtype=torch.float64)}
    assert not can_share(GeneratorConfig(precision="float32"), parameters)


class Lending(SharedPolicy):
    """The policy without its engine: what it asks of one is noted."""

    def __init__(self, *, is_on_gpu: bool, is_idle: bool) -> None:
        self.asked: list[str] = []
        self._engine_asked = SimpleNamespace(
            is_on_gpu=is_on_gpu,
            lend_cache=lambda: self.asked.append("lend") or is_idle,
            reclaim_cache=lambda: self.asked.append("reclaim"),
        )

    @property
    def _native(self) -> Any:
        return self._engine_asked

    async def _do(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    async def work(self, error: Exception | None = None) -> None:
        async with self._cache_lent():
            self.asked.append("work")
            if error is not None:
                raise error


@pytest.mark.parametrize(
    ("is_on_gpu", "is_idle", "expected"),
    [
        (True, True, ["lend", "work", "reclaim"]),
        (True, False, ["lend", "work"]),
        (False, True, ["work"]),
    ],
)
def test_a_trainer_has_the_memory_of_the_cache(is_on_gpu: bool, is_idle: bool, expected: list[str]) -> None:
    policy = Lending(is_on_gpu=is_on_gpu, is_idle=is_idle)
    asyncio.run(policy.work())
    assert policy.asked == expected


def test_the_cache_comes_back_after_a_step_that_failed() -> None:
    policy = Lending(is_on_gpu=True, is_idle=True)
    with pytest.raises(ArithmeticError):
        asyncio.run(policy.work(ArithmeticError("no number")))
    assert policy.asked == ["lend", "work", "reclaim"]
