"""What a handle says when it is used as another library's, or before it was awaited."""

from __future__ import annotations

import asyncio
import copy

import pytest

import forge
from forge import ForgeActor, endpoint
from forge.runtime.actor import PendingHandle
from forge.runtime.handle import EndpointVerbs
from forge.service.handle import Service
from forge.service.options import ServiceOptions


class Policy(ForgeActor):
    @endpoint
    async def generate(self, prompt: str) -> str:
        return prompt

    @endpoint
    async def words(self):
        yield "word"


@pytest.mark.parametrize(
    ("verb", "meant"),
    [
        ("call_all", "fanout"),
        ("call", "fanout"),
        ("broadcast", "fanout"),
        ("call_one", "route"),
        ("choose", "route"),
    ],
)
@pytest.mark.parametrize("name", ["generate", "words"])
def test_a_service_names_its_equivalent_of_other_verbs(verb: str, meant: str, name: str) -> None:
    service = Service(Policy, ServiceOptions(), name="policy", uid="one")
    with pytest.raises(AttributeError) as caught:
        getattr(getattr(service, name), verb)
    assert str(caught.value) == f"policy.{name} has no {verb!r}: use .{meant}(...)"


def test_a_verb_of_nobody_lists_those_that_there_are() -> None:
    service = Service(Policy, ServiceOptions(), name="policy", uid="two")
    with pytest.raises(AttributeError, match="has no 'rout': an endpoint is called with route, fanout or stream"):
        service.generate.rout  # noqa: B018
    assert not hasattr(service.generate, "_anything")
    copy.copy(service.generate)


@pytest.mark.parametrize(("verb", "meant"), [("route", "call_one"), ("fanout", "call"), ("call_all", "call")])
def test_an_actor_names_its_equivalent_of_a_services_verbs(verb: str, meant: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(EndpointVerbs(object(), None, "trainer"), verb)
    assert str(caught.value) == f"an endpoint of actor trainer has no {verb!r}: use .{meant}(...)"


@pytest.mark.parametrize("start", ["as_service", "as_actor"])
@pytest.mark.parametrize("spawner", [Policy, Policy.options()])
def test_a_forgotten_await_is_named(start: str, spawner: type[Policy]) -> None:
    starting = getattr(spawner, start)("model")
    with pytest.raises(AttributeError) as caught:
        starting.generate  # noqa: B018
    call = f"Policy.{start}(...)"
    assert str(caught.value) == f"{call} was not awaited, so there is no 'generate' yet: write `await {call}`"
    assert repr(starting) == f"<{call}, not awaited>"
    starting.close()


def test_what_is_started_can_be_awaited_gathered_and_made_a_task() -> None:
    async def started(value: int) -> int:
        await asyncio.sleep(0)
        return value

    async def body() -> list[int]:
        first = await PendingHandle(started(1), call="a")
        task = asyncio.create_task(PendingHandle(started(2), call="b"))
        async with asyncio.TaskGroup() as tasks:
            third = tasks.create_task(PendingHandle(started(3), call="c"))
        fourth, fifth = await asyncio.gather(PendingHandle(started(4), call="d"), started(5))
        return [first, await task, third.result(), fourth, fifth]

    assert asyncio.run(body()) == [1, 2, 3, 4, 5]


def test_cancelling_a_start_reaches_it() -> None:
    seen: list[str] = []

    async def waiting() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def body() -> None:
        task = asyncio.create_task(PendingHandle(waiting(), call="a"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert seen == ["cancelled"]


def test_the_library_names_its_store_for_another_ones() -> None:
    with pytest.raises(AttributeError, match=r"`import forge\.store as ts`"):
        forge.torchstore  # noqa: B018


def test_the_failure_of_an_actor_is_a_public_name() -> None:
    from forge.errors import ActorFailure

    assert forge.ActorFailure is ActorFailure
