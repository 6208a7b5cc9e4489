"""How a checkpoint gets onto the disk: DCP's file writer, made atomic and checked."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter, LoadPlan, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from forge.errors import CheckpointError
from forge.trainer.checkpoint_folder import (
    RECORD_NAME,
    CheckpointInfo,
    FileRecord,
    move_into,
    next_sequence,
    prune,
    publish,
    write_record,
)

Stage = Literal["staged", "data", "metadata", "record", "published", "done"]
"""The moments of a save, in order. `staged` and `data` are reached on every rank, the others on rank 0."""

_BUFFER_BYTES: Final = 1 << 20
_METADATA_NAME: Final = ".metadata"


@dataclasses.dataclass(frozen=True, slots=True)
class SavePurpose:
    """What is being saved: the checkpoint as it is to be described, the keep rule, and who wants to know the stages.

    `info.path` is the final folder; `info.sequence`, `info.time` and `info.files` are filled in when it is complete.
    `parts` are complete checkpoints of other models that become folders in this one, by name.
    """

    info: CheckpointInfo
    keep: int
    keep_best: bool
    on_stage: Callable[[Stage], None]
    parts: Mapping[str, Path] = dataclasses.field(default_factory=dict)


class CheckpointWriter(FileSystemWriter):  # type: ignore[misc]
    """Writes into `partial`, and when every rank's files are on the disk, makes the checkpoint visible by a rename.

    Everything happens inside DCP's own steps, so that an error on one rank is an error on all.
    """

    def __init__(self, partial: Path, *, purpose: SavePurpose) -> None:
        # What is written was staged in host memory or is copied piece by piece; files are synced when they are closed.
        super().__init__(partial, sync_files=False, per_thread_copy_ahead=0)
        self.fs = SyncedFiles()
        self._partial = partial
        self._purpose = purpose

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        results: Any = super().write_data(plan, planner)
        written: torch.futures.Future[_Written] = torch.futures.Future()
        written.set_result(_Written(results.value(), files=self.fs.records))
        self._purpose.on_stage("data")
        return written

    def finish(self, metadata: Metadata, results: list[_Written]) -> None:
        purpose, target = self._purpose, self._purpose.info.path
        super().finish(metadata, results)
        purpose.on_stage("metadata")
        files = {name: record for written in results for name, record in written.files.items()}
        files[_METADATA_NAME] = self.fs.records[f"{_METADATA_NAME}.tmp"]
        for name, source in purpose.parts.items():
            files[f"{name}/{RECORD_NAME}"] = move_into(source, self._partial / name)
        info = dataclasses.replace(
            purpose.info,
            sequence=next_sequence(target.parent),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            files=files,
        )
        write_record(info, folder=self._partial)
        purpose.on_stage("record")
        publish(self._partial, target=target)
        purpose.on_stage("published")
        prune(target.parent, keep=purpose.keep, keep_best=purpose.keep_best)
        purpose.on_stage("done")


class _Written(list[WriteResult]):
    """What a rank wrote, as DCP wants it, with the records of the files, which travel to rank 0 along with it."""

    def __init__(self, results: list[WriteResult], *, files: dict[str, FileRecord]) -> None:
        super().__init__(results)
        self.files = dict(files)


class SyncedFiles(FileSystem):  # type: ignore[misc]
    """Files that are on the disk once closed. `records` has size and digest of each by name."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as plain:
                yield plain
            return
        with _SyncedStream(Path(path)) as stream:
            try:
                yield stream
            except RuntimeError as error:
                # torch.save replaces what `write` raises by an error of its own, which does not say why.
                raise stream.failure or error from error
        self.records[Path(path).name] = stream.record()


