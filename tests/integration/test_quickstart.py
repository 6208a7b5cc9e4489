"""The quick start's program: what it prints, and its exit code when the model does not learn."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from forge.errors import ConfigError
from forge.loops.evaluation import Evaluation
from forge.loops.grpo import GRPOResult

APP = Path(__file__).parents[2] / "apps" / "quickstart"


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(APP))
    spec = importlib.util.spec_from_file_location("quickstart_main", APP / "main.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ended(first: float, last: float) -> GRPOResult:
    evaluations = [Evaluation(192, solved, solved, {1: solved}, 6.0) for solved in (first, last)]
    return GRPOResult(90, 0.9, *evaluations, is_stopped=False, export=Path("hf"), report=Path("report.html"))


@pytest.mark.parametrize(("first", "last", "learned"), [(0.25, 0.99, True), (0.25, 0.84, False), (0.36, 0.99, False)])
def test_only_learning_counts_as_success(
    quickstart: ModuleType, capsys: pytest.CaptureFixture[str], first: float, last: float, learned: bool
) -> None:
    assert quickstart.report(ended(first, last), seconds=100.0) is learned
    out, err = capsys.readouterr()
    assert f"Held-out accuracy: {first:.1%} -> {last:.1%}" in out
    assert "report.html" in out
    assert ("FAILED" in err) is not learned
    assert quickstart.report(ended(first, last), seconds=100.0, is_judged=False), "overrides make it another task"
    assert "FAILED" not in capsys.readouterr().err


def test_the_configurations_fit_the_files_that_are_written(quickstart: ModuleType, tmp_path: Path) -> None:
    from forge.config import GRPOConfig, SFTConfig

    quickstart.prepare(tmp_path / "run")
    quickstart.write_task(tmp_path / "run" / "task", seed=3)
    sft = quickstart.configured(SFTConfig, "quickstart/sft.yaml", tmp_path / "run", seed=3)
    grpo = quickstart.configured(GRPOConfig, "grpo/tiny.yaml", tmp_path / "run", seed=3)
    assert (sft.run.seed, grpo.run.seed) == (3, 3)
    paths = [sft.data.sources[0].path, grpo.prompts.sources[0].path, grpo.evaluation.sources[0].path]
    assert all(Path(path).is_file() for path in paths)
    assert Path(grpo.model.path) == tmp_path / "run" / "sft" / "checkpoints" / "hf"


def test_a_folder_of_somebody_else_is_left_alone(quickstart: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match="not empty") as refused:
        quickstart.prepare(tmp_path)
    assert (refused.value.path, refused.value.value) == ("--output", str(tmp_path))
    with pytest.raises(ConfigError, match="a folder that can be written: Not a directory"):
        quickstart.prepare(tmp_path / "mine.txt")
    assert (tmp_path / "mine.txt").read_text() == "precious"
    own = tmp_path / "own"
    quickstart.prepare(own)
    (own / "old").write_text("from the last run")
    quickstart.prepare(own)
    assert [path.name for path in own.iterdir()] == [".quickstart"]
    assert sys.modules.get("digits") is not None
