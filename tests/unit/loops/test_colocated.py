"""One process for trainer and generator: when they can compute with the same tensors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge.config import GeneratorConfig
from forge.loops.colocated import SharedPolicy, shareable
from forge.runtime.device_memory import OutOfDeviceMemory


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
    assert shareable(GeneratorConfig(**fields), parameters) == (parameters if expected else {})


def test_one_parameter_of_another_precision_is_enough() -> None:
    parameters = {"weight": torch.zeros(2), "norm.weight": torch.zeros(1, dtype=torch.float64)}
    assert not shareable(GeneratorConfig(precision="float32"), parameters)


def test_weights_below_an_adapter_of_another_precision_are_shared() -> None:
    base = {"wq.weight": torch.zeros(2, dtype=torch.bfloat16)}
    adapter = {"wq.lora_a": torch.zeros(1), "wq.lora_b": torch.zeros(1)}
    found = shareable(GeneratorConfig(precision="bfloat16"), base | adapter)
    assert found.keys() == base.keys()
    assert not shareable(GeneratorConfig(precision="float32"), base | adapter), "the adapter alone is no model"


class ReleasingPolicy(SharedPolicy):
    """The policy without its engine: what it asks of one is noted."""

    def __init__(self, *, is_on_gpu: bool = True, is_idle: bool = True, restore_error: Exception | None = None) -> None:
        self.asked: list[str] = []
        self._runs_ahead = False
        self.has_begun = asyncio.Event()
        self._restore_error = restore_error
        self._engine_asked = SimpleNamespace(
            version=0,
            is_on_gpu=is_on_gpu,
            paused=self._paused,
            release_cache=lambda preempt: self.asked.append("release") or is_idle,
            restore_cache=self._restore,
        )

    @property
    def _native(self) -> Any:
        return self._engine_asked

    @contextlib.asynccontextmanager
    async def _paused(self, version: int) -> AsyncIterator[None]:
        self.asked.append("pause")
        try:
            yield
        finally:
            self.asked.append("resume")

    def _restore(self) -> None:
        self.asked.append("restore")
        if self._restore_error is not None:
            raise self._restore_error

    async def _do(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    async def work(self, error: Exception | None = None, until: asyncio.Event | None = None) -> str:
        async def step() -> str:
            self.asked.append("work")
            self.has_begun.set()
            if until is not None:
                await until.wait()
            if error is not None:
                raise error
            return "done"

        return await self._between_steps(step)


@pytest.mark.parametrize(
    ("is_on_gpu", "is_idle", "expected"),
    [
        (True, True, ["release", "work", "restore"]),
        (True, False, ["release", "work"]),
        (False, True, ["work"]),
    ],
)
def test_a_trainer_has_the_memory_of_the_cache(is_on_gpu: bool, is_idle: bool, expected: list[str]) -> None:
    policy = ReleasingPolicy(is_on_gpu=is_on_gpu, is_idle=is_idle)
    assert asyncio.run(policy.work()) == "done"
    assert policy.asked == ["pause", *expected, "resume"]


TOO_LITTLE = OutOfDeviceMemory("no room", path="generator.kv_cache_gb", value="1 GiB", rule="less", repair="lower it")


@pytest.mark.parametrize("restore_error", [None, TOO_LITTLE])
def test_the_cache_comes_back_after_a_step_that_failed_and_its_error_is_told(restore_error: Exception | None) -> None:
    policy = ReleasingPolicy(restore_error=restore_error)
    with pytest.raises(ArithmeticError, match="no number"):
        asyncio.run(policy.work(ArithmeticError("no number")))
    assert policy.asked == ["pause", "release", "work", "restore", "resume"]


def test_a_cache_that_does_not_come_back_after_a_step_is_told() -> None:
    with pytest.raises(OutOfDeviceMemory):
        asyncio.run(ReleasingPolicy(restore_error=TOO_LITTLE).work())


def test_whoever_cancels_a_step_waits_until_its_cache_is_back() -> None:
    async def body() -> None:
        policy, until = ReleasingPolicy(), asyncio.Event()
        step = asyncio.ensure_future(policy.work(until=until))
        await policy.has_begun.wait()
        step.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert policy.asked == ["pause", "release", "work"], "generation is still held"
        until.set()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert policy.asked == ["pause", "release", "work", "restore", "resume"]

    asyncio.run(body())


def test_weights_in_few_bits_are_shared_in_every_precision() -> None:
    base = {"norm.weight": torch.ones(2, dtype=torch.bfloat16)}
    packed = {"wq.weight_packed": torch.ones(2, dtype=torch.uint8), "wq.weight_scales": torch.ones(1)}
    assert shareable(GeneratorConfig(precision="bfloat16"), base | packed) == base | packed
    assert not shareable(GeneratorConfig(precision="float32"), base | packed)
