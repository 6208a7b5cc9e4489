"""Curricula: weights, choices that no task is left out of, the history, and what a checkpoint keeps of it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from episodes import make_group
from forge.config import CurriculumConfig
from forge.data.prompts import PromptOrder
from forge.errors import ConfigError, DataError
from forge.rollout.curriculum import Choice, Curriculum
from forge.rollout.curriculum_rules import (
    History,
    draw,
    explored,
    make_rule,
    make_stages,
    prioritised_weights,
    range_weights,
    staged_weights,
)
from forge.types import Group, Task


@dataclass
class Tasks:
    """Tasks with a difficulty, by number."""

    levels: tuple[Any, ...] = (1, 1, 1, 2, 2, 3)
    key: str = "level"
    digest: str = field(default="tasks")

    def __len__(self) -> int:
        return len(self.levels)

    def read(self, index: int) -> Task:
        return Task(f"task:{index}", text=str(index), metadata={self.key: self.levels[index]})


def history(*rates: float | None, num_groups: int = 1) -> History:
    """Tasks with these pass rates over 8 completions; None for one that was never asked."""
    found = History.empty(len(rates))
    for task, rate in enumerate(rates):
        for step in range(num_groups if rate is not None else 0):
            found.count(task, num_passed=round(8 * (rate or 0)), num_scored=8, step=step, decay=1.0)
    return found


def curriculum(num_tasks: int = 6, seed: int = 3, **keys: Any) -> Curriculum:
    config = CurriculumConfig(**{"kind": "prioritised", **keys})
    dataset = Tasks(levels=tuple(range(num_tasks)))
    rule = make_rule(config, dataset)
    assert rule is not None
    return Curriculum(PromptOrder(dataset, seed=seed), config=config, rule=rule, seed=seed)


# ---- Weights --------------------------------------------------------------------------------------------------------


def test_prioritised_weights_are_largest_at_the_target_and_0_at_the_ends() -> None:
    known = history(0.0, 0.25, 0.5, 1.0, None)
    half = prioritised_weights(known, target=0.5, power=1.0, unseen=0.3)
    assert half.tolist() == pytest.approx([0.0, 0.75, 1.0, 0.0, 0.3])  # 4 p (1 - p)
    sharp = prioritised_weights(known, target=0.5, power=3.0, unseen=1.0)
    assert sharp.tolist() == pytest.approx([0.0, 0.75**3, 1.0, 0.0, 1.0])
    hard = prioritised_weights(known, target=0.25, power=1.0, unseen=1.0)
    assert hard[1] == pytest.approx(1.0)
    assert hard[2] < 1.0


def test_a_range_holds_its_ends_and_what_was_never_asked() -> None:
    weights = range_weights(history(0.0, 0.25, 0.5, 0.75, 1.0, None), low=0.25, high=0.75)
    assert weights.tolist() == [0, 1, 1, 1, 0, 1]


def test_a_task_that_cannot_be_asked_is_left_to_exploration() -> None:
    """It counts as asked, and has no pass rate: refused prompts must not come again and again."""
    refused = History.empty(1)
    refused.count(0, num_passed=0, num_scored=0, step=1, decay=0.5)
    assert range_weights(refused, low=0.0, high=1.0).tolist() == [0]
    assert prioritised_weights(refused, target=0.5, power=1.0, unseen=1.0).tolist() == [0]


def test_stages_are_added_when_those_before_them_are_passed() -> None:
    stages = make_stages(np.array([1.0, 1.0, 5.0, 9.0]), None)
    assert stages.tolist() == [0, 0, 1, 2]

    def added(known: History) -> list[float]:
        return staged_weights(known, stages=stages, advance_at=0.75, min_groups=2).tolist()

    assert added(history(None, None, None, None)) == [1, 1, 0, 0]
    assert added(history(1.0, 0.5, None, None)) == [1, 1, 1, 0]  # 0.75 over 2 groups
    assert added(history(1.0, None, None, None)) == [1, 1, 0, 0]  # one group is not enough
    assert added(history(1.0, 0.25, 1.0, None, num_groups=2)) == [1, 1, 0, 0]  # the first is not passed any more
    assert added(history(1.0, 1.0, 1.0, None, num_groups=2)) == [1, 1, 1, 1]
    assert added(history(1.0, 1.0, 1.0, 1.0, num_groups=2)) == [1, 1, 1, 1]


def test_a_number_of_stages_splits_difficulties_evenly() -> None:
    difficulty = np.array([0.3, 0.1, 0.2, 0.9, 0.5, 0.6, 0.4, 0.5])
    stages = make_stages(difficulty, 2)
    assert stages.tolist() == [0, 0, 0, 1, 1, 1, 0, 1]
    assert make_stages(np.ones(5), 3).tolist() == [0] * 5


# ---- Choices --------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.sampled_from([0.05, 0.1, 0.2, 0.3, 0.75, 1.0]), st.integers(0, 500))
def test_every_task_comes_within_the_bound(num_tasks: int, explore: float, start: int) -> None:
    """Whatever the rule says: here its weights are 0 for all tasks but one."""
    config = CurriculumConfig(kind="range", explore=explore)
    order = PromptOrder(Tasks(levels=(0,) * num_tasks), seed=1)
    first = Curriculum(order, config=config, rule=lambda known: np.eye(1, num_tasks)[0], seed=1)
    window = int(np.ceil(2 * num_tasks / explore))
    assert {first.choose(number).task for number in range(start, start + window)} == set(range(num_tasks))


@settings(deadline=None)
@given(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]), st.integers(1, 200))
def test_explored_groups_are_spread_evenly(share: float, count: int) -> None:
    found = [turn for number in range(count) if (turn := explored(number, share)) is not None]
    assert found == list(range(int(round(share * 10) * count // 10)))


def test_draws_follow_the_weights_and_pass_over_what_is_busy() -> None:
    weights = np.array([0.0, 3.0, 1.0, 0.0])
    keys = [int(key) << 56 for key in range(256)]
    counted = Counter(draw(weights, key=key, busy=()) for key in keys)
    assert counted == {1: 192, 2: 64}
    assert {draw(weights, key=key, busy={1}) for key in keys} == {2}
    assert {draw(weights, key=key, busy={1, 2}) for key in keys} == {1, 2}  # a task again, before one without weight
    assert {draw(np.zeros(4), key=key, busy={0, 3}) for key in keys} == {1, 2}
    assert {draw(np.zeros(4), key=key, busy={0, 1, 2, 3}) for key in keys} == {0, 1, 2, 3}
    assert draw(weights, key=2**64 - 1, busy=()) == 2


def finished(chosen: Curriculum, number: int, rewards: tuple[float, ...], **score: Any) -> Group:
    group = make_group(number, rewards)
    episodes = [replace(each, score=replace(each.score, **score)) for each in group.episodes]
    chosen.finished(replace(group, episodes=tuple(episodes)))
    return group


def test_a_choice_stays_until_its_group_is_committed() -> None:
    chosen = curriculum(explore=0.0)
    tasks = [chosen.choose(number).task for number in range(6)]
    assert sorted(tasks) == list(range(6))  # none twice while it is pending
    finished(chosen, 0, (0.0, 1.0))
    chosen.commit([0], [(1, "refused")], step=1)
    assert chosen.choose(0).task == tasks[0]  # its records are written after the step
    assert [chosen.choose(number).task for number in range(2, 6)] == tasks[2:]
    assert chosen.choose(6).task == tasks[0]  # the only one with a weight that is not pending
    assert chosen.at(6)[0] == 1  # an epoch is as many groups as there are tasks
    chosen.commit([2], [], step=2)
    assert chosen._committed.keys() == {2}


def test_groups_count_once_by_the_reward_that_decides() -> None:
    chosen = curriculum(explore=0.0, decay=0.5, reward="right", solved_at=1.0)
    task = chosen.choose(0).task
    finished(chosen, 0, (5.0, 5.0), parts={"right": 0.0})
    finished(chosen, 0, (0.0, 0.0), parts={"right": 1.0})  # it was requeued: the last time counts
    chosen.commit([0], [], step=1)
    known = chosen.history
    assert (known.passes[task], known.trials[task], known.num_samples[task]) == (2, 2, 2)
    chosen._choices[1] = Choice(task)
    finished(chosen, 1, (0.0, 0.0, 0.0), parts={"right": 0.0})
    chosen.commit([], [(1, "no_signal")], step=2)
    assert (known.passes[task], known.trials[task]) == (1, 4)
    assert (known.num_groups[task], known.last_step[task], known.pass_rate[task]) == (2, 2, 0.25)


def test_a_completion_without_a_reward_and_a_dropped_group_have_no_part_in_pass_rates() -> None:
    chosen = curriculum(explore=0.0)
    tasks = [chosen.choose(number).task for number in range(3)]
    finished(chosen, 0, (1.0, 1.0), failures={"right": "it raised"})
    finished(chosen, 1, (1.0, 1.0))
    finished(chosen, 2, (1.5, 1.5), unshaped=0.5)  # a bonus for brevity does not solve it
    chosen.commit([0, 2], [(1, "failed")], step=4)
    assert chosen.history.num_groups[tasks].tolist() == [1, 1, 1]
    assert chosen.history.trials[tasks].tolist() == [0, 0, 2]
    assert chosen.history.passes[tasks].tolist() == [0, 0, 0]


def test_a_checkpoint_keeps_history_and_choices_bit_for_bit() -> None:
    chosen = curriculum(num_tasks=20, explore=0.3, decay=0.7)
    for step in range(1, 9):
        numbers = range(3 * step - 3, 3 * step)
        for number in numbers:
            task = chosen.choose(number).task
            finished(chosen, number, (float(task > 5), float(task > 9), float(number % 2)))
        chosen.commit(list(numbers)[:2], [(numbers[2], "no_signal")], step=step)
    pending = [24, 25, 26]
    tasks = [chosen.choose(number) for number in pending]
    text = json.dumps(chosen.state([*pending, 27]))
    resumed = curriculum(num_tasks=20, explore=0.3, decay=0.7)
    resumed.load(json.loads(text), pending=pending)
    assert [resumed.choose(number) for number in pending] == tasks
    assert resumed.state(pending) == chosen.state(pending)
    assert [resumed.choose(number) for number in range(27, 60)] == [chosen.choose(number) for number in range(27, 60)]
    assert np.array_equal(resumed.weights, chosen.weights)


def test_pending_groups_of_a_run_without_a_curriculum_keep_their_tasks() -> None:
    chosen = curriculum(explore=0.0)
    chosen.load(None, pending=[7, 9])
    order = PromptOrder(Tasks(levels=tuple(range(6))), seed=3)
    assert [chosen.choose(number).task for number in (7, 9)] == [order.place(number)[1] for number in (7, 9)]


def test_the_metrics_of_a_step() -> None:
    chosen = curriculum(num_tasks=5, explore=0.5)
    for number, rewards in enumerate([(1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (1.0, 1.0)]):
        chosen._choices[number] = Choice(number, is_explored=number == 3)
        finished(chosen, number, rewards)
    chosen.commit([0, 1, 2, 3], [], step=1)
    assert chosen.metrics() == {
        "curriculum/explored": 0.25,
        "curriculum/num_unseen": 1,
        "curriculum/num_solved": 2,
        "curriculum/num_unsolved": 1,
        "curriculum/num_active": 2,
        "curriculum/epoch": 0.8,
        "curriculum/pass_rate": 0.5,
    }


# ---- The rule of a run ----------------------------------------------------------------------------------------------


def least_tried(known: History, *, difficulty: np.ndarray, most: float = 2.0) -> list[float]:
    """A rule of one's own, as the guide has it."""
    return [float(level <= most) / (1 + groups) for level, groups in zip(difficulty, known.num_groups, strict=True)]


