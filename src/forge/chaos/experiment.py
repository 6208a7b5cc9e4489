"""Runs a configuration undisturbed and with faults, each as `forge run --supervise` in processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forge.chaos.faults import NotInjected, Surroundings, inject
from forge.chaos.processes import TAG, kill_all, wait_gone
from forge.chaos.script import Fault
from forge.chaos.shared_memory import SegmentWatch
from forge.errors import ConfigError
from forge.observe.clock import CLOCK_FILE, CLOCK_FORMAT

_POLL_S = 0.1
_GONE_S = 30.0
_CACHES = ("torchinductor_",)
"""Files in the folder for temporary files that later processes use again."""


@dataclass(frozen=True, slots=True)
class RunCommand:
    """What `forge run` is given, but for the run's name and folder.

    Attributes:
        program: the Python file.
        configs: the YAML files.
        overrides: `a.b=c`.
        max_restarts: of the supervisor, between two checkpoints.
    """

    program: Path
    configs: Sequence[str]
    overrides: Sequence[str] = ()
    max_restarts: int = 50

    def words(self, name: str, output_dir: Path) -> list[str]:
        """Return the command line of a run with this name."""
        configs = [word for config in self.configs for word in ("--config", config)]
        supervised = ["--supervise", "--max-restarts", str(self.max_restarts), "--restart-backoff", "0.2"]
        own = [f"run.name={name}", f"run.output_dir={output_dir}"]
        command = [sys.executable, "-m", "forge.cli", "run", *supervised, str(self.program), *configs]
        return [*command, *self.overrides, *own]


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault and what became of it: `done` says what was hit, `skipped` why nothing was."""

    fault: Fault
    at_s: float
    done: str | None = None
    skipped: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return {"at_s": round(self.at_s, 3), "fault": asdict(self.fault), "done": self.done, "skipped": self.skipped}


@dataclass(slots=True)
class Trial:
    """A run that is over, and what it left.

    Attributes:
        folder: the run's folder.
        status: the exit status of its supervisor; None if it did not end within its limit.
        seconds: from its start to its end.
        injections: the faults, in the order in which they were over.
        leaked_processes, leaked_segments, leaked_files: command labels, names in shared memory, and paths in the
            run's own folder of temporary files, that were left behind.
    """

    folder: Path
    status: int | None = None
    seconds: float = 0.0
    injections: list[Injection] = field(default_factory=list)
    leaked_processes: list[str] = field(default_factory=list)
    leaked_segments: list[str] = field(default_factory=list)
    leaked_files: list[str] = field(default_factory=list)


async def run_trial(
    command: RunCommand,
    output_dir: Path,
    *,
    name: str,
    faults: Sequence[Fault] = (),
    limit_s: float = 3600.0,
    on_event: Callable[[str], None] = lambda text: None,
) -> Trial:
    """Run once, inject the faults, and look at what is left. Nothing of the run lives when it returns or raises."""
    trial, tag = Trial(output_dir / name), uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="forge-chaos-") as scratch:
        clock, own_files = Path(scratch) / "clock", Path(scratch) / "tmp"
        clock.write_bytes(struct.pack(CLOCK_FORMAT, 0.0, 0.0))
        own_files.mkdir()
        own_variables = {TAG: tag, CLOCK_FILE: str(clock), "TMPDIR": str(own_files)}
        segments = SegmentWatch(tag)
        around = Surroundings(tag, trial.folder, trial.folder / "checkpoints", clock)
        log, began = output_dir.parent / f"{output_dir.name}-{name}.log", time.monotonic()
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *command.words(name, output_dir),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **own_variables},
                    start_new_session=True,
                )
                injecting = _due(faults, trial, around, on_event)
                await _watch(trial, process, (injecting, asyncio.create_task(segments.watch())), limit_s=limit_s)
            trial.seconds = time.monotonic() - began
            left = await asyncio.to_thread(wait_gone, tag, limit_s=_GONE_S)
            trial.leaked_processes = [process.label or f"process {process.pid}" for process in left]
        finally:
            kill_all(tag)
            await asyncio.to_thread(wait_gone, tag, limit_s=_GONE_S)
        trial.leaked_segments = await segments.left(limit_s=_GONE_S)
        trial.leaked_files = sorted(_described(path) for path in own_files.iterdir() if not _is_expected(path))
    return trial


