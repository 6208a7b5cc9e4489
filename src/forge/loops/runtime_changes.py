"""What was changed while a run ran: recorded in its folder, and applied again when it resumes.

`runtime_changes.jsonl` has one line for each change: the key, the value that the configuration gave it, and what it was
changed from and to. There are two kinds of keys:

- Numbers of workers and hosts. No result depends on them: a resumed run begins with the last value.
- Settings of training (`forge.loops.live_settings`). A resumed run begins with the value of the step that it resumes
  after, and makes later changes again at the steps at which they were made.

Either way, what the user writes later wins: a key that the configuration gives another value than it did then is not
changed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from forge.config.base import ConfigModel
from forge.errors import MISSING, RecordError
from forge.loops.run_paths import HasRunPaths

FILE_NAME: Final = "runtime_changes.jsonl"
_log = logging.getLogger("forge.loops")
C = TypeVar("C", bound=ConfigModel)


@dataclass(frozen=True, slots=True)
class RuntimeChange:
    """One change of a running run.

    Attributes:
        step: the steps that the run had taken: the change holds for the next one.
        key: the dotted key of the configuration that it stands for.
        configured: what the configuration says.
        before: the value until then.
        after: the value from then on.
        by: what asked for it.
    """

    step: int
    key: str
    configured: Any
    before: Any
    after: Any
    by: str


def record_change(folder: Path, change: RuntimeChange) -> None:
    """Add a change to the run's folder, through to the disk."""
    record_changes(folder, [change])


def record_changes(folder: Path, changes: Sequence[RuntimeChange]) -> None:
    """Add the changes of one command to the run's folder, through to the disk: all of them or none."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    lines = []
    for num_left, change in zip(reversed(range(len(changes))), changes, strict=True):
        more = {"num_left": num_left} if num_left else {}  # lines of the same command that follow
        lines.append(json.dumps({"time": now, **asdict(change), **more}) + "\n")
    path = folder / FILE_NAME
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab", buffering=0) as file:
            _write_all(file.fileno(), "".join(lines).encode())
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):  # half a line would spoil the next one
            os.truncate(path, size)
        raise RecordError(
            f"a change of the run cannot be recorded: {error.strerror}",
            path=str(path),
            rule="every change while a run runs is recorded, so that a resume continues with it",
            repair="make room, or correct the permissions of the run's folder",
        ) from error


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def read_changes(folder: Path) -> Iterator[RuntimeChange]:
    """Yield the changes in the order in which they were made. What a kill cut off at the end is left out: part of a
    line, and the lines of a command whose last line is missing."""
    for lines, _ in _commands(folder):
        for fields in lines:
            yield RuntimeChange(**{name: fields[name] for name in RuntimeChange.__slots__})


def _commands(folder: Path) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Yield the lines of each complete command, with the number of bytes up to its end."""
    try:
        data = (folder / FILE_NAME).read_bytes()
    except FileNotFoundError:
        return
    lines: list[dict[str, Any]] = []
    end = 0
    for line in data.split(b"\n")[:-1]:
        end += len(line) + 1
        fields: dict[str, Any] = json.loads(line)
        for name in ("configured", "before", "after"):  # as they stand in a configuration
            if isinstance(fields[name], list):
                fields[name] = tuple(fields[name])
        lines.append(fields)
        if not fields.get("num_left", 0):
            yield lines, end
            lines = []


def is_continued(config: HasRunPaths, *, has_checkpoint: bool) -> bool:
    """Return whether a run continues the one whose changes are in its folder: from a checkpoint, or with
    `checkpointing.resume: auto` from the start, after a crash before the first checkpoint."""
    return has_checkpoint or config.checkpointing.resume == "auto"


def begin_changes(folder: Path, *, is_resumed: bool) -> None:
    """Prepare the file for a run that begins. A run that is resumed goes on with it, without what a kill cut off;
    otherwise the changes of another run in this folder are moved aside."""
    path = folder / FILE_NAME
    if not path.exists():
        return
    if is_resumed:
        os.truncate(path, max((end for _, end in _commands(folder)), default=0))
        return
    number = 1
    while (aside := path.with_name(f"runtime_changes.{number}.jsonl")).exists():
        number += 1
    path.rename(aside)


def with_changes(config: C, folder: Path, *, other_than: Collection[str] = ()) -> C:
    """Return a resumed run's configuration with the last value of every key that was changed while it ran, apart from
    keys that are changed step by step."""
    last = {change.key: change for change in read_changes(folder) if change.key not in other_than}
    for change in last.values():
        if value_at(config, change.key) == change.configured and change.after != change.configured:
            _log.info("%s is %r, as changed after step %d by %s", change.key, change.after, change.step, change.by)
            config = with_value(config, change.key, change.after)
    return config


def changes_in_force(changes: Iterable[RuntimeChange], key: str, *, configured: Any = MISSING) -> list[RuntimeChange]:
    """Return the changes of a key that were not replaced, one for a step at most, in the order of their steps: after a
    resume from an earlier checkpoint, a new change takes the place of those of later steps.

    With `configured` they are those that a run makes again whose configuration gives the key this value: what was
    changed before the configuration last gave another one is left out.
    """
    found: list[RuntimeChange] = []
    for change in changes:
        if change.key != key:
            continue
        if configured is not MISSING and change.configured != configured:
            found.clear()
            continue
        while found and found[-1].step >= change.step:
            found.pop()
        found.append(change)
    return found


def value_at(config: ConfigModel, key: str) -> Any:
    """Return what stands under a dotted key."""
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name, None)
    return found


def with_value(config: C, key: str, value: Any) -> C:
    """Return a configuration with another value under a dotted key."""
    name, _, rest = key.partition(".")
    return config.model_copy(update={name: with_value(getattr(config, name), rest, value) if rest else value})
