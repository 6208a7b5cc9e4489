"""The curriculum of a run: which task each group has, and how often each task was solved.

The task of a group is chosen when the group is admitted, by its number, the run's seed and what was known then: the
history of committed groups, and the tasks of the groups before it that are not committed yet. It is kept until the
group is learned from or dropped: a group that is rolled out again, in the same process or after a resume, has the same
task.

Groups count in the history once, when they are committed, in the order of their numbers. Groups dropped for lack of
signal count as well: most of those are always or never solved. A checkpoint keeps the history and the choices bit for
bit, so a synchronous run that was killed chooses after its resume what it would have chosen without.

Some groups explore: they take the tasks in the order that a run without a curriculum has. Their numbers are spread
evenly, so every task comes at least once in 2 x tasks / `explore` groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from forge.config import CurriculumConfig
from forge.data.mixing import derive
from forge.data.prompts import PromptOrder
from forge.rollout.curriculum_rules import History, Numbers, Rule, draw, explored
from forge.rollout.signal import DropReason
from forge.types import Episode, Group, Score, Task

_COUNTED: Final = ("no_signal", "empty")
"""Why a group was dropped whose completions count all the same."""
_MARGIN: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Choice:
    """The task of a group, by its index in the dataset, and whether it explores."""

    task: int
    is_explored: bool = False


class Curriculum:
    """Chooses the tasks of groups. It stands in for the order of prompts: `at` says what a group is asked.

    Args:
        order: the prompts in the order without a curriculum.
        config: the section `curriculum`.
        rule: gives each task its weight.
        seed: the run's.
    """

    def __init__(self, order: PromptOrder, *, config: CurriculumConfig, rule: Rule, seed: int) -> None:
        self._order, self._config, self._rule, self._seed = order, config, rule, seed
        self.history = History.empty(len(order))
        self._weights: Numbers | None = None
        self._choices: dict[int, Choice] = {}
        self._committed: dict[int, Choice] = {}  # of the last step: its records are still to be written
        self._results: dict[int, tuple[int, int]] = {}
        self._rates: list[float] = []

    # ---- Choices ------------------------------------------------------------------------------------------------

    def at(self, number: int) -> tuple[int, Task]:
        """Return the epoch and the task of a group. An epoch is as many groups as there are tasks."""
        return number // len(self._order), self._order.dataset.read(self.choose(number).task)

    def choose(self, number: int) -> Choice:
        """Return the choice for a group: the same until the group is committed. Ask in the order of numbers."""
        if number in self._committed:
            return self._committed[number]
        if number not in self._choices:
            self._choices[number] = self._drawn(number)
        return self._choices[number]

    def _drawn(self, number: int) -> Choice:
        turn = explored(number, self._config.explore)
        if turn is not None:
            return Choice(self._order.place(turn)[1], is_explored=True)
        busy = {choice.task for choice in self._choices.values()}
        return Choice(draw(self.weights, key=derive(self._seed, "curriculum", number), busy=busy))

    @property
    def weights(self) -> Numbers:
        """The weight of each task now."""
        if self._weights is None:
            self._weights = self._rule(self.history)
        return self._weights

    # ---- Results ------------------------------------------------------------------------------------------------

    def finished(self, group: Group) -> None:
        """Note which completions of a group are solved. They count when the group is committed."""
        scored = [episode for episode in group.episodes if not episode.score.failures]
        self._results[group.number] = (sum(map(self._is_solved, scored)), len(scored))

    def _is_solved(self, episode: Episode) -> bool:
        return _decisive(episode.score, self._config.reward) >= self._config.solved_at - _MARGIN

    def commit(self, trained: Iterable[int], drops: Iterable[tuple[int, DropReason]], *, step: int) -> None:
        """Count the groups that a step learned from, and those dropped before it."""
        outcomes: dict[int, str] = dict.fromkeys(trained, "trained") | dict(drops)
        self._committed, self._rates = {}, []
        for number, outcome in sorted(outcomes.items()):
            choice = self._committed[number] = self.choose(number)
            self._choices.pop(number, None)
            counts = outcome == "trained" or outcome in _COUNTED
            num_passed, num_scored = self._results.pop(number, (0, 0)) if counts else (0, 0)
            self._results.pop(number, None)
            self.history.count(
                choice.task, num_passed=num_passed, num_scored=num_scored, step=step, decay=self._config.decay
            )
            if num_scored and not choice.is_explored:
                self._rates.append(num_passed / num_scored)
        self._weights = None

    # ---- Checkpoints and metrics --------------------------------------------------------------------------------

    def state(self, pending: Iterable[int]) -> dict[str, Any]:
        """Return what a checkpoint keeps: the history, and the tasks of groups that are not committed."""
        chosen = {number: self._choices[number] for number in pending if number in self._choices}
        choices = {str(number): [choice.task, choice.is_explored] for number, choice in chosen.items()}
        return {"history": self.history.state(), "choices": choices}

    def load(self, state: Mapping[str, Any] | None, *, pending: Iterable[int]) -> None:
        """Resume from what a checkpoint kept. Where the run had no curriculum before (None), its pending groups have
        the tasks that they had then."""
        if state is None:
            self._choices = {number: Choice(self._order.place(number)[1]) for number in pending}
            return
        self.history.load(state["history"])
        self._choices = {
            int(number): Choice(int(task), bool(is_explored))
            for number, (task, is_explored) in state["choices"].items()
        }
        self._weights = None

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step that was committed last."""
        history, last = self.history, self._committed.values()
        rate = history.pass_rate
        values = {
            "curriculum/explored": sum(choice.is_explored for choice in last) / max(1, len(last)),
            "curriculum/num_unseen": float(history.is_new.sum()),
            "curriculum/num_solved": float((rate >= 1).sum()),
            "curriculum/num_unsolved": float((rate <= 0).sum()),
            "curriculum/num_active": float(np.count_nonzero(self.weights)),
            "curriculum/epoch": float(history.num_groups.sum() / len(history)),
        }
        if self._rates:
            values["curriculum/pass_rate"] = math.fsum(self._rates) / len(self._rates)
        return values


def _decisive(score: Score, reward: str | None) -> float:
    if reward is not None:
        return score.parts.get(reward, 0.0)
    return score.reward if score.unshaped is None else score.unshaped
