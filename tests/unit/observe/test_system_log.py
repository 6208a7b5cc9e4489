"""`system.jsonl`: rates from two looks, sums of gauges, names of GPUs, and what happens when it cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forge.observe.jsonl import read_jsonl
from forge.observe.process_status import ProcessStatus, own_status
from forge.observe.system_log import SystemLog
from forge.observe.tracing import Process
from forge.observe.usage import DeviceUse, ProcessUse

TRAINER, GENERATOR = Process("one", 1, "trainer"), Process("one", 2, "generator[0]")


def status(process: Process, time: float, cpu_s: float, **more: object) -> ProcessStatus:
    return ProcessStatus(process, time, ProcessUse(cpu_s, 2**30, 2**29, **more))  # type: ignore[arg-type]


def test_cpu_is_what_was_used_between_two_lines(tmp_path: Path) -> None:
    log = SystemLog(tmp_path / "system.jsonl", interval_s=0)
    log.write(1, [status(TRAINER, 10.0, 5.0), status(GENERATOR, 10.0, 1.0)])
    log.write(2, [status(TRAINER, 12.0, 11.0)])
    log.write(3, [status(TRAINER, 14.0, 10.0)])  # another process of the same number: never below 0
    log.close()
    first, second, third = (line.values for line in read_jsonl(tmp_path / "system.jsonl"))
    assert first == {
        "memory_gib/trainer": 1.0, "shared_gib/trainer": 0.5, "memory_gib/generator[0]": 1.0,
        "shared_gib/generator[0]": 0.5,
    }  # fmt: skip
    assert second["cpu/trainer"] == 3.0
    assert third["cpu/trainer"] == 0.0


def test_gauges_of_several_processes_add_up_and_gpus_are_named_by_host(tmp_path: Path) -> None:
    log = SystemLog(tmp_path / "system.jsonl", interval_s=0)
    gpu = DeviceUse("gpu0", 3 * 2**30, 0.5)
    calls = [ProcessStatus(process, 1.0, gauges={"calls/x": 2.0}) for process in (TRAINER, GENERATOR)]
    log.write(1, [*calls, status(TRAINER, 1.0, 0.0, gpu_memory=2**30, devices=(gpu,))])
    other = status(Process("two", 1, "trainer rank 1"), 2.0, 0.0, devices=(DeviceUse("gpu0", 2**30, None),))
    log.write(2, [other])
    log.close()
    first, second = (line.values for line in read_jsonl(tmp_path / "system.jsonl"))
    assert first["calls/x"] == 4.0
    assert (first["gpu/gpu0"], first["gpu_used_gib/gpu0"], first["gpu_memory_gib/trainer"]) == (0.5, 3.0, 1.0)
    assert second["gpu_used_gib/two:gpu0"] == 1.0
    assert "gpu/two:gpu0" not in second


def test_a_line_is_due_once_in_an_interval_and_none_without_anybody_asked(tmp_path: Path) -> None:
    log = SystemLog(tmp_path / "system.jsonl", interval_s=1e6)
    assert log.is_due
    log.write(1, [ProcessStatus(TRAINER, 1.0)])
    assert log.is_due, "nobody was asked"
    log.write(1, [status(TRAINER, 1.0, 0.0)])
    assert not log.is_due
    log.close()
    assert len(list(read_jsonl(tmp_path / "system.jsonl"))) == 1


def test_a_resumed_run_continues_it(tmp_path: Path) -> None:
    path = tmp_path / "system.jsonl"
    for resume_step, step in ((None, 3), (2, 5)):
        log = SystemLog(path, interval_s=0, resume_step=resume_step)
        log.write(step, [status(TRAINER, 1.0, 0.0)])
        log.close()
    assert [line.step for line in read_jsonl(path)] == [5]
    assert [line.step for line in read_jsonl(tmp_path / "system.discarded.jsonl")] == [3]


@pytest.mark.parametrize("is_open", [True, False])
def test_what_cannot_be_written_is_said_once_and_ends_nothing(
    tmp_path: Path, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "system.jsonl"
    if not is_open:
        path.write_text("not a line of ours\n")
    log = SystemLog(path, interval_s=0)
    if is_open:
        assert log._file is not None
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), log._file._file.fileno())
    for step in range(3):
        log.write(step, [status(TRAINER, 1.0, 0.0)])
    assert not log.is_due
    log.close()
    assert [record.message.partition(" failed")[0] for record in caplog.records] == [f"writing {path}"]


def test_the_status_of_a_process_is_what_was_asked_for() -> None:
    asked, unasked = own_status(with_use=True), own_status(with_use=False)
    assert asked.use is not None
    assert asked.use.memory > 0
    assert (unasked.use, unasked.gauges) == (None, {})
