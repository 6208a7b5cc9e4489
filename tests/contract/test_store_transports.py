"""One suite over every way in which published weights can reach a reader."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import forge
import forge.store as ts
from leftovers import lasting_children, lasting_orphans, running_children, shared_memory_files
from store_actors import (
    Rank,
    check_as,
    check_every_dtype,
    check_regions,
    num_segments,
    publish_and_listen,
    publish_every_dtype,
)
from store_traffic import used

LIMIT_S = 600
LARGE = {"embed": (96, 64), "norm": (48,), "odd": (7, 5, 6), "scalar": (), "large": (256, 300)}
SMALL = {"embed": (32, 16), "norm": (48,), "odd": (7, 5, 6), "scalar": ()}


@dataclass(frozen=True)
class Way:
    """Where the data is kept, and how readers get at it."""

    name: str
    uses: str
    """The way of reading that must have been used."""
    publisher: dict[str, str] = field(default_factory=dict)
    reader: dict[str, str] = field(default_factory=dict)
    volumes: int = 0
    copies: int = 1
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: LARGE)

    def shares_processes(self, other: Way) -> bool:
        return replace(self, name="", uses="", shapes={}) == replace(other, name="", uses="", shapes={})


TCP = {"FORGE_STORE_WAYS": "tcp"}
RDMA = {"FORGE_STORE_WAYS": "rdma", "FORGE_RDMA": "force"}
ELSEWHERE = {"FORGE_STORE_WAYS": "shm,tcp", "FORGE_HOST": "elsewhere"}
DIRECT = {"FORGE_STORE_DISTRIBUTION": "direct"}
WAYS = [
    Way("inline", "", shapes=SMALL),
    Way("shm", "shm"),  # in the processes of the one before, which have not yet read from shared memory
    Way("tcp", "tcp", TCP, TCP),
    Way("rdma", "rdma", RDMA, RDMA),
    Way("disk", "shm", {"FORGE_STORE_MEMORY_GB": "0.0001"}),
    Way("one volume", "shm", volumes=1),
    Way("two volumes", "shm", volumes=2, copies=2),
    Way("publisher elsewhere", "shm", ELSEWHERE, volumes=2, copies=2),
    Way("volumes elsewhere", "tcp", ELSEWHERE, TCP, volumes=2, copies=2),
    Way("direct", "tcp", ELSEWHERE, DIRECT),
    Way("relayed", "relayed", ELSEWHERE),
]


class Place:
    """A run with two ranks that publish and two that read, for all tests of one way."""

    def __init__(self, way: Way) -> None:
        self.transport = way
        self._runner = asyncio.Runner()
        self._run = forge.run()
        self._numbers = iter(range(1000))

    def do(self, body: Coroutine[Any, Any, Any]) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(LIMIT_S):
                return await body

        return self._runner.run(limited())

    def key(self) -> str:
        return f"weights {next(self._numbers)}"

    async def open(self) -> None:
        await self._run.__aenter__()
        if self.transport.volumes:
            await ts.setup(volumes=self.transport.volumes, copies=self.transport.copies)
        self.trainer, self.readers = await asyncio.gather(
            Rank.options(procs=2, env=self.transport.publisher).as_actor((2,)),
            Rank.options(procs=2, env=self.transport.reader).as_actor((2,)),
        )

    async def close(self) -> None:
        await self._run.__aexit__(None, None, None)

    def end(self) -> None:
        self._runner.close()

    async def publish(self, key: str, version: int, words: str = "", **options: Any) -> str:
        published = await self.trainer.publish.call(key, version, self.shapes(words), words, options)
        digests = {entry.digest for _, entry in published.items()}
        assert len(digests) == 1
        return digests.pop()

    def shapes(self, words: str = "") -> dict[str, tuple[int, ...]]:
        """Those that can be sharded so."""
        dim = int(words[1:]) if words.startswith("s") else -1
        return {name: shape for name, shape in self.transport.shapes.items() if len(shape) > dim}

    async def everywhere(self, function: Any, *args: Any) -> list[Any]:
        return [answer for _, answer in (await self.readers.run.call(function, *args)).items()]


class Places:
    """Keeps the processes of one way until one comes that needs others."""

    def __init__(self) -> None:
        self._place: Place | None = None

    def at(self, way: Way) -> Place:
        if self._place is not None and self._place.transport.shares_processes(way):
            self._place.transport = way
            return self._place
        self.close()
        self._before, self._children = shared_memory_files(), running_children()
        self._place = Place(way)
        self._place.do(self._place.open())
        return self._place

    def close(self) -> None:
        if self._place is None:
            return
        place, self._place = self._place, None
        place.do(place.close())
        place.end()
        assert lasting_children(self._children) == []
        assert lasting_orphans(self._before) == set()


@pytest.fixture(scope="module")
def places() -> Iterator[Places]:
    opened = Places()
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: way.name.replace(" ", "-"))
def place(request: pytest.FixtureRequest, places: Places) -> Place:
    way: Way = request.param
    return places.at(way)


def test_disk_takes_what_memory_does_not_and_says_so(drive: Any, leaves_nothing: None) -> None:
    async def scenario() -> None:
        limited = Rank.options(env={"FORGE_STORE_MEMORY_GB": "0.0001"})
        publisher, reader = await asyncio.gather(limited.as_actor(), Rank.as_actor())
        shapes = {"a": (1024, 1100), "b": (1024, 1024)}
        said, on_disk = await publisher.run.call_one(publish_and_listen, "policy", shapes)
        assert on_disk == [True]
        assert len(said) == 1
        assert "needs 0.01 GiB of memory and 0.00 GiB are left" in said[0]
        assert "FORGE_STORE_MEMORY_GB" in said[0]
        await reader.fetch.call_one("policy", shapes, "", {"verify": "full"})

    drive(scenario())


@pytest.mark.parametrize("verify", ["cheap", "full"])
@pytest.mark.parametrize("words", ["", "s0", "s1"])
def test_any_sharding_to_any_other(place: Place, words: str, verify: str) -> None:
    async def scenario() -> None:
        key = place.key()
        digest = await place.publish(key, 3, words)
        for wanted in ("", "s0", "s1", "r"):
            shapes = {name: shape for name, shape in place.shapes(words).items() if name in place.shapes(wanted)}
            options = {"verify": verify, "strict": shapes == place.shapes(words)}
            found = await place.readers.fetch.call(key, shapes, wanted, options)
            assert {answer for _, answer in found.items()} == {(3, digest)}, wanted

    place.do(scenario())


@pytest.mark.parametrize("verify", ["cheap", "full", "off"])
@pytest.mark.parametrize("words", ["", "s0"])
def test_any_rectangles(place: Place, words: str, verify: str) -> None:
    async def scenario() -> None:
        key = place.key()
        await place.publish(key, 0, words)
        for seed in range(4):
            copied = await place.everywhere(check_regions, key, place.shapes(words), seed, verify)
            assert min(copied) > 0

    place.do(scenario())


@pytest.mark.parametrize("verify", ["cheap", "full"])
def test_every_dtype(place: Place, verify: str) -> None:
    async def scenario() -> None:
        key = place.key()
        padding = 0 if place.transport.name == "inline" else 40_000
        rank = place.trainer.slice(procs=0)
        await rank.run.call_one(publish_every_dtype, key, 0, padding)
        await place.everywhere(check_every_dtype, key, verify)

    place.do(scenario())


@pytest.mark.parametrize("verify", ["cheap", "full"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_converted_when_published(place: Place, dtype: str, verify: str) -> None:
    async def scenario() -> None:
        import torch

        key = place.key()
        digest = await place.publish(key, 0, "s0", dtype=getattr(torch, dtype))
        shapes = place.shapes("s0")
        assert set(await place.everywhere(check_as, key, shapes, dtype, dtype, verify)) == {digest}

    place.do(scenario())


@pytest.mark.parametrize("verify", ["cheap", "full"])
def test_converted_when_fetched(place: Place, verify: str) -> None:
    async def scenario() -> None:
        key = place.key()
        digest = await place.publish(key, 0)
        for dtype in ("bfloat16", "float64"):
            found = await place.everywhere(check_as, key, place.shapes(), "float32", dtype, verify)
            assert set(found) == {digest}

    place.do(scenario())


def test_views_stay_while_newer_versions_come(place: Place) -> None:
    async def scenario() -> None:
        key = place.key()
        weights = ts.Weights(key)
        for version in range(5):
            await place.publish(key, version)
            found = await place.readers.hold.call(key, f"{key} {version}")
            assert {number for _, number in found.items()} == {version}
        for version in range(5):
            await place.readers.check_held.call(f"{key} {version}", place.shapes())
        assert [info.number for info in await weights.versions()] == [3, 4]
        for version in range(5):
            await place.readers.let_go.call(f"{key} {version}")

    place.do(scenario())


def test_waiting_listing_retiring_and_going_back(place: Place) -> None:
    async def scenario() -> None:
        key = place.key()
        weights = ts.Weights(key, keep=4)
        waiting = asyncio.create_task(weights.wait(at_least=2))
        for version in range(4):
            await place.publish(key, version, keep=4)
        assert await waiting >= 2
        infos = await weights.versions()
        assert [info.number for info in infos] == [0, 1, 2, 3]
        assert len({info.digest for info in infos}) == 4
        assert await weights.retire(keep=2) == [0, 1]
        with pytest.raises(ts.StoreKeyError, match="version 1"):
            await weights.fetch(version=1)
        with pytest.raises(ts.StoreError, match="is too old"):
            await place.publish(key, 3)
        assert await weights.rewind(to=2) == [3]
        assert [info.number for info in await weights.versions()] == [2]
        digest = await place.publish(key, 3, keep=4)
        found = await place.readers.fetch.call(key, place.shapes(), "", {"version": 3})
        assert {answer for _, answer in found.items()} == {(3, digest)}

    place.do(scenario())


def test_a_dtype_that_was_not_asked_for_is_refused(place: Place) -> None:
    async def scenario() -> None:
        import torch

        key = place.key()
        await place.publish(key, 0, dtype=torch.bfloat16)
        with pytest.raises(ts.StoreError, match="another dtype"):
            await place.readers.fetch.call(key, place.shapes())

    place.do(scenario())


def test_the_way_is_the_one_that_was_meant(place: Place) -> None:
    async def scenario() -> None:
        key = place.key()
        await place.publish(key, 0)
        await place.readers.fetch.call(key, place.shapes())
        for ways in await place.everywhere(used):
            expected = {way for way in (place.transport.uses,) if way}
            full_needs = {"tcp"} if place.transport.name.startswith(("rdma", "relayed")) else set()
            assert expected <= {way for way, is_used in ways.items() if is_used} <= expected | full_needs

    place.do(scenario())


async def num_kept(place: Place) -> list[int]:
    """How many segments each process has."""
    found = [await group.run.call(num_segments) for group in (place.trainer, place.readers)]
    return [answer for answers in found for _, answer in answers.items()]


def test_memory_of_retired_versions_is_free_again(place: Place) -> None:
    async def scenario() -> None:
        key = place.key()
        before = await num_kept(place)
        for version in range(6):
            await place.publish(key, version)
            await place.readers.fetch.call(key, place.shapes())
        await ts.Weights(key).retire(keep=0)
        while True:  # a reader's last word may still be on its way to the publisher
            after = await num_kept(place)
            if all(has <= had + 1 for had, has in zip(before, after, strict=True)):
                return  # one segment stays for the next version, and no more

    place.do(scenario())
