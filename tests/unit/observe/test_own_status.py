"""What this process says of itself, also where that cannot be measured."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from forge.observe import process_status
from forge.observe.fault_records import drain_faults, record_fault
from forge.observe.process_status import own_status
from forge.observe.tracing import this_process


def test_a_process_says_what_it_uses_only_when_it_is_asked() -> None:
    drain_faults()
    record_fault("test", "a fault")
    short, whole = own_status(with_use=False), own_status(with_use=True)
    assert (short.use, short.gauges, [each.message for each in short.faults]) == (None, {}, ["a fault"])
    assert whole.use is not None
    assert whole.use.memory > 1 << 20
    assert (whole.faults, whole.process) == ((), this_process())
    assert whole.time >= short.time


def test_one_that_cannot_be_measured_still_reports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*, except_for: Collection[int]) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    drain_faults()
    monkeypatch.setattr(process_status, "measure_use", fail)
    monkeypatch.setattr(process_status, "_has_failed", False)
    record_fault("test", "a fault")
    first, second = own_status(with_use=True), own_status(with_use=True)
    assert (first.use, second.use) == (None, None)
    assert [each.message for each in first.faults] == ["a fault"]
    assert [each.message for each in caplog.records] == ["what this process uses cannot be measured, and is left out"]
