"""A folder of checkpoints: what is in it, which are complete, and which may go. Knows no tensors.

A checkpoint is a folder `step-00000120` that came into being by one rename, so it is whole or it is not there. Other
names in the folder are on their way in or out, and readers ignore them:

    step-00000120.partial-…     being written
    step-00000120.replaced-…    about to be replaced by one of the same step
    step-00000120.trash-…       being deleted
    .writer                     locked by the process that writes here

`checkpoint.json` inside each says what it is and lists its files with sizes and digests.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
import struct
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from forge.errors import CheckpointError
from forge.trainer.lock_holders import name_of, wait_while_ending

RECORD_NAME: Final = "checkpoint.json"
LOCK_NAME: Final = ".writer"
_FORMAT: Final = 1
_COMPLETE: Final = re.compile(r"step-\d{8,}")
_INDEX_NAME: Final = ".metadata"
_MAX_DIGEST_BYTES: Final = 2 << 30
_UNREADABLE: Final = (OSError, ValueError, TypeError, KeyError, AttributeError)
_LEFTOVER: Final = re.compile(r"(step-\d{8,})\.(partial|replaced|trash)-.+")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One complete checkpoint, as its `checkpoint.json` describes it.

    Attributes:
        path: its folder.
        step: optimizer steps taken when it was saved.
        sequence: counts the checkpoints of a folder in the order in which they were completed. The latest is the one
            completed last, which after going back to an older one need not be the one with the most steps.
        time: when it was completed, in ISO 8601, UTC.
        metric: the checkpoint's score (lower is better), or None.
        world_size: how many ranks saved it.
        torch_version: the PyTorch that saved it.
        extra: what the caller stored with it.
        files: the files it consists of, `checkpoint.json` excluded.
    """

    path: Path
    step: int
    sequence: int
    time: str
    metric: float | None
    world_size: int
    torch_version: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def write_record(info: CheckpointInfo, *, folder: Path) -> None:
    """Write `checkpoint.json` into `folder`, through to the disk."""
    record = {"format": _FORMAT, **asdict(info)}
    del record["path"]
    with (folder / RECORD_NAME).open("w", encoding="utf-8") as file:
        json.dump(record, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_checkpoint(path: Path) -> CheckpointInfo:
    """Return the checkpoint at `path`. Raise CheckpointError when there is none, or its record cannot be read."""
    path = Path(path)
    if _LEFTOVER.fullmatch(path.name):
        raise CheckpointError(
            "This is not a complete checkpoint: it was being written or deleted.",
            path=str(path),
            rule="a folder such as step-00000120, without anything after the number",
            repair=_known_checkpoints(path.parent),
        )
    if not (path / RECORD_NAME).is_file():
        raise CheckpointError(
            "There is no checkpoint here.",
            path=str(path),
            value="a folder" if path.is_dir() else "a file" if path.exists() else "nothing",
            rule=f"a folder with a {RECORD_NAME}",
            repair=_known_checkpoints(path if path.is_dir() and _complete_names(path) else path.parent),
        )
    try:
        return _parse(path)
    except _UNREADABLE as error:
        raise CheckpointError(
            f"The record of a checkpoint cannot be read: {error!r}",
            path=str(path / RECORD_NAME),
            rule=f"a record of format {_FORMAT}, as this library writes it",
            repair=f"restore the file, or remove {path}",
        ) from error


def list_checkpoints(folder: Path) -> tuple[CheckpointInfo, ...]:
    """Return the complete checkpoints of a folder in the order in which they were completed. Needs no lock."""
    found = [read_checkpoint(folder / name) for name in _complete_names(folder)]
    return tuple(sorted(found, key=lambda info: (info.sequence, info.step)))


def best_checkpoint(infos: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
    """Return the one with the lowest metric; the earlier of two equal ones; None when none has a metric."""
    scored = [info for info in infos if info.metric is not None and math.isfinite(info.metric)]
    return min(scored, key=lambda info: (info.metric, info.sequence), default=None)


def checkpoints_to_delete(infos: Sequence[CheckpointInfo], *, keep: int, keep_best: bool) -> tuple[CheckpointInfo, ...]:
    """Return which of `infos`, in order of completion, the keep rule drops. The newest always stays."""
    best = best_checkpoint(infos) if keep_best else None
    return tuple(info for info in infos[: -max(1, keep)] if info is not best)


def find_checkpoint(folder: Path, *, resume: str) -> CheckpointInfo | None:
    """Return the checkpoint to start from under a rule of `checkpointing.resume`; None to start anew."""
    if resume not in ("never", "auto", "must"):
        return read_checkpoint(Path(resume).expanduser())
    infos = list_checkpoints(folder)
    if resume == "never" and infos:
        raise CheckpointError(
            f"This folder already holds {len(infos)} checkpoint(s), the latest of step {infos[-1].step}.",
            path=str(folder),
            value=infos[-1].path.name,
            rule="with checkpointing.resume=never the folder must hold no checkpoint, so that no two runs are mixed",
            repair=_another_run(folder),
        )
    if resume == "must" and not infos:
        raise CheckpointError(
            "There is no checkpoint to resume from.",
            path=str(folder),
            value="no complete checkpoint" if folder.is_dir() else "no such folder",
            rule="checkpointing.resume=must requires one",
            repair="check run.name and checkpointing.output_dir, or set checkpointing.resume=auto to start anew where "
            "there is none",
        )
    return infos[-1] if infos else None


def _another_run(folder: Path) -> str:
    """Return what to do where these checkpoints are in the way of a new run."""
    run = folder.parent
    is_in_run = folder.name == "checkpoints" and (run / "config.yaml").is_file()
    free = next(each for number in count(2) if not (run.parent / (each := f"{run.name}-{number}")).exists())
    name = free if is_in_run else "NAME"
    return (
        f"add --resume to continue that run, or run.name={name} for a new one in its own folder"
        + (f", or remove {run} to start over" if is_in_run else "")
        + "; a run that is done continues with a larger training.max_steps; in Python, set checkpointing.resume=auto "
        "instead of --resume"
    )


def damaged_files(info: CheckpointInfo, *, names: Iterable[str], digests: bool) -> tuple[str, ...]:
    """Return what is wrong with the files called `names`: gone, of another size, or of other content.

    `digests` also reads the files and compares SHA-256; without it only sizes are compared.
    """
    faults = []
    for name in names:
        path, expected = info.path / name, info.files[name]
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif path.stat().st_size != expected.size:
            faults.append(f"{name} has {path.stat().st_size} bytes instead of {expected.size}")
        elif digests and _sha256(path) != expected.sha256:
            faults.append(f"{name} has other content than was written")
    return tuple(faults)


def check_checkpoint(info: CheckpointInfo, *, max_digest_bytes: int = _MAX_DIGEST_BYTES) -> None:
    """Refuse a damaged checkpoint, in seconds: the sizes of all files, and the SHA-256 of as many as are quickly read.

    The index is always read, the other files if they are no larger than `max_digest_bytes` together. Loading compares
    the digests of all files, whatever their size.
    """
    total = sum(record.size for record in info.files.values())
    quick = set(info.files) if total <= max_digest_bytes else {_INDEX_NAME} & set(info.files)
    faults = (
        *damaged_files(info, names=sorted(set(info.files) - quick), digests=False),
        *damaged_files(info, names=sorted(quick), digests=True),
    )
    if faults:
        raise damage(info, faults)


def damage(info: CheckpointInfo, faults: Sequence[str]) -> CheckpointError:
    """Return the error about a damaged checkpoint. It names an older one, if there is one."""
    older = [each.path for each in readable_checkpoints(info.path.parent) if each.sequence < info.sequence]
    instead = f"resume from an older one: --resume {older[-1]}" if older else "start anew under another run.name"
    return CheckpointError(
        f"The checkpoint is damaged: {'; '.join(faults)}",
        path=str(info.path),
        rule="its files are as they were written",
        repair=f"restore its files, or {instead}",
    )


def move_into(source: Path, target: Path) -> FileRecord:
    """Make a complete checkpoint a part of another one that is being written. Returns the record of its
    `checkpoint.json`, which has the digests of all its other files."""
    source.rename(target)
    sync_folder(target.parent)
    record = target / RECORD_NAME
    return FileRecord(record.stat().st_size, _sha256(record))


def publish(partial: Path, *, target: Path) -> None:
    """Make a written checkpoint visible, by one rename. One of the same step is replaced; a kill loses neither."""
    sync_folder(partial)
    replaced = target.with_name(f"{target.name}.replaced-{partial.name.rpartition('.partial-')[2]}")
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    sync_folder(target.parent)
    if replaced.exists():
        delete(replaced)


def delete(path: Path) -> None:
    """Delete a checkpoint's folder. It is renamed first: a kill leaves it whole or gone, never half.

    What cannot be deleted, such as a file that a reader on a network file system holds open, is left as `.trash-…`
    for the next start, with a warning: it must not end a training run.
    """
    name = _LEFTOVER.sub(r"\1", path.name)
    trash = path if ".trash-" in path.name else path.with_name(f"{name}.trash-{os.urandom(4).hex()}")
    try:
        if trash != path:
            path.rename(trash)
        shutil.rmtree(trash)
    except FileNotFoundError:
        return
    except OSError as error:
        warnings.warn(f"an old checkpoint could not be deleted now: {error}", RuntimeWarning, stacklevel=2)


def prune(folder: Path, *, keep: int, keep_best: bool) -> None:
    """Delete what the keep rule drops. A checkpoint whose record cannot be read is neither counted nor deleted."""
    infos = readable_checkpoints(folder)
    for info in checkpoints_to_delete(infos, keep=keep, keep_best=keep_best):
        delete(info.path)


def next_sequence(folder: Path) -> int:
    """Return the sequence number of the checkpoint that is completed next."""
    infos = readable_checkpoints(folder)
    return infos[-1].sequence + 1 if infos else 0


def clean(folder: Path) -> None:
    """Remove what dead writers left behind, and restore a checkpoint that was being replaced. Needs the lock."""
    for entry in sorted(folder.iterdir()):
        leftover = _LEFTOVER.fullmatch(entry.name)
        if leftover is None:
            continue
        original = folder / leftover[1]
        if leftover[2] == "replaced" and not original.exists():
            entry.rename(original)
        else:
            delete(entry)
    sync_folder(folder)


@dataclass(frozen=True, slots=True)
class LockState:
    """Who writes into a folder.

    Attributes:
        is_held: whether its lock is held, as far as this machine sees; None where that cannot be known.
        text: what holds it, or held it last: `process 12 on node7`. Empty for a folder that was never locked.
    """

    is_held: bool | None
    text: str


class WriterLock:
    """Held by the one process that writes into a folder, checkpoints or a run's records.

    The system releases it when that process ends.

    A child process that outlives it does not hold it. On a file system without locks there is a warning and no
    protection: `is_held` is False, and leftovers must not be removed.
    """

    _held: Final[set[Path]] = set()
    _guard: Final = threading.Lock()

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        with self._guard:
            if self._folder in self._held:
                raise _locked(self._folder, f"this process, {os.getpid()}")
            self._file = (folder / LOCK_NAME).open("a+", encoding="utf-8")
            try:
                self.is_held = self._take()
            except BaseException:
                self._file.close()
                raise
            self._held.add(self._folder)

    def _take(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self._file.seek(0)
                raise _locked(self._folder, self._file.read().strip() or "another process") from error
            warnings.warn(
                f"{self._folder} cannot be locked ({error}): make sure that one run alone writes there",
                RuntimeWarning,
                stacklevel=4,
            )
            return False
        self._file.truncate(0)
        self._file.write(f"{name_of(os.getpid())}\n")
        self._file.flush()
        return True

    @classmethod
    def check(cls, folder: Path) -> None:
        """Refuse a folder that another run has locked. Takes no lock and makes nothing, so a run may still be first."""
        wait_while_ending(lambda: found.text if (found := cls.look(folder)).is_held else None)
        found = cls.look(folder)
        if found.is_held:
            raise _locked(folder.resolve(), found.text)

    @classmethod
    def look(cls, folder: Path) -> LockState:
        """Return whether a folder is locked, and by whom. Takes no lock and makes nothing."""
        resolved = folder.resolve()
        with cls._guard:
            if resolved in cls._held:  # to open the file here and close it would let go of the lock
                return LockState(True, f"this process, {os.getpid()}")
            try:
                handle = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                return LockState(False, "")
            except OSError:
                return LockState(None, "")
            with os.fdopen(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    return LockState(None, "")
                text = file.read(256).decode("utf-8", "replace").strip()
                wanted = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                try:
                    found = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, wanted))
                except OSError:  # no locks on this file system
                    return LockState(None, text)
                return LockState(found[0] != fcntl.F_UNLCK, text or f"process {found[4]}")

    def release(self) -> None:
        """Let go. A second call does nothing."""
        with self._guard:
            if not self._file.closed:
                self._file.close()
                self._held.discard(self._folder)


def _locked(folder: Path, holder: str) -> CheckpointError:
    return CheckpointError(
        "Another run is writing into this folder.",
        path=str(folder),
        value=holder,
        rule="one run writes into a folder at a time",
        repair="end the other run (or close its Checkpoints), choose another run.name, or open checkpoints with "
        "read_only=True",
    )


def sync_folder(folder: Path) -> None:
    """Write the names in a folder through to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _complete_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if _COMPLETE.fullmatch(entry.name))


def _parse(path: Path) -> CheckpointInfo:
    record = json.loads((path / RECORD_NAME).read_text(encoding="utf-8"))
    if record.pop("format") != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT}")
    files = {name: FileRecord(**facts) for name, facts in record.pop("files").items()}
    return CheckpointInfo(path=path, files=files, **record)


def readable_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Return the complete checkpoints whose record is readable, in the order in which they were completed."""
    infos = []
    for name in _complete_names(folder):
        with contextlib.suppress(*_UNREADABLE):
            infos.append(_parse(folder / name))
    return sorted(infos, key=lambda info: (info.sequence, info.step))


def _known_checkpoints(folder: Path) -> str:
    infos = readable_checkpoints(folder)
    if not infos:
        return "name the folder of a checkpoint, such as checkpoints/step-00000120"
    return f"the latest in {folder} is {infos[-1].path}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
