"""What the rules look at: the metrics of a run by step, its evaluations, its configuration, and recorded
completions."""

from __future__ import annotations

import math
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from forge.config.loading import FILE_NAME
from forge.config.yaml_text import read_yaml
from forge.errors import DataError
from forge.observe.jsonl import MetricsLine, read_jsonl
from forge.observe.report.reading import setting_of
from forge.observe.report.samples import json_lines
from forge.observe.sink import EVALUATION, EVALUATION_REWARD, REWARD_MEAN, SKIPPED, TRAIN_LOSS

ROLLOUTS: Final = re.compile(r"(step|fruitless)_(\d+)\.jsonl")
FIRST: Final = 3
"""How many of the first steps a mean is taken over: runs learn fast at first."""
_MOST_FILES: Final = 6
"""Files of rollouts that are read: those of the last steps."""
_LEDGER_TAIL: Final = 1 << 22
"""Bytes of the ledger that are read, from its end. A run ends long before it drops so many groups in a row."""
_MOST_NAMED: Final = 5
_COUNTS: Final = ("rollout/num_", "rollout/no_signal/", SKIPPED)
"""Metrics that are 0 where a step has none."""


@dataclass(frozen=True, slots=True)
class Trend:
    """How a metric moved: its means over the first and the last steps, and the standard error of their difference,
    judged by how much the metric jumps from step to step."""

    first: float
    last: float
    error: float

    @property
    def change(self) -> float:
        return self.last - self.first

    def is_significant(self, *, sigmas: float = 3.0) -> bool:
        """Whether first and last differ by more than the noise of single steps explains."""
        return abs(self.change) > sigmas * self.error


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a run wrote.

    Attributes:
        folder: the run's.
        steps: the steps that it learned in, ascending.
        columns: for each metric one number per step; NaN where the step has none, or one that is not finite.
        evaluations: the held-out evaluations, with the steps after which they were made.
        config: config.yaml as plain data.
        num_dropped_at_end: groups that taught nothing since the last step, as the ledger has them.
        nonfinite: for each metric the first step at which it was NaN or infinite.
    """

    folder: Path
    steps: tuple[int, ...]
    columns: Mapping[str, tuple[float, ...]]
    evaluations: tuple[tuple[int, Mapping[str, float]], ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    num_dropped_at_end: int = 0
    nonfinite: Mapping[str, int] = field(default_factory=dict)

    def setting(self, path: str) -> Any:
        """Return a value of the configuration by its dotted path; None where there is none."""
        return setting_of(self.config, path)

    def column(self, name: str) -> tuple[float, ...]:
        """Return a metric for each step; nothing where no step has it.

        Where a step has none, a count is 0, and another metric is as in the step before: a policy has an
        entropy while its critic warms up, and it is not 0.
        """
        found = self.columns.get(name, ())
        if name.startswith(_COUNTS):
            return tuple(0.0 if math.isnan(value) else value for value in found)
        last = next((value for value in found if not math.isnan(value)), None)
        return () if last is None else tuple(last := last if math.isnan(value) else value for value in found)

    @property
    def window(self) -> int:
        """How many of the last steps a mean is taken over."""
        return min(10, max(3, len(self.steps) // 5))

    def trend(self, name: str) -> Trend | None:
        """Return how a metric moved; None where there are too few steps, or the metric is not there."""
        values, size = self.column(name), self.window
        if len(values) < FIRST + size:
            return None
        error = noise(values) * math.sqrt(1 / FIRST + 1 / size)
        return Trend(_mean(values[:FIRST]), _mean(values[-size:]), error)

    def recent(self, name: str) -> float:
        """Return the mean of a metric over the last steps; NaN where it is not there."""
        values = self.column(name)[-self.window :]
        return _mean(values) if values else math.nan

    @property
    def num_groups(self) -> tuple[float, ...]:
        """Groups that were scored for each step, those without signal included."""
        learned = self.column("rollout/num_groups") or (0.0,) * len(self.steps)
        dropped = self.column("rollout/num_no_signal") or (0.0,) * len(self.steps)
        is_kept = self.setting("rollout.no_signal") == "keep"
        return learned if is_kept else tuple(a + b for a, b in zip(learned, dropped, strict=True))

    def solved(self) -> list[tuple[int, float]]:
        """Return the fraction of held-out completions that are solved, by step."""
        return [
            (step, value)
            for step, values in self.evaluations
            for name, value in values.items()
            if name.startswith(f"{EVALUATION}avg@")
        ]

    def held_out(self, name: str) -> list[tuple[int, float]]:
        """Return a metric of the evaluations, by step."""
        return [(step, values[name]) for step, values in self.evaluations if name in values]

    def episodes(self, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield recorded episodes of the last steps, newest first, each with where it is: `FILE:LINE`. `kind` is `step`
        for what was learned from, `fruitless` for what taught nothing."""
        names = [
            (int(found[2]), path)
            for path in (self.folder / "rollouts").glob(f"{kind}_*.jsonl")
            if (found := ROLLOUTS.fullmatch(path.name))
        ]
        for _, path in sorted(names, reverse=True)[:_MOST_FILES]:
            with open(path, "rb") as file:
                for number, fields in enumerate(json_lines(file), start=1):
                    if fields is not None:
                        yield f"rollouts/{path.name}:{number}", fields


