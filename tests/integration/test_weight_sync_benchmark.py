"""The benchmarks of the store run, and print every row that they promise."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RATES = [
    "memcpy of the C library, 1 process",
    "memcpy of the C library, 2 processes",
    "memcpy of the C library, 4 processes",
    "publish, cold",
    "publish, warm",
    "publish, warm, float32 → bfloat16 (bytes read)",
    "fetch in place, 1 reader, verify=cheap",
    "fetch in place, 2 readers, verify=cheap",
    "fetch in place, 4 readers, verify=cheap",
    "fetch in place, 1 reader, verify=off",
    "fetch in place, 1 reader, verify=full",
    "publish + fetch in place, 1 reader",
    "publish + fetch in place, 2 readers",
    "publish by 2 ranks, Shard(0)",
    "2 ranks Shard(0) → 2 readers Shard(1)",
    "2 ranks Shard(0) → 4 readers Shard(1)",
    "fetch over TCP, verify=cheap",
    "fetch over TCP, verify=off",
]
FIGURES = [
    "publish, cold",
    "publish, warm: the weights must not change for",
    "zero-copy fetch, verify=cheap",
    "zero-copy fetch, verify=off",
    "publish, 500 tensors of 1 KB, the first time",
    "publish, 500 tensors of 1 KB, from then on",
    "fetch in place, 500 tensors of 1 KB, the first time",
    "fetch in place, 500 tensors of 1 KB, from then on",
    "peak extra memory for each kept version, keep=1",
    "peak extra memory for each kept version, keep=2",
    "peak extra memory for each kept version, keep=3",
    "torn reads of 100",
    "reads that were refused",
    "a step alone",
    "a step during which the weights are published is slower by",
]
GOALS = ["publish, warm", "zero-copy fetch, verify=cheap", "torn reads of 100", "fetch over TCP, verify=cheap"]


def run(file: str, *args: str) -> str:
    command = [sys.executable, str(BENCHMARKS / file), *args]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def cells(printed: str) -> list[list[str]]:
    lines = [line for line in printed.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def entries(found: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    sections = [section for part in found["parts"] for section in part["sections"].values()]
    return {entry["what"]: entry for section in sections for entry in section.get(kind, ())}


def test_a_quick_run_prints_every_row(tmp_path: Path, leaves_nothing: None) -> None:
    written = tmp_path / "found.json"
    printed = cells(run("weight_sync.py", "--quick", "--json", str(written)))
    rates = {row[0]: row for row in printed if len(row) == 7}
    figures = {row[0]: row for row in printed if len(row) == 4}
    assert [what for what in RATES if what not in rates] == []
    assert [what for what in FIGURES if what not in figures] == []
    for what in RATES:
        assert re.fullmatch(r"\d+\.\d\d \(\d+\.\d\d–\d+\.\d\d\)", rates[what][3]), rates[what]
    for what in GOALS:
        assert re.search(r": (met|missed)$", (rates.get(what) or figures[what])[-1]), what

    found = json.loads(written.read_text())
    moved, measured = entries(found, "rows"), entries(found, "figures")
    size = found["parts"][0]["num_bytes"]
    assert moved["fetch in place, 4 readers, verify=cheap"]["num_bytes"] == 4 * size
    assert measured["torn reads of 100"]["value"] == 0
    assert measured["reads that were refused"]["value"] == 0
    assert 0.9 < measured["of that, segments, keep=2"]["value"] <= 1.1


@pytest.fixture
def weight_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark as a module. What its import and its run change in this process is as before afterwards."""
    before, environment, logger = set(sys.modules), dict(os.environ), logging.getLogger("forge")
    level = logger.level
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    try:
        yield importlib.import_module("weight_sync")
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("weight_sync", "harness"):
                del sys.modules[name]
        logger.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)


@pytest.mark.parametrize(
    ("num_torn", "code", "verdict"),
    [(0, 0, "every goal measured was met\n"), (2, 1, "goals missed: torn reads of 100\n")],
)
def test_one_question_alone_is_checked(
    weight_sync: Any,
    num_torn: int,
    code: int,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def measure(plan: Any, sections: list[str]) -> dict[str, Any]:
        assert (plan, sections) == (weight_sync.QUICK, ["torn"])
        figures = [weight_sync.figure("torn reads of 100", num_torn, "", goal=0, sign="≤")]
        return {"label": plan.label, "num_bytes": plan.size, "sections": {"torn": {"figures": figures}}}

    monkeypatch.setattr(weight_sync, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["weight_sync.py", "--quick", "--only", "torn", "--check"])
    assert weight_sync.main() == code
    printed = capsys.readouterr().out
    assert [row[0] for row in cells(printed)][1:] == ["torn reads of 100"]
    assert printed.endswith(verdict)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_between_two_plain_processes(device: str, leaves_nothing: None) -> None:
    import torch

    printed = run("weight_sync_cuda.py", "--quick", "--device", device)
    if device == "cuda" and not torch.cuda.is_available():
        assert "no NVIDIA GPU is visible here" in printed
        return
    on = "host" if device == "cpu" else "cuda"
    wanted = {f"publish, on={on}", f"publish + fetch, on={on}", f"fetch without a copy, on={on}"}
    wanted |= {f"fetch in place, on={on}, verify={verify}" for verify in ("off", "cheap", "full")}
    assert wanted - {row[0] for row in cells(printed)} == set()
