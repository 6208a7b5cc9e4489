"""A curriculum in the loop: the same choices after a kill as without one, and its metrics and records."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge.config import CurriculumConfig
from forge.loops.curriculum import describe_curriculum, groups_with_tasks
from forge.loops.dry_run import dry_run
from forge.loops.planning import plan_run
from forge.observe.report.charts import choose_charts
from forge.observe.report.reading import read_run
from forge.rollout.ledger import check_ledger
from forge.types import Completion, Score, Task
from grpo_runs import config, ledger, metrics
from grpo_workers import StandInRewards, StandInTrainer, number_of, run_loop

CURRICULUM = ("curriculum.kind=prioritised", "curriculum.explore=0.25")


class Mixed(StandInRewards):
    """Tasks of which a third is always solved, a third never, and a third sometimes."""

    async def score(self, prompt: Task, completions: Sequence[Completion]) -> list[Score]:
        kind = number_of(prompt.id) % 3
        solved = [float(kind == 0 or (kind == 1 and number_of(each.token_ids) % 2)) for each in completions]
        return [Score(value, {"all": value}) for value in solved]


class SavingTrainer(StandInTrainer):
    """Keeps its weights with every checkpoint, which goes through JSON as a real one does."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoints: list[tuple[str, int, int]] = []

    async def save(self, *, extra: Mapping[str, Any], metric: float | None = None, **options: Any) -> None:
        self.checkpoints.append((json.dumps(extra), self.weights, self.step))

    def resumed(self, place: int) -> SavingTrainer:
        """Return what a process finds that starts after a kill: a checkpoint, and nothing else."""
        text, weights, step = self.checkpoints[place]
        trainer = SavingTrainer()
        trainer.found, trainer.weights, trainer.step = json.loads(text), weights, step
        return trainer


@pytest.mark.parametrize("rule", ["drop", "replace"])
def test_a_run_that_resumes_from_any_checkpoint_makes_the_same_choices(rule: str, tmp_path: Path) -> None:
    overrides = (*CURRICULUM, f"rollout.no_signal={rule}", "training.max_steps=10", "checkpointing.save_interval=1")
    chosen = config(tmp_path / "run", *overrides)
    whole = SavingTrainer()
    run_loop(chosen, whole, rewards=Mixed())
    lines, share = ledger(chosen), metrics(chosen, "curriculum/pass_rate")
    plain = config(tmp_path / "plain", *overrides[2:])
    run_loop(plain, StandInTrainer(), rewards=Mixed())
    assert [line.prompt for line in ledger(plain)] != [line.prompt for line in lines]
    for place in (1, 4, 8):
        resumed = whole.resumed(place)
        run_loop(chosen, resumed, rewards=Mixed())
        assert ledger(chosen) == lines
        assert metrics(chosen, "curriculum/pass_rate") == share
        assert resumed.weights == whole.weights
        # The last checkpoint may have groups in flight that the other run had not begun.
        first, last = (json.loads(each.checkpoints[-1][0])["curriculum"]["history"] for each in (whole, resumed))
        assert first == last


def test_an_asynchronous_run_keeps_the_tasks_of_groups_that_were_begun(tmp_path: Path) -> None:
    overrides = (*CURRICULUM, "rollout.staleness=2", "rollout.no_signal=replace", "checkpointing.save_interval=1")
    chosen = config(tmp_path / "run", *overrides)
    whole = SavingTrainer()
    run_loop(chosen, whole, rewards=Mixed())
    resumed = whole.resumed(2)
    assert resumed.found is not None
    kept, buffer = copy.deepcopy(resumed.found["curriculum"]["choices"]), resumed.found["buffer"]
    assert {int(number) for number in kept} == set(buffer["pending"])
    run_loop(chosen, resumed, rewards=Mixed())
    after = json.loads(resumed.checkpoints[-1][0])["buffer"]
    lines = [line for line in ledger(chosen) if line.step <= 6]
    check_ledger(lines, pending=after["pending"], next_number=after["next_number"])
    dataset = plan_run(chosen).prompts.dataset
    asked = {line.group: line.prompt for line in lines}
    committed = [number for number in kept if int(number) in asked]
    assert committed
    assert all(asked[int(number)] == dataset.read(kept[number][0]).id for number in committed)


def test_a_run_can_start_a_curriculum_when_it_resumes(tmp_path: Path) -> None:
    whole = SavingTrainer()
    run_loop(config(tmp_path / "run", "checkpointing.save_interval=1"), whole, rewards=Mixed())
    resumed = whole.resumed(2)
    chosen = config(tmp_path / "run", *CURRICULUM, "training.max_steps=9")
    assert run_loop(chosen, resumed, rewards=Mixed()).step == 9
    history = json.loads(resumed.checkpoints[-1][0])["curriculum"]["history"]
    assert sum(history["num_groups"]) == len([line for line in ledger(chosen) if line.step > 3])


def test_only_groups_whose_tasks_are_kept_may_replay_their_journals(tmp_path: Path) -> None:
    """A group that was begun after the checkpoint may get another task, and one without a curriculum another again."""

    def checkpoint(**curriculum: Any) -> Any:
        return SimpleNamespace(extra={"caller": {"buffer": {"pending": [3, 4]}, **curriculum}})

    plain = plan_run(config(tmp_path / "plain"))
    chosen = plan_run(config(tmp_path / "chosen", *CURRICULUM))
    before = checkpoint(curriculum={"choices": {"3": [0, False], "5": [1, True]}})
    assert groups_with_tasks(replace(plain, checkpoint=checkpoint())) is None
    assert groups_with_tasks(replace(plain, checkpoint=before)) == frozenset()
    assert groups_with_tasks(replace(chosen, checkpoint=before)) == {3, 5}
    assert groups_with_tasks(replace(chosen, checkpoint=checkpoint())) == {3, 4}


def test_what_a_dry_run_and_the_report_say(tmp_path: Path) -> None:
    section = CurriculumConfig(kind="range", explore=0.25)
    assert describe_curriculum(section, 30) == (
        "range; 0.25 of the groups explore, so each prompt comes within 240 groups"
    )
    assert "may never come" in describe_curriculum(CurriculumConfig(kind="range", explore=0), 30)
    facts = dict(dry_run(config(tmp_path / "run", *CURRICULUM)).facts)
    assert facts["curriculum"].startswith("prioritised; 0.25 of the groups explore")
    values = {"curriculum/pass_rate": 0.5, "curriculum/num_unseen": 3.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 4, "time": 1.0, "values": values}) + "\n")
    titles = {chart["title"] for chart in choose_charts(read_run(tmp_path, max_samples=0).metrics)}
    assert {"Pass rate of chosen prompts", "Prompts"} <= titles
