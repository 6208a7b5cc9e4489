"""Reads what a run's folder holds. Runs that are still going or were killed are read like finished ones."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forge.config.loading import FILE_NAME
from forge.config.yaml_text import read_yaml
from forge.errors import DataError, OptionError
from forge.observe.jsonl import MetricsLine, read_jsonl
from forge.observe.league_table import LEAGUE_TABLE, read_league
from forge.observe.report.samples import SampleSet, json_lines, read_evaluation, read_samples
from forge.observe.sink import NUM_TOKENS

_MAX_POINTS: Final = 1500
"""Points of a curve. Of a longer run each point is the mean of several steps, so that the page stays small."""
_MAX_CONFIG: Final = 200_000
EVAL_SAMPLES: Final = "samples.jsonl"
EVAL_RESULTS: Final = "results.json"
"""What `forge eval` writes."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The metrics of a run as a table with one row for each point.

    Attributes:
        steps: the step of each row; where a row stands for several steps, the last of them.
        columns: for each metric one number per row, None where the step had none.
        nonfinite: for each metric the rows' steps at which it was NaN or infinite.
        stride: how many steps a row stands for.
        num_steps, last_step: of the whole run so far; 0 where it has no metrics yet.
        first_time, last_time: seconds since 1970; None where it has none.
        times: when the step of each row ended, in seconds since 1970.
        tokens: how many tokens were trained on up to each row; empty where that is not known.
    """

    steps: tuple[int, ...]
    columns: Mapping[str, tuple[float | None, ...]]
    nonfinite: Mapping[str, tuple[int, ...]]
    stride: int
    num_steps: int
    last_step: int
    first_time: float | None
    last_time: float | None
    times: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """All that a report is made of.

    Attributes:
        folder: where it was read from; its name is the run's.
        metrics, samples: the curves and the episodes.
        config_text: config.yaml as it stands, empty where there is none; `config` the same as plain data.
        ledger: how many groups came to each outcome.
        league: the table of a self-play league, as `read_league` returns it; empty without one.
        notes: what a reader should know about what is not here.
        changes: what was changed while the run ran, a line for each.
    """

    folder: Path
    metrics: Metrics
    samples: SampleSet
    config_text: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    ledger: Mapping[str, int] = field(default_factory=dict)
    league: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    def setting(self, path: str) -> Any:
        """Return a value of the configuration by its dotted path; None where there is none."""
        return setting_of(self.config, path)


def setting_of(config: Mapping[str, Any], path: str) -> Any:
    """Return what stands under a dotted path of a configuration; None where there is nothing."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def read_run(folder: str | os.PathLike[str], *, max_samples: int) -> Run:
    """Read the folder of a run or of an evaluation.

    That of a run must have a `metrics.jsonl`, with at least one whole line where nothing else is known.
    """
    place = Path(folder)
    if max_samples < 0:
        raise OptionError(
            "the number of samples is out of range",
            path="--max-samples",
            value=max_samples,
            rule="0 or more",
            repair="leave it out, or give 0 for a report without samples",
        )
    if not (place / "metrics.jsonl").is_file() and (place / EVAL_SAMPLES).is_file():
        return _read_evaluation(place, max_samples=max_samples)
    _check_folder(place)
    metrics = _read_metrics(place / "metrics.jsonl")
    notes: list[str] = []
    if metrics.stride > 1:
        notes.append(f"Each point of a curve is the mean of {metrics.stride} steps.")
    text, config = _read_config(place / FILE_NAME, notes)
    samples = read_samples(place / "rollouts", max_samples=max_samples)
    ledger = _read_ledger(place / "ledger.jsonl", notes)
    if not metrics.steps:
        if not samples.num_samples and not ledger:
            raise DataError(
                "this run has no metrics yet",
                path=str(place / "metrics.jsonl"),
                rule="at least one whole line",
                repair="wait for the end of its first step",
            )
        notes.append("The run has not finished a step, so there are no curves.")
    league, changes = _read_league(place, notes), _read_changes(place / "runtime_changes.jsonl", notes)
    return Run(place, metrics, samples, text, config, ledger, league, (*notes, *samples.notes), changes)


def _read_evaluation(place: Path, *, max_samples: int) -> Run:
    """Read the folder of a `forge eval`, whose figures are one row of metrics."""
    notes: list[str] = []
    results = _read_results(place / EVAL_RESULTS, notes)
    figures: Any = results.get("figures") or {}
    values: dict[str, float] = {}
    if figures.get("reward") is not None:
        values["evaluation/reward"] = float(figures["reward"]["value"])
    values |= {f"evaluation/pass@{k}": float(each["value"]) for k, each in figures.get("pass_at", {}).items()}
    if figures.get("length") is not None:
        values["evaluation/length"] = float(figures["length"])
    if figures.get("num_missing"):
        notes.append(f"{figures['num_missing']} tasks are missing because of faults, and not part of the figures.")
    step = int((results.get("target") or {}).get("step") or 0)
    columns = {name: (short(value),) for name, value in values.items()}
    ended = results.get("time")
    metrics = Metrics((step,) if values else (), columns, {}, 1, len(values) and 1, step, ended, ended)
    text, config = _read_config(place / FILE_NAME, notes)
    samples = read_evaluation(place / EVAL_SAMPLES, max_samples=max_samples)
    return Run(place, metrics, samples, text, config, notes=(*notes, *samples.notes))


