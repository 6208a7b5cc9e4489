"""Download a repository of a Hugging Face hub into a directory; an interruption costs only the bytes in flight.

    Hub.list_files ──Snapshot──▶ select ──Snapshot──▶ plan_download ──Plan──▶ download ──▶ the record

Requests, redirects, tokens and listings are those of `huggingface_hub`. Its own downloader is not used: it starts an
interrupted file again from byte 0, and verifies no digests (docs/decisions.md). The revision is resolved to a commit
once, and every file is fetched at that commit. `hub_requests` holds the requests, `hub_files` the directory.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from forge.errors import DownloadError
from forge.models.hub_files import Folder, RemoteFile
from forge.models.hub_requests import Hub, Snapshot, Source

# A worker that is writing ends well within this; one that waits for the network sees `stop` before it writes again.
_GRACE_S: Final = 2.0

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Plan:
    """Which files of a snapshot are in the directory already, and how much of the others must still be fetched."""

    snapshot: Snapshot
    present: tuple[RemoteFile, ...]
    missing: tuple[RemoteFile, ...]
    num_bytes: int
    num_bytes_to_fetch: int


class Progress(Protocol):
    """Receives events from several threads: `note` at any time, the others one at a time."""

    def begin(self, num_bytes: int, *, num_bytes_present: int) -> None: ...

    def advance(self, num_bytes: int) -> None:
        """Count bytes that are on disk now; negative when they had to be thrown away."""

    def finish(self, file: RemoteFile, *, was_present: bool) -> None: ...

    def note(self, text: str) -> None: ...


def plan_download(snapshot: Snapshot, *, folder: Folder, max_workers: int) -> Plan:
    """Compare the snapshot with the directory, reading files only where the record cannot vouch for them."""
    _check_owner(snapshot.source, folder)
    for file in snapshot.files:
        folder.target(file.path)
    held = dict(
        _in_parallel(
            snapshot.files, lambda file: (file, folder.holds(file)), num_workers=max_workers, stop=threading.Event()
        )
    )
    missing = tuple(file for file in snapshot.files if not held[file])
    return Plan(
        snapshot,
        tuple(file for file in snapshot.files if held[file]),
        missing,
        num_bytes=sum(file.size or 0 for file in snapshot.files),
        num_bytes_to_fetch=sum(max(0, (file.size or 0) - folder.partial_size(file)) for file in missing),
    )


def download(plan: Plan, *, folder: Folder, hub: Hub, progress: Progress, max_workers: int) -> dict[str, Any]:
    """Fetch what is missing and return the record. After an error the finished files stay; the next call resumes."""
    folder.check_space(plan.num_bytes_to_fetch)
    folder.prepare()
    with folder.lock():
        return _Fetch(plan, folder=folder, hub=hub, progress=progress).run(max_workers)


class _Stopped(Exception):
    """Ends a worker whose download has failed elsewhere."""


class _Fetch:
    """One running download. Workers are daemon threads: Ctrl-C need not wait for a silent socket."""

    def __init__(self, plan: Plan, *, folder: Folder, hub: Hub, progress: Progress) -> None:
        self._plan, self._folder, self._hub, self._progress = plan, folder, hub, progress
        self._stop = threading.Event()
        self._reporting = threading.Lock()

    def run(self, max_workers: int) -> dict[str, Any]:
        plan, done = self._plan, list(self._plan.present)
        self._progress.begin(plan.num_bytes, num_bytes_present=plan.num_bytes - plan.num_bytes_to_fetch)
        for file in plan.present:
            self._progress.finish(file, was_present=True)
        largest_first = sorted(plan.missing, key=lambda file: -(file.size or 0))
        try:
            for file in _in_parallel(largest_first, self._fetch, num_workers=max_workers, stop=self._stop):
                done.append(file)
                with self._reporting:
                    self._progress.finish(file, was_present=False)
        except BaseException:
            # The record only saves work; the reason why the download ended matters more than a failure to write it.
            with contextlib.suppress(DownloadError):
                self._record(done)
            raise
        return self._record(done)

    def _record(self, done: Sequence[RemoteFile]) -> dict[str, Any]:
        source, snapshot = self._plan.snapshot.source, self._plan.snapshot
        entries = {file.path: self._folder.entry(file) for file in done}
        record = {
            "repo": source.repo,
            "repo_type": source.repo_type,
            "revision": source.revision,
            "commit": snapshot.commit,
            "complete": len(done) == len(snapshot.files),
            "num_files": len(done),
            "num_bytes": sum(entry["size"] for entry in entries.values()),
            "num_files_present": len(self._plan.present),
            "files": dict(sorted({**self._folder.record.get("files", {}), **entries}.items())),
        }
        self._folder.write_record(record)
        return record

    def _fetch(self, file: RemoteFile) -> RemoteFile:
        url = self._hub.url(self._plan.snapshot, file)
        self._folder.drop_stale_partials(file)
        self._hub.attempt(
            lambda: self._continue(file, url), at=url, num_bytes_received=lambda: self._folder.partial_size(file)
        )
        self._check_stop()
        self._folder.publish(file)
        return file

    def _continue(self, file: RemoteFile, url: str) -> None:
        """Append to the partial what the hub sends after its end, over one connection."""
        self._check_stop()
        with self._folder.open_partial(file) as out:
            offset = out.tell()
            if offset == file.size:
                return
            with self._hub.open(url, offset=offset) as (start, chunks):
                if start != offset:
                    out.truncate(start)
                    out.seek(start)
                    self._advance(start - offset)
                for chunk in chunks:
                    self._check_stop()
                    self._folder.append(out, chunk, file)
                    self._advance(len(chunk))

    def _advance(self, num_bytes: int) -> None:
        with self._reporting:
            self._progress.advance(num_bytes)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _Stopped


def _in_parallel(items: Sequence[A], work: Callable[[A], B], *, num_workers: int, stop: threading.Event) -> Iterator[B]:
    """Yield results as they come. Raise the first exception, once `stop` is set and the workers had time to end."""
    todo: queue.SimpleQueue[A] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[B] | Exception] = queue.SimpleQueue()
    for item in items:
        todo.put(item)

    def take() -> None:
        while not stop.is_set():
            try:
                done.put((work(todo.get_nowait()),))
            except queue.Empty:
                return
            except Exception as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
                done.put(error)
                return

    workers = [
        threading.Thread(target=take, name="forge-download", daemon=True) for _ in range(min(num_workers, len(items)))
    ]
    for worker in workers:
        worker.start()
    try:
        for _ in items:
            outcome = done.get()
            if isinstance(outcome, Exception):
                stop.set()
                for worker in workers:
                    worker.join(_GRACE_S)
                raise outcome
            yield outcome[0]
    finally:
        stop.set()


def _check_owner(source: Source, folder: Folder) -> None:
    owner = (folder.record.get("repo"), folder.record.get("repo_type"))
    if folder.record and owner != (source.repo, source.repo_type):
        raise DownloadError(
            f"The output directory holds another repository: {owner[0]}.",
            path="--output-dir",
            value=str(folder.root),
            rule="one repository per directory, so that the files of two models never mix",
            repair="choose another --output-dir, or remove the old one",
        )
