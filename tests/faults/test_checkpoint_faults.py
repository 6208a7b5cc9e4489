"""Checkpoints and what can go wrong: ranks killed at any moment of a save, a full disk, damaged files."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_ranks import Ranks, ranks_of
from forge.errors import CheckpointError, SaveError
from forge.trainer.checkpoint import Checkpoints

KILLED = -signal.SIGKILL
MOMENTS_OF_ALL = ("staged", "serializing", "data")
MOMENTS_OF_RANK_0 = ("metadata", "record", "published", "done")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from ranks_of(__name__)


def die_together(rank: int, folder: str, victims: list[int]) -> None:
    """Die when all victims have come here: one that still waits for another rank would be told of its death instead."""
    Path(f"{folder}-here-{rank}").touch()
    while not all(Path(f"{folder}-here-{each}").exists() for each in victims):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


class Bomb:
    """Kills its process when it is written, in the middle of the rank's file."""

    def __init__(self, *victim: Any) -> None:
        self._victim = victim

    def __deepcopy__(self, memo: Any) -> Bomb:
        return self

    def __reduce__(self) -> Any:
        die_together(*self._victim)
        raise AssertionError("unreachable")


def state_of(step: int, *, rank: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), f"rank{rank}": torch.full((100,), step * 10.0 + rank)}


def save_and_die(rank: int, folder: str, moment: str, victims: list[int]) -> None:
    saved = []

    def on_stage(stage: str) -> None:
        if saved == [1, 2] and stage == moment and rank in victims:
            die_together(rank, folder, victims)

    checkpoints = Checkpoints(Path(folder), keep=2, on_stage=on_stage)
    for step in (1, 2):
        checkpoints.save(step, state_of(step, rank=rank), extra={"step": step})
        checkpoints.wait()
        saved.append(step)
    state = state_of(3, rank=rank)
    if moment == "serializing" and rank in victims:
        state["a"] = {f"rank{rank}": Bomb(rank, folder, victims)}
    checkpoints.save(3, state, extra={"step": 3})
    with pytest.raises(SaveError, match="step 3 could not be written") as caught:
        checkpoints.close()  # only a survivor gets here
    assert caught.value.path == folder


def go_on_after_a_kill(rank: int, folder: str, complete: list[int]) -> None:
    before = sorted(entry.name for entry in Path(folder).iterdir())
    with Checkpoints(Path(folder), read_only=True) as reader:
        assert [info.step for info in reader.list()] == complete, before  # the half one is invisible
    checkpoints = Checkpoints(Path(folder), keep=2)
    names = sorted(entry.name for entry in Path(folder).iterdir())
    assert names == [".writer", *(f"step-{step:08d}" for step in complete)], (before, names)
    for info in checkpoints.list():
        state = state_of(0, rank=rank)
        assert checkpoints.load(info, state) == {"step": info.step}
        for name, value in state_of(info.step, rank=rank).items():
            assert torch.equal(state[name], value)
    checkpoints.save(4, state_of(4, rank=rank))
    checkpoints.close()
    assert [info.step for info in checkpoints.list()] == [complete[-1], 4]


@pytest.mark.parametrize("moment", [*MOMENTS_OF_ALL, *MOMENTS_OF_RANK_0])
@pytest.mark.parametrize("num_ranks", [0, 2])
def test_a_kill_at_any_moment_leaves_what_was_complete(
    ranks: Ranks, tmp_path: Path, num_ranks: int, moment: str
) -> None:
    victims = list(range(max(1, num_ranks))) if moment in MOMENTS_OF_ALL else [0]
    codes = ranks.run(save_and_die, num_ranks, scratch=tmp_path, folder=tmp_path / "c", moment=moment, victims=victims)
    assert codes == [KILLED if rank in victims else 0 for rank in range(len(codes))]
    complete = {"published": [1, 2, 3], "done": [2, 3]}.get(moment, [1, 2])
    if moment == "staged":  # the writing thread may have been anywhere
        complete = [int(entry.name[5:]) for entry in sorted((tmp_path / "c").glob("step-????????"))]
        assert complete[:-1] in ([1], [1, 2], [2])
        assert 2 in complete
    codes = ranks.run(go_on_after_a_kill, num_ranks, scratch=tmp_path, folder=tmp_path / "c", complete=complete)
    assert set(codes) == {0}


@pytest.mark.parametrize(("moment", "victim"), [("serializing", 0), ("serializing", 1), ("data", 1), ("metadata", 0)])
def test_a_kill_of_one_rank_is_told_to_the_other_and_leaves_what_was_complete(
    ranks: Ranks, tmp_path: Path, moment: str, victim: int
) -> None:
    codes = ranks.run(save_and_die, 2, scratch=tmp_path, folder=tmp_path / "c", moment=moment, victims=[victim])
    assert codes[victim] == KILLED
    assert codes[1 - victim] == 0
    codes = ranks.run(go_on_after_a_kill, 2, scratch=tmp_path, folder=tmp_path / "c", complete=[1, 2])
    assert codes == [0, 0]


