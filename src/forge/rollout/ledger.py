"""The ledger: what became of every group of a run, one line each, written before the checkpoint that stands on it.

    {"step": 3, "group": 17, "epoch": 0, "prompt": "arithmetic:0:5", "outcome": "trained"}

`step` is the step that learned from the group, or the one that was being prepared when it was dropped. A run that
resumes from step c moves the lines of later steps aside, since what they taught is lost: those groups come again. So do
groups that were dropped after the last step of a run, whose lines are written when it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from forge.errors import CheckpointError, DataError, RecordError


@contextlib.contextmanager
def recording(path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside the block, an OSError becomes a `RecordError` that names the file and says how to continue."""
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"a record of the run could not be written: {error.strerror or error}",
            path=str(path),
            rule="a file that can be written, on a disk with room for it",
            repair="free space or correct the permissions, then continue with --resume",
        ) from error


def append(file: FileIO, data: bytes, *, sync: bool = False) -> None:
    """Append to an unbuffered file, all of it or nothing. A write may take a part without an error: the next one says
    why, such as that the disk is full.

    With `sync` it is written through to the disk.
    """
    start = os.fstat(file.fileno()).st_size
    with recording(os.fsdecode(file.name)):
        try:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            if sync:
                os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), start)
            raise


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """What became of one group. `outcome` is `trained`, or why it was dropped."""

    step: int
    group: int
    epoch: int
    prompt: str
    outcome: str


class Ledger:
    """Appends lines to RUN_DIR/ledger.jsonl; those of one step in a single write."""

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = _keep_up_to(self.path, -1 if resume_step is None else resume_step) if self.path.exists() else []
        self.committed = frozenset(line.group for line in kept)
        """The groups that were committed before this run began."""
        twice = [group for group, count in Counter(line.group for line in kept).items() if count > 1]
        if twice:
            raise CheckpointError(
                "the ledger holds groups twice",
                path=str(self.path),
                value=twice[:8],
                rule="a group is committed once",
                repair="the file was changed by hand, or two runs wrote to one folder; start in another folder",
            )
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def write(self, lines: Iterable[LedgerLine]) -> None:
        text = "".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines)
        if not text:
            return
        append(self._file, text.encode(), sync=True)

    def close(self) -> None:
        self._file.close()


def read_ledger(path: str | os.PathLike[str]) -> Iterator[LedgerLine]:
    """The lines in order. A last line that was cut off by a kill is left out."""
    with _opened(path) as file:
        for number, raw in enumerate(file, start=1):
            fields = _decode(raw)
            if fields is not None:
                yield LedgerLine(**fields)
            elif raw.endswith(b"\n"):
                raise DataError(
                    "a line of a ledger cannot be read",
                    path=f"{path}:{number}",
                    value=raw[:200],
                    rule="each line is a JSON object with step, group, epoch, prompt and outcome",
                    repair="the file was changed by hand: correct the line, or start in another folder",
                )


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(
            f"the ledger cannot be read: {error.strerror or error}",
            path=str(path),
            rule="a file that can be read",
            repair="correct its permissions, or move it away to continue without a record of what came before",
        ) from error


def check_ledger(
    lines: Iterable[LedgerLine],
    *,
    pending: Iterable[int],
    next_number: int,
    path: str | os.PathLike[str] = "ledger.jsonl",
    before: Mapping[str, Any] | None = None,
) -> None:
    """Raise unless every group below `next_number` is committed exactly once or pending, none lost, twice or unknown.

    The error names the line at which it shows: the second of a group, that of an unknown one, or the first after the
    place of a missing one.

    Args:
        lines: the ledger's, all or those up to a step, in order from the first on.
        pending: the groups that a checkpoint will roll out again.
        next_number: the first number that was not given out yet.
        path: the ledger's file.
        before: `next_number` and `pending` of the checkpoint that the run branched off from, whose groups another run's
            ledger holds; None if this one has all.
    """
    first: dict[int, int] = {}
    twice: dict[int, int] = {}
    waiting = set(pending)
    for place, line in enumerate(lines, start=1):
        if line.group in first or line.group in waiting:
            twice.setdefault(line.group, place)
        first.setdefault(line.group, place)
    begun = int(before["next_number"]) if before else 0
    open_before = set(before["pending"]) if before else set()
    expected = {number for number in range(next_number) if number >= begun or number in open_before}
    lost = sorted(expected - set(first) - waiting)
    unknown = {group: place for group, place in first.items() if group not in expected}
    if not twice and not lost and not unknown:
        return
    after_gap = min((place for group, place in first.items() if lost and group > lost[0]), default=None)
    at = min((*twice.values(), *unknown.values()), default=after_gap)
    given = f"twice: {sorted(twice)[:8]}, lost: {lost[:8]}"
    raise CheckpointError(
        "the ledger does not add up",
        path=str(path) if at is None else f"{path}:{at}",
        value=f"{given}, unknown: {sorted(unknown)[:8]}" if unknown else given,
        rule="every group that was given out is committed once or pending, and no other is in it",
        repair="the file was changed, or two runs wrote to it: restore it, resume from a checkpoint of an earlier step "
        "(--resume PATH), or move the file away to continue without a record of what came before",
    )


def _decode(raw: bytes) -> Mapping[str, Any] | None:
    try:
        fields = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(fields, dict) or set(fields) != set(LedgerLine.__slots__):
        return None
    numbers, texts = ("step", "group", "epoch"), ("prompt", "outcome")
    is_ours = all(type(fields[key]) is int for key in numbers) and all(type(fields[key]) is str for key in texts)
    return fields if is_ours else None


def _keep_up_to(path: Path, last_step: int) -> list[LedgerLine]:
    """Leave the lines up to a step and put later ones into `ledger.discarded.jsonl`. The file is replaced at once."""
    lines = list(read_ledger(path))
    kept = [line for line in lines if line.step <= last_step]
    later = [line for line in lines if line.step > last_step]
    part = path.with_name(f"{path.name}.part")
    with open(part, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    if later:
        with open(path.with_name(f"{path.stem}.discarded{path.suffix}"), "a", encoding="utf-8") as aside:
            aside.writelines(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in later)
    os.replace(part, path)
    return kept
