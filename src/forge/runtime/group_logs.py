"""The log files of a group of ranks, as its owner sees them. Everything here runs on the control loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from forge.errors import LaunchError
from forge.observe.logs.folder import current_folder, file_name
from forge.observe.logs.setup import shown_options
from forge.observe.phases import PHASES_VARIABLE, has_listener
from forge.runtime.log_pump import CONSOLE
from forge.runtime.relay import relay

if TYPE_CHECKING:
    from forge.runtime.process_watch import ProcessWatch

LAST_WORDS_S: Final = 1.0
"""How long an error waits for the last words of a process that has died."""
NUM_LAST_LINES: Final = 12


class GroupLogs:
    """Where the ranks of one group log to.

    Args:
        label: what the group is called.
        num_ranks: how many ranks it has.
    """

    def __init__(self, label: str, *, num_ranks: int) -> None:
        self._folder, self._num_ranks = current_folder(), num_ranks
        self._claimed = None if self._folder is None else self._folder.claim(label)
        self._name = self._claimed or file_name(label)
        self._written: dict[int, asyncio.Event] = {}

    @property
    def is_open(self) -> bool:
        """Whether the ranks have log files."""
        return self._folder is not None

    def name(self, rank: int) -> str:
        """Return what a rank is called in logs and in the phases of a start."""
        return self._name if self._num_ranks == 1 else f"{self._name}-rank-{rank}"

    @property
    def first(self) -> tuple[str, tuple[str, ...]] | None:
        """The log file of the first rank, without its lines; None where there is none."""
        return None if self._folder is None else (str(self._folder.file(self.name(0))), ())

    def environment(self, rank: int) -> dict[str, str]:
        """Return what a rank has in its environment of how it logs."""
        variables = {PHASES_VARIABLE: str(int(has_listener()))}
        if self._folder is not None:
            return {**variables, **self._folder.variables(self.name(rank)), CONSOLE: relay().address}
        options = shown_options()
        return variables if options is None else {**variables, **options.variables(), "FORGE_LOG_NAME": self.name(rank)}

    async def watch_writer(self, rank: int, pid: int, watch: ProcessWatch) -> None:
        """Note the process that writes a rank's log file, and ends after the rank."""
        if pid and self._folder is not None:
            self._written[rank] = written = asyncio.Event()
            await watch.watch(pid, written.set)

    async def last_words(self, rank: int, watch: ProcessWatch) -> tuple[str, tuple[str, ...]]:
        """Return the log file of a rank that has ended, and its last lines."""
        assert self._folder is not None
        path = str(self._folder.file(self.name(rank)))
        if (written := self._written.get(rank)) is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(written.wait(), LAST_WORDS_S)
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                return path, tuple(await watch.read_end(path, NUM_LAST_LINES))
        except (LaunchError, TimeoutError):  # its host does not answer
            return path, ()

    async def wait_written(self) -> None:
        """Wait until everything that the ranks have printed is in their files; not for long."""
        waiting = [asyncio.create_task(written.wait()) for written in self._written.values()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=LAST_WORDS_S)
            for task in late:
                task.cancel()

    def close(self) -> None:
        """Let the name of the files go: the ranks have ended."""
        if self._folder is not None and self._claimed is not None:
            self._folder.release(self._claimed)
            self._claimed = None
