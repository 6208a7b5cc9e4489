"""The engine's thread has no step under way when it does anything but the next one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import torch

import generator_models as models
from forge.config import Sampling, UpdateMode
from forge.generator.engine import Request
from forge.generator.native.engine import NativeEngine
from forge.generator.native.thread import WeightUpdate
from forge.types import Completion, Delta
from generator_models import FIRST, SECOND, Kind, prompt
from lookahead_runs import Run, shown


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[NativeEngine]:
    engine = NativeEngine(models.config(FIRST), model=models.model(FIRST), tokenizer=models.tokenizer(FIRST))
    await engine.start()
    engine.thread.serving().looks_ahead = True
    try:
        yield engine
    finally:
        await engine.close()


def run_engine(body: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(600):
            return await body

    torch.set_num_threads(1)
    return asyncio.run(limited())


LONG = Request("long", prompt(20, 5), Sampling(seed=5, max_tokens=200, ignore_eos=True))


async def begun(engine: NativeEngine, num_tokens: int = 4) -> AsyncIterator[Delta]:
    """A stream of a long completion that has made some tokens."""
    stream = engine.stream(LONG)
    for _ in range(num_tokens):
        assert (await anext(stream)).completion is None
    return stream


async def last_of(stream: AsyncIterator[Delta]) -> Completion:
    (found,) = [delta.completion async for delta in stream if delta.completion is not None]
    return found


def without(num_before: int, mode: UpdateMode = "keep", kind: Kind | None = None) -> Any:
    """The long completion, with weights that change after so many of its tokens."""
    run = Run(looks_ahead=False)
    run.ask(5, max_tokens=200)
    while run.batching.counts.num_tokens < num_before:
        run.batching.step(run.version)
    if kind is not None:
        run.update(kind, mode)
    run.go_on([])
    return run.completions()[5]


def test_whatever_is_asked_finds_no_step_under_way() -> None:
    async def body() -> list[bool]:
        async with serving() as engine:
            stream = await begun(engine)
            found = []
            for _ in range(20):
                await anext(stream)
                found.append(await asyncio.wrap_future(engine.thread.ask(lambda batching: batching.is_ahead)))
            ahead = engine.stats().more["num_ahead"]
            found.append(ahead == 0)
            completion = await last_of(stream)
            assert [shown([[completion]])] == [without(0)]
            return found

    assert not any(run_engine(body()))


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_weights_change_when_no_step_is_under_way(mode: UpdateMode) -> None:
    async def body() -> tuple[Completion, bool]:
        async with serving() as engine:
            stream = await begun(engine)
            batching = engine.thread.serving()
            seen: list[bool] = []

            def load() -> None:
                seen.append(batching.is_ahead)
                batching.runner.update_weights(models.weights(SECOND))

            await engine.thread.update_weights(WeightUpdate(mode, 0, load))
            found = await last_of(stream)
            assert batching.counts.num_ahead > 100
            return found, seen[0]

    found, was_ahead = run_engine(body())
    assert not was_ahead
    assert [span.version for span in found.versions] == [-1, 0]
    assert shown([[found]]) == without(found.versions[0].end, mode, SECOND)


def test_an_engine_that_sleeps_has_no_step_under_way() -> None:
    async def body() -> Completion:
        async with serving() as engine:
            stream = await begun(engine)
            await engine.sleep()
            assert not engine.thread.serving().is_ahead
            await engine.wake()
            return await last_of(stream)

    assert shown([[run_engine(body())]]) == without(0)


def test_an_engine_that_closes_ends_completions_as_they_are() -> None:
    async def body() -> Completion:
        async with serving() as engine:
            stream = await begun(engine)
            batching = engine.thread.serving()
            await engine.close()
            assert not batching.is_ahead
            return await last_of(stream)

    found, ((_, whole, *_),) = run_engine(body()), without(0)
    assert found.finish_reason == "abort"
    assert found.token_ids == whole[: len(found)]