def noise(values: Sequence[float]) -> float:
    """Return by how much single values stray, judged by how much they jump: a trend does not count."""
    return math.sqrt(_mean([(later - earlier) * (later - earlier) / 2 for earlier, later in pairwise(values)]))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def read_evidence(folder: Path) -> Evidence:
    """Read the folder of a run of reinforcement learning, running or not.

    `DataError` where there is no such run, or none that has evaluated or taken a step.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise _no_metrics(folder)
    table = _Table()
    for line in read_jsonl(path):
        table.add(line)
    steps = table.steps_with(REWARD_MEAN)
    evaluations = [
        (step, {name: value for name, value in table.row(step).items() if name.startswith(EVALUATION)})
        for step in table.steps_with(EVALUATION_REWARD)
    ]
    if not steps and table.steps_with(TRAIN_LOSS):
        raise _refusal(
            path,
            "it has no rewards",
            "a run of reinforcement learning",
            "use `forge report`, which shows runs of every kind",
        )
    if not steps and not evaluations:
        raise _refusal(
            path, "it has no step and no evaluation yet", "a run that has taken a step", "wait for its first step"
        )
    dropped = _dropped_after(folder / "ledger.jsonl", steps[-1] if steps else 0)
    columns = {name: table.at(steps, name) for name in table.columns} if steps else {}
    return Evidence(folder, tuple(steps), columns, tuple(evaluations), _config(folder), dropped, table.nonfinite)


class _Table:
    """The numbers of a metrics file, a column for each metric, so that those of a long run fit into memory."""

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {}
        self.nonfinite: dict[str, int] = {}
        self._places: dict[int, int] = {}

    def add(self, line: MetricsLine) -> None:
        place = self._places.setdefault(line.step, len(self._places))
        for name, value in line.values.items():
            if not isinstance(value, int | float):
                continue
            if not math.isfinite(value):
                self.nonfinite.setdefault(name, line.step)
                continue
            column = self.columns.setdefault(name, array("d"))
            column.extend(math.nan for _ in range(place + 1 - len(column)))
            column[place] = value

    def _value(self, step: int, name: str) -> float:
        column, place = self.columns[name], self._places[step]
        return column[place] if place < len(column) else math.nan

    def at(self, steps: Sequence[int], name: str) -> tuple[float, ...]:
        """Return a metric at these steps, NaN where there is none."""
        return tuple(self._value(step, name) for step in steps)

    def row(self, step: int) -> dict[str, float]:
        """Return the metrics of a step."""
        found = {name: self._value(step, name) for name in self.columns}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def steps_with(self, name: str) -> list[int]:
        """Return the steps that have a metric, ascending."""
        steps = self._places if name in self.columns else ()
        return sorted(step for step in steps if not math.isnan(self._value(step, name)))


def _no_metrics(folder: Path) -> DataError:
    repair = "check the path; the run needs metrics.jsonl: true"
    if folder.name == "metrics.jsonl" and folder.is_file():
        repair = f"give the folder: {folder.parent}"
    elif found := sorted(each.parent for each in (*folder.glob("*/metrics.jsonl"), *folder.glob("*/*/metrics.jsonl"))):
        more = ", …" if len(found) > _MOST_NAMED else ""
        repair = f"give one of the runs in it: {', '.join(map(str, found[:_MOST_NAMED]))}{more}"
    return DataError(
        "this folder has no metrics of a run",
        path=str(folder if folder.is_file() else folder / "metrics.jsonl"),
        rule="the folder of a run, RUN_OUTPUT_DIR/RUN_NAME, with its metrics.jsonl",
        repair=repair,
    )


def _refusal(path: Path, why: str, rule: str, repair: str) -> DataError:
    return DataError(f"this run cannot be diagnosed: {why}", path=str(path), rule=rule, repair=repair)


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / FILE_NAME
    if not path.is_file():
        return {}
    document = read_yaml(path.read_text(encoding="utf-8", errors="replace"), source=str(path))
    if not document.readable:
        (problem, *_) = document.problems
        raise DataError(
            "the configuration of this run cannot be read",
            path=problem.path,
            rule=problem.rule,
            repair="correct the file, or move it away: the rules then know only the metrics",
        )
    return document.data if isinstance(document.data, Mapping) else {}


def _dropped_after(path: Path, step: int) -> int:
    """Return how many groups the end of the ledger has dropped since a step."""
    if not path.is_file():
        return 0
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) > _LEDGER_TAIL:
            file.seek(-_LEDGER_TAIL, os.SEEK_END)
            file.readline()
        else:
            file.seek(0)
        lines = (fields for fields in json_lines(file) if fields is not None)
        return sum(line.get("step", 0) > step and line.get("outcome") != "trained" for line in lines)