def replace_and_die(rank: int, folder: str) -> None:
    def on_stage(stage: str) -> None:
        if stage == "record":
            # What a kill between the two renames leaves: the old one set aside, the new one not yet in its place.
            (Path(folder) / "step-00000001").rename(Path(folder) / "step-00000001.replaced-x")
            os.kill(os.getpid(), signal.SIGKILL)

    with Checkpoints(Path(folder), on_stage=on_stage) as checkpoints:
        checkpoints.save(1, {"w": torch.tensor([2.0])})


def test_a_kill_while_a_checkpoint_is_being_replaced_loses_neither(tmp_path: Path, ranks: Ranks) -> None:
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(1, {"w": torch.tensor([1.0])})
    assert ranks.run(replace_and_die, 0, scratch=tmp_path, folder=tmp_path / "c") == [KILLED]
    state = {"w": torch.zeros(1)}
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert sorted(entry.name for entry in (tmp_path / "c").iterdir()) == [".writer", "step-00000001"]
        checkpoints.load(checkpoints.find("must") or "", state)
    assert state["w"].item() == 1.0


def fill_the_disk(rank: int, folder: str, asynchronous: bool) -> None:
    checkpoints = Checkpoints(Path(folder), keep=1, asynchronous=asynchronous)
    checkpoints.save(1, state_of(1, rank=rank))
    checkpoints.wait()
    large = {**state_of(2, rank=rank), f"large/rank{rank}": torch.zeros(2_000_000 if rank else 10)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    def save_too_much() -> None:
        checkpoints.save(2, large)
        checkpoints.wait()

    with pytest.raises(SaveError) as caught:
        save_too_much()
    assert "step 2 could not be written, on rank 1" in caught.value.message
    assert caught.value.path == folder
    assert "free space" in str(caught.value.repair)
    assert [info.step for info in checkpoints.list()] == [1]
    state = state_of(0, rank=rank)
    checkpoints.load(Path(folder) / "step-00000001", state)
    assert torch.equal(state["w"], state_of(1, rank=rank)["w"])
    assert not list(Path(folder).glob("step-00000002*"))  # it no longer fills the disk
    checkpoints.save(3, state_of(3, rank=rank))  # what fits is saved again
    checkpoints.close()
    assert [info.step for info in checkpoints.list()] == [3]


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_a_full_disk_is_reported_on_every_rank_and_keeps_the_older_one(
    ranks: Ranks, tmp_path: Path, asynchronous: bool
) -> None:
    codes = ranks.run(fill_the_disk, 2, scratch=tmp_path, folder=tmp_path / "c", asynchronous=asynchronous)
    assert codes == [0, 0]


def truncate(folder: Path, name: str) -> None:
    os.truncate(folder / name, (folder / name).stat().st_size - 1)


def flip(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)


def remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


def load_damaged(rank: int, folder: str, fault: str) -> None:
    state = state_of(0, rank=rank)
    checkpoints = Checkpoints(Path(folder), read_only=True)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(Path(folder) / "step-00000001", state)
    assert f"The checkpoint is damaged: {fault}" in caught.value.message
    assert caught.value.path == str(Path(folder) / "step-00000001")
    assert caught.value.repair
    assert torch.equal(state["w"], state_of(0, rank=rank)["w"])
    checkpoints.close()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize(("damage", "fault"), [(truncate, "has"), (flip, "has other content"), (remove, "is missing")])
def test_a_damaged_file_is_named_on_every_rank_before_anything_changes(
    ranks: Ranks, tmp_path: Path, damage: Callable[[Path, str], None], fault: str, name: str
) -> None:
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(1, state_of(1, rank=0))
    size = (tmp_path / "c/step-00000001" / name).stat().st_size
    damage(tmp_path / "c/step-00000001", name)
    if damage is truncate:
        fault = f"has {size - 1} bytes instead of {size}"
    codes = ranks.run(load_damaged, 2, scratch=tmp_path, folder=tmp_path / "c", fault=f"{name} {fault}")
    assert codes == [0, 0]


def test_a_record_that_cannot_be_read_is_named_and_left_alone(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
        checkpoints.save(1, state_of(1, rank=0))
        checkpoints.wait()
        record = tmp_path / "c/step-00000001/checkpoint.json"
        record.write_text(json.dumps({"format": 1}))
        with pytest.raises(CheckpointError, match="cannot be read") as caught:
            checkpoints.latest()
        assert caught.value.path == str(record)
        checkpoints.save(2, state_of(2, rank=0))
        checkpoints.wait()
        assert record.exists()
