"""The history checker finds what it is there to find, in files that no code of the library wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main
from forge.errors import DataError
from forge.loops.run_paths import run_dir
from forge.observe.history import check_history
from grpo_runs import config, train_here

PROMPT = {"epoch": 0, "prompt": "p"}


def lines(path: Path, *found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in found))


def episode(group: int, version: int, *more: list[int]) -> dict[str, Any]:
    return {"group": group, "index": 0, "versions": [[version, 0, 4], *more]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of two groups with a staleness of 1. Group 2 was dropped, 5 and 6 are pending; step 2 was repeated."""
    (tmp_path / "config.yaml").write_text("rollout: {staleness: 1}\nrecord: {rollouts: all}\n")
    given = [(1, 0, "trained"), (1, 1, "trained"), (2, 2, "no_signal"), (2, 3, "trained"), (2, 4, "trained")]
    ledger = [{"step": step, "group": group, "outcome": outcome, **PROMPT} for step, group, outcome in given]
    lines(tmp_path / "ledger.jsonl", *ledger)
    lines(tmp_path / "ledger.discarded.jsonl", ledger[3])
    lines(tmp_path / "rollouts/step_000001.jsonl", episode(0, 0), episode(1, 0))
    lines(tmp_path / "rollouts/step_000002.jsonl", episode(3, 0, [1, 4, 8]), episode(4, 1))
    lines(tmp_path / "metrics.jsonl", {"step": 1}, {"step": 2})
    save(tmp_path, 2, pending=[5, 6], next_number=7)
    lines(tmp_path / "journals/abc/5-0.jsonl", {})
    trace(tmp_path, ("train", 0), ("save", 1), ("train", 1), ("train", 1))
    return tmp_path


def save(folder: Path, step: int, **buffer: Any) -> None:
    caller = {"step": step, "buffer": buffer, "ledger_before": None}
    lines(folder / f"checkpoints/step-{step:08d}/checkpoint.json", {"extra": {"caller": caller}})


def trace(folder: Path, *spans: tuple[str, int]) -> None:
    events = [{"name": name, "ph": "X", "ts": at, "args": {"step": step}} for at, (name, step) in enumerate(spans)]
    (folder / "trace.json").write_text("[\n" + ",\n".join(map(json.dumps, events)))


def append(path: Path, line: dict[str, Any] | str) -> None:
    with path.open("a") as file:
        file.write(line if isinstance(line, str) else json.dumps(line) + "\n")


def test_a_run_that_kept_every_guarantee(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(run / "ledger.jsonl", '{"step": 3, "gro')  # by a kill
    found = check_history(run)
    assert found.violations == []
    assert found.skipped == {}
    assert (found.counts["groups"], found.counts["tokens"], found.counts["lines cut off by a kill"]) == (5, 20, 2)
    assert main(["history", str(run)]) == 0
    assert "ok         staleness" in capsys.readouterr().out


def twice(run: Path) -> None:
    append(run / "ledger.jsonl", {"step": 2, "group": 1, "outcome": "no_signal", **PROMPT})


def back(run: Path) -> None:
    append(run / "metrics.jsonl", {"step": 1})


def lost(run: Path) -> None:
    save(run, 2, pending=[5], next_number=7)


def unknown(run: Path) -> None:
    save(run, 2, pending=[], next_number=4)


def pending_too(run: Path) -> None:
    save(run, 2, pending=[4, 5, 6], next_number=7)


def gone(run: Path) -> None:
    kept = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(line for line in kept if '"group": 3' not in line))


def other_rollouts(run: Path) -> None:
    lines(run / "rollouts/step_000001.jsonl", episode(0, 0), episode(9, 0))


def no_rollouts(run: Path) -> None:
    (run / "rollouts/step_000001.jsonl").unlink()


def too_old(run: Path) -> None:
    (run / "config.yaml").write_text("rollout: {staleness: 0}\n")


def too_new(run: Path) -> None:
    lines(run / "rollouts/step_000001.jsonl", episode(0, 0), episode(1, 1))


