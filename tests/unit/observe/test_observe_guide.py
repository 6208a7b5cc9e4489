"""What the guide shows is what happens."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from forge.observe import ConsoleSink, read_jsonl
from forge.observe.metrics import drain_metrics
from forge.observe.monitor import monitored
from forge.observe.step_lines import step_line
from forge.observe.tracing import drain_trace

GUIDES = Path(__file__).resolve().parents[3] / "docs" / "guides"
GUIDE = (GUIDES / "metrics.md").read_text(encoding="utf-8")


def blocks(language: str, *, page: str = "metrics.md") -> list[str]:
    text = (GUIDES / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def block_with(text: str, language: str = "python") -> str:
    (found,) = [block for block in blocks(language) if text in block]
    return found


PROGRAM, RECORDING, PHASES = (block_with(text) for text in ("step_values", "import Reduce", "import phase"))
TRACING = blocks("python", page="tracing.md")[0]


def ran(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(program, "guide", "exec", dont_inherit=True), names)
    return names


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_console_looks_like_that(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(log_interval=100, num_epochs=10, total_steps=200, progress=False)
    first = {"train/epoch": 1, "train/loss": 2.45, "train/learning_rate": 1e-4}
    more = {"train/tokens_per_s": 12345.0, "train/grad_norm": 0.53, "train/memory_gib": 12.1, "train/mfu": 0.451}
    sink.write(100, first)
    sink.write(200, {**first, "train/loss": 2.3712, **more})
    sink.write(200, {"validation/loss": 2.31, "validation/best": True})
    sink.close()
    assert capsys.readouterr().out == blocks("text")[0]


def test_episodes_look_like_that(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(log_interval=1, total_steps=100, progress=False)
    times = {"step": 8.0, "waiting": 0.8, "generating": 4.0, "training": 2.4, "syncing": 0.4, "other": 0.4}
    more = {"train/entropy": 1.23, "rollout/staleness_mean": 0.5, "rollout/tokens_per_s": 1234.0}
    sink.write(1, {"rollout/reward_mean": 0.75, "train/kl": 0.12})
    values = {"rollout/reward_mean": 0.78125, "train/kl": 0.0034, **more, "train/tokens_per_s": 5678.0}
    values |= {f"time/{name}": seconds for name, seconds in times.items()}
    sink.write(100, {"evaluation/reward": 0.71, "evaluation/pass@8": 0.93, "evaluation/num_prompts": 64})
    sink.close()
    first, last = capsys.readouterr().out.splitlines()
    assert [first, step_line(2, values, total=100, left_s=784), last] == blocks("text")[1].splitlines()
    old = ConsoleSink(log_interval=1, style="episode", progress=False)
    old.write(1, {"rollout/reward_mean": 0.75, "train/kl": 0.12})
    old.write(2, {"train/loss": 2.45, "train/learning_rate": 1e-4, "train/epoch": 1})
    old.close()
    assert capsys.readouterr().out == blocks("text")[2]


def test_figures_from_anywhere_come_together_as_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    drain_metrics()
    ran(RECORDING)
    (said,) = re.findall(r"print\(.*\)  # (.*)$", RECORDING, flags=re.MULTILINE)
    assert capsys.readouterr().out.strip() == said


def test_a_phase_of_ones_own_is_reported_and_written_as_is_shown(tmp_path: Path) -> None:
    with monitored(progress=False) as monitor:
        monitor.startup.write_to(tmp_path)
        ran(PHASES)
        monitor.started()
    found = json.loads((tmp_path / "startup.json").read_text())
    shown = json.loads(block_with('"state": "done"', "json"))
    assert found.keys() == shown.keys()
    (own,) = found["phases"]
    assert {**own, "unit": "B"}.keys() == shown["phases"][0].keys()
    assert (own["process"], own["phase"], own["done"], own["total"]) == ("controller", "reading the index", 3, 3)


def test_the_traced_program_writes_a_trace() -> None:
    drain_trace()
    ran(TRACING)
    spans = [event for event in json.loads(Path("trace.json").read_text()) if event["ph"] == "X"]
    assert [(span["name"], span["args"]) for span in spans] == [
        ("step", {"number": 1}),
        ("score", {"prompt": "one"}),
        ("score", {"prompt": "two"}),
    ]
    assert len({span["tid"] for span in spans}) == 3


def test_the_file_that_is_shown_is_read_as_is_said() -> None:
    Path("metrics.jsonl").write_text(block_with('"step": 200', "json"))
    losses = ran(block_with("import read_jsonl"))["losses"]
    assert losses[200] == 2.3712
    assert math.isnan(losses[201])


def test_the_program_writes_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    ran(PROGRAM)
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"(0\.0001) .*", r"\1", line) for line in lines] == [
        "Step 2/4 | epoch 1/1 | loss 1.00 | lr 0.0001",
        "Step 4/4 | epoch 1/1 | loss 0.50 | lr 0.0001",
        "Validation at step 4/4 | loss 0.75 | best",
    ]
    written = list(read_jsonl("runs/mine/metrics.jsonl"))
    assert [line.step for line in written] == [1, 2, 3, 4, 4]
    named = set(re.findall(r"`((?:train|validation)/\w+)`", GUIDE))
    assert {name for line in written for name in line.values} <= named
    assert json.loads(Path("runs/mine/metrics.jsonl").read_text().splitlines()[-1])["values"]["validation/loss"] == 0.75


def test_the_arithmetic_is_right() -> None:
    (program,) = [block for block in blocks("python") if "num_parameters" in block]
    names = ran(program)
    (size,) = re.findall(r"^num_parameters\(model\)  # (\d+)$", program, flags=re.MULTILINE)
    assert names["num_parameters"](names["model"]) == int(size)
    used = names["model_flops_utilization"](30_000.0, flops_per_token=names["per_token"], peak_flops=names["peak"])
    assert 0.3 < used < 0.5
