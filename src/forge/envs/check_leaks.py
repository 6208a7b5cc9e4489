"""What this process has open: tasks, processes, files, threads and sandboxes, to find what episodes leave behind."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

GRACE_S: Final = 2.0
"""How long things may take to go after an episode has ended."""
_LOOK_S: Final = 0.05
_OWN_THREADS: Final = "asyncio_"
"""The name of the threads of `asyncio.to_thread`, which stay for the next call."""


SHARED_TASK: Final = "forge shared "
"""How names of tasks begin that belong to no episode, such as those that watch servers of all episodes."""


@dataclass(frozen=True, slots=True)
class OpenResources:
    """What is open, as (kind, identity, label) of each."""

    entries: frozenset[tuple[str, str, str]]

    @classmethod
    def now(cls, *, with_garbage: bool = False) -> Self:
        """Look at this process. Garbage is collected first, unless it may count as open."""
        if not with_garbage:
            gc.collect()
        return cls(frozenset((*_processes(), *_files(), *_threads(), *_sandboxes())))

    def since(self, before: Self) -> list[tuple[str, str]]:
        """Return kind and label of what is open now and was not before."""
        return sorted((kind, label) for kind, _, label in self.entries - before.entries)


async def resources_after(before: OpenResources, *, grace_s: float = GRACE_S) -> OpenResources:
    """Return what is open, once nothing is new or `grace_s` have passed."""
    loop = asyncio.get_running_loop()
    until = loop.time() + grace_s
    found = OpenResources.now(with_garbage=True)  # a collection takes long, and mostly nothing is new
    if found.since(before):
        found = OpenResources.now()
    while found.since(before) and loop.time() < until:
        await asyncio.sleep(_LOOK_S)  # processes that were ended go when they go
        found = OpenResources.now()
    return found


async def pending_since(before: Iterable[asyncio.Task[object]], *, grace_s: float = GRACE_S) -> list[str]:
    """Wait for tasks that were started since `before`, and return the names of those that stay."""
    left = _started_since(before)
    if not left:
        return []
    _, pending = await asyncio.wait(left, timeout=grace_s)
    return sorted(_task_name(task) for task in pending)


async def cancel_since(before: Iterable[asyncio.Task[object]], *, grace_s: float = GRACE_S) -> None:
    """Cancel tasks that were started since `before`, and wait for their end."""
    left = _started_since(before)
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=grace_s)


def _started_since(before: Iterable[asyncio.Task[object]]) -> set[asyncio.Task[object]]:
    started = asyncio.all_tasks() - set(before) - {asyncio.current_task()}
    return {task for task in started if not task.get_name().startswith(SHARED_TASK)}


def counted(labels: Iterable[str], *, most: int = 3) -> str:
    """Return labels with their numbers, the most frequent first."""
    counts = Counter(labels).most_common()
    shown = [label if count == 1 else f"{label} ({count} times)" for label, count in counts[:most]]
    return ", ".join(shown) + (f" and {len(counts) - most} more" if len(counts) > most else "")


def _task_name(task: asyncio.Task[object]) -> str:
    coroutine = task.get_coro()
    return getattr(coroutine, "__qualname__", None) or task.get_name()


def _processes() -> Iterable[tuple[str, str, str]]:
    for folder in Path("/proc/self/task").glob("*"):
        try:
            children = (folder / "children").read_text().split()
        except OSError:
            continue
        for pid in children:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            except OSError:
                continue
            if state != "Z" and "resource_tracker" not in line:
                yield "process", pid, line[:80] or f"process {pid}"


def _files() -> Iterable[tuple[str, str, str]]:
    folder = "/proc/self/fd"
    for name in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue  # the listing's own, closed since
        kind = target.partition(":")[0]
        yield (
            "file descriptor",
            f"{name} {target}",
            kind if target.startswith(("socket:", "pipe:", "anon_")) else target,
        )


def _threads() -> Iterable[tuple[str, str, str]]:
    for thread in threading.enumerate():
        if not thread.name.startswith(_OWN_THREADS):
            yield "thread", str(thread.ident), thread.name


def _sandboxes() -> Iterable[tuple[str, str, str]]:
    module = sys.modules.get("forge.runtime.sandbox.box")
    if module is None:
        return
    for each in gc.get_objects():
        if type(each) is module.Box and each.is_open:  # isinstance would ask proxies for their class, which may act
            yield "sandbox", str(id(each)), repr(each)
