"""Calls of typed handles, right and wrong. `test_typed_calls` lets mypy read this file; nothing here runs.

A line that ends in `# error: code` must be reported with that code, and no other line may be reported.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import assert_type

import forge
from forge import ForgeActor, Service, endpoint
from forge.runtime import ActorHandle, MeshActor
from forge.service import Batch, Outcome, ServiceMetrics


class Policy(ForgeActor):
    def __init__(self, model: str) -> None:
        self.model = model

    @endpoint
    async def generate(self, prompt: str, *, n: int = 1) -> list[str]:
        return [prompt] * n

    @endpoint(retry=True)
    def count(self, text: str) -> int:
        return len(text)

    @endpoint
    async def words(self, prompt: str) -> AsyncIterator[str]:
        yield prompt

    @endpoint(retry=True)
    async def numbers(self, most: int) -> AsyncGenerator[int, None]:
        yield most

    @endpoint(batch=Batch(size=4))
    async def score(self, texts: list[str]) -> list[float]:
        return [0.0 for _ in texts]

    @endpoint(batch=8, retry=True)
    def grade(self, texts: Sequence[str]) -> list[int | Exception]:
        return [self.count(text) for text in texts]

    @endpoint
    async def both(self, prompt: str) -> list[str]:
        assert_type(self.count(prompt), int)
        assert_type(await self.score([prompt]), Sequence[float | Exception])
        self.count(1)  # error: arg-type
        return await self.generate(prompt, n=2)


class Tuned(Policy):
    @endpoint
    async def generate(self, prompt: str, *, n: int = 1, adapter: str = "") -> list[str]:
        return await super().generate(prompt, n=n)


class Counter(MeshActor):
    @endpoint
    async def add(self, amount: int) -> int:
        return amount


async def call_a_service(policy: Service[Policy]) -> None:
    assert_type(await policy.generate.route("a", n=2), list[str])
    assert_type(await policy.generate.fanout("a"), list[list[str]])
    assert_type(await policy.count.route(text="a"), int)
    await policy.generate.route()  # error: call-arg
    await policy.generate.route(1)  # error: arg-type
    await policy.generate.route("a", m=2)  # error: call-arg
    await policy.generate.route("a", n="2")  # error: arg-type
    await policy.count.fanout(b"a")  # error: arg-type
    await policy.generat.route("a")  # error: attr-defined
    await policy.generate.call_all("a")  # error: attr-defined
    text: str = await policy.count.route("a")  # error: assignment
    print(text)


async def read_a_stream(policy: Service[Policy]) -> None:
    async for word in policy.words.stream("a"):
        assert_type(word, str)
    assert_type(policy.numbers.options(timeout_s=1.0).stream(most=3), AsyncGenerator[int, None])
    policy.numbers.stream("3")  # error: arg-type
    await policy.words.route("a")  # error: attr-defined


async def use_a_session(policy: Service[Policy]) -> None:
    async with policy.session() as session:
        assert_type(session, str)
        assert_type(await policy.generate.options(session=session).route("a"), list[str])
    await policy.terminate_session(await policy.start_session())
    await policy.terminate_session(3)  # error: arg-type


async def choose_options(policy: Service[Policy]) -> None:
    assert_type(await policy.count.options(timeout_s=1.0, retry=False).fanout("a"), list[int])
    assert_type(await policy.count.options(partial=True).fanout("a"), list[Outcome])
    assert_type(await policy.count.rolling("a"), list[int])
    assert_type(await policy.count.options(partial=True).rolling("a"), list[Outcome])
    assert_type(await policy.count.options(all_ranks=True).route("a"), tuple[int, ...])
    assert_type(await policy.count.options(partial=True, all_ranks=True).fanout("a"), list[Outcome])
    await policy.count.options(all_ranks=True).route(1)  # error: arg-type
    policy.count.options(timeout=1.0)  # error: call-overload


async def call_in_batches(policy: Service[Policy]) -> None:
    assert_type(await policy.score.route("a"), float)
    assert_type(await policy.score.fanout("a"), list[float])
    assert_type(await policy.grade.options(timeout_s=1.0).route("a"), int)
    await policy.score.route(["a"])  # error: arg-type


async def call_an_actor(counter: ActorHandle[Counter]) -> None:
    assert_type(await counter.add.call_one(1), int)
    assert_type(counter.add.call_one(amount=1).get(), int)
    values = await counter.add.call(1)
    assert_type([value for _, value in values.items()], list[int])
    assert_type([value for value in values.values()], list[int])  # noqa: C416
    assert_type(await counter.add.choose(1), int)
    await counter.slice(procs=0).add.call_one("1")  # error: arg-type
    await counter.add.call("1")  # error: arg-type
    counter.add.broadcast(1, 2)  # error: call-arg
    assert_type(counter.pids, tuple[int, ...])
    await counter.stop()


async def start() -> None:
    async with forge.run():
        policy = await Policy.options(num_replicas=2).as_service("model")
        assert_type(policy, Policy)
        assert_type(await policy.get_metrics(), ServiceMetrics)
        await policy.wait_until(lambda metrics: metrics.num_healthy == 2, timeout_s=60)
        await call_a_service(policy)
        await policy.shutdown()
        tuned = await Tuned.as_service("model")
        assert_type(await tuned.generate.route("a", adapter="b"), list[str])
        await call_a_service(tuned)
        await policy.generate.route("a", adapter="b")  # error: call-arg
        counter = await Counter.options(procs=2).as_actor()
        await call_an_actor(counter)
        Counter.as_actor().add  # noqa: B018  # error: attr-defined
