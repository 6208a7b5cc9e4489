"""Checkpoints with real ranks: exact round trips, other layouts, and tensors that change while they are written.

Functions that take `rank` run on the ranks, in processes of their own; what they assert fails their exit code.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpoint_ranks import Ranks, ranks_of
from forge.errors import CheckpointError
from forge.trainer.checkpoint import Checkpoints
from forge.trainer.checkpointer import rng_state, set_rng_state

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from ranks_of(__name__)


class Training:
    """A small model of odd sizes, sharded where there is a group, and its optimizer after some steps."""

    def __init__(self, *, seed: int, num_steps: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5))
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(self.model[0], mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        self.model(torch.randn(4, 7)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
        }

    def take(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=FLAT)

    def whole(self) -> dict[str, Any]:
        """Everything as plain values, equal on all ranks."""
        state = self.state()
        return {**whole(state["model"]), **whole(state["optimizer"])}


def whole(values: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        found[name] = value.full_tensor() if isinstance(value, DTensor) else value
        if isinstance(found[name], Tensor):
            found[name] = found[name].clone()
    return found


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def save_trained(rank: int, folder: str, expected: str, asynchronous: bool) -> None:
    training = Training(seed=1, num_steps=3)
    before = training.whole()
    with Checkpoints(Path(folder), asynchronous=asynchronous) as checkpoints:
        checkpoints.save(3, training.state(), extra={"position": [1, 2], "rank": rank}, metric=0.5)
        training.step()  # must not reach the checkpoint
    assert any(not torch.equal(value, before[name]) for name, value in training.whole().items() if "weight" in name)
    if rank == 0:
        torch.save(before, expected)


def load_trained(rank: int, folder: str, expected: str) -> None:
    training = Training(seed=2, num_steps=1)
    state = training.state()
    with Checkpoints(Path(folder), read_only=True) as checkpoints:
        info = checkpoints.find("must")
        assert info is not None
        assert (info.step, info.metric) == (3, 0.5)
        assert checkpoints.load(info, state) == {"position": [1, 2], "rank": 0}
    training.take(state)
    assert_equal(training.whole(), torch.load(expected, weights_only=False))


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(0, 0), (1, 1), (2, 2), (1, 2), (2, 1), (2, 0), (3, 2)])
def test_a_round_trip_is_exact_on_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, saved_on: int, loaded_on: int, asynchronous: bool
) -> None:
    places = {"folder": tmp_path / "checkpoints", "expected": tmp_path / "expected.pt"}
    assert set(ranks.run(save_trained, saved_on, scratch=tmp_path, **places, asynchronous=asynchronous)) == {0}
    record = json.loads((tmp_path / "checkpoints/step-00000003/checkpoint.json").read_text())
    assert record["world_size"] == max(1, saved_on)
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == [".writer", "step-00000003"]
    assert set(ranks.run(load_trained, loaded_on, scratch=tmp_path, **places)) == {0}


def save_in_grid(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    value = torch.arange(35.0).reshape(7, 5)
    state = {"w": distribute_tensor(value, mesh, [Shard(0), Shard(1)]), f"stage{rank}": torch.full((2,), float(rank))}
    with Checkpoints(Path(folder)) as checkpoints:
        checkpoints.save(0, state)


def load_in_row(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(1), Replicate()):
        stages = {f"stage{2 * rank + index}": torch.zeros(2) for index in range(2)}
        state = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [placement]), **stages}
        with Checkpoints(Path(folder), read_only=True) as checkpoints:
            checkpoints.load(checkpoints.find("must") or "", state)
        assert torch.equal(state["w"].full_tensor(), torch.arange(35.0).reshape(7, 5))
        for index in range(2):
            assert state[f"stage{2 * rank + index}"].tolist() == [2.0 * rank + index] * 2


def test_a_grid_of_shards_and_stages_loads_into_another_grid(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(save_in_grid, 4, scratch=tmp_path, folder=tmp_path / "checkpoints") == [0] * 4
    assert ranks.run(load_in_row, 2, scratch=tmp_path, folder=tmp_path / "checkpoints") == [0] * 2


def save_random(rank: int, folder: str, draws: str) -> None:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    random.gauss(0, 1), np.random.standard_normal(), torch.randn(3)
    with Checkpoints(Path(folder)) as checkpoints:
        checkpoints.save(1, {"rng": {f"rank{rank}": rng_state()}})
    Path(f"{draws}{rank}").write_text(json.dumps(draw()))


def load_random(rank: int, folder: str, draws: str) -> None:
    state = {"rng": {f"rank{rank}": rng_state()}}
    with Checkpoints(Path(folder), read_only=True) as checkpoints:
        checkpoints.load(checkpoints.find("must") or "", state)
    set_rng_state(state["rng"][f"rank{rank}"])
    found = draw()
    if rank < 2:
        assert found == json.loads(Path(f"{draws}{rank}").read_text())


def draw() -> list[float]:
    numpy = np.random.standard_normal(3).tolist()
    return [random.gauss(0, 1), random.gauss(0, 1), random.random(), *numpy, *torch.randn(3).tolist()]


@pytest.mark.parametrize("loaded_on", [1, 2, 3])
def test_each_rank_gets_its_own_random_state_back_and_other_numbers_of_ranks_load_what_there_is(
    ranks: Ranks, tmp_path: Path, loaded_on: int
) -> None:
    places = {"folder": tmp_path / "checkpoints", "draws": tmp_path / "draws"}
    assert ranks.run(save_random, 2, scratch=tmp_path, **places) == [0, 0]
    assert set(ranks.run(load_random, loaded_on, scratch=tmp_path, **places)) == {0}


def refuse_on_all_ranks(rank: int, folder: str) -> None:
    checkpoints = Checkpoints(Path(folder))
    checkpoints.save(1, {"w": torch.zeros(3), f"stage{rank}": torch.zeros(1)})
    path = Path(folder) / "step-00000001"
    own = {"w": torch.ones(3), f"stage{rank}": torch.ones(1)}
    cases = {
        "lacks 1 key(s) that this state has: more": {**own, **({"more": torch.zeros(1)} if rank else {})},
        "has 1 key(s) that this state lacks: stage1": {"w": torch.ones(3), "stage0": torch.ones(1)},
        "w ([3] in the checkpoint, [4] here)": {**own, "w": torch.ones(4 if rank else 3)},
        "w (a tensor in the checkpoint, an object here)": {**own, "w": 5 if rank else torch.ones(3)},
    }
    for expected, state in cases.items():
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(path, state)
        assert expected in caught.value.message
        assert caught.value.path == str(path)
        assert caught.value.repair
        assert state[f"stage{0 if 'stage1' in expected else rank}"].tolist() == [1.0]  # nothing was changed
    checkpoints.load(path, own)
    assert own["w"].tolist() == [0.0] * 3
    checkpoints.close()


def test_what_one_rank_finds_wrong_is_raised_on_all_before_anything_changes(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(refuse_on_all_ranks, 2, scratch=tmp_path, folder=tmp_path / "checkpoints") == [0, 0]


def refuse_a_taken_folder(rank: int, folder: str) -> None:
    with pytest.raises(CheckpointError, match="Another run is writing"):
        Checkpoints(Path(folder))
    with Checkpoints(Path(folder), read_only=True) as reader:
        assert [info.step for info in reader.list()] == [7]


def test_a_folder_has_one_writer_and_any_number_of_readers(ranks: Ranks, tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(7, {"w": torch.zeros(1)})
        checkpoints.wait()
        codes = ranks.run(refuse_a_taken_folder, 2, scratch=tmp_path, folder=tmp_path / "checkpoints")
    assert codes == [0, 0]
    Checkpoints(tmp_path / "checkpoints").close()
