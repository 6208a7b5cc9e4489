"""Generators that serve several versions at once: every bit is that of an engine with that version alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import generator_models as models
from forge.errors import StoreKeyError, WeightMismatch
from forge.generator.engine import Request
from forge.generator.native.engine import NativeEngine
from forge.store import PinnedVersions, Weights
from forge.types import Completion, VersionSpan
from generator_bench import native_engine, request
from generator_models import FIRST, Kind, prompt
from store_scenarios import alone

KINDS = [Kind(seed) for seed in range(3)]
"""Version n has the weights of `KINDS[n % 3]`."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.asynccontextmanager
async def serving(kind: Kind = FIRST, **changes: Any) -> AsyncIterator[NativeEngine]:
    engine = native_engine(models.config(kind, **{"max_seq_len": 512, "kv_cache_gb": 0.05} | changes), kind)
    await engine.start()
    try:
        yield engine
        assert engine.stats().cache_used == 0.0, "a page was not given back"
    finally:
        await engine.close()


async def publish(version: int) -> None:
    await Weights("policy", rank=0, world_size=1).publish(models.weights(KINDS[version % 3]), version=version)


def asked(version: int | None, *, length: int, seed: int = 0, max_tokens: int = 40, **sampling: Any) -> Request:
    made = request(prompt(length, seed), **{"temperature": 1.0, "seed": seed, "max_tokens": max_tokens} | sampling)
    return replace(made, version=version)


def bits(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(each.prompt_ids, each.index, each.token_ids, each.logprobs, each.full_logprobs) for each in completions]


