"""The lines of a run on its console: what they say, and that they fit."""

from __future__ import annotations

import io
import math
import os
import termios
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.observe import ConsoleSink, Value, step_values
from forge.observe.console import Pace
from forge.observe.step_lines import (
    evaluation_line,
    fitted,
    format_clock,
    format_count,
    format_short,
    plain_line,
    step_line,
    validation_line,
)
from forge.types import StepResult
from panel_runs import EVALUATION, STEP

RESULT = StepResult(100, 2.45, 0.53, 1e-4, num_tokens=4096, num_loss_tokens=2048, seconds=0.5)


def printed(writes: list[tuple[int, Mapping[str, Value]]], **options: Any) -> list[str]:
    stream = io.StringIO()
    sink = ConsoleSink(stream=stream, **options)
    for step, values in writes:
        sink.write(step, values)
    sink.close()
    return stream.getvalue().splitlines()


def test_a_step_of_rollouts_says_where_the_run_is_and_what_matters_most() -> None:
    line = step_line(51, STEP, total=100, left_s=25)
    assert line == "Step 51/100 | reward 0.75 | KL 0.12 | entropy 1.2345 | 8.0 s | 0:25 left"
    whole = step_line(51, STEP, total=100, left_s=25, width=200)
    assert whole == (
        "Step 51/100 | reward 0.75 | KL 0.12 | entropy 1.2345 | staleness 0.5 | gen 1.23k tok/s | train 5.68k tok/s"
        " | 8.0 s | wait 10% gen 50% train 30% sync 5% | 0:25 left"
    )
    assert step_line(51, STEP, total=100, left_s=25, width=40) == "Step 51/100 | reward 0.75 | 0:25 left"


def test_a_step_of_a_loss_says_what_is_known() -> None:
    values = step_values(RESULT, epoch=3, mfu=0.4512, tokens_per_s=12345.4, memory_gib=12.14)
    line = step_line(100, values, total=1000, num_epochs=10, left_s=3725, width=120)
    assert line == (
        "Step 100/1000 | epoch 3/10 | loss 2.45 | lr 0.0001 | 12.3k tok/s | grad 0.53 | 12.1 GiB | MFU 45.1%"
        " | 1:02:05 left"
    )
    assert step_line(7, {"train/loss": 1.0}) == "Step 7 | loss 1.00"


def test_what_went_wrong_is_said_before_anything_else() -> None:
    failed: dict[str, Value] = {**STEP, "rollout/num_failed": 3, "train/skipped": 1}
    assert step_line(7, failed, width=42) == "Step 7 | reward 0.75 | failed 3 | skipped"
    skipped = StepResult(9, math.nan, math.inf, 1e-5, num_tokens=1, num_loss_tokens=1, skipped=True)
    assert step_line(9, step_values(skipped)) == "Step 9 | loss nan | lr 1e-05 | grad inf | skipped"


def test_validations_and_evaluations_come_when_they_come() -> None:
    assert printed(
        [
            (99, {"validation/loss": 2.31, "validation/best": True}),
            (101, {"validation/loss": 2.4, "validation/best": False, "validation/accuracy": 0.5}),
        ],
        log_interval=50,
        total_steps=200,
    ) == ["Validation at step 99/200 | loss 2.31 | best", "Validation at step 101/200 | loss 2.40 | accuracy 50.0%"]
    line = "Evaluation at step 3 | reward 0.71 | pass@8 0.93 | avg@8 0.70 | 64 prompts"
    assert printed([(3, EVALUATION)], log_interval=50) == [line]
    assert evaluation_line(3, EVALUATION, width=100) == line.replace("| 64", "| length 34.20 | 64")


def test_lines_come_at_the_interval_and_at_the_end_with_the_time_that_is_left() -> None:
    writes = [(step, {"rollout/reward_mean": 1.0}) for step in range(1, 12)]
    lines = printed(writes, log_interval=4, total_steps=11)
    assert [line.partition(" | ")[0] for line in lines] == ["Step 4/11", "Step 8/11", "Step 11/11"]
    assert [line.endswith(" left") for line in lines] == [True, True, False]


def test_the_time_that_is_left_is_that_of_the_steps_after_the_first() -> None:
    now = [50.0]
    pace = Pace(10, clock=lambda: now[0])
    assert pace.left_s(0) is None
    pace.note(3)  # a resumed run: the first step, which compiles and warms up
    assert pace.left_s(3) is None
    for step in (4, 5):
        now[0] += 6
        pace.note(step)
    assert pace.left_s(5) == 30.0
    assert pace.left_s(10) is None
    assert Pace(None).left_s(5) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0, "0:00"), (25.9, "0:25"), (3725, "1:02:05"), (100 * 3600, "4 d 4 h")],
        *[(-1, "?"), (math.nan, "?"), (math.inf, "?")],
    ],
)
def test_times_are_readable(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text


def test_numbers_are_readable() -> None:
    shorts = [format_short(value) for value in (2.45, 0.0, 1e-5, 123456.0, -1e300, math.nan, math.inf)]
    assert shorts == ["2.45", "0.00", "1e-05", "1.23e+05", "-1e+300", "nan", "inf"]
    counts = [format_count(value) for value in (1.25, 950, 4555, 105287, 1.2e6, 9.999e5, 1e20, math.nan)]
    assert counts == ["1.2", "950", "4.55k", "105k", "1.2M", "1M", "1.00e+05P", "nan"]


MORE = ("train/learning_rate", "train/grad_norm", "train/mfu", "rollout/num_failed", "train/skipped")
numbers = st.floats() | st.integers(-(10**25), 10**25)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    step=st.integers(0, 10**12),
    total=st.none() | st.integers(1, 10**12),
    values=st.fixed_dictionaries({}, optional=dict.fromkeys([*STEP, *MORE], numbers)),
    left_s=st.none() | numbers,
    width=st.integers(20, 200),
)
def test_no_line_is_wider_than_the_console(
    step: int, total: int | None, values: dict[str, float], left_s: float | None, width: int
) -> None:
    line = step_line(step, values, total=total, left_s=left_s, width=width)
    assert len(line) <= width
    assert line.startswith(f"Step {step}"[:width])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values=st.dictionaries(st.text(min_size=1, max_size=40), numbers | st.text()), width=st.integers(20, 200))
def test_no_line_of_other_metrics_is_wider_than_the_console(values: dict[str, Any], width: int) -> None:
    evaluated = {f"evaluation/{name}": value for name, value in values.items()} | {"evaluation/reward": 0.5}
    evaluated |= {"validation/loss": 0.5, "evaluation/num_prompts": 3}
    for line in (
        plain_line(3, values, width=width),
        evaluation_line(3, evaluated, width=width),
        validation_line(3, evaluated, total=9, width=width),
    ):
        assert len(line) <= width


def test_what_matters_least_is_left_out_first() -> None:
    parts = [(0, "first"), (2, "second"), (1, "third")]
    assert fitted(parts, 80) == "first | second | third"
    assert fitted(parts, 15) == "first | third"
    assert fitted(parts, 5) == "first"
    assert fitted(parts, 3) == "fir"


@pytest.mark.parametrize(("columns", "width"), [(40, 40), (120, 120), (10, 20)])
def test_a_terminal_gets_lines_as_wide_as_it_is(columns: int, width: int) -> None:
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    with open(slave, "w", encoding="utf-8") as stream:
        sink = ConsoleSink(log_interval=1, total_steps=100, progress=False, stream=stream)
        sink.write(51, STEP)
        sink.close()
    line = os.read(master, 4096).decode().rstrip()
    os.close(master)
    assert line == step_line(51, STEP, total=100, width=width)
