"""The folder of a supervised run: what its files say, its lock, and what a killed run leaves outside of it."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forge.errors import ConfigError

EVENTS_NAME: Final = "supervisor.jsonl"
LOCK_NAME: Final = ".supervisor"
_ALL_BYTES: Final = sys.maxsize


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a supervised run writes, as its configuration says."""

    path: Path
    checkpoints: Path

    @classmethod
    def of(cls, merged: Mapping[str, Any]) -> RunFolder | None:
        """Read the folders from a program's merged configuration, whatever else its schema has. None where the sections
        `run` or `checkpointing` break a rule: the program itself will say which."""
        from pydantic import ValidationError

        from forge.config import CheckpointConfig, RunConfig

        try:
            run = RunConfig.model_validate_json(json.dumps(merged.get("run") or {}))
            saved = CheckpointConfig.model_validate_json(json.dumps(merged.get("checkpointing") or {}))
        except ValidationError:
            return None
        path = run.output_dir / run.name
        return cls(path, saved.output_dir or path / "checkpoints")

    def newest_checkpoint(self) -> tuple[int, int] | None:
        """Return sequence number and step of the checkpoint completed last; None if there is none."""
        from forge.trainer.checkpoint_folder import readable_checkpoints

        infos = readable_checkpoints(self.checkpoints)
        return (infos[-1].sequence, infos[-1].step) if infos else None

    def set_damaged_aside(self) -> list[Path]:
        """Rename newest checkpoints whose files are not as they were written to NAME.damaged, while an older one stays.
        Returns what they are called now."""
        from forge.errors import CheckpointError
        from forge.trainer.checkpoint_folder import check_checkpoint, readable_checkpoints

        moved: list[Path] = []
        infos = list(readable_checkpoints(self.checkpoints))
        while len(infos) > 1:
            try:
                check_checkpoint(infos[-1], max_digest_bytes=_ALL_BYTES)
            except CheckpointError:
                path = infos.pop().path
                moved.append(path.rename(path.with_name(f"{path.name}.damaged-{os.urandom(4).hex()}")))
            else:
                break
        return moved

    def last_step(self) -> int | None:
        """Return the last step in the run's metrics; None if there is none."""
        try:
            with (self.path / "metrics.jsonl").open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - (1 << 20)))
                lines = file.read().splitlines()
        except OSError:
            return None
        for line in reversed(lines):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return int(json.loads(line)["step"])
        return None

    def record(self, event: str, **facts: Any) -> None:
        """Add a line to `supervisor.jsonl`. A full disk must not end the supervisor."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError), (self.path / EVENTS_NAME).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": now, "event": event, **facts}) + "\n")


@contextlib.contextmanager
def only_supervisor(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder. Refuse a folder that another supervisor holds."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_NAME).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "the supervisor cannot write to the run's folder",
            path="run.output_dir",
            value=str(folder),
            rule=f"a folder that can be written: {error.strerror}",
            repair="choose another one, or correct its permissions",
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                "another supervisor runs in this folder",
                path=str(folder),
                value=file.read().strip() or "another process",
                rule="one supervisor for each run's folder",
                repair="end the other one, or choose another run.name",
            ) from None
        except OSError as error:
            report(f"{folder} cannot be locked ({error.strerror}): make sure that one supervisor alone runs there")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def remove_dead_sockets(since: float) -> int:
    """Remove folders of sockets that processes made after `since` and that no process listens on: a controller that is
    killed leaves those of its workers. Returns how many there were. An empty folder stays: it may be in the making."""
    num_removed = 0
    for folder in Path(tempfile.gettempdir()).glob(".tmp??????"):
        with contextlib.suppress(OSError):  # it has gone, or was used meanwhile
            facts = folder.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mtime < since:
                continue
            files = list(folder.iterdir())
            if not files or not all(stat.S_ISSOCK(file.lstat().st_mode) for file in files):
                continue
            # Read after the files were found: it names those that another run has just made.
            listening = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
            if all(str(file) not in listening for file in files):
                for file in files:
                    file.unlink()
                folder.rmdir()
                num_removed += 1
    return num_removed


def report(text: str) -> None:
    """Print a line of the supervisor. A terminal that is gone does not end it."""
    with contextlib.suppress(OSError):
        print(f"forge run --supervise: {text}", file=sys.stderr, flush=True)