def _read_results(path: Path, notes: list[str]) -> Mapping[str, Any]:
    if not path.is_file():
        notes.append("The evaluation has not ended, so there are no figures.")
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        notes.append(f"{path.name} could not be read, so there are no figures.")
        return {}
    return found


def _check_folder(place: Path) -> None:
    if not place.is_dir():
        raise DataError(
            "there is no such run",
            path=str(place),
            rule="the folder of a run, <run.output_dir>/<run.name>",
            repair="check the path",
        )
    if not (place / "metrics.jsonl").is_file():
        inside = sorted(child.name for child in place.iterdir() if (child / "metrics.jsonl").is_file())
        hint = (
            f"give one of the runs in it: {', '.join(inside[:8])}" if inside else "run with metrics.jsonl set to true"
        )
        raise DataError(
            "this folder has no metrics of a run",
            path=str(place / "metrics.jsonl"),
            rule="a run's folder has a metrics.jsonl",
            repair=hint,
        )


def _read_metrics(path: Path) -> Metrics:
    rows: dict[int, dict[str, float]] = {}
    ended: dict[int, float] = {}
    times: list[float] = []
    for line in read_jsonl(path):
        rows.setdefault(line.step, {}).update(_numbers(line))
        ended.setdefault(line.step, line.time)  # a later line of a step is of its evaluation
        times.append(line.time)
    steps = sorted(rows)
    stride = max(1, math.ceil(len(steps) / _MAX_POINTS))
    chunks = [steps[start : start + stride] for start in range(0, len(steps), stride)]
    names = sorted({name for values in rows.values() for name in values})
    columns: dict[str, tuple[float | None, ...]] = {}
    nonfinite: dict[str, tuple[int, ...]] = {}
    for name in names:
        found = [[rows[step][name] for step in chunk if name in rows[step]] for chunk in chunks]
        columns[name] = tuple(_mean(values) for values in found)
        odd = [chunk[-1] for chunk, values in zip(chunks, found, strict=True) if not all(map(math.isfinite, values))]
        if odd:
            nonfinite[name] = tuple(odd)
    return Metrics(
        steps=tuple(chunk[-1] for chunk in chunks),
        columns=columns,
        nonfinite=nonfinite,
        stride=stride,
        num_steps=len(steps),
        last_step=steps[-1] if steps else 0,
        first_time=min(times, default=None),
        last_time=max(times, default=None),
        times=tuple(round(ended[chunk[-1]], 1) for chunk in chunks),
        tokens=_tokens(rows, chunks),
    )


def _tokens(rows: Mapping[int, Mapping[str, float]], chunks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return how many tokens were trained on up to the end of each chunk; nothing where no step says."""
    counts = [sum(_finite(rows[step].get(NUM_TOKENS, 0.0)) for step in chunk) for chunk in chunks]
    return tuple(int(total) for total in itertools.accumulate(counts)) if any(counts) else ()


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _numbers(line: MetricsLine) -> dict[str, float]:
    return {name: float(value) for name, value in line.values.items() if isinstance(value, int | float)}


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return short(math.fsum(finite) / len(finite)) if finite else None


def short(value: float) -> float:
    """Return a number with six digits, which is more than a screen shows."""
    return float(f"{value:.6g}")


def _read_config(path: Path, notes: list[str]) -> tuple[str, Mapping[str, Any]]:
    if not path.is_file():
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    if len(text) > _MAX_CONFIG:
        notes.append(f"Of {path.name} only the first {_MAX_CONFIG} characters are shown.")
    document = read_yaml(text, source=path.name)
    if document.problems:
        notes.append(f"{path.name} could not be read in full, so the run is described without it.")
    data = document.data
    return text[:_MAX_CONFIG], data if isinstance(data, Mapping) and not document.problems else {}


def _read_changes(path: Path, notes: list[str]) -> tuple[str, ...]:
    """Return what was changed while the run ran, in the order in which it was."""
    if not path.is_file():
        return ()
    found, num_unreadable = [], 0
    with open(path, "rb") as file:
        for fields in json_lines(file):
            if fields is None or not {"step", "key", "before", "after", "by"} <= fields.keys():
                num_unreadable += 1
                continue
            before, after = (json.dumps(fields[name], ensure_ascii=False) for name in ("before", "after"))
            found.append(f"after step {fields['step']}: {fields['key']} {before} → {after} ({fields['by']})")
    if num_unreadable:
        notes.append(f"{num_unreadable} lines of {path.name} could not be read.")
    return tuple(found)


def _read_league(place: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        return read_league(place)
    except DataError as error:
        if (place / LEAGUE_TABLE).exists():
            notes.append(f"{LEAGUE_TABLE} could not be read: {error.rule}.")
        return {}


def _read_ledger(path: Path, notes: list[str]) -> Mapping[str, int]:
    if not path.is_file():
        return {}
    counts: Counter[str] = Counter()
    num_unreadable = 0
    with open(path, "rb") as file:
        for fields in json_lines(file):
            if fields is None or not isinstance(fields.get("outcome"), str):
                num_unreadable += 1
            else:
                counts[fields["outcome"]] += 1
    if num_unreadable:
        notes.append(f"{num_unreadable} lines of {path.name} could not be read and are not counted.")
    return dict(counts.most_common())
