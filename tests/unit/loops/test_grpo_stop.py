"""The loop of reinforcement learning when it is stopped, runs out of time, or out of disk. Workers are stand-ins."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from episodes import make_group
from forge.config import RecordConfig
from forge.errors import RecordError, SaveError, StepAbandoned
from forge.loops.stopping import Stop
from forge.rollout.ledger import Ledger, LedgerLine, check_ledger, read_ledger
from forge.rollout.record import RolloutRecorder
from forge.rollout.signal import NoSignalGroup
from forge.types import Batch, StepResult
from grpo_runs import config, ledger
from grpo_workers import StandInPolicy, StandInTrainer, run_loop

SAVE_NEVER = ("checkpointing.save_interval=null", "checkpointing.save_interval_s=null")


class Busy(StandInTrainer):
    """Asks the run to stop while it trains step 3."""

    def __init__(self, stop: Stop) -> None:
        super().__init__()
        self._stop = stop
        self.num_waits = 0

    async def train_step(self, batch: Batch, *, keep_logprobs: bool = False) -> StepResult:
        if self.step == 2:
            self._stop.ask(signal.SIGTERM)
        return await super().train_step(batch, keep_logprobs=keep_logprobs)

    async def wait_saved(self) -> None:
        self.num_waits += 1


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_signal_lets_the_step_finish_saves_and_says_so_in_the_exit_code(staleness: int, tmp_path: Path) -> None:
    stop = Stop()
    trainer = Busy(stop)
    chosen = config(tmp_path / "run", *SAVE_NEVER, f"rollout.staleness={staleness}", "evaluation.fraction=0.2")
    result = run_loop(chosen, trainer, stop=stop)
    assert (result.step, result.is_stopped, result.exit_code) == (3, True, 143)
    (extra,) = trainer.saved
    assert (extra["step"], trainer.num_waits) == (3, 1), "it waits until the checkpoint is complete"
    assert max(trainer.published) == 2, "no generator needs the last weights"
    buffer = extra["buffer"]
    check_ledger(ledger(chosen), pending=buffer["pending"], next_number=buffer["next_number"])


def test_a_run_that_ends_by_itself_exits_with_0(tmp_path: Path) -> None:
    result = run_loop(config(tmp_path / "run"), StandInTrainer())
    assert (result.is_stopped, result.exit_code) == (False, 0)


def test_before_the_first_step_there_is_nothing_to_save_or_to_report(tmp_path: Path) -> None:
    stop, trainer = Stop(), StandInTrainer()
    policy = StandInPolicy(trainer, on_update=lambda version: stop.ask(signal.SIGINT))
    result = run_loop(config(tmp_path / "run", "record.report=true"), trainer, policy=policy, stop=stop)
    assert (result.step, result.exit_code, result.report) == (0, 130, None)
    assert trainer.saved == []


class Slow(StandInTrainer):
    """Never finishes step 3 unless it is abandoned."""

    def __init__(self, stop: Stop) -> None:
        super().__init__()
        self._stop = stop

    async def train_step(self, batch: Batch, *, keep_logprobs: bool = False) -> StepResult:
        if self.step == 2:
            self._given_up = asyncio.Event()
            self._stop.ask(signal.SIGTERM)
            self._stop.expire()
            await self._given_up.wait()
            raise StepAbandoned("no time")
        return await super().train_step(batch, keep_logprobs=keep_logprobs)

    async def abandon_step(self) -> None:
        self._given_up.set()


def test_a_step_without_time_is_abandoned_and_its_groups_come_again(tmp_path: Path) -> None:
    stop = Stop()
    trainer = Slow(stop)
    chosen = config(tmp_path / "run", *SAVE_NEVER)
    result = run_loop(chosen, trainer, stop=stop)
    assert (result.step, result.exit_code) == (2, 143)
    (extra,) = trainer.saved
    assert (extra["step"], extra["buffer"]["pending"]) == (2, [4, 5])
    assert [line.group for line in ledger(chosen)] == [0, 1, 2, 3]


def test_time_makes_a_checkpoint_due(tmp_path: Path) -> None:
    trainer = StandInTrainer()
    chosen = config(tmp_path / "run", "checkpointing.save_interval=null", "checkpointing.save_interval_s=20")
    run_loop(chosen, trainer, clock=lambda: 10.0 * trainer.step)  # each step takes ten seconds
    assert [extra["step"] for extra in trainer.saved] == [2, 4, 6]


# ---- Disks that are full --------------------------------------------------------------------------------------------


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Inside the block no file of this process grows beyond a size: a write fails, or is cut short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 10], ids=["nothing fits", "a part fits"])
def test_a_ledger_on_a_full_disk_keeps_its_lines_and_names_the_file(room: int, tmp_path: Path) -> None:
    written = Ledger(tmp_path / "ledger.jsonl")
    written.write([LedgerLine(1, 0, 0, "p", "trained")])
    with largest_file(written.path.stat().st_size + room), pytest.raises(RecordError) as caught:
        written.write([LedgerLine(2, 1, 0, "p", "trained")])
    written.close()
    assert [line.group for line in read_ledger(written.path)] == [0]
    assert written.path.read_bytes().endswith(b"\n")
    assert caught.value.path == str(written.path)
    assert "--resume" in str(caught.value.repair)


def test_a_group_without_signal_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    writer = RolloutRecorder(tmp_path, decode=str, config=RecordConfig(), resume_step=None)
    group = make_group(0, (0.0, 0.0))
    path = writer.write_no_signal(1, NoSignalGroup(0, "no_signal", "all_zero", group))
    assert path is not None
    before = path.read_bytes()
    with largest_file(len(before) + 10), pytest.raises(RecordError) as caught:
        writer.write_no_signal(1, NoSignalGroup(1, "no_signal", "all_zero", group))
    assert caught.value.path == str(path)
    assert path.read_bytes() == before


class Saving(StandInTrainer):
    """Writes its checkpoint when somebody waits for it, and fails."""

    is_saving = False

    async def save(self, *, extra: Mapping[str, Any], metric: float | None = None) -> None:
        await super().save(extra=extra, metric=metric)
        self.is_saving = True

    async def wait_saved(self) -> None:
        if self.is_saving:
            self.is_saving = False
            raise SaveError("The checkpoint of step 2 could not be written")


def test_a_full_disk_ends_the_run_with_one_error_when_the_save_under_way_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, chosen = Saving(), config(tmp_path / "run", "record.rollouts=none")

    class Full(StandInPolicy):
        async def update_weights(self, version: int) -> Any:
            if version == 3:
                size = os.path.getsize(tmp_path / "run" / "ledger.jsonl")
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            return await super().update_weights(version)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(RecordError) as caught:
            run_loop(chosen, trainer, policy=Full(trainer))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.path == str(tmp_path / "run" / "ledger.jsonl")
    assert not trainer.is_saving
    assert "The checkpoint of step 2 could not be written" in caplog.text