async def by_its_version_alone(requests: Sequence[Request], **changes: Any) -> list[list[tuple[Any, ...]]]:
    """Return what engines give that have the weights of a request's version and no others."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for kind in KINDS:
        async with serving(kind, **changes) as engine:
            for place, each in enumerate(requests):
                if each.version is not None and KINDS[each.version % 3] == kind:
                    found[place] = bits(await engine.generate(replace(each, version=None)))
    return [found[place] for place in sorted(found)]


async def readers() -> dict[int, int]:
    return {info.number: info.num_readers for info in await Weights("policy").pinned()}


async def until(look: Callable[[], Awaitable[Any]], expected: object) -> None:
    """Wait for what another thread tells the store; `alone` bounds it."""
    while await look() != expected:  # noqa: ASYNC110 - the store has no event for it
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("changes", [{}, {"prefill_chunk_tokens": 16, "max_batch": 3}], ids=["wide", "narrow"])
def test_interleaved_requests_of_three_versions_have_the_bits_of_each_version_alone(changes: dict[str, Any]) -> None:
    """Also while the live weights are updated in between, and where slots and pages are short."""
    requests = [
        asked(place % 3, length=length, seed=place, n=1 + place % 2)
        for place, length in enumerate((5, 5, 5, 17, 33, 40, 64, 64, 64, 3, 90, 31))
    ]
    live = [asked(None, length=20, seed=100 + place, max_tokens=480) for place in range(3)]

    async def scenario() -> None:
        pins = PinnedVersions("policy")
        for version in range(3):
            await publish(version)
            await pins.add(version)
        async with serving(**changes) as engine:
            await engine.update_weights(2, "keep")
            await publish(3)
            lives = [asyncio.create_task(engine.generate(each)) for each in live]
            answers = [asyncio.create_task(engine.generate(each)) for each in requests]
            modes = ("keep", "recompute", "keep", "drain")
            for version, mode in zip(range(3, 7), modes, strict=True):
                await engine.update_weights(version, mode)  # type: ignore[arg-type]
                await publish(version + 1)
            found = [await answer for answer in answers]
            for each, completions in zip(requests, found, strict=True):
                for completion in completions:
                    assert completion.versions == (VersionSpan(each.version or 0, 0, len(completion)),)
            spans = [span for each in await asyncio.gather(*lives) for one in each for span in one.versions]
            assert len({span.version for span in spans}) > 1, "no update came while completions were in progress"
            assert [bits(each) for each in found] == await by_its_version_alone(requests)
            again = [bits(await engine.generate(each)) for each in requests]  # from cached prefixes
            assert again == [bits(each) for each in found]

    alone(scenario)


def test_prefixes_are_shared_inside_a_version_and_survive_updates_of_the_live_weights() -> None:
    async def scenario() -> None:
        pins = PinnedVersions("policy")
        for version in (0, 1):
            await publish(version)
            await pins.add(version)
        async with serving() as engine:
            first = asked(0, length=100, max_tokens=4)
            (cold,) = await engine.generate(first)
            (other,) = await engine.generate(replace(first, version=1))
            (live,) = await engine.generate(replace(first, version=None))
            assert (cold.num_shared, other.num_shared, live.num_shared) == (0, 0, 0)
            await publish(2)
            await engine.update_weights(2, "keep")
            (warm,) = await engine.generate(first)
            (updated,) = await engine.generate(replace(first, version=None))
            assert warm.num_shared >= 96
            assert updated.num_shared == 0
            assert bits([warm]) == bits([cold])
            assert bits([other])[0][2] != bits([cold])[0][2], "the versions are the same model"

    alone(scenario)


def test_pinned_weights_are_the_memory_of_the_store_and_are_let_go() -> None:
    async def scenario() -> None:
        pins = PinnedVersions("policy")
        for version in range(3):
            await publish(version)
            await pins.add(version)
        async with serving(pinned_versions=1) as engine:
            for version in range(3):
                await engine.generate(asked(version, length=5, max_tokens=2))
            runner = engine.thread.serving().runner
            assert runner.pinned.versions == (2,)
            (model,) = runner.pinned._models.values()
            (weights,) = runner.pinned._models
            own = {parameter.data_ptr() for parameter in model.model.parameters()}
            assert own == {tensor.data_ptr() for tensor in weights.tensors.values()}
            del model, weights
            await until(readers, {0: 0, 1: 0, 2: 1})
            await pins.remove(2)
            with pytest.raises(StoreKeyError, match="version 2 of 'policy' is not pinned") as caught:
                await engine.generate(asked(2, length=5))
            assert "[0, 1]" in str(caught.value)
            await engine.unload_version(2)
            gc.collect()
            assert runner.pinned.versions == ()
            with pytest.raises(StoreKeyError):
                await Weights("policy@2").fetch()
            await engine.generate(asked(None, length=5, max_tokens=2))

    alone(scenario)


def test_a_version_that_is_unloaded_during_a_request_goes_with_it() -> None:
    async def scenario() -> None:
        await publish(0)
        pins = PinnedVersions("policy")
        await pins.add(0)
        async with serving() as engine:
            fetched = engine._pinned_versions()
            whole = asked(0, length=30)
            async with engine.paused(engine.version):  # until the version is gone
                answering = asyncio.create_task(engine.generate(whole))
                while fetched.versions != (0,):  # noqa: ASYNC110 - the engine has no event for it
                    await asyncio.sleep(0.01)
                await pins.remove(0)
                await engine.unload_version(0)
            (expected,) = await by_its_version_alone([whole])
            assert bits(await answering) == expected
            assert (fetched.versions, engine.thread.serving().runner.pinned.versions) == ((), ())

    alone(scenario)


def test_a_version_goes_also_if_whoever_unloads_it_is_cancelled() -> None:
    async def scenario() -> None:
        await publish(0)
        await PinnedVersions("policy").add(0)
        async with serving() as engine:
            await engine.generate(asked(0, length=5, max_tokens=2))
            async with engine.paused(engine.version):
                unloading = asyncio.create_task(engine.unload_version(0))
                await asyncio.sleep(0)  # it waits for the engine's thread
                unloading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await unloading
            await engine.generate(asked(None, length=5, max_tokens=2))
            assert engine.thread.serving().runner.pinned.versions == ()

    alone(scenario)


def test_a_number_that_is_pinned_again_serves_the_new_weights() -> None:
    async def scenario() -> None:
        pins = PinnedVersions("policy")
        async with serving() as engine:
            answers = []
            for version in (0, 1):
                await Weights("policy").rewind(to=-1)
                await Weights("policy", rank=0, world_size=1).publish(models.weights(KINDS[version]), version=0)
                await pins.add(0)
                answers.append(bits(await engine.generate(asked(0, length=40))))
                await pins.remove(0)
            expected = await by_its_version_alone([asked(0, length=40), asked(1, length=40)])
            assert answers == expected

    alone(scenario)


def test_equal_weights_with_two_numbers_say_their_own() -> None:
    """They share prefixes, too: the keys and values are the same."""

    async def scenario() -> None:
        pins = PinnedVersions("policy")
        for version in (0, 3):  # of the same model
            await publish(version)
            await pins.add(version)
        async with serving() as engine:
            found = [(await engine.generate(asked(version, length=40, max_tokens=4)))[0] for version in (0, 3)]
            assert [each.version for each in found] == [0, 3]
            assert bits(found[:1]) == bits(found[1:])
            assert found[1].num_shared >= 32

    alone(scenario)


def test_sleep_releases_pinned_versions_and_requests_continue_after_wake() -> None:
    async def scenario() -> None:
        await publish(1)
        await PinnedVersions("policy").add(1)
        async with serving(max_seq_len=2048) as engine:
            whole = asked(1, length=30, max_tokens=1000)
            answering = asyncio.create_task(engine.generate(whole))
            await engine.generate(asked(1, length=5, max_tokens=2))
            await engine.sleep()
            assert engine.thread.serving().runner.pinned.versions == ()
            assert not answering.done()
            await engine.wake()
            assert [bits(await answering)] == await by_its_version_alone([whole], max_seq_len=2048)

    alone(scenario)


def test_streams_come_from_the_pinned_version_too() -> None:
    async def scenario() -> None:
        await publish(1)
        await PinnedVersions("policy").add(1)
        async with serving() as engine:
            deltas = [delta async for delta in engine.stream(asked(1, length=12))]
            assert {delta.version for delta in deltas} == {1}
            (completion,) = [delta.completion for delta in deltas if delta.completion is not None]
            assert [bits([completion])] == await by_its_version_alone([asked(1, length=12)])

    alone(scenario)


def test_weights_of_another_model_are_refused() -> None:
    async def scenario() -> None:
        other = models.weights(Kind(family="llama", tied=False))
        await Weights("policy", rank=0, world_size=1).publish(other, version=0)
        await PinnedVersions("policy").add(0)
        async with serving() as engine:
            with pytest.raises(WeightMismatch, match="not those of this model"):
                await engine.generate(asked(0, length=5))
            await engine.generate(asked(None, length=5, max_tokens=1))

    alone(scenario)
