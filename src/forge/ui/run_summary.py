"""One line about a run, from a few small reads of its files: what the list of runs shows."""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, TypeGuard

from forge.observe.jsonl import MetricsLine, decode_line
from forge.observe.report.reading import EVAL_RESULTS, setting_of
from forge.trainer.checkpoint_folder import LOCK_NAME, WriterLock
from forge.ui.metric_tail import sample_lines
from forge.ui.plain_yaml import read_plain_yaml
from forge.ui.run_files import (
    CONFIG,
    METRICS,
    Fingerprint,
    fingerprint,
    read_json_lines,
    read_tail,
    read_text,
)
from forge.ui.run_state import Evidence, RunState, has_shared_locks, judge

SUPERVISOR: Final = "supervisor.jsonl"
_WATCHED: Final = (METRICS, CONFIG, SUPERVISOR, EVAL_RESULTS, LOCK_NAME)
_MAIN_METRICS: Final = (
    ("rollout/reward_mean", "reward"),
    ("evaluation/reward", "reward"),
    ("validation/accuracy", "accuracy"),
    ("validation/loss", "loss"),
    ("train/loss", "loss"),
)
_SPARK_POINTS: Final = 32
_AVERAGED: Final = 5
_MAX_TAGS: Final = 32
_MAX_WORD: Final = 120
_EMPTY: Final = RunState("empty")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What the list shows of a run.

    Attributes:
        id: its folder, relative to the folder of runs; `.` for that folder itself.
        name: what its configuration calls it.
        kind: `policy`, `fine-tuning` or `evaluation`.
        state: whether it is running, and how it ended.
        step, total_steps: the last step, and how many there are to be; None where that is not known.
        metric, value, spark: its main metric, the mean of its last values, and values over the whole run.
        started, changed: seconds since 1970 of its first and last metrics; None before them.
        model, algorithm, tags: from its configuration.
    """

    id: str
    name: str
    kind: str = "fine-tuning"
    state: RunState = _EMPTY
    step: int | None = None
    total_steps: int | None = None
    metric: str = ""
    value: float | None = None
    spark: tuple[float, ...] = ()
    started: float | None = None
    changed: float | None = None
    model: str = ""
    algorithm: str = ""
    tags: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {name: getattr(self, name) for name in _NAMES} | {"state": asdict(self.state)}


_NAMES: Final = tuple(field.name for field in fields(RunSummary))


class SummaryReader:
    """Summarises the run in a folder. What has not changed is not read again."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder, self.id = folder, run_id
        self._seen: tuple[Fingerprint | None, ...] | None = None
        self._summary = RunSummary(run_id, folder.name)
        self._evidence: dict[str, Any] = {}
        self._checkpoints = folder / "checkpoints"

    def read(self) -> RunSummary:
        """Return the summary as of now."""
        seen = tuple(fingerprint(self.folder / name) for name in _WATCHED)
        if seen != self._seen:
            self._summary, self._evidence = self._read_files(seen)
            self._seen = seen
        changed = self._summary.changed
        evidence = Evidence(
            WriterLock.look(self.folder),
            is_exported=changed is not None and self._exported_at() >= changed,
            **self._evidence,
        )
        return replace(self._summary, state=judge(evidence))

    def _read_files(self, seen: Sequence[Fingerprint | None]) -> tuple[RunSummary, dict[str, Any]]:
        config = read_settings(self.folder)
        results = self._results()
        is_evaluation = seen[0] is None and results is not None
        is_policy = setting_of(config, "rollout.group_size") is not None
        total = setting_of(config, "training.max_steps")
        summary = RunSummary(
            id=self.id,
            name=_word(setting_of(config, "run.name")) or self.folder.name,
            kind="evaluation" if is_evaluation else "policy" if is_policy else "fine-tuning",
            total_steps=total if type(total) is int else None,
            model=_word(setting_of(config, "model.preset")) or _base(setting_of(config, "model.path")),
            algorithm=_word(setting_of(config, "algorithm.preset")),
            tags=_tags(setting_of(config, "run.tags")),
        )
        summary = _with_results(summary, results) if is_evaluation else self._with_metrics(summary)
        given = setting_of(config, "checkpointing.output_dir")
        self._checkpoints = Path(given) if isinstance(given, str) else self.folder / "checkpoints"
        return summary, self._gather(summary, seen, has_results=is_evaluation and bool(results))

    def _with_metrics(self, summary: RunSummary) -> RunSummary:
        path = self.folder / METRICS
        lines = [found for line in read_tail(path) if (found := decode_line(line)) is not None]
        if not lines:
            return summary
        sampled = sample_lines(path, _SPARK_POINTS)
        known = [*sampled, *lines]
        key, label = next(
            (pair for pair in _MAIN_METRICS if any(_value(line, pair[0]) is not None for line in known)), ("", "")
        )
        last = [value for line in lines if (value := _value(line, key)) is not None][-_AVERAGED:]
        spark = [value for line in sampled if (value := _value(line, key)) is not None]
        return replace(
            summary,
            step=max(line.step for line in lines),
            metric=label,
            value=_short(math.fsum(last) / len(last)) if last else None,
            spark=tuple(map(_short, spark)),
            started=min((line.time for line in known), default=None),
            changed=max(line.time for line in lines),
        )

    def _gather(self, summary: RunSummary, seen: Sequence[Fingerprint | None], *, has_results: bool) -> dict[str, Any]:
        lock = seen[_WATCHED.index(LOCK_NAME)]
        began = None if lock is None else lock.changed_ns / 1e9
        events = [event for event in read_json_lines(self.folder / SUPERVISOR) if _is_after(event, began)]
        return {
            "has_shared_locks": has_shared_locks(self.folder),
            "last_step": summary.step,
            "total_steps": summary.total_steps,
            "has_results": has_results,
            "events": events[-8:],
            "num_resumes": count_resumes(self.folder),
        }

    def _exported_at(self) -> float:
        """Return when the run's model was exported; 0 where it was not."""
        try:
            return os.stat(self._checkpoints / "hf" / "config.json").st_mtime
        except (OSError, ValueError):
            return 0.0

    def _results(self) -> Mapping[str, Any] | None:
        text = read_text(self.folder / EVAL_RESULTS)
        if text is None:
            return {} if fingerprint(self.folder / "samples.jsonl") is not None else None
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def read_settings(folder: Path) -> Mapping[str, Any]:
    """Return a run's configuration as plain data; nothing where it cannot be read."""
    text = read_text(folder / CONFIG)
    try:
        found = read_plain_yaml(text or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def count_resumes(folder: Path) -> int:
    """Return how often a run was resumed, as far as its files tell.

    The record of steps has a session for each start after another step, and a supervisor notes every restart.
    """
    try:
        sessions = sum(name.startswith("session_") for name in os.listdir(folder / "replay"))
    except OSError:
        sessions = 0
    events = [(event.get("event"), event.get("action")) for event in read_json_lines(folder / SUPERVISOR)]
    return max(sessions - 1, events.count(("crash", "restart")), 0)


def _with_results(summary: RunSummary, results: Mapping[str, Any] | None) -> RunSummary:
    try:
        reward = (results or {})["figures"]["reward"]["value"]
        ended = float((results or {})["time"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return summary
    value = _short(float(reward)) if _is_number(reward) else None
    return replace(summary, metric="reward", value=value, started=ended, changed=ended)


def _is_after(event: Mapping[str, Any], began: float | None) -> bool:
    """Return whether an event is of the last start of a run, or later. Its time has whole seconds."""
    time = event.get("time")
    try:
        at = datetime.datetime.fromisoformat(time if isinstance(time, str) else "").timestamp()
    except (ValueError, OverflowError):
        return False
    return began is None or at >= began - 1


def _value(line: MetricsLine, key: str) -> float | None:
    value = line.values.get(key)
    return float(value) if _is_number(value) else None


def _is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _word(value: object) -> str:
    return str(value)[:_MAX_WORD] if isinstance(value, str | int | float) else ""


def _base(value: object) -> str:
    return _word(value).rstrip("/").rpartition("/")[2]


def _tags(value: object) -> tuple[str, ...]:
    return tuple(map(_word, value))[:_MAX_TAGS] if isinstance(value, list) else ()
