"""Several runs beside each other: their values, which differ only in seeds, and how configurations differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np

from forge.loops.runtime_changes import FILE_NAME as CHANGES
from forge.observe.report.charts import MORE, charts_of
from forge.observe.report.headline import num_averaged
from forge.ui.config_view import Preset, leaves, preset_of, read_config
from forge.ui.live_run import LiveRun
from forge.ui.metric_table import Floats, TableRows
from forge.ui.run_files import read_json_lines
from forge.ui.run_summary import RunSummary, read_settings

MAX_KEYS: Final = 5_000
_NAMING: Final = frozenset(
    ("run.name", "run.output_dir", "run.tags", "checkpointing.output_dir", "checkpointing.resume", "metrics.wandb.name")
)
"""Keys that say what a run is called and where it is, and not what it does."""
_HIGHER: Final = (
    *("evaluation/reward", "evaluation/pass@*", "evaluation/avg@*", "rollout/reward_mean", "reward/*"),
    *("validation/accuracy", "train/accuracy", "validation/reward_margin", "train/reward_margin"),
    *("*/tokens_per_s", "*/samples_per_s", "train/mfu", "critic/explained_variance", "league/win_rate/*"),
)
_LOWER: Final = (
    *("validation/loss", "validation/ece", "validation/brier", "time/step", "train/seconds", "sync/*"),
    *("rollout/truncated", "train/mismatch", "train/mismatch_max", "train/mismatch_outside"),
)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One of the runs: its folder, its metrics and its line in the list."""

    run: LiveRun
    summary: RunSummary


def compare_runs(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return the charts that any of the runs has, the values of their metrics, and which of them are repetitions."""
    tables = [compared.run.rows() for compared in runs]
    names = sorted({name for rows in tables for name, column in rows.columns.items() if not np.isnan(column).all()})
    charts = charts_of(names)
    shown = [one for chart in charts if chart["section"] != MORE for one in chart["series"]]
    return {
        "runs": [_describe(compared, rows) for compared, rows in zip(runs, tables, strict=True)],
        "charts": charts,
        "values": [_values_of(key, tables) for key in dict.fromkeys(one["key"] for one in shown)],
        "groups": group_by_seed([leaves_of(compared.run.folder) for compared in runs]),
    }


def _describe(compared: ComparedRun, rows: TableRows) -> dict[str, Any]:
    return {
        "summary": compared.summary.plain(),
        "progress": round(compared.run.progress, 3),
        "numRows": len(rows),
        "firstTime": float(rows.times[0]) if len(rows) else None,
        "lastTime": float(rows.times[-1]) if len(rows) else None,
    }


# ---- Values ----------------------------------------------------------------------------------------------------------


def better(key: str) -> str:
    """Return whether a metric is better when it is `higher` or `lower`; an empty text where that is not known."""
    if any(fnmatchcase(key, pattern) for pattern in _HIGHER):
        return "higher"
    return "lower" if any(fnmatchcase(key, pattern) for pattern in _LOWER) else ""


def _values_of(key: str, tables: Sequence[TableRows]) -> dict[str, Any]:
    """Return for each run the final value, and the smallest and the largest with their steps."""
    return {"key": key, "better": better(key), "cells": [_cell(rows, key) for rows in tables]}


def _cell(rows: TableRows, key: str) -> dict[str, Any] | None:
    column: Floats | None = rows.columns.get(key)
    known = np.zeros(0, np.int64) if column is None else np.flatnonzero(~np.isnan(column))
    if column is None or not len(known):
        return None
    values = column[known]
    count = num_averaged(key, len(known))
    least, most = known[int(values.argmin())], known[int(values.argmax())]
    return {
        "final": _short(values[-count:].mean()),
        "averaged": count,
        "step": int(rows.steps[known[-1]]),
        "low": [_short(column[least]), int(rows.steps[least])],
        "high": [_short(column[most]), int(rows.steps[most])],
    }


def _short(value: Any) -> float:
    return float(f"{float(value):.6g}")


# ---- Configurations --------------------------------------------------------------------------------------------------


def is_seed(key: str) -> bool:
    """Return whether a key says how random numbers begin, and nothing else."""
    return key == "seed" or key.endswith((".seed", "_seed"))


def leaves_of(folder: Path) -> Mapping[str, str]:
    """Return the keys of a run's configuration with their values as text."""
    return dict(leaves(read_settings(folder)))


def group_by_seed(configs: Sequence[Mapping[str, str]]) -> list[list[int]]:
    """Return the runs, by their numbers, in groups that differ in nothing but seeds, names and folders.

    A run without a configuration is a group of its own: nothing says what it repeats.
    """
    groups: dict[object, list[int]] = {}
    for number, config in enumerate(configs):
        alike = frozenset((key, value) for key, value in config.items() if not is_seed(key) and key not in _NAMING)
        groups.setdefault(alike if alike else number, []).append(number)
    return list(groups.values())


def compare_configs(folders: Sequence[Path]) -> dict[str, Any]:
    """Return every key of the runs' configurations with its value in each, and where that is from.

    A row is `{key, values, origins, changes}`: a value is null where a run has no such key; its origin is `preset`
    where the run's presets and the defaults give it, else `set`, or an empty text where that is not known; `changes`
    has the values that the key was given while each run ran.
    """
    read = [read_config(folder) for folder in folders]
    configs = [dict(leaves(each.data)) for each in read]
    presets = [preset_of(each.data) if each.data else Preset() for each in read]
    changes = [_changes_of(folder) for folder in folders]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = []
    for key in keys[:MAX_KEYS]:
        values = [config.get(key) for config in configs]
        origins = [_origin(key, value, preset) for value, preset in zip(values, presets, strict=True)]
        row = {"key": key, "values": values, "origins": origins}
        rows.append(row | {"isSeed": is_seed(key), "changes": [change.get(key, []) for change in changes]})
    notes = [note for each, preset in zip(read, presets, strict=True) if (note := each.note or preset.note)]
    return {"rows": rows, "presets": [preset.name for preset in presets], "notes": list(dict.fromkeys(notes))}


def _origin(key: str, value: str | None, preset: Preset) -> str:
    if value is None or not preset.values:
        return ""
    return "preset" if preset.values.get(key) == value else "set"


def _changes_of(folder: Path) -> dict[str, list[list[Any]]]:
    """Return what was changed while a run ran: by key the steps after which it was, and the new values."""
    changes: dict[str, list[list[Any]]] = {}
    for line in read_json_lines(folder / CHANGES):
        if isinstance(line.get("key"), str):
            changes.setdefault(line["key"], []).append([line.get("step"), line.get("after")])
    return changes
