"""What an evaluation writes, so that a kill at any time loses nothing that was done.

EVAL_DIR/settings.json   what the samples depend on, written before the first one
EVAL_DIR/samples.jsonl   one line per sample, appended when it is scored
EVAL_DIR/faults.jsonl    one line per fault; the sample is run again
EVAL_DIR/results.json    settings and figures, replaced atomically
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Final

from forge.errors import DataError, EvalError
from forge.observe.report.reading import EVAL_RESULTS, EVAL_SAMPLES
from forge.rollout.ledger import append, recording

SETTINGS: Final = "settings.json"
SAMPLES: Final = EVAL_SAMPLES
FAULTS: Final = "faults.jsonl"
RESULTS: Final = EVAL_RESULTS
_FORMAT: Final = 1
_MAX_CHANGES: Final = 20


@dataclass(frozen=True, slots=True)
class SampleScore:
    """What the figures need of one sample.

    Attributes:
        task: the task's place in the dataset.
        sample: which of the task's samples it is.
        task_id: the task's id.
        reward, parts: what it earned.
        num_failures: rewards that failed; their parts are 0.
        outcome: how the episode ended; `truncated` for a single completion that was cut off by length.
        num_tokens: tokens that were sampled; None where an endpoint reports none.
        num_turns: completions.
    """

    task: int
    sample: int
    task_id: str
    reward: float
    parts: Mapping[str, float]
    num_failures: int
    outcome: str
    num_tokens: int | None
    num_turns: int

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> SampleScore:
        """Return the score of a line of `samples.jsonl`."""
        turns = fields.get("turns")
        is_cut = fields["finish_reason"] == "length" and not turns
        return cls(
            task=int(fields["group"]),
            sample=int(fields["index"]),
            task_id=str(fields["prompt_id"]),
            reward=float(fields["reward"]),
            parts={str(name): float(value) for name, value in fields["parts"].items()},
            num_failures=len(fields["failures"]),
            outcome="truncated" if is_cut else str(fields.get("ending", "finished")),
            num_tokens=None if fields["num_tokens"] is None else int(fields["num_tokens"]),
            num_turns=len(turns) if turns else 1,
        )


@dataclass(slots=True)
class EvalRecord:
    """The folder of an evaluation, open for writing by one process. Make one with `open_record`.

    Attributes:
        folder: the folder.
        scores: what is done, by task and sample.
        num_faults: faults so far, by kind, those of earlier processes included.
    """

    folder: Path
    scores: dict[tuple[int, int], SampleScore]
    num_faults: dict[str, int]
    _samples: FileIO = field(repr=False)
    _faults: FileIO = field(repr=False)

    def add(self, fields: Mapping[str, Any], line: bytes) -> SampleScore:
        """Append a sample's line. It is in the file when this returns, also if the process is killed afterwards."""
        score = SampleScore.read(fields)
        append(self._samples, line)
        self.scores[score.task, score.sample] = score
        return score

    def add_fault(self, task: int, sample: int, *, kind: str, message: str) -> None:
        """Append a fault."""
        fields = {"time": time.time(), "group": task, "index": sample, "kind": kind, "message": message}
        append(self._faults, json.dumps(fields).encode() + b"\n")
        self.num_faults[kind] = self.num_faults.get(kind, 0) + 1

    def write_results(self, results: Mapping[str, Any]) -> Path:
        """Replace `results.json`."""
        return _replace(self.folder / RESULTS, results)

    def close(self) -> None:
        """Close the files."""
        self._samples.close()
        self._faults.close()


