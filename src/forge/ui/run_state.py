"""Whether a run is running, and if not how it ended: judged from its files alone.

The lock that a run holds in its folder decides. The system lets go of it when the process ends, however it ends, so a
killed run is never shown as running, and a run that is silent for hours is.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from forge.trainer.checkpoint_folder import LockState

Kind = Literal["starting", "running", "finished", "stopped", "failed", "unknown", "empty"]

_LOCAL: Final = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "bcachefs"))
"""File systems of one machine: a lock that is not seen there is not held."""
_SHARING: Final = {"nfs": "local_lock=none", "nfs4": "local_lock=none", "lustre": "flock"}
"""Shared file systems that show locks of other machines, with the option that says so."""
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the files of a run say about its state.

    Attributes:
        lock: the lock of its folder.
        has_shared_locks: whether a lock that another machine holds would be seen here.
        last_step: the last step in its metrics; None before the first.
        total_steps: how many it takes; None where that is not known.
        is_exported: whether its model was exported after its last metrics, which a run does when it has finished.
        has_results: for an evaluation, whether its results are there.
        events: the lines of `supervisor.jsonl`.
        num_resumes: how often the run was resumed, as far as its files tell.
    """

    lock: LockState
    has_shared_locks: bool = True
    last_step: int | None = None
    total_steps: int | None = None
    is_exported: bool = False
    has_results: bool = False
    events: Sequence[Mapping[str, Any]] = ()
    num_resumes: int = 0


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run.

    Attributes:
        kind: `starting` and `running` while its process lives; `finished`, `stopped` or `failed` when it does not;
            `unknown` where its lock cannot be seen from this machine; `empty` for a folder that no run has used.
        detail: why, in a few words.
        num_resumes: how often it was resumed.
    """

    kind: Kind
    detail: str = ""
    num_resumes: int = 0


def judge(evidence: Evidence) -> RunState:
    """Return the state of a run."""
    kind, detail = _kind(evidence)
    return RunState(kind, detail, evidence.num_resumes)


def _kind(found: Evidence) -> tuple[Kind, str]:
    lock = found.lock
    if lock.is_held:
        if found.last_step is None:
            return "starting", f"{lock.text}: no step is finished yet"
        return "running", lock.text
    if found.has_results:
        return "finished", "the evaluation has its results"
    if is_final := _finished(found):
        return "finished", is_final
    if not lock.text and lock.is_held is not None:  # never locked: of an earlier release, or of another program
        return ("stopped", "its last step is not the last one") if found.last_step is not None else ("empty", "")
    if lock.is_held is None or (not found.has_shared_locks and not _is_here(lock.text)):
        return "unknown", f"locks of other machines cannot be seen here; last written by {lock.text or 'a process'}"
    return _ended(found)


def _finished(found: Evidence) -> str:
    if found.total_steps is not None and found.last_step is not None and found.last_step >= found.total_steps:
        return f"all {found.total_steps} steps"
    return "its model is exported" if found.is_exported else ""


def _ended(found: Evidence) -> tuple[Kind, str]:
    """Return how a run ended that did not finish."""
    after = f"after step {found.last_step}" if found.last_step is not None else "before its first step"
    last = found.events[-1] if found.events else {}
    status = last.get("status")
    if isinstance(status, int) and last.get("event") in ("end", "crash"):
        if last["event"] == "end" and _was_asked(status):
            return "stopped", f"{after}, by a signal"
        if last["event"] == "crash" and last.get("action") == "restart":
            return "stopped", f"{after}; its supervisor has ended"
        if last["event"] == "crash" or status != 0:
            return "failed", f"{after}, with {_status_text(status)}"
    return "stopped", after


def _was_asked(status: int) -> bool:
    return any(status in (-number, 128 + number) for number in _STOP_SIGNALS)


def _status_text(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _is_here(text: str) -> bool:
    return text.rpartition(" on ")[2] == socket.gethostname()


def has_shared_locks(folder: Path, *, mounts: Iterable[str] | None = None) -> bool:
    """Return whether a lock that any machine holds on a file of this folder would be seen here.

    `mounts` are the lines of /proc/self/mountinfo.
    """
    place = os.path.realpath(folder)
    best, kind, options = "", "", ""
    for line in _mounts() if mounts is None else mounts:
        left, _, right = line.partition(" - ")
        fields, words = left.split(), right.split()
        if len(fields) < 5 or len(words) < 3:
            continue
        point = fields[4].replace("\\040", " ")
        if len(point) >= len(best) and (place + "/").startswith(point.rstrip("/") + "/"):
            best, kind, options = point, words[0], words[2]
    return kind in _LOCAL or (kind in _SHARING and _SHARING[kind] in options.split(","))


def _mounts() -> list[str]:
    try:
        return Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
