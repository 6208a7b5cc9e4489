"""The proof that a reader has what was published: data is spoiled where it lies, and readers must notice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import forge.store as ts
from store_actors import Rank, attempt, restore, spoil, value

Drive = Callable[[Any], Any]
SHAPES = {"a": (96, 100), "b": (96, 100), "c": (128, 48), "d": (64, 20, 12), "e": (100, 66)}
"""Two are equal, so that they can be swapped; together they are too large to be kept inline."""
KINDS = ("bit", "stale", "swapped", "dropped", "short")
READERS = ("whole", "rows", "columns", "slice", "views")
NUM_SEEDS = 42

Table = dict[tuple[str, str, str, str], Counter[str]]


async def spoil_everything() -> Table:
    """Spoil one thing after another; what every kind of reader made of it."""
    offering = Rank.options(procs=2, env={"FORGE_STORE_WAYS": "shm,tcp"})
    trainer, near, far = await asyncio.gather(
        offering.as_actor((2,)),
        Rank.as_actor(),
        Rank.options(env={"FORGE_STORE_WAYS": "tcp"}).as_actor(),
    )
    for version in range(2):
        await trainer.publish.call("policy", version, SHAPES, "s0")
    table: Table = {}

    async def read(way: str, rank: Any, seed: int, kind: str, spoilt: list[str]) -> None:
        for (reader, verify), named in (await rank.run.call_one(attempt, "policy", SHAPES, seed)).items():
            count = table.setdefault((verify, kind, way, reader), Counter())
            count["total"] += 1
            count["caught"] += named is not None
            count["misnamed"] += named is not None and not set(named) <= set(spoilt)
            count["unnamed"] += named is not None and not set(spoilt) <= set(named)

    for seed in range(NUM_SEEDS):
        for kind in KINDS:
            answers = await trainer.run.call(spoil, "policy", kind, seed)
            spoilt = sorted({name for _, names in answers.items() for name in names})
            assert len(spoilt) == (2 if kind == "swapped" else 1)
            await asyncio.gather(read("shm", near, seed, kind, spoilt), read("tcp", far, seed, kind, spoilt))
            await trainer.run.call(restore)
    for rank in (near, far):
        assert set((await rank.run.call_one(attempt, "policy", SHAPES, 0)).values()) == {None}
    return table


def printed(table: Table, verify: str) -> str:
    rows = [f"{verify:10}" + "".join(f"{way + ' ' + reader:>14}" for way in ("shm", "tcp") for reader in READERS)]
    for kind in KINDS:
        cells = [table[verify, kind, way, reader] for way in ("shm", "tcp") for reader in READERS]
        rows.append(f"{kind:10}" + "".join(f"{cell['caught']:>9}/{cell['total']:<4}" for cell in cells))
    return "\n".join(rows)


def test_whatever_is_spoilt_is_noticed(drive: Drive, leaves_nothing: None) -> None:
    table = drive(spoil_everything())
    print("\n" + printed(table, "full") + "\n\n" + printed(table, "cheap"))
    assert NUM_SEEDS * len(KINDS) >= 200
    for (verify, kind, way, reader), count in table.items():
        where = f"{kind}, read as {reader} by {way}, verify={verify}: {dict(count)}"
        assert count["misnamed"] == 0, where
        if verify == "full":
            assert count["caught"] == count["total"] == NUM_SEEDS, where
            assert count["unnamed"] == 0, where
        elif reader == "whole":  # what the cheap mode promises: pieces that are copied whole are digested on the way
            assert count["caught"] == count["total"], where


def test_a_tensor_that_was_not_published_is_named(drive: Drive, leaves_nothing: None) -> None:
    async def scenario() -> None:
        weights = ts.Weights("policy", rank=0, world_size=1)
        tensors = {name: value(name, shape, 0) for name, shape in SHAPES.items() if name != "c"}
        await weights.publish(tensors, version=0)
        into = {name: value(name, shape, 0) for name, shape in SHAPES.items()}
        for strict in (True, False):
            with pytest.raises(ts.WeightMismatch, match="lacks 1 tensor") as caught:
                await weights.fetch(into, strict=strict)
            assert caught.value.tensors == ("c",)
        del into["c"], into["d"]
        with pytest.raises(ts.WeightMismatch, match="does not name: d") as caught:
            await weights.fetch(into)
        assert caught.value.tensors == ("d",)
        assert (await weights.fetch(into, strict=False)).version == 0

    drive(scenario())


def test_a_segment_that_was_cut_short_is_not_read(drive: Drive, leaves_nothing: None) -> None:
    """By readers that come to it anew: what is missing of a file cannot be read, and must not end the reader."""

    async def scenario() -> None:
        for ways in ("shm", "tcp"):
            env = {"FORGE_STORE_WAYS": ways}
            publisher, reader = await asyncio.gather(Rank.options(env=env).as_actor(), Rank.options(env=env).as_actor())
            await publisher.publish.call_one(ways, 0, SHAPES)
            await publisher.run.call_one(cut_short)
            for _ in range(2):
                with pytest.raises(ts.StoreError, match=r"rank 0's part"):
                    await reader.fetch.call_one(ways, SHAPES)
            await publisher.publish.call_one(ways, 1, {**SHAPES, "more": (100, 100)})
            version, _ = await reader.fetch.call_one(ways, {**SHAPES, "more": (100, 100)})
            assert version == 1

    drive(scenario())


async def cut_short(_: Rank) -> None:
    import os

    from forge.store.client import client

    for segment in client().segments._segments.values():
        os.ftruncate(segment.fd, segment.size // 2)
