"""The rules of curricula, as pure functions: from the history of all tasks to the weight of each, and from weights to
the task of a group."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from forge.config import CurriculumConfig
from forge.data.prompts import Readable
from forge.errors import ConfigError, DataError, did_you_mean
from forge.registry import CURRICULA

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]

Rule = Callable[["History"], Numbers]
"""Returns a weight for each task: how often it comes, compared with the others."""

_FIELDS: Final = ("num_groups", "num_samples", "last_step", "trials", "passes")


@dataclass(frozen=True, slots=True)
class History:
    """What became of the groups of each of N tasks. A group counts once, when it was learned from or dropped.

    Attributes:
        num_groups: int64 [N]: groups so far, those included that were refused or whose rewards failed.
        num_samples: int64 [N]: completions that were scored.
        last_step: int64 [N]: the step of the last group; 0 for a task that was never asked.
        trials: float64 [N]: scored completions, those of earlier groups discounted by `curriculum.decay`.
        passes: float64 [N]: the solved ones among `trials`.
    """

    num_groups: Counts
    num_samples: Counts
    last_step: Counts
    trials: Numbers
    passes: Numbers

    @classmethod
    def empty(cls, num_tasks: int) -> History:
        """Return the history of tasks that were never asked."""
        groups, samples, steps = np.zeros((3, num_tasks), dtype=np.int64)
        trials, passes = np.zeros((2, num_tasks))
        return cls(groups, samples, steps, trials, passes)

    def __len__(self) -> int:
        return len(self.num_groups)

    @property
    def is_new(self) -> NDArray[np.bool_]:
        """Whether each task was never asked."""
        return np.equal(self.num_groups, 0)

    @property
    def pass_rate(self) -> Numbers:
        """The part of each task's completions that is solved; NaN where none was scored."""
        rate: Numbers = np.full(len(self), np.nan)
        np.divide(self.passes, self.trials, out=rate, where=self.trials > 0)
        return rate

    def count(self, task: int, *, num_passed: int, num_scored: int, step: int, decay: float) -> None:
        """Count a group of a task. One without a scored completion changes no pass rate."""
        self.num_groups[task] += 1
        self.last_step[task] = step
        if num_scored:
            self.num_samples[task] += num_scored
            self.trials[task] = decay * self.trials[task] + num_scored
            self.passes[task] = decay * self.passes[task] + num_passed

    def read_only(self) -> History:
        """Return the same history, which cannot be changed through it."""
        views = [getattr(self, name).view() for name in _FIELDS]
        for view in views:
            view.flags.writeable = False
        return History(*views)

    def state(self) -> dict[str, list[Any]]:
        """Return what a checkpoint keeps, of tasks that were asked. `load` restores it bit for bit."""
        asked = np.flatnonzero(self.num_groups)
        return {"task": asked.tolist()} | {name: getattr(self, name)[asked].tolist() for name in _FIELDS}

    def load(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Resume from what a checkpoint kept."""
        asked = np.asarray(state["task"], dtype=np.int64)
        for name in _FIELDS:
            values = getattr(self, name)
            values[:] = 0
            values[asked] = state[name]


# ---- Weights --------------------------------------------------------------------------------------------------------


def prioritised_weights(history: History, *, target: float, power: float, unseen: float) -> Numbers:
    """Return weights that are 1 at the pass rate `target` and 0 for tasks that are always or never solved."""
    rate = np.nan_to_num(history.pass_rate)
    closeness = (rate / target) ** target * ((1 - rate) / (1 - target)) ** (1 - target)
    return np.where(history.is_new, unseen, closeness ** (2 * power))


def range_weights(history: History, *, low: float, high: float) -> Numbers:
    """Return weight 1 for tasks that were never asked and for pass rates from `low` to `high`, 0 for all others."""
    rate = history.pass_rate  # comparisons with NaN are false
    return (history.is_new | ((rate >= low) & (rate <= high))).astype(np.float64)


def staged_weights(history: History, *, stages: Counts, advance_at: float, min_groups: int) -> Numbers:
    """Return weight 1 for the tasks of the stages so far. A stage is added to those before it once theirs all have the
    pass rate `advance_at`, each over at least `min_groups` groups."""
    num_stages = int(stages.max()) + 1
    groups = np.bincount(stages, weights=history.num_groups, minlength=num_stages)
    trials = np.bincount(stages, weights=history.trials, minlength=num_stages)
    passes = np.bincount(stages, weights=history.passes, minlength=num_stages)
    is_done = (groups >= min_groups) & (trials > 0) & (passes >= advance_at * trials)
    last = int(np.argmin(np.append(is_done, False)))
    return (stages <= last).astype(np.float64)


def make_stages(difficulty: Numbers, num_stages: int | None) -> Counts:
    """Return the stage of each task, from 0 for the easiest. Tasks of the same difficulty are in the same stage."""
    levels, place = np.unique(difficulty, return_inverse=True)
    if num_stages is None or num_stages >= len(levels):
        return place.astype(np.int64)
    first = np.searchsorted(np.sort(difficulty), levels, side="left")
    _, stages = np.unique(first * num_stages // len(difficulty), return_inverse=True)
    return stages[place].astype(np.int64)


# ---- Choices --------------------------------------------------------------------------------------------------------


def explored(number: int, share: float) -> int | None:
    """Return how many groups explored before the group of a number, if it explores too; None if it does not.

    Explored groups are spread evenly: of any n groups in a row, at least floor(n x share) explore.
    """
    exact = Fraction(repr(share))
    before = math.floor(exact * number)
    return before if math.floor(exact * (number + 1)) > before else None


def draw(weights: Numbers, *, key: int, busy: Collection[int]) -> int:
    """Return a task with a probability in proportion to its weight. 64 bits of `key` decide which.

    Tasks that are `busy` are passed over while there are others with a weight. Where all weights are 0, each task is as
    probable.
    """
    free = weights.copy()
    free[list(busy)] = 0.0
    chosen = next((each for each in (free, weights) if each.any()), None)
    if chosen is None:
        chosen = np.ones(len(weights))
        if len(busy) < len(weights):
            chosen[list(busy)] = 0.0
    sums = np.cumsum(chosen)
    place = int(np.searchsorted(sums, (key >> 11) / (1 << 53) * sums[-1], side="right"))
    return min(place, int(np.flatnonzero(chosen)[-1]))  # rounding


# ---- The rule of a run ----------------------------------------------------------------------------------------------


def make_rule(config: CurriculumConfig, dataset: Readable) -> Rule | None:
    """Return the rule that a configuration names, for the tasks of a run; None without a curriculum.

    It is tried once, so that what cannot work is refused before a run starts.
    """
    if config.kind is None:
        return None
    function = CURRICULA.find(config.kind, path="curriculum.kind")
    args = _arguments(config, dataset)
    is_own = ":" in config.kind
    if is_own:
        _check_arguments(function, args, config)

    def weights(history: History) -> Numbers:
        found = function(history.read_only(), **args)
        return _checked(found, config, len(history)) if is_own else np.asarray(found, dtype=np.float64)

    weights(History.empty(len(dataset)))
    return weights


def _check_arguments(function: Callable[..., Any], args: Mapping[str, Any], config: CurriculumConfig) -> None:
    try:
        inspect.signature(function).bind(None, **args)
    except TypeError as error:
        raise ConfigError(
            f"{config.kind} cannot be called with its arguments: {error}",
            path="curriculum.args",
            value=sorted(args),
            rule="the keyword arguments of the function, and `difficulty` with curriculum.difficulty_key",
            repair="change the arguments, or the function",
        ) from None


def _arguments(config: CurriculumConfig, dataset: Readable) -> dict[str, Any]:
    if config.kind == "prioritised":
        return {"target": config.target, "power": config.power, "unseen": config.unseen}
    if config.kind == "range":
        return {"low": config.low, "high": config.high}
    difficulty = None if config.difficulty_key is None else _difficulties(config.difficulty_key, dataset)
    if config.kind == "staged":
        assert difficulty is not None
        stages = make_stages(difficulty, config.num_stages)
        return {"stages": stages, "advance_at": config.advance_at, "min_groups": config.min_groups}
    return dict(config.args) | ({} if difficulty is None else {"difficulty": difficulty})


def _difficulties(key: str, dataset: Readable) -> Numbers:
    found = np.empty(len(dataset))
    for index in range(len(dataset)):
        task = dataset.read(index)
        value = task.metadata.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            known, is_there = sorted(map(str, task.metadata)), key in task.metadata
            repair = did_you_mean(key, known) or f"name another key: it has {', '.join(known) or 'none'}"
            raise DataError(
                f"{task.id}: `{key}` is {'not a number' if is_there else 'missing'}",
                path="curriculum.difficulty_key",
                value=value if is_there else key,
                rule=f"every prompt has a finite number as `{key}`",
                repair="correct the record, or name another key" if is_there else repair,
            )
        found[index] = value
    return found


def _checked(found: Any, config: CurriculumConfig, num_tasks: int) -> Numbers:
    try:
        weights = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError):
        weights = np.empty(0)
    if weights.shape != (num_tasks,) or not np.isfinite(weights).all() or (weights < 0).any():
        raise ConfigError(
            f"{config.kind} does not return a weight for each prompt",
            path="curriculum.kind",
            value=f"an array of shape {weights.shape}" if weights.shape != (num_tasks,) else "negative or not finite",
            rule=f"{num_tasks} finite numbers of at least 0, one for each prompt",
            repair="return an array as long as `history`",
        )
    return weights
