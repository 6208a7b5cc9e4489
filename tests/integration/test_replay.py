"""`forge replay` and `forge bisect` on runs whose workers are in this process: every step of an asynchronous run is
reproduced bit for bit, and what was changed since is named."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge.cli import main
from forge.config import GRPOConfig
from forge.errors import ReplayError
from forge.loops.replay.bisecting import bisect_run
from forge.loops.replay.groups import resample_group
from forge.loops.replay.recorded import RecordedRun
from forge.loops.replay.steps import replay_step
from forge.loops.run_paths import run_dir
from forge.rollout.step_log import step_path
from forge.rollout.step_record import pack, unpack
from forge.trainer.checkpointer import Checkpointer
from forge.trainer.engine import Engine
from grpo_runs import NUM_STEPS, config, train_here
from local_services import services_here


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    """An asynchronous run that was resumed once."""
    folder = tmp_path_factory.mktemp("replay") / "late"
    options = ("rollout.staleness=2", "checkpointing.keep=8")
    train_here(config(folder, *options, "training.max_steps=3", "checkpointing.save_interval=1"))
    chosen = config(folder, *options, "checkpointing.resume=must")
    assert train_here(chosen).step == NUM_STEPS
    return chosen


@pytest.fixture
def copied(late: GRPOConfig, tmp_path: Path) -> Path:
    """A copy of the run to change something in."""
    return Path(shutil.copytree(run_dir(late), tmp_path / "run"))


def change(folder: Path, step: int, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change the record of a step, and let the file be whole again."""
    path = step_path(folder / "replay", step)
    head, columns = unpack(path.read_bytes(), path=path)
    edit(head, columns)
    path.write_bytes(pack(head, columns))


def replay(folder: Path, step: int) -> list[Any]:
    with services_here():
        return asyncio.run(replay_step(RecordedRun(folder), step))[1]


def test_every_step_of_an_asynchronous_run_is_reproduced_bit_for_bit(late: GRPOConfig) -> None:
    recorded = RecordedRun(run_dir(late))
    stale = [step - 1 - min(group.version for group in recorded.read(step).groups) for step in recorded.steps]
    assert max(stale) == 2
    with services_here():
        found = asyncio.run(bisect_run(recorded))
    assert (found.first, found.tolerance, found.other_hardware) == (None, 0.0, ())
    assert found.steps == recorded.window == tuple(recorded.steps)
    assert NUM_STEPS in found.steps
    last = replay(run_dir(late), NUM_STEPS)
    assert last[-1].weights == recorded.read(NUM_STEPS).weights is not None


def test_a_changed_token_is_named(copied: Path) -> None:
    def edit(head: dict[str, Any], columns: dict[str, Any]) -> None:
        columns["token_ids"][0] ^= 1

    change(copied, 5, edit)
    first = RecordedRun(copied).read(5).groups[0].number
    (difference,) = replay(copied, 5)[-1].differences
    assert (difference.component, difference.quantity) == (
        "record",
        f"digest of the token ids of group {first}, sample 0",
    )


def test_a_changed_reward_is_named_with_the_advantages_that_follow(copied: Path) -> None:
    def edit(head: dict[str, Any], columns: dict[str, Any]) -> None:
        head["groups"][1]["episodes"][2]["score"][0] += 1.0

    change(copied, 4, edit)
    number = RecordedRun(copied).read(4).groups[1].number
    differences = replay(copied, 4)[-1].differences
    assert (differences[0].component, differences[0].quantity) == (
        "record",
        f"digest of the reward of group {number}, sample 2",
    )
    assert {each.component for each in differences[1:]} == {"advantages"}


def test_a_changed_weight_of_a_checkpoint_is_found(copied: Path, tmp_path: Path) -> None:
    recorded = RecordedRun(copied)
    start = recorded.find_start(NUM_STEPS)
    assert start.checkpoint is not None
    engine = Engine(recorded.session_of(NUM_STEPS).trainer_config(tmp_path / "changed"))
    checkpointer = Checkpointer(engine)
    extra = checkpointer.load(str(start.checkpoint.path))
    next(iter(engine.trained_parameters().values())).view(-1)[0] += 1.0
    checkpointer.save(extra=extra)
    checkpointer.close()
    engine.close()
    shutil.rmtree(start.checkpoint.path)
    shutil.copytree(tmp_path / "changed" / start.checkpoint.path.name, start.checkpoint.path)
    (found,) = replay(copied, NUM_STEPS)
    assert (found.step, found.component) == (start.step, "checkpoint")
    assert found.differences[0].recorded == start.weights


@pytest.mark.parametrize(
    ("key", "value", "component"),
    [("loss", 0.5, "loss"), ("grad_norm", 1.5, "backward pass"), ("learning_rate", 1.0, "schedule")],
)
def test_a_number_that_training_does_not_give_again_is_named(
    key: str, value: float, component: str, copied: Path
) -> None:
    def edit(head: dict[str, Any], columns: dict[str, Any]) -> None:
        head["outcome"][key] = value

    change(copied, 5, edit)
    found = replay(copied, 5)[-1]
    (difference,) = found.differences
    assert (found.step, difference.component, difference.recorded) == (5, component, value)


