"""Finding runs, and what the list says of each."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from forge.observe.jsonl import JsonlSink
from forge.trainer.checkpoint_folder import WriterLock
from forge.ui.run_list import RunList, find_runs
from forge.ui.run_summary import RunSummary, SummaryReader
from run_folders import HOSTILE, make_grpo_run, make_sft_run, write_metrics


def found(root: Path) -> set[str]:
    return {folder.relative_to(root).as_posix() for folder in find_runs(root)}


def summary_of(folder: Path) -> RunSummary:
    return SummaryReader(folder, "run").read()


def test_runs_are_found_at_any_depth_and_inside_each_other(tmp_path: Path) -> None:
    write_metrics(_made(tmp_path / "first"), 1)
    write_metrics(_made(tmp_path / "sweep" / "lr" / "3e-4"), 1)
    write_metrics(_made(tmp_path / "first" / "extra"), 1)
    (_made(tmp_path / "evals" / "math") / "results.json").write_text("{}")
    (_made(tmp_path / "evals" / "going") / "samples.jsonl").write_text("")
    assert found(tmp_path) == {"first", "first/extra", "sweep/lr/3e-4", "evals/math", "evals/going"}
    assert found(tmp_path / "first") == {".", "extra"}


def test_a_name_that_is_not_text_can_be_in_an_address(tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff"))
    write_metrics(_made(odd), 1)
    runs = RunList(tmp_path)
    runs.scan()
    (summary,) = runs.summarise()
    assert summary.id.encode("utf-8") == rb"run-\xff"
    assert runs.folder(summary.id) == odd


def test_a_run_that_has_begun_is_there_before_its_first_step(tmp_path: Path) -> None:
    folder = _made(tmp_path / "new")
    (folder / "config.yaml").write_text("run: {name: new}\n")
    assert found(tmp_path) == set()  # any folder may have a config.yaml
    lock = WriterLock(folder)
    assert found(tmp_path) == {"new"}
    assert summary_of(folder).state.kind == "starting"
    lock.release()


def test_what_runs_write_is_not_taken_for_runs_and_links_are_not_followed(tmp_path: Path) -> None:
    outside = _made(tmp_path / "outside")
    write_metrics(outside, 1)
    root = _made(tmp_path / "root")
    for name in ("checkpoints", "rollouts", ".git", "node_modules", "__pycache__"):
        write_metrics(_made(root / "run" / name), 1)
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / "sealed").mkdir(mode=0)
    assert found(root) == set()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_summary_of_reinforcement_learning(tmp_path: Path) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=50, max_steps=80)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("seed: 7", "seed: 7\n  tags: [baseline, lr=3e-4]"))
    summary = summary_of(folder)
    assert (summary.name, summary.kind, summary.algorithm, summary.model) == (
        "arithmetic-grpo", "policy", "dapo", "tiny",
    )  # fmt: skip
    assert (summary.step, summary.total_steps, summary.metric) == (50, 80, "reward")
    assert summary.value == pytest.approx(0.9, abs=0.1)
    assert len(summary.spark) > 12
    assert summary.spark[0] < 0.3 < summary.spark[-1]
    assert summary.tags == ("baseline", "lr=3e-4")
    assert summary.started is not None
    assert summary.changed is not None
    assert summary.changed > summary.started > 1_790_000_000 - 1
    assert summary.state.kind == "stopped"


def test_a_summary_of_fine_tuning_and_of_an_evaluation(tmp_path: Path) -> None:
    summary = summary_of(make_sft_run(tmp_path / "sft"))
    assert (summary.kind, summary.name, summary.step, summary.total_steps) == ("fine-tuning", "sft", 80, None)
    assert summary.metric == "loss"
    folder = _made(tmp_path / "eval")
    (folder / "samples.jsonl").write_text("")
    assert summary_of(folder).kind == "evaluation"
    (folder / "results.json").write_text(json.dumps({"time": 5.0, "figures": {"reward": {"value": 0.25}}}))
    summary = summary_of(folder)
    assert (summary.state.kind, summary.metric, summary.value, summary.changed) == ("finished", "reward", 0.25, 5.0)


@pytest.mark.parametrize(
    "results", ["nonsense", "[]", '{"figures": {"reward": {"value": NaN}}, "time": 1}', "[" * 9999]
)
def test_results_that_cannot_be_read_are_no_results(tmp_path: Path, results: str) -> None:
    (tmp_path / "results.json").write_text(results)
    summary = summary_of(tmp_path)
    assert summary.value is None


def test_a_model_that_was_exported_after_the_last_step_says_that_the_run_is_finished(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", clock=lambda: 1000.0)
    sink.write(3, {"train/loss": 1.0})
    sink.close()
    reader = SummaryReader(tmp_path, "run")
    WriterLock(tmp_path).release()
    assert reader.read().state.kind == "stopped"
    config = _made(tmp_path / "checkpoints" / "hf") / "config.json"
    config.write_text("{}")
    os.utime(config, (999, 999))  # of an earlier part of the run
    assert reader.read().state.kind == "stopped"
    os.utime(config, (1001, 1001))
    assert reader.read().state.kind == "finished"


@pytest.mark.parametrize(
    "text",
    ["run: [", "- 1", "run: {tags: 5, name: [x]}", "training: {max_steps: true}", "a: &a [*a]", "\0", "[" * 5000],
)
def test_a_configuration_that_cannot_be_read_hides_nothing_else(tmp_path: Path, text: str) -> None:
    write_metrics(tmp_path, 2)
    (tmp_path / "config.yaml").write_text(text)
    summary = summary_of(tmp_path)
    assert (summary.name, summary.step, summary.total_steps, summary.tags) == (tmp_path.name, 2, None, ())


def test_names_are_bounded(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1)
    (tmp_path / "config.yaml").write_text(
        json.dumps({"run": {"name": HOSTILE[:60] * 90, "tags": ["t" * 900] * 900}, "model": {"preset": "p" * 900}})
    )
    summary = summary_of(tmp_path)
    assert max(map(len, (summary.name, summary.model, *summary.tags))) == 120
    assert len(summary.tags) == 32


def test_nothing_is_read_again_that_has_not_changed(tmp_path: Path) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=4)
    reader = SummaryReader(folder, "run")
    before = reader.read()
    (folder / "metrics.jsonl").chmod(0)
    assert reader.read() == before
    (folder / "metrics.jsonl").chmod(0o644)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "time": time.time(), "values": {}}) + "\n")
    assert reader.read().step == 9


def test_the_list_says_what_is_new_and_looks_names_up_only(tmp_path: Path) -> None:
    write_metrics(_made(tmp_path / "a"), 1)
    runs = RunList(tmp_path)
    runs.scan()
    assert [summary.id for summary in runs.summarise()] == ["a"]
    assert runs.is_complete
    assert list(runs.summarise()) == []
    write_metrics(_made(tmp_path / "b"), 2)
    assert runs.folder("b") is None
    runs.scan()
    assert [summary.id for summary in runs.summarise()] == ["b"]
    assert runs.folder("b") == tmp_path / "b"
    for name in ("../a", "./a", "a/", "/etc", "a/../b", "", "a\0"):
        assert runs.folder(name) is None
        assert runs.refresh(name) is None
    (tmp_path / "a" / "metrics.jsonl").unlink()
    runs.scan()
    assert set(runs.summaries) == {"b"}


def test_the_newest_run_is_summarised_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old", "older")):
        write_metrics(_made(tmp_path / name), 1)
        os.utime(tmp_path / name / "metrics.jsonl", (1e9 - age, 1e9 - age))
    runs = RunList(tmp_path)
    runs.scan()
    assert [summary.id for summary in runs.summarise()] == ["new", "old", "older"]
