"""Pinned versions: what readers get, what is counted, and what a later run finds in the folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.errors import CheckpointError, SaveError, StoreError, StoreKeyError
from forge.store import PinnedVersions, Weights
from forge.store.version_file import version_path
from store_scenarios import alone


def tensors(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    wide, half = torch.randn(64, 32, generator=generator), torch.randn(2000, generator=generator).bfloat16()
    return {"wide": wide, "half": half, "one": torch.tensor(float(number))}


async def publish(*numbers: int) -> None:
    weights = Weights("policy", rank=0, world_size=1)
    for number in numbers:
        await weights.publish(tensors(number), version=number)


async def read(version: int) -> dict[str, Tensor]:
    fetched = await Weights(f"policy@{version}", verify="full").fetch()
    return {name: tensor.clone() for name, tensor in fetched.tensors.items()}


def equal(found: dict[str, Tensor], number: int) -> bool:
    made = tensors(number)
    return found.keys() == made.keys() and all(torch.equal(found[name], made[name]) for name in made)


def test_pinned_versions_are_readable_and_counted_until_they_are_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        pins = PinnedVersions("policy", folder=tmp_path, max_versions=2)
        await publish(0)
        first = await pins.add(0)
        assert await pins.add(0) == first
        await publish(1, 2, 3)
        await pins.add(3)
        assert pins.versions == (0, 3)
        assert pins.num_bytes == sum(info.num_bytes for info in await Weights("policy").pinned())
        await publish(4, 5, 6)
        assert equal(await read(0), 0)
        assert equal(await read(3), 3)
        with pytest.raises(StoreError, match="no more versions") as caught:
            await pins.add(6)
        assert "[0, 3]" in str(caught.value)
        await pins.remove(0)
        assert (pins.versions, [path.name for path in tmp_path.iterdir()]) == ((3,), [version_path(tmp_path, 3).name])
        with pytest.raises(StoreKeyError):
            await read(0)
        with pytest.raises(StoreKeyError, match="published versions: \\[5, 6\\]"):
            await pins.add(1)
        assert pins.versions == (3,)
        pins.close()
        assert pins.num_bytes == 0

    alone(scenario)


def test_a_pinned_version_is_not_copied_where_its_memory_outlives_the_publisher() -> None:
    async def scenario() -> None:
        await publish(0)
        pins = PinnedVersions("policy")
        await pins.add(0)
        (live,) = await Weights("policy").versions()
        assert live.num_readers == 1  # the pinned name reads the same memory
        await publish(1, 2)
        assert equal(await read(0), 0)

    alone(scenario)


def test_a_later_run_restores_them_whatever_it_has_published(tmp_path: Path) -> None:
    digests: dict[int, str] = {}

    async def first() -> None:
        pins = PinnedVersions("policy", folder=tmp_path)
        for number in (0, 7):
            await publish(number)
            digests[number] = (await pins.add(number)).digest

    async def second() -> None:
        pins = PinnedVersions("policy", folder=tmp_path)
        await Weights("policy", rank=0, world_size=1).publish(tensors(99), version=7)  # another 7 than before
        await pins.restore([0, 7])
        assert {version: pins[version].digest for version in pins.versions} == digests
        assert equal(await read(7), 7)
        await publish(8, 9)
        assert equal(await read(0), 0)
        assert not equal((await Weights("policy").fetch(version=8)).tensors, 7)
        await pins.remove(0, keep_file=True)
        assert version_path(tmp_path, 0).is_file()
        assert await pins.delete_files(keep=[0]) == []
        assert await pins.delete_files() == [0]
        assert [path.name for path in tmp_path.iterdir()] == [version_path(tmp_path, 7).name]

    alone(first)
    alone(second)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(bytes(data))


def _swap(path: Path) -> None:
    path.write_bytes(version_path(path.parent, 1).read_bytes())


@pytest.mark.parametrize(
    ("harm", "message"),
    [(Path.unlink, "is missing"), (_cut, "is damaged"), (_flip, "is damaged"), (_swap, "is damaged")],
)
def test_a_missing_or_damaged_file_restores_nothing(tmp_path: Path, harm: Any, message: str) -> None:
    async def scenario() -> None:
        pins = PinnedVersions("policy", folder=tmp_path)
        await publish(0, 1)
        await pins.add(0)
        await pins.add(1)
        pins.close()
        harm(version_path(tmp_path, 0))
        with pytest.raises(CheckpointError, match=message) as caught:
            await pins.restore([1, 0])
        assert str(version_path(tmp_path, 0)) in str(caught.value)
        assert "backup" in str(caught.value)
        assert (pins.versions, await Weights("policy").pinned()) == ((), [])
        await pins.restore([1])
        assert equal(await read(1), 1)

    alone(scenario)


def test_a_folder_that_cannot_be_written_pins_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "file"
        file.write_text("")
        pins = PinnedVersions("policy", folder=file / "pinned")
        await publish(0)
        with pytest.raises(SaveError, match="could not be written"):
            await pins.add(0)
        assert await Weights("policy").pinned() == []

    alone(scenario)


def test_two_restore_the_same_version(tmp_path: Path) -> None:
    """As a league does and an agent that is bound to one of its members."""

    async def scenario() -> None:
        one, other = (PinnedVersions("policy", folder=tmp_path / name) for name in ("one", "other"))
        await publish(0)
        for each in (one, other):
            await each.add(0)
            each.close()
        await publish(1)
        for each in (one, other):
            await each.restore([0])
        (info,) = await Weights("policy").pinned()
        assert (info.num_pins, other[0].digest) == (2, one[0].digest)
        await one.remove(0)
        assert equal(await read(0), 0)
        await other.remove(0)
        assert await Weights("policy").pinned() == []

    alone(scenario)


def test_only_a_folder_can_restore() -> None:
    async def scenario() -> None:
        with pytest.raises(StoreError, match="only be restored from a folder"):
            await PinnedVersions("policy").restore([0])

    alone(scenario)


def test_a_cancelled_pin_is_released() -> None:
    async def scenario() -> None:
        await publish(0)
        adding = asyncio.create_task(Weights("policy").pin(0))
        await asyncio.sleep(0)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        await publish(1)  # the release was sent before
        while await Weights("policy").pinned():  # noqa: ASYNC110 - it comes with the next message
            await asyncio.sleep(0.01)

    alone(scenario)
