"""What was changed while a run ran: recorded in its folder, and applied again when it resumes.

`runtime_changes.jsonl` has one line for each change: the key, the value that the configuration gave it, and what it was
changed from and to. A resumed run begins with the last value of each key, unless its configuration now gives another
one than it did then: what the user writes later wins.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from forge.config.base import ConfigModel
from forge.errors import RecordError

FILE_NAME: Final = "runtime_changes.jsonl"
_log = logging.getLogger("forge.loops")
C = TypeVar("C", bound=ConfigModel)


@dataclass(frozen=True, slots=True)
class RuntimeChange:
    """One change of a running run.

    Attributes:
        step: the steps that the run had taken.
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
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    path = folder / FILE_NAME
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": now, **asdict(change)}) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RecordError(
            f"a change of the run cannot be recorded: {error.strerror}",
            path=str(path),
            rule="every change while a run runs is recorded, so that a resume continues with it",
            repair="make room, or correct the permissions of the run's folder",
        ) from error


def read_changes(folder: Path) -> Iterator[RuntimeChange]:
    """Yield the changes in the order in which they were made. A last line that a kill cut off is left out."""
    try:
        text = (folder / FILE_NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    for line in text.split("\n")[:-1]:
        fields: dict[str, Any] = json.loads(line)
        fields.pop("time")
        for name in ("configured", "before", "after"):  # as they stand in a configuration
            if isinstance(fields[name], list):
                fields[name] = tuple(fields[name])
        yield RuntimeChange(**fields)


def begin_changes(folder: Path, *, is_resumed: bool) -> None:
    """Move the changes of another run in this folder aside, unless this one continues it."""
    path = folder / FILE_NAME
    if is_resumed or not path.exists():
        return
    number = 1
    while (aside := path.with_name(f"runtime_changes.{number}.jsonl")).exists():
        number += 1
    path.rename(aside)


def with_changes(config: C, folder: Path) -> C:
    """Return a resumed run's configuration with the last value of every key that was changed while it ran."""
    last = {change.key: change for change in read_changes(folder)}
    for change in last.values():
        if value_at(config, change.key) == change.configured and change.after != change.configured:
            _log.info("%s is %r, as changed after step %d by %s", change.key, change.after, change.step, change.by)
            config = with_value(config, change.key, change.after)
    return config


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