def test_bisect_finds_the_first_step_and_its_component(copied: Path) -> None:
    def other_weights(head: dict[str, Any], columns: dict[str, Any]) -> None:
        head["weights"] = "0" * 64

    def other_logprob(head: dict[str, Any], columns: dict[str, Any]) -> None:
        columns["logprobs"][3] = np.nextafter(columns["logprobs"][3], np.float32(0))

    change(copied, 6, other_logprob)
    with services_here():
        found = asyncio.run(bisect_run(RecordedRun(copied)))
    assert found.first is not None
    assert (found.first.step, found.first.component, 6 in found.steps) == (6, "record", False)
    assert found.first.differences[0].quantity.startswith("digest of the logprobs of group")
    change(copied, 5, other_weights)
    with services_here():
        found = asyncio.run(bisect_run(RecordedRun(copied)))
    assert found.first is not None
    assert (found.first.step, found.first.component, found.steps[-1]) == (5, "optimizer", 4)


def test_on_other_hardware_numbers_are_compared_within_a_tolerance(copied: Path) -> None:
    for path in (copied / "replay").glob("session_*.json"):
        session = json.loads(path.read_text())
        session["hardware"]["cpu"] = "another"
        path.write_text(json.dumps(session))

    def edit(head: dict[str, Any], columns: dict[str, Any]) -> None:
        head["outcome"]["grad_norm"] *= 1 + 1e-5
        head["weights"] = "0" * 64

    change(copied, 5, edit)
    found = replay(copied, 5)[-1]
    assert found.is_same
    assert (found.tolerance, [line.split(":")[0] for line in found.other_hardware]) == (1e-3, ["cpu"])


def test_wrong_input_is_refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = RecordedRun(copied)
    with pytest.raises(ReplayError, match="not recorded") as refused:
        recorded.find_start(40)
    assert (refused.value.path, refused.value.value) == ("--step", 40)
    assert f"steps 1 to {NUM_STEPS}" in (refused.value.rule or "")
    assert "checkpointing.keep" in (refused.value.repair or "")
    assert main(["replay", str(copied / "nowhere"), "--step", "1"]) == 2
    assert "a folder with the config.yaml" in capsys.readouterr().err
    assert main(["bisect", str(copied), "--tolerance", "-1"]) == 2
    assert main(["replay", str(copied)]) == 0
    assert "bytes per token" in capsys.readouterr().out
    path = step_path(copied / "replay", 2)
    path.write_bytes(path.read_bytes()[:-40])  # as a full disk leaves it
    with pytest.raises(ReplayError, match="damaged") as refused:
        recorded.read(2)
    assert refused.value.path == str(path)
    shutil.rmtree(copied / "replay")
    with pytest.raises(ReplayError, match="no record of its steps") as refused:
        RecordedRun(copied)
    assert refused.value.repair == "run with record.replay.enabled: true"


def test_runs_that_cannot_be_replayed_say_so(tmp_path: Path) -> None:
    chosen = config(tmp_path / "off", "record.replay.enabled=false", "training.max_steps=1")
    train_here(chosen)
    with pytest.raises(ReplayError) as refused:
        RecordedRun(run_dir(chosen))
    assert "record.replay" in str(refused.value.value)
    assert not (run_dir(chosen) / "replay").exists()


def test_a_loss_that_was_given_in_python_must_be_given_again(copied: Path) -> None:
    for path in (copied / "replay").glob("session_*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"own_loss": True}))
    with pytest.raises(ReplayError, match="given its loss in Python") as refused:
        replay(copied, 5)
    assert (refused.value.path, refused.value.rule) == (
        str(copied),
        "run_grpo(config, loss=…) is replayed with the same loss",
    )
    assert "open_replayer" in (refused.value.repair or "")


def test_records_without_a_state_to_start_from_are_refused(copied: Path) -> None:
    for path in (copied / "replay").glob("session_*.json"):  # the resume's checkpoint was that of the original
        path.write_text(json.dumps(json.loads(path.read_text()) | {"checkpoint": str(copied / "gone")}))
    shutil.rmtree(copied / "checkpoints")
    recorded = RecordedRun(copied)
    assert (recorded.window, len(recorded.steps)) == ((), NUM_STEPS)
    with pytest.raises(ReplayError, match="cannot be replayed") as refused:
        recorded.find_start(4)
    assert "every checkpoint that their records follow is gone" in (refused.value.rule or "")
    with pytest.raises(ReplayError, match="no step of this run") as refused:
        asyncio.run(bisect_run(recorded))
    assert refused.value.value == f"{NUM_STEPS} recorded steps"
    with pytest.raises(ReplayError, match="weights that sampled this group") as refused, services_here():
        asyncio.run(resample_group(recorded, recorded.read(5).groups[0].number))
    assert str(refused.value.value).startswith("version ")


def test_the_guides_program_runs(late: GRPOConfig) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "replay.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    with services_here():
        assert asyncio.run(names["check"](str(run_dir(late)), NUM_STEPS))
