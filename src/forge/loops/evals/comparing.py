"""Compare evaluations of the same tasks, task by task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.errors import EvalError, OptionError
from forge.loops.evals.record import changed_settings, read_results
from forge.loops.evals.statistics import PairedDifference, paired_difference, pass_at_k

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class FigureComparison:
    """One figure of two evaluations, over the tasks that both have.

    Attributes:
        name: `reward`, or `pass@k`.
        first, second: the figure of A and of B.
        difference: B minus A, task by task.
    """

    name: str
    first: float
    second: float
    difference: PairedDifference

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        paired = self.difference
        return {
            "first": self.first,
            "second": self.second,
            "difference": paired.estimate.plain(),
            "p_value": paired.p_value,
            "wins": paired.num_wins,
            "losses": paired.num_losses,
            "ties": paired.num_ties,
        }


@dataclass(frozen=True, slots=True)
class EvalComparison:
    """Two evaluations of the same tasks.

    Attributes:
        first, second: the folders of A and B.
        num_tasks: tasks that both have.
        num_left_out: tasks that one of them lacks because of faults.
        figures: the reward, and pass@k for every k that both can give.
        changes: settings that differ.
    """

    first: Path
    second: Path
    num_tasks: int
    num_left_out: int
    figures: tuple[FigureComparison, ...]
    changes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "first": str(self.first),
            "second": str(self.second),
            "num_tasks": self.num_tasks,
            "num_left_out": self.num_left_out,
            "figures": {figure.name: figure.plain() for figure in self.figures},
            "changed_settings": list(self.changes),
        }


def compare_evals(folders: Sequence[str | Path], *, confidence: float = _CONFIDENCE) -> list[EvalComparison]:
    """Compare each evaluation with the first one. They must have the same tasks; anything else may differ."""
    if len(folders) < 2:
        raise OptionError(
            "one evaluation cannot be compared",
            path="EVAL_DIR",
            value=[str(folder) for folder in folders],
            rule="at least two folders",
            repair="forge eval compare BEFORE AFTER",
        )
    if not 0 < confidence < 1:
        raise OptionError(
            "this is not a level of confidence",
            path="--confidence",
            value=confidence,
            rule="a number above 0 and below 1",
            repair="leave it out for 0.95",
        )
    opened = [(Path(folder), read_results(Path(folder))) for folder in folders]
    return [_compare(opened[0], other, confidence) for other in opened[1:]]


def _compare(
    one: tuple[Path, Mapping[str, Any]], other: tuple[Path, Mapping[str, Any]], confidence: float
) -> EvalComparison:
    (first, before), (second, after) = one, other
    _check_tasks(one, other)
    mine, theirs = _by_rank(before), _by_rank(after)
    pairs = [(task, theirs[rank]) for rank, task in mine.items() if rank in theirs]
    if not pairs:
        raise EvalError(
            "there is no task that both evaluations completed",
            path=str(second),
            rule="at least one task with all its samples in both",
            repair="run forge eval again: it tries again what faults left out",
        )
    counts = [int(each["settings"]["num_samples"]) for each in (before, after)]
    figures = [_figure("reward", [(_mean(a["rewards"]), _mean(b["rewards"])) for a, b in pairs], confidence)]
    shared = sorted(set(map(int, before["figures"]["pass_at"])) & set(map(int, after["figures"]["pass_at"])))
    for k in (k for k in shared if k <= min(counts)):
        values = [
            (pass_at_k(counts[0], sum(a["solved"]), k), pass_at_k(counts[1], sum(b["solved"]), k)) for a, b in pairs
        ]
        figures.append(_figure(f"pass@{k}", values, confidence))
    num_tasks = int(before["settings"]["tasks"]["count"])
    changes = [
        *changed_settings(before["settings"], after["settings"]),
        *changed_settings(before["counting"], after["counting"], path="eval"),
    ]
    return EvalComparison(first, second, len(pairs), num_tasks - len(pairs), tuple(figures), tuple(changes))


def _by_rank(results: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return the tasks by their rank among all of the evaluation: another dataset may have them at other places."""
    ranks = {index: rank for rank, index in enumerate(results["indices"])}
    return {ranks[task["index"]]: task for task in results["tasks"]}


def _check_tasks(one: tuple[Path, Mapping[str, Any]], other: tuple[Path, Mapping[str, Any]]) -> None:
    (first, before), (second, after) = one, other
    mine, theirs = before["settings"]["tasks"], after["settings"]["tasks"]
    if mine["digest"] != theirs["digest"]:
        raise EvalError(
            "these evaluations have different tasks",
            path=str(second),
            value=f"{theirs['count']} tasks, digest {theirs['digest']}",
            rule=f"the tasks of {first}: {mine['count']} tasks, digest {mine['digest']}",
            repair="evaluate both on the same tasks: the same sources, eval.num_tasks, prompts.shuffle and run.seed",
        )


def _figure(name: str, values: Sequence[tuple[float, float]], confidence: float) -> FigureComparison:
    first, second = [value[0] for value in values], [value[1] for value in values]
    return FigureComparison(name, _mean(first), _mean(second), paired_difference(first, second, confidence=confidence))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
