"""The learning rate's schedules, against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forge.config.training import TrainingConfig
from forge.errors import ConfigError
from forge.trainer.schedules import rate_factor


def factors(total_steps: int, *, until: int | None = None, **keys: Any) -> list[float]:
    config = TrainingConfig(**keys)
    steps = range(total_steps if until is None else until)
    return [rate_factor(step, config=config, total_steps=total_steps) for step in steps]


def test_the_warm_up_rises_in_equal_parts_and_never_uses_zero() -> None:
    assert factors(10, until=5, schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_constant_stays_whatever_the_end_value() -> None:
    assert factors(4, until=6, schedule="constant", warmup_steps=0, min_lr_ratio=0.3) == [1.0] * 6


def test_linear_falls_to_the_end_value_and_stays_there() -> None:
    found = factors(6, until=9, schedule="linear", warmup_steps=2, min_lr_ratio=0.2)
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2], abs=1e-15)


def test_cosine_goes_through_its_known_points() -> None:
    found = factors(8, until=10, schedule="cosine", warmup_steps=0)
    assert found[0] == 1.0
    assert found[2] == pytest.approx((1 + math.sqrt(0.5)) / 2, abs=1e-15)
    assert found[4] == pytest.approx(0.5, abs=1e-15)
    assert found[6] == pytest.approx((1 - math.sqrt(0.5)) / 2, abs=1e-15)
    assert found[8] == found[9] == 0.0


def test_cosine_ends_at_the_end_value() -> None:
    found = factors(8, until=10, schedule="cosine", warmup_steps=0, min_lr_ratio=0.1)
    assert found[4] == pytest.approx(0.55, abs=1e-15)
    assert found[8] == found[9] == pytest.approx(0.1, abs=1e-15)


def test_wsd_is_stable_and_then_falls_in_a_straight_line() -> None:
    found = factors(10, until=11, schedule="wsd", warmup_steps=2, decay_ratio=0.4, min_lr_ratio=0.0)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0], abs=1e-15)


def test_a_wsd_decay_that_would_reach_into_the_warm_up_begins_after_it() -> None:
    found = factors(6, until=7, schedule="wsd", warmup_steps=4, decay_ratio=1.0)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0], abs=1e-15)


def test_the_warm_up_can_be_a_part_of_all_steps_and_the_number_of_steps_wins() -> None:
    assert factors(100, until=9, schedule="constant", warmup_ratio=0.09)[-1] == 1.0
    assert factors(100, until=9, schedule="constant", warmup_ratio=0.09)[-2] == pytest.approx(8 / 9)
    assert factors(100, until=1, schedule="constant", warmup_ratio=0.5, warmup_steps=2) == [0.5]


@pytest.mark.parametrize(
    ("total_steps", "ratio", "warmup"),
    [
        (10, 0.03, 1),
        (34, 0.03, 2),
        (1, 0.03, 1),
        (100, 0.03, 3),
        (100, 0.07, 8),
        (100, 0.0, 0),
        (101, 0.1, 11),
        (3, 0.34, 2),
        (7, 0.99, 7),
        (1000, 0.0004, 1),
    ],
)
def test_a_part_of_all_steps_is_rounded_up_as_in_transformers(total_steps: int, ratio: float, warmup: int) -> None:
    """The numbers are those of transformers 5.19.0, `TrainingArguments.get_warmup_steps`; 100 x 0.07 is above 7."""
    found = factors(total_steps, schedule="constant", warmup_ratio=ratio)
    assert found == pytest.approx([min(1.0, (step + 1) / max(warmup, 1)) for step in range(total_steps)])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_a_warm_up_over_all_steps_still_ends_at_the_end_value(schedule: str) -> None:
    found = factors(3, until=5, schedule=schedule, warmup_steps=3, min_lr_ratio=0.5)
    assert found[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert found[3:] == ([1.0, 1.0] if schedule == "constant" else [0.5, 0.5])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_one_step_uses_the_whole_rate(schedule: str) -> None:
    assert factors(1, schedule=schedule) == [1.0]


def test_a_warm_up_longer_than_the_training_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        factors(5, warmup_steps=6)
    assert caught.value.path == "training.warmup_steps"
    assert caught.value.value == 6
    assert "which is 5" in str(caught.value.rule)
    assert caught.value.repair is not None


@pytest.mark.parametrize(("step", "total_steps", "path"), [(-1, 5, "step"), (0, 0, "total_steps")])
def test_counts_out_of_range_are_refused(step: int, total_steps: int, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rate_factor(step, config=TrainingConfig(), total_steps=total_steps)
    assert caught.value.path == path
