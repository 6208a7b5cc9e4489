"""What a run shows and logs: its panel or its lines, and the log files of its processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from forge.config import RunConfig
from forge.loops.run_paths import HasRunPaths, run_dir
from forge.observe.logs.folder import FOLDER, logging_to
from forge.observe.monitor import RunMonitor, current_monitor, monitored


@contextlib.contextmanager
def log_files(folder: Path, run: RunConfig, *, is_leader: bool = True) -> Iterator[None]:
    """Let all processes log to files in the folder of a run, and write there what its start takes, inside the block."""
    with logging_to(folder / FOLDER, max_bytes=int(run.max_log_mb * 2**20)):
        monitor = current_monitor()
        if is_leader and monitor is not None:
            monitor.startup.write_to(folder)
        yield


class ShownRun:
    """A run that is shown. Nothing is written before `open_files`: a configuration that is refused leaves no folder."""

    def __init__(self, config: HasRunPaths, monitor: RunMonitor, stack: contextlib.ExitStack) -> None:
        self.monitor = monitor
        self._config, self._stack = config, stack

    def open_files(self, *, is_leader: bool = True) -> None:
        """Let all processes of the run log to files in its folder, and write there what its start takes."""
        folder, run = run_dir(self._config), self._config.run
        self._stack.enter_context(log_files(folder, run, is_leader=is_leader))


@contextlib.contextmanager
def shown_run(config: HasRunPaths, *, is_leader: bool = True) -> Iterator[ShownRun]:
    """Show a run inside the block. Of several ranks that run the same loop the leader alone does."""
    with contextlib.ExitStack() as stack:
        monitor = stack.enter_context(monitored(progress=config.metrics.progress, is_leader=is_leader))
        yield ShownRun(config, monitor, stack)