def open_record(folder: Path, settings: Mapping[str, Any], *, overwrite: bool = False) -> EvalRecord:
    """Open a folder to continue the evaluation in it, or to start one. The caller holds the folder's lock.

    Samples that were made with other settings raise `EvalError`, unless `overwrite`: then they are removed.
    """
    with recording(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if overwrite:
            for name in (RESULTS, SAMPLES, FAULTS, SETTINGS):
                (folder / name).unlink(missing_ok=True)
        scores = _read_scores(folder)
        if scores or (folder / SETTINGS).is_file():
            _check_settings(folder, settings)
        else:
            _replace(folder / SETTINGS, settings)
        faults: dict[str, int] = {}
        for fields, _ in _whole_lines(folder / FAULTS):
            faults[str(fields.get("kind"))] = faults.get(str(fields.get("kind")), 0) + 1
        return EvalRecord(
            folder,
            scores,
            faults,
            open(folder / SAMPLES, "ab", buffering=0),
            open(folder / FAULTS, "ab", buffering=0),
        )


def check_record(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder whose samples were made with other settings, before anything starts."""
    if (folder / SETTINGS).is_file():
        _check_settings(folder, settings)


def read_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of an evaluation as plain values; a line that is being written is left out."""
    path = folder / SAMPLES
    if not path.is_file():
        raise no_evaluation(folder)
    for fields, _ in _whole_lines(path):
        yield fields


def read_results(folder: Path) -> dict[str, Any]:
    """Return the results of an evaluation as plain values."""
    path = folder / RESULTS
    if not path.is_file() and (folder / SAMPLES).is_file():
        raise DataError(
            "this evaluation has no results yet",
            path=str(path),
            rule="it is still running, or it was killed",
            repair="wait for it, or run the same forge eval again: it continues; forge report shows what is done",
        )
    if not path.is_file():
        raise no_evaluation(folder)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']}")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the results cannot be read: {error}",
            path=str(path),
            rule=f"a file of format {_FORMAT}, as forge eval writes it",
            repair="run the same forge eval again: it writes the file from samples.jsonl",
        ) from None
    return dict(found)


def no_evaluation(folder: Path) -> DataError:
    """Return the error for a folder that no evaluation has written."""
    return DataError(
        "this is not the folder of an evaluation",
        path=str(folder),
        value="no such folder" if not folder.is_dir() else f"no {RESULTS}",
        rule=f"a folder with the {RESULTS} and {SAMPLES} that forge eval writes",
        repair="name the folder that forge eval printed",
    )


def stamped(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return results with the number of their format."""
    return {"format": _FORMAT, **results}


def _read_scores(folder: Path) -> dict[tuple[int, int], SampleScore]:
    path = folder / SAMPLES
    scores: dict[tuple[int, int], SampleScore] = {}
    size = 0
    for number, (fields, end) in enumerate(_whole_lines(path), 1):
        size = end
        try:
            score = SampleScore.read(fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(path, number, f"{type(error).__name__}: {error}") from None
        if (score.task, score.sample) in scores:
            raise _damaged(path, number, f"sample {score.sample} of task {score.task} is there twice")
        scores[score.task, score.sample] = score
    if path.is_file() and path.stat().st_size > size:
        os.truncate(path, size)  # a line that a kill cut off: what is appended must not join it
    return scores


def _whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the object of each whole line, and where the line ends."""
    if not path.is_file():
        return
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise _damaged(path, number, str(error)) from None
            if not isinstance(fields, dict):
                raise _damaged(path, number, "not an object")
            yield fields, end


def _damaged(path: Path, number: int, reason: str) -> DataError:
    return DataError(
        f"a line of the evaluation cannot be read: {reason}",
        path=f"{path}:{number}",
        rule="lines as forge eval writes them, each sample once",
        repair="restore the file, or start over with --overwrite",
    )


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / SETTINGS
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"the settings of the evaluation cannot be read: {error}",
            path=str(path),
            rule="JSON as forge eval writes it",
            repair="restore the file, or start over with --overwrite",
        ) from None
    changes = changed_settings(before, json.loads(json.dumps(settings, default=str)))
    if changes:
        more = [f"and {len(changes) - _MAX_CHANGES} more"] if len(changes) > _MAX_CHANGES else []
        raise EvalError(
            "the samples in this folder were made with other settings:\n    "
            + "\n    ".join([*changes[:_MAX_CHANGES], *more]),
            path=str(folder),
            rule="an evaluation continues with the settings that it started with",
            repair="set them back to continue, give --output another folder, or start over with --overwrite",
        )


def changed_settings(before: Any, now: Any, *, path: str = "") -> list[str]:
    """Return one line for each setting that differs: where it is, what it was and what it is."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = [*before, *(key for key in now if key not in before)]
        return [
            line
            for key in keys
            for line in changed_settings(before.get(key), now.get(key), path=f"{path}.{key}".lstrip("."))
        ]
    return [] if before == now else [f"{path}: {_shown(before)} -> {_shown(now)}"]


def _shown(value: Any, *, limit: int = 100) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _replace(path: Path, content: Mapping[str, Any]) -> Path:
    part = path.with_name(f".{path.name}.part")
    with recording(path):
        try:
            with open(part, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, ensure_ascii=False, default=str)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return path


def task_order(scores: Mapping[tuple[int, int], SampleScore], indices: Sequence[int]) -> list[list[SampleScore]]:
    """Return the samples of each task in the order of the dataset, those of one task by number."""
    by_task: dict[int, list[SampleScore]] = {index: [] for index in sorted(indices)}
    for (task, _), score in sorted(scores.items()):
        if task in by_task:
            by_task[task].append(score)
    return list(by_task.values())
