"""The files that say how the processes of a run are, in a run of this process alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from forge.config import ForgeConfig, load
from forge.config.record import ObserveConfig
from forge.loops.observing import RunObserver, tracing
from forge.loops.utilization import Utilization
from forge.models.sizes import flops_per_token, mean_context
from forge.observe import read_jsonl, record_metric, span
from forge.observe.fault_records import drain_faults, record_fault
from forge.observe.metrics import drain_metrics
from forge.observe.trace_file import read_events


def test_each_step_writes_what_was_recorded_since_the_last(tmp_path: Path) -> None:
    drain_faults()
    drain_metrics()
    with tracing(True):
        observer = RunObserver(tmp_path, ObserveConfig(system_interval_s=0), resume_step=None)
        for step in (1, 2):
            with span("train", step=step):
                record_metric("test/step", step)
            if step == 2:
                record_fault("test", "a fault")
            assert asyncio.run(observer.after_step(step)) == {"test/step": float(step)}
        with span("save"):
            pass
        asyncio.run(observer.last_spans())
        observer.note_end(RuntimeError("the end"))
        observer.close()
    events, _ = read_events((tmp_path / "trace.json").read_bytes())
    assert [event["name"] for event in events if event["ph"] == "X"] == ["train", "train", "save"]
    lines = list(read_jsonl(tmp_path / "system.jsonl"))
    assert [line.step for line in lines] == [1, 2]
    assert float(lines[1].values["memory_gib/controller"]) > 0
    assert "cpu/controller" in lines[1].values
    faults = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert [(fault["step"], fault["kind"], fault["message"]) for fault in faults] == [
        (2, "test", "a fault"), (2, "run", "RuntimeError: the end"),
    ]  # fmt: skip


def test_what_is_switched_off_is_not_written(tmp_path: Path) -> None:
    observer = RunObserver(tmp_path, ObserveConfig(trace=False, system_interval_s=None), resume_step=None)
    asyncio.run(observer.after_step(1))
    asyncio.run(observer.last_spans())
    observer.close()
    assert list(tmp_path.iterdir()) == []


def test_utilization_is_known_where_the_peak_is() -> None:
    model = load(ForgeConfig, overrides=["model.preset=qwen3_0_6b"]).model
    state = {"num_ranks": 2, "device_name": "NVIDIA H200", "compute_dtype": "bfloat16"}
    lengths = [100, 300]
    found = Utilization(model, state).of(lengths, 10_000.0)
    assert found == pytest.approx(10_000 * flops_per_token(model, mean_context(lengths)) / (2 * 989e12), rel=0.01)
    assert Utilization(model, {**state, "device_name": "cpu"}).of(lengths, 10_000.0) is None
    assert Utilization(model, state).of(lengths, None) is None
