"""The handle of the generators: what it does when their queues are full, or when one dies."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from episodes import make_completion
from forge.config import GeneratorConfig, GRPOConfig, Sampling, load
from forge.errors import ActorFailure, ConfigError, FanoutError, Overloaded, ServiceStopped, SyncError
from forge.generator.engine import UpdateReport
from forge.generator.native.cache_size import ColocatedGeneratorConfig
from forge.loops.workers import (
    PolicyHandle,
    Workers,
    generator_config,
    gpus_beside,
)
from forge.memory import resolve_run
from forge.service.records import Outcome
from forge.trainer.handles import ServiceTrainer
from forge.types import Task
from grpo_workers import StandInService

PROMPT = Task("p", text="hello")


class Full:
    """A generator with room for two requests."""

    def __init__(self) -> None:
        self.running = self.num_refused = 0
        self.go_on = asyncio.Event()

    async def route(self, **request: Any) -> list[Any]:
        if self.running == 2:
            self.num_refused += 1
            raise Overloaded("full")
        self.running += 1
        await self.go_on.wait()
        self.running -= 1
        return [make_completion()]


def policy(**endpoints: Any) -> PolicyHandle:
    return PolicyHandle(SimpleNamespace(**endpoints))  # type: ignore[arg-type]


def test_requests_beyond_the_queue_wait_until_others_are_done() -> None:
    async def body() -> None:
        full = Full()
        handle = policy(generate=full)
        asking = [asyncio.ensure_future(handle.generate(PROMPT, sampling=Sampling())) for _ in range(7)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert (full.running, full.num_refused) == (2, 5)
        full.go_on.set()
        assert [len(found) for found in await asyncio.wait_for(asyncio.gather(*asking), 600)] == [1] * 7

    asyncio.run(body())


def test_a_request_that_is_too_large_by_itself_raises() -> None:
    async def body() -> None:
        full = Full()
        full.running = 2
        with pytest.raises(Overloaded):
            await policy(generate=full).generate(PROMPT, sampling=Sampling())

    asyncio.run(body())


def updated(*outcomes: Outcome) -> Any:
    async def fanout(version: int) -> list[Any]:
        if all(outcome.ok for outcome in outcomes):
            return [outcome.value for outcome in outcomes]
        raise FanoutError("some failed", outcomes=outcomes)

    return asyncio.run(policy(update_weights=SimpleNamespace(fanout=fanout)).update_weights(3))


def test_a_generator_that_dies_during_an_update_is_not_waited_for() -> None:
    report = UpdateReport(3, "keep", 0.1, 0.0)
    assert updated(Outcome(0, report), Outcome(1, error=ActorFailure("died"))) == [report]
    assert updated(Outcome(0, report), Outcome(1, None)) == [report]


def test_an_update_that_fails_otherwise_is_raised() -> None:
    report = UpdateReport(3, "keep", 0.1, 0.0)
    with pytest.raises(FanoutError):
        updated(Outcome(0, report), Outcome(1, error=SyncError("not the trainer's weights")))


def test_a_service_that_does_not_end_in_order_cuts_nobody_short() -> None:
    """The trainer completes its last checkpoint as it closes."""
    done: list[str] = []

    class Slow:
        async def close(self) -> None:
            for _ in range(5):
                await asyncio.sleep(0)
            done.append("closed")

    class Lost:
        async def close(self) -> None:
            raise ServiceStopped("all its replicas were given up")

    workers: Any = (Slow(), Lost(), StandInService(Slow()), None)
    asyncio.run(Workers(*workers).close())
    assert done == ["closed", "closed"]
    workers = (Lost(), Slow(), StandInService(Slow()), None)
    with pytest.raises(ServiceStopped):
        asyncio.run(Workers(*workers).close())


QWEN3_1_7B = load(GRPOConfig, overrides=["model.preset=qwen3_1_7b", "model.name=policy"]).model


@pytest.mark.parametrize(
    ("placement", "keys", "share"),
    [
        ("apart", {}, None),
        ("beside", {}, 0.35),
        ("turns", {}, None),
        ("turns", {"generator": {"engine": "vllm"}}, 0.5),
        ("turns", {"generator": {"gpu_memory_share": 0.3}}, 0.3),
        ("shared", {}, None),
        ("beside", {"generator": {"num_replicas": 2}}, 0.175),
        ("beside", {"generator": {"gpu_memory_share": 0.2, "num_replicas": 2}}, 0.2),
        ("apart", {"generator": {"gpu_memory_share": 0.9}}, 0.9),
    ],
)
def test_a_generator_leaves_the_rest_of_a_gpu_to_the_trainer(
    placement: str, keys: dict[str, Any], share: float | None
) -> None:
    chosen = GRPOConfig.model_validate({"placement": placement, **keys})
    made = generator_config(chosen, QWEN3_1_7B, resolve_run(chosen, facts=QWEN3_1_7B))
    assert made.gpu_memory_share == (None if share is None else pytest.approx(share))
    assert made.model.name == "policy"


@pytest.mark.parametrize(
    ("keys", "gigabytes", "num_colocated"),
    [
        ({"placement": "shared"}, 0, 1),
        ({"placement": "turns"}, 6.88, 1),
        ({"placement": "turns", "generator": {"num_replicas": 3}}, 6.88, 3),
        ({"placement": "turns", "generator": {"precision": "float32"}}, 13.77, 1),
        ({"placement": "turns", "generator": {"engine": "vllm"}}, None, None),
        ({"placement": "beside"}, None, None),
        ({"placement": "apart"}, None, None),
    ],
)
def test_a_guest_leaves_room_for_what_is_still_to_come(
    keys: dict[str, Any], gigabytes: float | None, num_colocated: int | None
) -> None:
    """In turns two published versions of the weights will be on the GPU; in one process nothing is published."""
    keys = {**keys, "generator": {"with_gpus": True, **keys.get("generator", {})}}
    chosen = GRPOConfig.model_validate(keys)
    made = generator_config(chosen, QWEN3_1_7B, resolve_run(chosen, facts=QWEN3_1_7B))
    if gigabytes is None:
        assert type(made) is GeneratorConfig
        return
    assert isinstance(made, ColocatedGeneratorConfig)
    assert made.expected_bytes / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert made.num_colocated == num_colocated
    assert GeneratorConfig.model_validate(made.model_dump(exclude={"expected_bytes", "num_colocated"}))
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"with_gpus": True}, "bfloat16"),
        ({"with_gpus": False}, None),
        ({"with_gpus": True, "precision": "float32"}, None),
        ({"with_gpus": False, "precision": "bfloat16"}, "bfloat16"),
        ({"with_gpus": True, "engine": "vllm", "engine_args": {"dtype": "float32"}}, None),
        ({"with_gpus": True, "engine": "vllm", "engine_args": {"dtype": "auto"}}, None),
    ],
)
def test_weights_are_sent_in_what_generators_make_of_them(fields: dict[str, Any], expected: str | None) -> None:
    run = resolve_run(GRPOConfig.model_validate({"generator": fields}), facts=QWEN3_1_7B)
    assert run.published_dtype == expected


def test_a_trainer_is_told_what_to_publish_in() -> None:
    asked: list[Any] = []

    async def route(*args: Any, **kwargs: Any) -> None:
        asked.append((args, kwargs))

    actor = SimpleNamespace(publish_weights=SimpleNamespace(route=route))
    asyncio.run(ServiceTrainer(actor, dtype="bfloat16", keep=3).publish_weights(4, name="policy"))
    assert asked == [((4,), {"name": "policy", "dtype": "bfloat16", "keep": 3})]


def test_beside_a_trainer_generators_use_its_first_gpus() -> None:
    assert gpus_beside("3", tensor_parallel=1) == "3"
    assert gpus_beside("3,5,6", tensor_parallel=2) == "3,5"
    with pytest.raises(ConfigError) as caught:
        gpus_beside("3,5", tensor_parallel=4)
    error = caught.value
    assert (error.path, error.value) == ("generator.tensor_parallel", 4)
    assert "at most 2" in error.rule
    assert "placement: apart" in error.repair
