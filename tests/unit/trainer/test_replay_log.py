"""What a log of steps and saves keeps, and from where a trainer is restored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from forge.config import RecoveryConfig
from forge.trainer.checkpoint_folder import CheckpointInfo, write_record
from forge.trainer.recovering import RecoveringTrainer, RecoverySetup, add_up
from forge.trainer.replay_log import LoggedSave, LoggedStep, ReplayLog, complete_saves
from forge.types import Batch, StepResult


def batch(num_tokens: int = 4) -> Batch:
    return Batch(torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens), (num_tokens,))


def result(step: int) -> StepResult:
    return StepResult(step, float("nan"), 1.0, 1e-3, 4, 4)


def numbers(entries: Any) -> list[int | str]:
    return [entry.found[0] if isinstance(entry, LoggedStep) else entry.id for entry in entries]


def test_what_precedes_the_save_before_the_last_is_dropped() -> None:
    """The last save may be on its way; the one before it is complete."""
    log = ReplayLog()
    for step in range(1, 7):
        log.add_step(batch(), result(step))
        if step % 2 == 0:
            log.add_save(LoggedSave({}, id=f"save {step}"))
    assert log.since([]) == (None, log.since([])[1])
    assert numbers(log.since([])[1]) == ["save 4", 5, 6, "save 6"]
    base, entries = log.since(["save 4"])
    assert (base is not None and base.id, numbers(entries)) == ("save 4", [5, 6, "save 6"])
    base, entries = log.since(["save 2", "save 4", "save 6"])
    assert (base is not None and base.id, numbers(entries)) == ("save 6", [])


def test_steps_with_the_same_nan_are_equal() -> None:
    assert LoggedStep.of(batch(), result(1)).found == LoggedStep.of(batch(), result(1)).found
    assert LoggedStep.of(batch(), result(1)).found != LoggedStep.of(batch(), result(2)).found


def test_memory_counts_each_batch_since_the_last_save_once() -> None:
    log, of_step = ReplayLog(), batch(1000)
    log.add_step(batch(10), result(1))
    log.add_save(LoggedSave({}))
    assert log.num_bytes_unsaved == 0
    for step in (2, 3):  # two steps on one batch
        log.add_step(of_step, result(step))
    assert log.num_bytes_unsaved == 1000 * (8 + 4)


def test_a_checkpoint_is_due_when_half_of_the_memory_is_used(tmp_path: Path) -> None:
    async def start() -> Any: ...

    for gigabytes, is_full in ((1e-5, True), (1e-3, False)):  # the batch has 12,000 bytes
        rules = RecoveryConfig(max_batches_gb=gigabytes)
        trainer = RecoveringTrainer(None, RecoverySetup("trainer", start, rules, tmp_path, tmp_path))  # type: ignore[arg-type]
        trainer._log.add_step(batch(1000), result(1))
        assert trainer.is_log_full == is_full


def test_saves_are_found_in_folders_and_as_parts(tmp_path: Path) -> None:
    def write(folder: Path, save_id: str | None, step: int) -> Path:
        folder.mkdir(parents=True)
        extra = {"caller": {} if save_id is None else {"save_id": save_id}}
        write_record(CheckpointInfo(folder, step, step, "", None, 1, "", extra), folder=folder)
        return folder

    own = write(tmp_path / "step-00000002", "a", 2)
    write(tmp_path / "step-00000001", None, 1)  # of an earlier release
    write(tmp_path / "step-00000003.partial-x", "b", 3)
    inside = write(own / "critic", "c", 2)
    waiting = write(tmp_path / "critic" / "step-00000003", "d", 3)
    assert complete_saves(tmp_path) == {"a": own}
    assert complete_saves(tmp_path, part="critic") == {"c": inside, "d": waiting}
    assert complete_saves(tmp_path / "missing") == {}
    assert json.loads((own / "checkpoint.json").read_text())["extra"]["caller"]["save_id"] == "a"


def test_costs_add_up() -> None:
    assert add_up([{"a": 1.0}, {}, {"a": 2.0, "b": 3.0}]) == {"a": 3.0, "b": 3.0}
