"""A run of reinforcement learning that is alive while a test looks at it, and takes a step when the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge.loops.observing import tracing
from forge.loops.run_client import RunClient
from forge.loops.run_paths import run_dir
from forge.loops.workers import Workers
from grpo_runs import LIMIT_S, config, train_watched
from live_commands import num_waiting
from local_services import services_here


class LiveRun:
    """A run in a thread of this process. It waits before its generators load a version, until it is let."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.config = config(folder, *overrides)
        self.folder = run_dir(self.config)
        self.error: BaseException | None = None
        self._may_load = threading.Semaphore(0)
        self._waits = threading.Semaphore(0)
        self._is_free = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with tracing(self.config.record.trace):
                train_watched(self.config, self._hold)
        except BaseException as error:  # noqa: BLE001 - raised where the test waits
            self.error = error
        finally:
            self._waits.release()

    async def _hold(self, workers: Workers, version: int) -> None:
        self._waits.release()
        if not self._is_free:
            await asyncio.to_thread(self._may_load.acquire)

    def start(self) -> None:
        """Start it, and take the first step: then it takes commands."""
        self._thread.start()
        self._wait()
        self.step()

    def step(self) -> None:
        """Take one step. Returns when the run waits again, or has ended."""
        self._may_load.release()
        self._wait()

    def _wait(self) -> None:
        assert self._waits.acquire(timeout=LIMIT_S)
        if self.error is not None:
            raise self.error

    def num_commands(self) -> int:
        """How many commands wait for the end of a step."""
        return num_waiting(RunClient(self.folder, timeout_s=LIMIT_S))

    def finish(self) -> None:
        """Let it run to its end."""
        self._is_free = True
        self._may_load.release()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


@contextmanager
def live_run(folder: Path, *overrides: str) -> Iterator[LiveRun]:
    """A run after its first step. It has ended when the block is left."""
    run = LiveRun(folder, *overrides)
    with services_here():
        try:
            run.start()
            yield run
        finally:
            run.finish()
    if run.error is not None:
        raise run.error
