"""Checkpoints of training, on PyTorch's distributed checkpoint format (DCP).

Every rank of a run makes one `Checkpoints` and calls it in the same order with its own part of the state. What is saved
is whole or invisible; what is loaded may be laid out over ranks in any other way.
"""

from __future__ import annotations

import errno
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from forge.errors import CheckpointError, ConfigError, ForgeError, SaveError
from forge.trainer import checkpoint_folder as folders
from forge.trainer.checkpoint_folder import CheckpointInfo, WriterLock
from forge.trainer.checkpoint_io import CheckpointWriter, SavePurpose, Stage, StrictLoadPlanner

_Answer = TypeVar("_Answer")
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SLOW_DISK: Final = timedelta(hours=2)
"""How long ranks wait for the slowest of them to write its part."""


@dataclass(slots=True)
class _Pending:
    """A save in the background."""

    step: int
    partial: Path
    future: Future[Any]
    stager: DefaultStager


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Made by every rank of the default process group (any backend), or by a single process without one. The group must
    exist before and outlive it, and all ranks must see the same folder. Methods that say *collective* are called by all
    ranks in the same order; the others only look at the folder.

    Args:
        folder: where the checkpoints are. It is made when it is not there.
        keep: how many of the newest are kept.
        keep_best: whether the one with the lowest metric is kept besides.
        asynchronous: whether `save` returns as soon as the state is copied into host memory.
        read_only: to load only. Nothing is created, cleaned or locked, so that another run may be writing here.
        on_stage: called with the stages of each save as they are passed (see `Stage`), some of them in the thread that
            writes. An exception that it raises fails the save.

    Making one takes the folder for writing, refuses if another run has it, and removes what a killed run left behind.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        keep_best: bool = True,
        asynchronous: bool = True,
        read_only: bool = False,
        on_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        if keep < 1:
            raise ConfigError(
                "checkpointing.keep is too small.", path="checkpointing.keep", value=keep, rule="at least 1"
            )
        self.folder = Path(folder)
        self._keep = keep
        self._keep_best = keep_best
        self._asynchronous = asynchronous
        self._read_only = read_only
        self._on_stage = on_stage
        self._pending: _Pending | None = None
        self._lock: WriterLock | None = None
        self._pinned_stager: DefaultStager | None = None
        self._num_saves = 0
        self._closed = False
        self._group = dist.new_group(backend="gloo", timeout=_SLOW_DISK) if dist.is_initialized() else None
        self._rank = dist.get_rank() if self._group is not None else 0
        self._world_size = dist.get_world_size() if self._group is not None else 1
        if self._group is None:
            # Without a process group DCP says at every call that it assumes a single process. Here that is known.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            self._token = self._from_rank_0(self._open_folder)
        except ForgeError:
            self._leave_group()
            raise

    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        extra: Mapping[str, Any] | None = None,
        metric: float | None = None,
        parts: Mapping[str, Path] | None = None,
    ) -> None:
        """Save a checkpoint. Collective.

        When it returns, the tensors may be changed. An asynchronous one is complete once `wait` has returned; there is
        never more than one on its way, so a second save waits for the first. If the previous one failed, this raises
        its error, on every rank, and saves nothing.

        Args:
            step: optimizer steps taken. A checkpoint of the same step is replaced.
            state: nested dictionaries of tensors, DTensors and picklable objects. Ranks may have different keys.
                Entries that each rank has for itself have a part such as `rank3` in their keys.
            extra: small facts that JSON can carry, returned by `load`. Rank 0's are taken.
            metric: what to judge it by, lower being better. One that is not finite counts as none.
            parts: complete checkpoints of other models on the same file system. Each is moved into this one under its
                name, before this one appears: both are there, or neither.
        """
        self._check_open(for_writing=True)
        self.wait()
        info = CheckpointInfo(
            path=self.folder / folders.checkpoint_name(_checked_step(step)),
            step=step,
            sequence=-1,
            time="",
            metric=float(metric) if metric is not None and math.isfinite(metric) else None,
            world_size=self._world_size,
            torch_version=str(torch.__version__),
            extra=_checked_extra(extra or {}),
        )
        self._num_saves += 1
        partial = info.path.with_name(f"{info.path.name}.partial-{self._token}-{self._num_saves}")
        purpose = SavePurpose(info, self._keep, self._keep_best, self._on_stage, parts or {})
        options = {
            "storage_writer": CheckpointWriter(partial, purpose=purpose),
            "process_group": self._group,
            "no_dist": self._group is None,
        }
        if not self._asynchronous:
            try:
                dcp.save(state, **options)
            except (Exception, CheckpointException) as error:
                raise self._failure(error, step=step, partial=partial) from error
            return
        stager = self._stager()
        future = dcp.async_save(state, async_stager=stager, **options)
        self._pending = _Pending(step, partial, future, stager)
        self._on_stage("staged")

    def wait(self) -> None:
        """Wait until the save in the background, if there is one, is complete. Raises its error, once. Collective."""
        pending = self._pending
        if pending is None:
            return
        try:
            pending.future.result()
        except (Exception, CheckpointException) as error:
            self._forget(pending)
            raise self._failure(error, step=pending.step, partial=pending.partial) from error
        self._forget(pending)

    def load(
        self, source: CheckpointInfo | Path | str, state: dict[str, Any], *, partial: bool = False, verify: bool = True
    ) -> dict[str, Any]:
        """Load a checkpoint into `state`, in place, and return its `extra`. Collective; rank 0's `source` is taken.

        Tensors may be laid out over ranks in any way, whatever the layout that saved them; values are converted to the
        dtype that a tensor has here. Objects are replaced in the dictionaries. A checkpoint that is damaged, lacks a
        key, has one too many or has another shape is refused before anything is changed, with the names.

        Entries of single ranks (see `save`) are loaded where both sides have them, if the number of ranks has changed.

        Args:
            partial: load the keys that both have, and leave the others alone.
            verify: compare the SHA-256 of every file, for which ranks share the work. Sizes are always compared.
        """
        self._check_open()
        self.wait()
        path = source.path if isinstance(source, CheckpointInfo) else Path(source)
        info = self._from_rank_0(lambda: folders.read_checkpoint(path))
        self._check_files(info, verify=verify)
        try:
            dcp.load(
                state,
                storage_reader=dcp.FileSystemReader(info.path),
                planner=StrictLoadPlanner(info, partial=partial, world_size=self._world_size),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as failure:
            rank, cause = _first_failure(failure)
            if isinstance(cause, CheckpointError):
                raise cause from failure
            raise CheckpointError(
                f"The checkpoint could not be read, on rank {rank}: {cause!r}", path=str(info.path)
            ) from failure
        return dict(info.extra)

    def list(self) -> tuple[CheckpointInfo, ...]:
        """Return the complete checkpoints, in the order in which they were completed."""
        return folders.list_checkpoints(self.folder)

    def latest(self) -> CheckpointInfo | None:
        """Return the one completed last."""
        infos = self.list()
        return infos[-1] if infos else None

    def best(self) -> CheckpointInfo | None:
        """Return the one with the lowest metric."""
        return folders.best_checkpoint(self.list())

    def find(self, resume: str) -> CheckpointInfo | None:
        """Return the one to start from under a rule of `checkpointing.resume`, or None to start anew.

        `never` refuses a folder that holds checkpoints, `auto` takes the latest if there is one, `must` insists on one,
        and anything else is the path of a checkpoint, in this folder or another.
        """
        return folders.find_checkpoint(self.folder, resume=resume)

    def close(self) -> None:
        """Wait for pending saves, release the folder, raise what went wrong. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
            if self._pinned_stager is not None:
                self._pinned_stager.close()
            self._leave_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_folder(self) -> str:
        if self._read_only:
            return ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(self.folder)
            if self._lock.is_held:
                folders.clean(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"The folder of the checkpoints cannot be written: {error}",
                path=str(self.folder),
                rule="a folder in which this run may create files",
                repair="choose another checkpointing.output_dir",
            ) from error
        return f"{os.getpid()}-{os.urandom(4).hex()}"

    def _check_files(self, info: CheckpointInfo, *, verify: bool) -> None:
        mine = sorted(info.files)[self._rank :: self._world_size]
        found = folders.damaged_files(info, names=mine, digests=verify)
        faults = [found] * self._world_size
        if self._group is not None:
            dist.all_gather_object(faults, found, group=self._group)
        if named := [fault for part in faults for fault in part]:
            raise folders.damage(info, named)

    def _failure(self, error: BaseException, *, step: int, partial: Path) -> SaveError:
        """Return what to raise for a failed save. Rank 0 first removes what was written, which may fill the disk."""
        if self._rank == 0 and partial.exists():
            folders.delete(partial)
        rank, cause = _first_failure(error) if isinstance(error, CheckpointException) else (self._rank, error)
        is_full = isinstance(cause, OSError) and cause.errno in _NO_SPACE
        return SaveError(
            f"The checkpoint of step {step} could not be written, on rank {rank}: {cause!r}",
            path=str(self.folder),
            rule="the disk must hold the new checkpoint before an old one is deleted" if is_full else None,
            repair="free space, or lower checkpointing.keep; the checkpoints before it are complete"
            if is_full
            else "fix the cause and save again; the checkpoints before it are complete",
        )

    def _from_rank_0(self, ask: Callable[[], _Answer]) -> _Answer:
        """Return what `ask` returns or raises on rank 0, on every rank."""
        if self._group is None:
            return ask()
        answer: list[Any] = [None, None]
        if self._rank == 0:
            try:
                answer[0] = ask()
            except ForgeError as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0, group=self._group)
        if answer[1] is not None:
            raise answer[1]
        found: _Answer = answer[0]
        return found

    def _stager(self) -> DefaultStager:
        """Return what copies a state into host memory: for a GPU a pinned one, kept because pinning is slow."""
        if not torch.cuda.is_available():
            return DefaultStager(StagingOptions(False, False, False, False))
        if self._pinned_stager is None:
            self._pinned_stager = DefaultStager(StagingOptions(True, False, False, True))
        return self._pinned_stager

    def _forget(self, pending: _Pending) -> None:
        self._pending = None
        if pending.stager is not self._pinned_stager:
            pending.stager.close()

    def _check_open(self, *, for_writing: bool = False) -> None:
        if self._closed:
            raise CheckpointError(
                "These Checkpoints are closed.", path=str(self.folder), rule="save and load before close()"
            )
        if for_writing and self._read_only:
            raise CheckpointError(
                "These Checkpoints were opened for reading only.",
                path=str(self.folder),
                rule="read_only=True loads and lists",
                repair="make another Checkpoints without read_only",
            )

    def _leave_group(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _checked_step(step: int) -> int:
    if step < 0:
        raise CheckpointError("A step is counted from 0.", path="step", value=step, rule="at least 0")
    return step


def _checked_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `extra`, if JSON brings it back as it was."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(extra, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise _unfit_extra(extra, reason=str(error)) from error
    changed = [key for key in extra if key not in copy or copy[key] != extra[key]]
    if changed:
        raise _unfit_extra(extra, reason=f"JSON would change {changed}")
    return copy


def _unfit_extra(extra: Mapping[str, Any], *, reason: str) -> CheckpointError:
    return CheckpointError(
        f"`extra` cannot be stored in a checkpoint: {reason}",
        path="extra",
        value=extra,
        rule="text, finite numbers, booleans, null, lists, and dictionaries with text as keys",
        repair="turn tuples into lists and keys into text; put tensors into `state`",
    )


def _first_failure(failure: BaseException) -> tuple[int, BaseException]:
    """Return the rank that failed first by number, and its exception."""
    assert isinstance(failure, CheckpointException)
    rank = min(failure.failures)
    return rank, failure.failures[rank][0]