def _is_expected(path: Path) -> bool:
    """Return whether a file is used again, or is the empty folder in which a controller that was killed had sockets."""
    return path.name.startswith(_CACHES) or (path.match(".tmp??????") and path.is_dir() and not any(path.iterdir()))


def _described(path: Path) -> str:
    """Return a file's name, and for a folder also what it holds: this tells who made it."""
    held = sorted(file.name for file in path.iterdir()) if path.is_dir() else ()
    return f"{path.name} ({', '.join(held)})" if held else path.name


async def _watch(
    trial: Trial, process: asyncio.subprocess.Process, beside: Sequence[asyncio.Task[None]], *, limit_s: float
) -> None:
    """Wait for the run's end, and end what happens beside it: the faults, for example."""
    try:
        async with asyncio.timeout(limit_s):
            trial.status = await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()
    finally:
        for task in beside:
            task.cancel()
        for task in beside:
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _due(
    faults: Sequence[Fault], trial: Trial, around: Surroundings, on_event: Callable[[str], None]
) -> asyncio.Task[None]:
    """Start the task that injects each fault when it is due."""

    async def all_faults() -> None:
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                group.create_task(one(fault))

    async def one(fault: Fault) -> None:
        began, too_late = time.monotonic(), "the run ended before it was due"
        try:
            await _reached(trial.folder, fault)
            if fault.at_s is not None:
                await asyncio.sleep(fault.at_s)
            began, too_late = time.monotonic(), "the run ended before it was over"
            found = Injection(fault, began, done=await inject(fault, around))
        except NotInjected as error:
            found = Injection(fault, began, skipped=str(error))
        except asyncio.CancelledError:
            trial.injections.append(Injection(fault, began, skipped=too_late))
            raise
        trial.injections.append(found)
        on_event(found.done or f"not injected ({fault.kind}): {found.skipped}")

    return asyncio.create_task(all_faults(), name="faults")


async def _reached(folder: Path, fault: Fault) -> None:
    """Wait until the run has taken the step that a fault waits for: its first, or the fault's own."""
    wanted = 1 if fault.at_step is None else fault.at_step
    while last_step(folder) < wanted:  # noqa: ASYNC110 - a file of other processes
        await asyncio.sleep(_POLL_S)


def last_step(folder: Path) -> int:
    """Return the last training step in a run's metrics; 0 if there is none."""
    last = 0
    with contextlib.suppress(FileNotFoundError), (folder / "metrics.jsonl").open("rb") as file:
        for raw in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that is being written
                line: Mapping[str, Any] = json.loads(raw)
                if any(name.startswith("train/") for name in line["values"]):
                    last = max(last, int(line["step"]))
    return last


@contextlib.contextmanager
def own_disk(folder: Path, size_gb: float | None) -> Iterator[None]:
    """Give a folder a file system of its own, in memory, that can be filled without harm to others."""
    folder.mkdir(parents=True, exist_ok=True)
    if size_gb is None:
        yield
        return
    options = f"size={int(size_gb * 2**30)}"
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    mounted = subprocess.run(words, capture_output=True, text=True)
    if mounted.returncode:
        raise ConfigError(
            f"a file system for the fault `disk_full` cannot be mounted: {mounted.stderr.strip()}",
            path="--disk-gb",
            value=size_gb,
            rule="the permission to mount a tmpfs (root, or CAP_SYS_ADMIN)",
            repair="leave out --disk-gb; faults `disk_full` are then skipped",
        )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