class _SyncedStream(io.RawIOBase):
    """A file for writing from the start to the end, which hashes what goes through it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=_BUFFER_BYTES)
        self._hash = hashlib.sha256()
        self._size = 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        part = memoryview(data).cast("B")
        try:
            self._file.write(part)
        except OSError as error:
            self.failure = error
            raise
        self._hash.update(part)
        self._size += part.nbytes
        return part.nbytes

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
            super().close()

    def record(self) -> FileRecord:
        return FileRecord(self._size, self._hash.hexdigest())


_PER_RANK: Final = re.compile(r"(?:^|[./])rank\d+(?:[./]|$)")
_NUM_NAMED: Final = 8


class StrictLoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """Refuses a checkpoint that is not of this state, naming what differs, on every rank and before any change.

    A rank may hold a part of the keys (a pipeline stage does): keys that no rank asks for are compared over all ranks.
    Entries of single ranks, with a part such as `rank3` in their key, are only compared when as many ranks saved;
    otherwise those that both sides have are loaded.
    """

    def __init__(self, info: CheckpointInfo, *, partial: bool, world_size: int) -> None:
        super().__init__()
        self._info = info
        self._partial = partial
        self._same_ranks = info.world_size == world_size

    def create_local_plan(self) -> LoadPlan:
        saved = self.metadata.state_dict_metadata
        missing = self._compared(key for key in self.state_dict if key not in saved)
        if missing and not self._partial:
            raise self._error(
                f"The checkpoint lacks {len(missing)} key(s) that this state has: {_names(missing)}",
                rule="every key of the state is in the checkpoint",
                repair="load it into the model and optimizer that saved it, or pass partial=True to keep the present "
                "values of what it lacks",
            )
        differing = [_difference(key, value, saved[key]) for key, value in self.state_dict.items() if key in saved]
        if faults := [text for text in differing if text is not None]:
            raise self._error(
                f"{len(faults)} key(s) of the checkpoint have another shape than in this state: {_names(faults)}",
                rule="shapes are equal (of whole tensors: how they are laid out over ranks may differ)",
                repair="load it into a model of the shape that saved it",
            )
        plan = create_default_local_load_plan(self.state_dict, self.metadata, strict=False)
        return dataclasses.replace(plan, planner_data=tuple(self.state_dict))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        saved = self.metadata.state_dict_metadata
        wanted = {key for plan in global_plan for key in plan.planner_data}
        extra = self._compared(key for key in saved if key not in wanted)
        if extra and not self._partial:
            raise self._error(
                f"The checkpoint has {len(extra)} key(s) that this state lacks: {_names(extra)}",
                rule="every key of the checkpoint is in the state of some rank",
                repair="load it into the model and optimizer that saved it, or pass partial=True to leave them out",
            )
        if not wanted & saved.keys():
            raise self._error(
                f"The checkpoint and this state have no key in common. The checkpoint has {_names(sorted(saved))}",
                rule="at least one key is loaded",
                repair="check that this is a checkpoint of this model",
            )
        plans: list[LoadPlan] = super().create_global_plan(global_plan)
        return plans

    def _compared(self, keys: Iterable[str]) -> list[str]:
        return sorted(key for key in keys if self._same_ranks or not _PER_RANK.search(key))

    def _error(self, message: str, *, rule: str, repair: str) -> CheckpointError:
        return CheckpointError(message, path=str(self._info.path), rule=rule, repair=repair)


def _difference(key: str, value: Any, saved: Any) -> str | None:
    kept_as_tensor = isinstance(saved, TensorStorageMetadata)
    if kept_as_tensor != isinstance(value, Tensor):
        kinds = ("a tensor", "an object")
        here, there = kinds if not kept_as_tensor else reversed(kinds)
        return f"{key} ({there} in the checkpoint, {here} here)"
    if kept_as_tensor and saved.size != value.size():
        return f"{key} ({list(saved.size)} in the checkpoint, {list(value.size())} here)"
    return None


def _names(texts: list[str]) -> str:
    named = ", ".join(texts[:_NUM_NAMED])
    return named if len(texts) <= _NUM_NAMED else f"{named} and {len(texts) - _NUM_NAMED} more"
