"""Metrics as strict JSON, one object to a line.

    {"step": 3, "time": 1767225600.0, "values": {"train/loss": 2.45}}

JSON has no NaN and no infinity. Such a metric is null among the values, and `nonfinite` says what it was:

    {"step": 4, "time": 1767225601.0, "values": {"train/loss": null}, "nonfinite": {"train/loss": "nan"}}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.errors import DataError
from forge.observe.clock import wall_s
from forge.observe.sink import Value, closed_error


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """One line of a metrics file, with NaN and infinities as they were written."""

    step: int
    time: float
    values: Mapping[str, Value]


class JsonlSink:
    """Appends each step to a file, one write to a line, and picks up after an earlier run.

    A file that is already there is first repaired. What a run that resumes at `resume_step` will write again,
    the lines of later steps, is moved to a file beside it (`metrics.discarded.jsonl` for `metrics.jsonl`). Without
    `resume_step` the run is new, and all lines are moved there. So every step is in the file once. A last line that
    was cut off by a kill is removed.

    Write everything of a step before you save the checkpoint of that step: lines up to `resume_step` stay as they are.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, resume_step: int | None = None, clock: Callable[[], float] = wall_s
    ) -> None:
        self.path = Path(path)
        self._clock = clock
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _repair(self.path, -1 if resume_step is None else resume_step)
        # Unbuffered: a line is one call of the system, and there is nothing to lose when the process is killed.
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        if self._file.closed:
            raise closed_error(self)
        line = _encode(step, self._clock(), values)
        start = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes went into {self.path}: is the disk full?")
        except OSError:
            os.ftruncate(self._file.fileno(), start)
            raise

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return os.fstat(self._file.fileno()).st_size

    def reopen(self) -> None:
        """Append to the file that has taken the place of this one."""
        file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._file.close()
        self._file = file

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[MetricsLine]:
    """Yield the lines of a metrics file in order, without a last line that is still being written."""
    for number, line in _numbered_lines(Path(path)):
        found = decode_line(line)
        if found is not None:
            yield found
        elif line.endswith(b"\n"):
            raise _not_metrics(Path(path), number, line)


def decode_line(line: bytes) -> MetricsLine | None:
    """Return what a line of a metrics file says, or None where it is not such a line."""
    fields = _decode(line)
    if fields is None:
        return None
    try:
        nonfinite = {name: float(text) for name, text in fields.get("nonfinite", {}).items()}
        time = float(fields["time"])
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
    return MetricsLine(fields["step"], time, {**fields["values"], **nonfinite})


def _encode(step: int, now: float, values: Mapping[str, Value]) -> bytes:
    nonfinite = {name: str(value) for name, value in values.items() if _is_nonfinite(value)}
    fields: dict[str, Any] = {
        "step": step,
        "time": now,
        "values": {name: None if name in nonfinite else value for name, value in values.items()},
    }
    if nonfinite:
        fields["nonfinite"] = nonfinite
    return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"


def _is_nonfinite(value: Value) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _decode(line: bytes) -> dict[str, Any] | None:
    """Return the fields of a line, or None where it is not a line of ours."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    ours = isinstance(fields, dict) and isinstance(fields.get("step"), int) and isinstance(fields.get("values"), dict)
    return fields if ours and isinstance(fields.get("time"), int | float) else None


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        yield from enumerate(file, start=1)


def _not_metrics(path: Path, number: int, line: bytes) -> DataError:
    return DataError(
        "a line of a metrics file cannot be read",
        path=f"{path}:{number}",
        value=line.decode("utf-8", "backslashreplace").rstrip("\n"),
        rule="each line but the last is a JSON object with step, time and values",
        repair="remove that line, or move the file away",
    )


def _repair(path: Path, last_step: int) -> None:
    """Leave the lines up to `last_step`, whole, and put later ones aside. The file is replaced atomically."""
    part = path.with_name(f"{path.name}.part")
    discarded: list[bytes] = []
    as_it_was = True
    try:
        with open(part, "wb") as kept:
            for number, line in _numbered_lines(path):
                fields = _decode(line)
                if fields is None and line.endswith(b"\n"):
                    raise _not_metrics(path, number, line)
                whole = line if line.endswith(b"\n") else line + b"\n"
                stays = fields is not None and fields["step"] <= last_step
                as_it_was = as_it_was and stays and line is whole
                if stays:
                    kept.write(whole)
                elif fields is not None:
                    discarded.append(whole)
            kept.flush()
            os.fsync(kept.fileno())
        if discarded:
            with open(path.with_name(f"{path.stem}.discarded{path.suffix}"), "ab") as aside:
                aside.writelines(discarded)
        if not as_it_was:
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
