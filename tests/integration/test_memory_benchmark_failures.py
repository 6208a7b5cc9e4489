"""A setting that cannot be measured is told, and the others are measured all the same."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The program as it sees itself; it leaves no modules behind for others that are called alike."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield importlib.import_module("memory_plan")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("harness", "memory_plan")]:
        del sys.modules[name]


def test_a_child_that_dies_does_not_end_the_others(benchmark_module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    good = benchmark_module.settings_for("tiny", quick=True)[1]
    bad = benchmark_module.Setting("trainer", (*good.words, "training.learning_rate=-1"))
    end = time.monotonic() + 300
    lines = asyncio.run(benchmark_module.compare("tiny", [bad, good], None, end=end))
    said = capsys.readouterr().out
    assert f"FAILED: tiny, {bad.label}" in said
    assert "learning_rate" in said.split("its process ended with 1", maxsplit=1)[1].splitlines()[0]
    assert {(line.setting, line.what) for line in lines} == {
        (good.label, what) for what in ("lasting", "gradients", "activations")
    }


def test_what_the_time_does_not_hold_is_named(benchmark_module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    settings = benchmark_module.settings_for("tiny", quick=True)
    assert asyncio.run(benchmark_module.compare("tiny", settings, None, end=time.monotonic() - 1)) == []
    assert capsys.readouterr().out.count("left out, because the time is over") == len(settings)
