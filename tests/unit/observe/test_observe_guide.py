"""What the guide shows is what happens."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from forge.observe import ConsoleSink, read_jsonl

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "metrics.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, flags=re.MULTILINE | re.DOTALL)


def ran(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(program, "guide", "exec", dont_inherit=True), names)
    return names


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_console_looks_like_that(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(log_interval=100, num_epochs=10, progress=False)
    first = {"train/epoch": 1, "train/loss": 2.45, "train/learning_rate": 1e-4}
    more = {"train/tokens_per_s": 12345.0, "train/grad_norm": 0.53, "train/memory_gib": 12.1, "train/mfu": 0.451}
    sink.write(100, first)
    sink.write(200, {**first, "train/loss": 2.3712, **more})
    sink.write(200, {"validation/loss": 2.31, "validation/best": True})
    sink.close()
    assert capsys.readouterr().out == blocks("text")[0]


def test_the_file_that_is_shown_is_read_as_is_said() -> None:
    Path("metrics.jsonl").write_text(blocks("json")[0])
    reading, _, _ = blocks("python")
    losses = ran(reading)["losses"]
    assert losses[200] == 2.3712
    assert math.isnan(losses[201])


def test_the_program_writes_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    ran(blocks("python")[1])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | Tokens/s")[0] for line in lines] == [
        "Epoch 1/1 | Step 2 | Loss: 1.00 | LR: 0.0001",
        "Epoch 1/1 | Step 4 | Loss: 0.50 | LR: 0.0001",
        "Validation | Step 4 | Loss: 0.75 | best",
    ]
    written = list(read_jsonl("runs/mine/metrics.jsonl"))
    assert [line.step for line in written] == [1, 2, 3, 4, 4]
    named = set(re.findall(r"`((?:train|validation)/\w+)`", GUIDE))
    assert {name for line in written for name in line.values} <= named
    assert json.loads(Path("runs/mine/metrics.jsonl").read_text().splitlines()[-1])["values"]["validation/loss"] == 0.75


def test_the_arithmetic_is_right() -> None:
    program = blocks("python")[2]
    names = ran(program)
    (size,) = re.findall(r"^num_parameters\(model\)  # (\d+)$", program, flags=re.MULTILINE)
    assert names["num_parameters"](names["model"]) == int(size)
    used = names["model_flops_utilization"](30_000.0, flops_per_token=names["per_token"], peak_flops=names["peak"])
    assert 0.3 < used < 0.5
