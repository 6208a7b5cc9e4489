"""Commands for a run in this process, at a known step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forge.loops.run_client import RunClient
from forge.loops.workers import Workers


class AtVersions:
    """A `watch` of `train_watched` that gives commands when generators are to load a version.

    `on[v]` gets a `RunClient` in a thread of its own. The run continues once it knows of the command. Step v is taken
    then, and settings for the next one are decided: what is saved or evaluated is step v, and what is set is set after
    step v + 1.
    """

    def __init__(self, folder: Path, on: Mapping[int, Callable[[RunClient], Any]]) -> None:
        self._folder, self._on = folder, on
        self._threads = ThreadPoolExecutor(len(on))
        self._asked: dict[int, Future[Any]] = {}

    async def __call__(self, workers: Workers, version: int) -> None:
        if version not in self._on:
            return
        run = RunClient(self._folder, timeout_s=600)
        before = await asyncio.to_thread(num_waiting, run)
        asked = self._asked[version] = self._threads.submit(self._on[version], run)
        while not asked.done() and await asyncio.to_thread(num_waiting, run) == before:
            pass

    def answers(self) -> dict[int, Any]:
        """Return what was returned or raised, by version, when the run is over."""
        self._threads.shutdown()
        return {version: asked.exception() or asked.result() for version, asked in self._asked.items()}


def num_waiting(run: RunClient) -> int:
    """How many commands wait for the end of the step."""
    return sum(run.show().commands.values())
