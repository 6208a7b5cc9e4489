"""Finds the first step of a run that cannot be reproduced.

    segments   ├── start 0 ── 1 ── 2 ──┤├── checkpoint 2 ── 3 ── 4 ──┤├── checkpoint 4 ── 5 …

Reading a record costs milliseconds and training a step much more, so all records are read first: training ends before
the first that is damaged or was changed. Then the steps between each two consecutive checkpoints are replayed, each
segment from its own checkpoint. A step is compared as soon as it is trained, so the first difference inside a segment
is known without going back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from forge.errors import CheckpointError, ReplayError
from forge.loops.replay.comparing import Difference, Replayed, record_differences
from forge.loops.replay.recorded import RecordedRun, Start
from forge.loops.replay.steps import open_replayer

Report = Callable[[Start, Replayed], None]
"""Called with what was found of each state that was started from, and of each step."""


@dataclass(frozen=True, slots=True)
class Bisected:
    """What a search found.

    Attributes:
        first: the first step, or state to start from, that differs; None where all are reproduced.
        steps: the steps that were replayed and are the same.
        other_hardware: see `Replayed`.
        tolerance: see `Replayed`.
    """

    first: Replayed | None
    steps: tuple[int, ...]
    other_hardware: tuple[str, ...] = ()
    tolerance: float = 0.0


def segments(recorded: RecordedRun) -> list[tuple[Start, int]]:
    """Return the states that steps are replayed from, each with the last step that is replayed from it."""
    found: dict[int, tuple[Start, int]] = {}
    for step in recorded.window:
        start = recorded.find_start(step)
        found[start.step] = (start, step)
    return list(found.values())


def first_changed_record(recorded: RecordedRun) -> Replayed | None:
    """Return the first step of the window whose record is damaged or was changed; None if there is none."""
    for step in recorded.window:
        try:
            differences = tuple(record_differences(recorded.read(step)))
        except ReplayError as error:
            differences = (Difference("record", str(error.path), "whole", error.message),)
        if differences:
            return Replayed(step, differences)
    return None


async def bisect_run(recorded: RecordedRun, *, report: Report = lambda start, found: None, **options: Any) -> Bisected:
    """Replay the window of a run until something differs. `options` are those of `open_replayer`."""
    if not recorded.window:
        raise ReplayError(
            "no step of this run can be replayed",
            path=str(recorded.folder),
            value=f"{len(recorded.steps)} recorded steps",
            rule="a checkpoint from which the records go on without a gap, or the records from step 1 on",
            repair="keep more with checkpointing.keep, record.replay.max_gb or record.replay.keep_steps",
        )
    changed = first_changed_record(recorded)
    same: list[int] = []
    found: Replayed | None = None
    async with open_replayer(recorded, **options) as replayer:
        for start, last in segments(recorded):
            if changed is not None and start.step >= changed.step:
                break
            try:
                found = await replayer.begin(start)
            except CheckpointError as error:
                found = Replayed(start.step, (Difference("checkpoint", str(error.path), "whole", error.message),))
            report(start, found)
            end = last if changed is None else min(last, changed.step - 1)
            while found.is_same and replayer.at < end:
                found = await replayer.step()
                report(start, found)
                same += [found.step] if found.is_same else []
            if not found.is_same:
                return Bisected(found, tuple(same), found.other_hardware, found.tolerance)
    if found is None:
        return Bisected(changed, ())
    if changed is not None:
        changed = replace(changed, other_hardware=found.other_hardware)
    return Bisected(changed, tuple(same), found.other_hardware, found.tolerance)