def journal(run: Path) -> None:
    lines(run / "journals/abc/4-0.jsonl", {})


def skipped_step(run: Path) -> None:
    trace(run, ("train", 0), ("train", 2))


def unsaved_repeat(run: Path) -> None:
    trace(run, ("train", 0), ("train", 1), ("train", 1))


def unreadable(run: Path) -> None:
    append(run / "metrics.jsonl", "{\n")


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (twice, {"once"}),
        (back, {"order"}),
        (lost, {"none_lost"}),
        (unknown, {"none_lost"}),
        (pending_too, {"once"}),
        (gone, {"none_lost", "returned", "recorded"}),
        (other_rollouts, {"recorded"}),
        (no_rollouts, {"recorded"}),
        (too_old, {"staleness"}),
        (too_new, {"staleness"}),
        (journal, {"journals"}),
        (skipped_step, {"trained_in_order"}),
        (unsaved_repeat, {"trained_in_order"}),
        (unreadable, {"readable"}),
    ],
)
def test_each_broken_guarantee_is_found(run: Path, change: Callable[[Path], None], rules: set[str]) -> None:
    change(run)
    assert {each.rule for each in check_history(run).violations} == rules
    assert main(["history", "--json", str(run)]) == 1


def bound(step: int, before: int, after: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "key": "rollout.staleness", "before": before, "after": after, **more}


@pytest.mark.parametrize(
    ("changes", "is_good"),
    [
        ([bound(1, 0, 1)], True),  # step 1 has tokens of its own version, step 2 of the one before
        ([bound(2, 0, 1)], False),  # it holds from step 3 on
        ([bound(0, 1, 0)], False),
        ([bound(2, 1, 0)], True),
        ([bound(0, 1, 0), bound(1, 0, 1)], True),
        ([bound(1, 0, 1), bound(0, 0, 0)], False),  # the run went back, and the later change was not made again
        ([bound(0, 1, 0), bound(0, 0, 1)], True),  # two in the same step: the last one holds
        ([bound(0, 1, 0, num_left=1)], True),  # of a command that a kill cut off
        ([bound(0, 1, 0, num_left=1), {**bound(0, 0, 0), "key": "rollout.batch_groups"}], False),
        ([{**bound(0, 1, 0), "key": "generator.num_replicas"}], True),
    ],
)
def test_the_bound_in_force_at_each_step_is_what_counts(
    run: Path, changes: list[dict[str, Any]], is_good: bool
) -> None:
    lines(run / "runtime_changes.jsonl", *changes)
    assert {each.rule for each in check_history(run).violations} == (set() if is_good else {"staleness"})


def test_tokens_that_do_not_learn_may_be_of_any_weights(run: Path) -> None:
    turns = [
        {"start": 0, "end": 4, "is_trained": True, "agent": "a"},
        {"start": 4, "end": 8, "is_trained": True, "agent": "b"},
        {"start": 8, "end": 9, "is_trained": False, "agent": "a"},
    ]
    agents = {"a": {"learns": True}, "b": {"learns": False}}
    line = episode(1, 0, [-7, 4, 8], [9, 8, 9]) | {"turns": turns, "agents": agents}
    lines(run / "rollouts/step_000001.jsonl", episode(0, 0), line)
    assert check_history(run).violations == []
    lines(run / "rollouts/step_000001.jsonl", episode(0, 0), line | {"agents": agents | {"b": {"learns": True}}})
    assert {each.rule for each in check_history(run).violations} == {"staleness"}


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no history that could be checked") as caught:
        check_history(tmp_path)
    assert caught.value.path == str(tmp_path)
    assert "config.yaml and ledger.jsonl" in str(caught.value.rule)


def test_a_real_run_ahead_of_its_trainer(tmp_path: Path) -> None:
    chosen = config(tmp_path / "ahead", "rollout.staleness=2", "training.max_steps=4", "record.trace=true")
    train_here(chosen)
    found = check_history(run_dir(chosen))
    assert found.violations == []
    assert found.skipped == {}
    assert found.counts["training steps in the trace"] == 4