def spoiled(known: History, *, how: str) -> Any:
    if how == "write":
        known.passes[:] = 1
    return {"short": [1.0], "negative": [-1.0] * len(known), "nan": [np.nan] * len(known), "text": "no"}[how]


def test_a_rule_of_ones_own_gets_history_arguments_and_difficulty() -> None:
    here = f"{__name__}:least_tried"
    rule = make_rule(CurriculumConfig(kind=here, args={"most": 1}, difficulty_key="level"), Tasks())
    assert rule is not None
    assert rule(History.empty(6)).tolist() == [1, 1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        make_rule(CurriculumConfig(kind=f"{__name__}:spoiled", args={"how": "write"}), Tasks())


@pytest.mark.parametrize(
    ("args", "message"), [({}, "missing a required argument: 'how'"), ({"how": "short", "more": 1}, "'more'")]
)
def test_arguments_that_a_rule_does_not_take_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_rule(CurriculumConfig(kind=f"{__name__}:spoiled", args=args), Tasks())
    assert (caught.value.path, caught.value.value) == ("curriculum.args", sorted(args))
    assert "keyword arguments" in str(caught.value.rule)
    assert "change the arguments" in str(caught.value.repair)


@pytest.mark.parametrize("how", ["short", "negative", "nan", "text"])
def test_weights_that_cannot_be_used_are_refused_before_a_run(how: str) -> None:
    with pytest.raises(ConfigError, match="a weight for each prompt") as caught:
        make_rule(CurriculumConfig(kind=f"{__name__}:spoiled", args={"how": how}), Tasks())
    assert (caught.value.path, caught.value.rule) == (
        "curriculum.kind",
        "6 finite numbers of at least 0, one for each prompt",
    )
    assert "as long as `history`" in str(caught.value.repair)


@pytest.mark.parametrize(
    ("levels", "key", "value", "repair"),
    [
        ((1, 2), "levle", "levle", "did you mean `level`?"),
        ((1, 2), "points", "points", "it has level"),
        ((1, None), "level", None, "correct the record"),
        ((1, "hard"), "level", "hard", "correct the record"),
        ((1, True), "level", True, "correct the record"),
        ((1, float("nan")), "level", None, "correct the record"),
    ],
)
def test_a_difficulty_that_is_missing_or_not_a_number_is_refused(
    levels: tuple[Any, ...], key: str, value: object, repair: str
) -> None:
    with pytest.raises(DataError) as caught:
        make_rule(CurriculumConfig(kind="staged", difficulty_key=key), Tasks(levels=levels))
    assert caught.value.path == "curriculum.difficulty_key"
    assert caught.value.rule == f"every prompt has a finite number as `{key}`"
    assert caught.value.value == value or value is None
    assert repair in str(caught.value.repair)
