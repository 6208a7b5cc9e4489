"""The lines that tools know from elsewhere: `metrics.console: episode`."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from forge.observe import ConsoleSink, Value
from forge.observe.lines import evaluation_line, rollout_line, time_shares, train_line, validation_line
from panel_runs import EVALUATION, STEP

WHOLE = (
    "Episode 1 | Avg Reward: 0.75 | KL Divergence: 0.12 | Entropy: 1.2345 | Staleness: 0.5 | Gen: 1234 tok/s"
    " | Train: 5678 tok/s | Time: 8.0 s (wait 10%, gen 50%, train 30%, sync 5%)"
)


def printed(writes: list[tuple[int, Mapping[str, Value]]], **options: Any) -> list[str]:
    stream = io.StringIO()
    sink = ConsoleSink(stream=stream, style="episode", **options)
    for step, values in writes:
        sink.write(step, values)
    sink.close()
    return stream.getvalue().splitlines()


def test_the_line_is_the_one_that_was_promised() -> None:
    short: dict[str, Value] = {"rollout/reward_mean": 0.75, "train/kl": 0.12}
    assert printed([(1, short)], log_interval=1) == ["Episode 1 | Avg Reward: 0.75 | KL Divergence: 0.12"]
    assert rollout_line(1, STEP) == WHOLE


def test_the_line_of_a_loss_is_the_one_that_was_promised() -> None:
    values: dict[str, Value] = {"train/loss": 2.45, "train/learning_rate": 1e-4, "train/epoch": 1}
    line = "Epoch 1/10 | Step 100 | Loss: 2.45 | LR: 0.0001"
    assert printed([(100, values)], num_epochs=10, total_steps=1000) == [line]
    assert train_line(7, {"train/loss": 1.0, "train/skipped": 1}) == "Step 7 | Loss: 1.00 | skipped"
    best: dict[str, Value] = {"validation/loss": 2.31, "validation/best": 1}
    assert validation_line(9, best) == "Validation | Step 9 | Loss: 2.31 | best"


def test_what_is_not_known_is_not_there() -> None:
    without_kl = {name: value for name, value in STEP.items() if name != "train/kl"}
    assert rollout_line(7, without_kl) == WHOLE.replace("Episode 1", "Episode 7").replace(" | KL Divergence: 0.12", "")
    assert rollout_line(7, {"rollout/reward_mean": -1.5}) == "Episode 7 | Avg Reward: -1.50"


def test_what_went_wrong_is_said() -> None:
    values: dict[str, Value] = {"rollout/reward_mean": float("nan"), "rollout/num_failed": 2.0, "train/skipped": 1}
    assert rollout_line(7, values) == "Episode 7 | Avg Reward: nan | Failed: 2 | skipped"
    assert rollout_line(7, {"rollout/reward_mean": 0, "rollout/num_failed": 0.0}) == "Episode 7 | Avg Reward: 0.00"


def test_the_time_is_split_over_the_whole_step() -> None:
    assert time_shares({"time/step": 4.0, "time/waiting": 1.0}) == {"wait": 0.25}
    assert time_shares({"time/waiting": 1.0, "time/training": 3.0}) == {"wait": 0.25, "train": 0.75}
    overlapping: dict[str, Value] = {"time/step": 2.0, "time/generating": 3.0, "time/training": 1.0}
    assert time_shares(overlapping) == {"gen": 0.75, "train": 0.25}
    assert time_shares({}) == {}
    assert time_shares({"time/step": 0.0, "time/waiting": 0.0}) == {}
    assert time_shares({"time/step": float("nan"), "time/waiting": float("inf")}) == {}


def test_an_evaluation_is_printed_whenever_it_comes() -> None:
    line = "Evaluation at step 3 | reward 0.71 | pass@8 0.93 | avg@8 0.70 | length 34.20 | 64 prompts"
    assert evaluation_line(3, EVALUATION) == line
    assert printed([(3, EVALUATION)], log_interval=50) == [line]
    assert printed([(4, {**STEP, **EVALUATION})], log_interval=4)[1] == line.replace("3", "4", 1)
