"""Several sinks, of which some fail."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy
import pytest

from forge.config import MetricsConfig
from forge.errors import ConfigError, DataError
from forge.observe import MetricsLog, Value, make_sinks, read_jsonl, step_values
from forge.testing import ListSink
from forge.types import StepResult


class FailsToClose(ListSink):
    def close(self) -> None:
        raise OSError("the disk is full")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_every_sink_gets_every_figure() -> None:
    sinks = {"a": ListSink(), "b": ListSink()}
    with MetricsLog(sinks) as log:
        log.write(1, {"x": 1.0})
        log.write(2, {"x": 2.0, "note": "n"})
    for sink in sinks.values():
        assert sink.entries == [(1, {"x": 1.0}), (2, {"x": 2.0, "note": "n"})]
        assert sink.closed
    assert not log.failures


def test_a_sink_that_fails_is_reported_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    good, bad, last = ListSink(), ListSink(fail_at=2), ListSink()
    with MetricsLog({"good": good, "bad": bad, "last": last}) as log:
        for step in (1, 2, 3):
            log.write(step, {"x": float(step)})
        assert list(log.sinks) == ["good", "last"]
    assert good.series("x") == last.series("x") == [1.0, 2.0, 3.0]
    assert bad.series("x") == [1.0]
    assert bad.closed
    assert list(log.failures) == ["bad"]
    assert isinstance(log.failures["bad"], OSError)
    (warning,) = warnings_of(caplog)
    assert "'bad' failed at step 2" in warning
    assert warning.endswith("OSError: configured to fail at step 2")


def test_a_sink_that_cannot_be_closed_is_reported_and_the_others_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    other = ListSink()
    log = MetricsLog({"bad": FailsToClose(), "other": other})
    log.close()
    assert other.closed
    assert list(log.failures) == ["bad"]
    (warning,) = warnings_of(caplog)
    assert "'bad' failed when it was closed" in warning
    assert "the disk is full" in warning


def test_an_interrupt_is_not_a_failure_of_a_sink() -> None:
    class Interrupted(ListSink):
        def write(self, step: int, values: Mapping[str, Value]) -> None:
            raise KeyboardInterrupt

    log = MetricsLog({"a": Interrupted()})
    with pytest.raises(KeyboardInterrupt):
        log.write(1, {})
    assert not log.failures


def test_scalars_of_numpy_become_pythons_own() -> None:
    sink = ListSink()
    MetricsLog({"a": sink}).write(1, {"x": numpy.float32(0.5), "n": numpy.int64(3), "z": numpy.array(2.0)})  # type: ignore[dict-item]
    ((_, values),) = sink.entries
    assert values == {"x": 0.5, "n": 3, "z": 2.0}
    assert {type(value) for value in values.values()} == {float, int}


@pytest.mark.parametrize("value", [None, [1.0], numpy.ones(2)])
def test_what_is_no_figure_is_the_callers_mistake(value: object) -> None:
    sink = ListSink()
    log = MetricsLog({"a": sink})
    with pytest.raises(DataError) as caught:
        log.write(1, {"x": value})  # type: ignore[dict-item]
    assert caught.value.path == "x"
    assert caught.value.value is value
    assert caught.value.rule == "each value is a float, an int or a str"
    assert caught.value.repair == "reduce it to one number first, such as by .mean().item()"
    assert sink.entries == []
    assert not log.failures


@pytest.mark.parametrize("step", [-1, 1.5])
def test_a_step_is_a_number_of_steps(step: int) -> None:
    with pytest.raises(DataError) as caught:
        MetricsLog({}).write(step, {})
    assert (caught.value.path, caught.value.value, caught.value.rule) == ("step", step, "a whole number, 0 or more")
    assert caught.value.repair == "count optimizer steps from 0 on"


def test_a_result_gets_the_names_that_sinks_know() -> None:
    metrics = {"memory_gib": 3.5, "entropy": 0.25}
    result = StepResult(5, 2.0, 0.5, 1e-4, num_tokens=10, num_loss_tokens=4, seconds=0.75, metrics=metrics)
    assert step_values(result, epoch=2, tokens_per_s=8.0, mfu=None) == {
        "train/loss": 2.0,
        "train/learning_rate": 1e-4,
        "train/grad_norm": 0.5,
        "train/num_tokens": 10,
        "train/num_loss_tokens": 4,
        "train/seconds": 0.75,
        "train/epoch": 2,
        "train/memory_gib": 3.5,
        "train/entropy": 0.25,
        "train/tokens_per_s": 8.0,
    }


def test_a_configuration_says_which_sinks_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = MetricsConfig(log_interval=2, tensorboard=False)
    with make_sinks(config, folder=tmp_path / "run", num_epochs=3, total_steps=2) as log:
        assert sorted(log.sinks) == ["console", "jsonl"]
        for step in (1, 2):
            log.write(step, {"train/loss": 1.5, "train/epoch": 1})
    assert capsys.readouterr().out == "Step 2/2 | epoch 1/3 | loss 1.50\n"
    with make_sinks(config, folder=tmp_path / "run", resume_step=1) as log:
        log.write(2, {"train/loss": 1.25})
    assert [(line.step, line.values["train/loss"]) for line in read_jsonl(tmp_path / "run/metrics.jsonl")] == [
        (1, 1.5),
        (2, 1.25),
    ]
    with make_sinks(MetricsConfig(jsonl=False), folder=tmp_path / "other") as log:
        assert sorted(log.sinks) == ["console", "tensorboard"]
    assert [item.name for item in (tmp_path / "other").iterdir()] == ["tensorboard"]


def test_weights_and_biases_that_is_not_there_is_an_error_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # how Python itself marks a module that cannot be imported
    with pytest.raises(ConfigError) as caught:
        make_sinks(MetricsConfig(wandb=True), folder=tmp_path)
    assert caught.value.path == "metrics.wandb"
    assert caught.value.value is True
    assert caught.value.rule == "the package wandb must be installed"
    assert caught.value.repair == "pip install 'torchforge[wandb]', or set metrics.wandb to false"
