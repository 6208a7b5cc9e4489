"""Pinned versions on a GPU: copies with recorded steps of their own, overwritten when others come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import generator_models as models
from forge.generator.engine import Request
from forge.generator.native.engine import NativeEngine
from forge.store import PinnedVersions, Weights
from forge.types import Completion
from generator_bench import native_engine, request
from generator_models import FIRST, Kind, prompt
from store_scenarios import alone

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here"),
]

KINDS = [Kind(seed) for seed in range(3)]


@contextlib.asynccontextmanager
async def serving(kind: Kind = FIRST, **changes: Any) -> AsyncIterator[NativeEngine]:
    options = {"with_gpus": True, "precision": "float32", "max_seq_len": 256, "kv_cache_gb": 0.2} | changes
    engine = native_engine(models.config(kind, **options), kind)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def asked(version: int | None, length: int) -> Request:
    return replace(request(prompt(length), max_tokens=24), version=version)


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in completions]


async def pin_all() -> PinnedVersions:
    pins = PinnedVersions("policy")
    for version, kind in enumerate(KINDS):
        on_device = {name: tensor.cuda() for name, tensor in models.weights(kind).items()}
        await Weights("policy", rank=0, world_size=1).publish(on_device, version=version)
        await pins.add(version)
    return pins


@pytest.mark.parametrize("num_loaded", [1, 3])
def test_versions_answer_as_engines_of_their_own_do(num_loaded: int) -> None:
    """Interleaved, with updates of the live weights in between; with room for one, versions are swapped."""
    requests = [asked(version, length) for length in (5, 40, 70) for version in range(3)]

    async def scenario() -> None:
        await pin_all()
        expected: dict[int, list[list[tuple[int, ...]]]] = {}
        for version, kind in enumerate(KINDS):
            async with serving(kind) as engine:
                own = [replace(each, version=None) for each in requests if each.version == version]
                expected[version] = [tokens(await engine.generate(each)) for each in own]
        async with serving(pinned_versions=num_loaded) as engine:
            answers = [asyncio.create_task(engine.generate(each)) for each in requests]
            await engine.update_weights(2, "keep")
            found = [tokens(await answer) for answer in answers]
            runner = engine.thread.serving().runner
            assert len(runner.pinned.versions) == num_loaded
            assert all(copy.graphs is not None for copy in runner.pinned._models.values())
            for version in range(3):
                of_it = [each for each, ask in zip(found, requests, strict=True) if ask.version == version]
                assert of_it == expected[version]
            (live,) = await engine.generate(asked(None, 40))
            assert [live.token_ids] == expected[2][1]

    alone(scenario)


def test_they_come_back_after_sleep() -> None:
    async def scenario() -> None:
        await pin_all()
        async with serving(pinned_versions=1) as engine:
            before = tokens(await engine.generate(asked(1, 30)))
            await engine.sleep()
            assert engine.thread.serving().runner.pinned.versions == ()
            await engine.wake()
            assert tokens(await engine.generate(asked(1, 30))) == before

    alone(scenario)


def test_pinned_versions_are_in_host_memory() -> None:
    """The publisher's copy on the GPU is free again: what is pinned does not take the trainer's memory."""

    async def scenario() -> None:
        pins = await pin_all()
        fetched = await Weights("policy@0").fetch()
        assert {tensor.device.type for tensor in fetched.tensors.values()} == {"cpu"}
        assert pins.num_bytes > 0

    alone(scenario)
