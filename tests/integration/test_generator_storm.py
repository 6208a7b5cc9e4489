"""What a generator does at bad moments: time-outs amid updates, proofs that cannot be made, queues that are full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

import generator_models as models
from forge.errors import OptionError, SyncError
from forge.generator.actor import Generator
from forge.store import Weights
from forge.store.canary import Canary, canary_ids, put_canary
from generator_actor import config, generator, publish
from generator_models import FIRST, SECOND, prompt

pytestmark = pytest.mark.usefixtures("leaves_nothing", "one_thread")
Drive = Callable[[Coroutine[Any, Any, Any]], Any]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SHORT = {**GREEDY, "max_tokens": 8}


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - the engine's thread tells nobody
        await asyncio.sleep(0)


async def read_into(seen: list[Any], stream: AsyncIterator[Any]) -> None:
    async for item in stream:
        seen.append(item)  # noqa: PERF401 - what came before an error counts


# ---- Weights that were not proven ----------------------------------------------------------------------------------


async def given_up_when_in_place(policy: Generator, version: int) -> None:
    """Ask for a version and stop waiting for it when its weights are in place, and not yet proven."""
    update = asyncio.ensure_future(policy.update_weights(version))
    await until(lambda: policy._engine.version == version)
    assert not update.done()
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update


def test_weights_are_proven_even_if_nobody_waits_for_the_update_any_more(drive: Drive) -> None:
    async def body() -> None:
        async with generator() as policy:
            await publish(1, SECOND, canary=FIRST)
            await given_up_when_in_place(policy, 1)
            with pytest.raises(SyncError):
                await policy.generate(token_ids=prompt(20), sampling=SHORT)
            await publish(2, SECOND, canary=SECOND)
            await given_up_when_in_place(policy, 2)
            (completion,) = await policy.generate(token_ids=prompt(20), sampling=SHORT)
            assert (completion.token_ids, completion.version) == (models.greedy(prompt(20), 8, SECOND), 2)

    drive(body())


def test_a_proof_that_cannot_be_made_is_a_failed_one(drive: Drive) -> None:
    async def body() -> None:
        async with generator() as policy:
            await put_canary("policy", Canary(1, canary_ids(512), (0.0, -1.0)))  # it was spoilt: too few logprobs
            await Weights("policy", rank=0, world_size=1).publish(models.weights(SECOND), version=1)
            with pytest.raises(SyncError, match="version 1 were not verified") as raised:
                await policy.update_weights()
            assert (raised.value.path, raised.value.value) == ("generator.canary", 1)
            assert "update again" in (raised.value.repair or "")
            with pytest.raises(SyncError):
                await policy.generate(token_ids=prompt(20), sampling=SHORT)
            await publish(2, SECOND, canary=SECOND)
            await policy.update_weights()
            assert len(await policy.generate(token_ids=prompt(20), sampling=SHORT)) == 1

    drive(body())


def test_tokens_of_a_version_that_failed_are_not_handed_out_after_the_next_one(drive: Drive) -> None:
    async def body() -> None:
        async with generator() as policy:
            await publish(1, SECOND, canary=FIRST)  # before, so that the stream does not end while it is published
            stream = policy.generate_stream(token_ids=prompt(20), sampling=GREEDY)
            await anext(stream)  # from now on its reader looks elsewhere
            with pytest.raises(SyncError):
                await policy.update_weights()
            before = policy._engine.stats().num_tokens
            await until(lambda: policy._engine.stats().num_tokens > before + 3)
            await publish(2, FIRST, canary=FIRST)
            await policy.update_weights()
            seen: list[Any] = []
            with pytest.raises(SyncError, match="version 1"):
                await read_into(seen, stream)
            assert {delta.version for delta in seen} <= {-1}

    drive(body())


def test_a_number_that_was_published_again_is_proven_again(drive: Drive) -> None:
    async def body() -> None:
        async with generator() as policy:
            await publish(1, FIRST, canary=FIRST)
            await policy.update_weights()
            await Weights("policy").rewind(to=0)
            await publish(1, SECOND, canary=FIRST)
            stream = policy.generate_stream(token_ids=prompt(20), sampling=GREEDY)
            seen = [await anext(stream)]
            update = asyncio.ensure_future(policy.update_weights())
            with pytest.raises(SyncError):
                await read_into(seen, stream)
            with pytest.raises(SyncError):
                await update
            tokens = sum((delta.token_ids for delta in seen), ())
            assert tokens == models.choices(prompt(20), tokens, FIRST), "no token of weights that were not proven"

    drive(body())


@pytest.mark.parametrize("version", ["newest", -1, True, 1.5, None, [1]])
def test_a_version_that_cannot_be_is_refused_at_once(version: Any) -> None:
    async def body() -> None:
        policy = Generator(config())
        policy._is_front = True
        with pytest.raises(OptionError, match="whole number >= 0") as raised:
            await policy.update_weights(version)
        assert (raised.value.path, raised.value.value) == ("update_weights(version=)", version)

    asyncio.run(body())


def test_a_context_shorter_than_the_canary_is_proven_as_far_as_it_goes(drive: Drive) -> None:
    async def body() -> None:
        async with generator(max_seq_len=16) as policy:
            await publish(1, SECOND, canary=SECOND)
            report = await policy.update_weights()
            assert report is not None
            assert report.canary is not None
            await publish(2, SECOND, canary=FIRST)
            with pytest.raises(SyncError):
                await policy.update_weights()

    drive(body())
