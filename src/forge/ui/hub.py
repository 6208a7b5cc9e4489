"""Looks at the folders again and again while pages are open, and tells the pages what has changed.

Files are looked at every `interval_s`, the list of folders less often: a notification by the system would not come for
a folder that another machine writes to. When no page is open, nothing is looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from forge.ui.list_part import ListPart
from forge.ui.live_run import LiveRun
from forge.ui.run_list import RunList

T = TypeVar("T")

MAX_LIVE_CELLS: Final = 48_000_000
"""Numbers of all runs that are kept in memory, 192 MB. The run that was looked at longest ago goes first."""
_SCAN_EVERY: Final = 6
"""So many looks at files are between two listings of the folders."""
_SCAN_SHARE: Final = 20
"""Listing the folders takes at most a twentieth of the time."""


class Hub:
    """What all pages share: the list of runs, the runs that are looked at, and the tasks that follow them."""

    def __init__(self, root: Path, *, interval_s: float = 0.5) -> None:
        self.runs = RunList(root)
        self._interval_s = interval_s
        self._live: OrderedDict[str, LiveRun] = OrderedDict()
        self._watched: dict[str, int] = {}
        self._num_pages = 0
        self._changed = asyncio.Event()
        self._opened = asyncio.Event()
        self._versions: dict[str, int] = {}
        """At which version of the list each run has changed last, in that order."""
        self._known: set[str] = set()
        self.list_version = 0
        """Counts changes of the list."""
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="forge-ui")
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Find the runs, and follow them from now on."""
        await self.call(self.runs.scan)
        self._tasks = [asyncio.create_task(self._follow_list()), asyncio.create_task(self._follow_runs())]

    async def failed(self) -> None:
        """Wait until following has failed, and raise why. It never ends by itself."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self) -> None:
        """Stop looking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(cancel_futures=True)

    async def call(self, work: Callable[..., T], *arguments: object) -> T:
        """Run work that blocks in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(work, *arguments))

    # ---- For pages

    @contextlib.asynccontextmanager
    async def page(self, run_id: str | None) -> AsyncIterator[None]:
        """Follow the list, and a run, while the block is open."""
        self._num_pages += 1
        if run_id is not None:
            self._watched[run_id] = self._watched.get(run_id, 0) + 1
        self._opened.set()
        try:
            yield
        finally:
            self._num_pages -= 1
            if run_id is not None:
                self._watched[run_id] -= 1
                if not self._watched[run_id]:
                    del self._watched[run_id]

    @property
    def change(self) -> asyncio.Event:
        """An event that is set when something changes. Take it before you look, and wait for it after."""
        return self._changed

    async def live(self, run_id: str) -> LiveRun | None:
        """Return a run with the first part of its metrics read; None where there is no such run."""
        folder = self.runs.folder(run_id)
        if folder is None:
            return None
        run = self._live.get(run_id)
        if run is None:
            run = self._live[run_id] = LiveRun(folder)
            self._make_room()
        self._live.move_to_end(run_id)
        if run.version == 0:
            await self.call(run.advance)
        return run

    def list_since(self, version: int, *, limit: int | None = None) -> ListPart:
        """Return what has changed in the list after a version of it: all, or the first `limit` changes."""
        if version > self.list_version:  # of another server
            version = 0
        changed: list[tuple[str, int]] = []
        for name, at in reversed(self._versions.items()):
            if at <= version:
                break
            changed.append((name, at))
        changed.reverse()
        has_more = limit is not None and len(changed) > limit
        part = changed[:limit]
        known = self.runs.summaries
        return ListPart(
            version=part[-1][1] if has_more else self.list_version,
            root=str(self.runs.root),
            is_complete=self.runs.is_complete and not has_more,
            is_cut=self.runs.is_cut,
            runs=[known[name] for name, _ in part if name in known],
            gone=[name for name, _ in part if name not in known],
            has_more=has_more,
        )

    # ---- Following

    async def _follow_list(self) -> None:
        while True:
            began = time.monotonic()
            await self.call(self.runs.scan)
            was_complete = self.runs.is_complete
            await self.call(self._summarise, asyncio.get_running_loop())
            self.list_version += not was_complete
            known = set(self.runs.summaries)
            for name in self._known - known:
                self._note(name)
                self._live.pop(name, None)
            self._known = known
            self._notify()
            took = time.monotonic() - began
            await asyncio.sleep(max(_SCAN_EVERY * self._interval_s, _SCAN_SHARE * took))
            await self._until_page()

    def _summarise(self, loop: asyncio.AbstractEventLoop) -> None:
        """Summarise runs, in a thread, and tell the pages now and then how far that is."""
        last = time.monotonic()
        for summary in self.runs.summarise():
            loop.call_soon_threadsafe(self._note, summary.id)
            if time.monotonic() - last > self._interval_s:
                last = time.monotonic()
                loop.call_soon_threadsafe(self._notify)

    async def _follow_runs(self) -> None:
        while True:
            await self._until_page()
            more = False
            for run_id in list(self._watched):
                more = await self._follow(run_id) or more
            if not more:
                await asyncio.sleep(self._interval_s)

    async def _follow(self, run_id: str) -> bool:
        """Read what is new of a run; whether there is more."""
        run = await self.live(run_id)
        if run is None:
            return False
        before, was = run.version, self.runs.summary(run_id)
        more = await self.call(run.advance)
        summary = await self.call(self.runs.refresh, run_id)
        if summary != was:
            self._note(run_id)
        if run.version != before or summary != was:
            self._notify()
        return more

    async def _until_page(self) -> None:
        while not self._num_pages:
            self._opened.clear()
            await self._opened.wait()

    def _note(self, run_id: str) -> None:
        self.list_version += 1
        self._versions.pop(run_id, None)
        self._versions[run_id] = self.list_version

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def _make_room(self) -> None:
        """Forget the metrics of runs that nobody looks at, if there are too many."""
        total = sum(run.num_cells for run in self._live.values())
        for name in [name for name in self._live if name not in self._watched][:-1]:
            if total <= MAX_LIVE_CELLS:
                return
            total -= self._live.pop(name).num_cells
