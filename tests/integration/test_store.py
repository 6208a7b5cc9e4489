"""The store between real processes: publishing by sharded ranks, reading under other shardings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

import forge.store as ts
from store_actors import Rank, value

Drive = Callable[[Any], Any]
SHAPES = {"embed": (64, 48), "norm": (48,), "odd": (7, 5, 3), "scalar": (), "large": (512, 1024)}


def test_sharded_trainer_to_other_shardings(drive: Drive, leaves_nothing: None) -> None:
    async def scenario() -> None:
        trainer = await Rank.options(procs=2).as_actor((2,))
        whole = await Rank.options(procs=1).as_actor()
        halves = await Rank.options(procs=2).as_actor((2,))
        shapes = {name: shape for name, shape in SHAPES.items() if len(shape) >= 2}
        published = await trainer.publish.call("policy", 1, shapes, "s0")
        digest = [entry.digest for _, entry in published.items()]
        assert digest[0] == digest[1]
        assert await whole.fetch.call_one("policy", shapes) == (1, digest[0])
        for words in ("s1", "s0", "r"):
            found = await halves.fetch.call("policy", shapes, words, {"verify": "full"})
            assert {answer for _, answer in found.items()} == {(1, digest[0])}

        same = ts.Weights("policy-again", rank=0, world_size=1)
        mine = await same.publish({name: value(name, shape, 1) for name, shape in shapes.items()}, version=1)
        assert mine.digest == digest[0], "the digest depends on the layout"

    drive(scenario())


def test_a_reader_keeps_its_version(drive: Drive, leaves_nothing: None) -> None:
    async def scenario() -> None:
        trainer, reader = await asyncio.gather(Rank.as_actor(), Rank.as_actor())
        for version in range(6):
            await trainer.publish.call_one("policy", version, SHAPES)
            assert await reader.hold.call_one("policy", str(version)) == version
        for version in range(6):
            await reader.check_held.call_one(str(version), SHAPES)
        assert [info.number for info in await ts.Weights("policy").versions()] == [4, 5]

    drive(scenario())


def test_put_and_get_between_processes(drive: Drive, leaves_nothing: None) -> None:
    async def scenario() -> None:
        reader = await Rank.as_actor()

        async def read(_: Any, key: str) -> Any:
            return await ts.get(key)

        stored = {"x": torch.arange(6).view(2, 3), "more": [torch.ones(2, 300_000), "text", None]}
        await ts.put("value", stored)
        found = await reader.run.call_one(read, "value")
        assert torch.equal(found["x"], stored["x"])
        assert torch.equal(found["more"][0], stored["more"][0])
        assert found["more"][1:] == ["text", None]

    drive(scenario())
