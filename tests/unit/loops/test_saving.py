"""When a checkpoint is due, and which step a resume continues after."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.config import CheckpointConfig
from forge.loops.resuming import SaveRule, saved_step, where_it_stopped
from forge.trainer.checkpoint_folder import CheckpointInfo, checkpoint_name, write_record


def keep(folder: Path, step: int, *, sequence: int, caller: dict[str, int] | None = None) -> None:
    path = folder / checkpoint_name(step)
    path.mkdir(parents=True)
    extra = {"step": step, "caller": caller or {}}
    write_record(CheckpointInfo(path, step, sequence, "", None, 1, "2", extra), folder=path)


def test_steps_and_seconds_both_make_a_checkpoint_due() -> None:
    now = [100.0]
    rule = SaveRule(CheckpointConfig(save_interval=3, save_interval_s=60.0), clock=lambda: now[0])
    assert [step for step in range(7) if rule.is_due(step)] == [3, 6]
    now[0] += 60.0
    assert [step for step in range(4) if rule.is_due(step)] == [1, 2, 3], "never before the first step"
    rule.saved()
    assert [step for step in range(7) if rule.is_due(step)] == [3, 6]


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_without_an_interval_of_steps_time_alone_decides(seconds: float | None) -> None:
    now = [0.0]
    rule = SaveRule(CheckpointConfig(save_interval=None, save_interval_s=seconds), clock=lambda: now[0])
    now[0] = 1e6
    assert rule.is_due(500) == (seconds is not None)


def test_by_default_a_quarter_of_an_hour_is_the_most_that_a_crash_costs() -> None:
    assert CheckpointConfig().save_interval_s == 900


def test_only_a_complete_checkpoint_is_resumed_from(tmp_path: Path) -> None:
    assert where_it_stopped(2, tmp_path / "none") == "stopped after step 2; there is no checkpoint yet"
    keep(tmp_path, 8, sequence=1, caller={"step": 4})  # two optimizer steps on each batch
    (tmp_path / f"{checkpoint_name(12)}.partial-1").mkdir()
    (tmp_path / checkpoint_name(16)).mkdir()  # without a record
    assert where_it_stopped(6, tmp_path) == "stopped after step 6; --resume continues after step 4"


def test_the_latest_is_the_one_completed_last(tmp_path: Path) -> None:
    keep(tmp_path, 9, sequence=0)
    keep(tmp_path, 5, sequence=1)  # after going back
    assert saved_step(tmp_path) == 5
