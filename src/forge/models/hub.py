"""Fetch a repository of a Hugging Face hub into a directory, so that any interruption costs only what was in flight.

    list_files ──Snapshot──▶ select ──Snapshot──▶ plan_download ──Plan──▶ download ──▶ Report

The revision asked for is resolved to a commit once, and every file is fetched at that commit: what arrives is one
consistent snapshot, even if the branch moves meanwhile. `hub_http` speaks to the hub, `hub_listing` knows what it
holds, `hub_files` owns the directory.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

from forge.errors import DownloadError
from forge.models.hub_files import Folder, RemoteFile, corrupt
from forge.models.hub_http import HubClient, PassingFailure
from forge.models.hub_listing import Snapshot, Source

_CHUNK: Final = 1 << 18
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


@dataclass(frozen=True)
class Report:
    """What a finished download left behind. `num_bytes` counts all files, fetched now or there before."""

    output_dir: Path
    commit: str
    num_files: int
    num_bytes: int
    num_files_present: int


class Progress(Protocol):
    """Told what happens, from several threads: `note` at any time, the others one at a time."""

    def begin(self, num_bytes: int, *, num_bytes_present: int) -> None: ...

    def advance(self, num_bytes: int) -> None:
        """So many bytes are on disk; negative when they had to be thrown away."""

    def finish(self, file: RemoteFile, *, was_present: bool) -> None: ...

    def note(self, text: str) -> None: ...


def plan_download(snapshot: Snapshot, *, folder: Folder, max_workers: int) -> Plan:
    """Compare the snapshot with the directory, reading files only where the record cannot vouch for them."""
    _check_owner(snapshot.source, folder)
    for file in snapshot.files:
        folder.target(file.path)
    looked = _in_parallel(
        snapshot.files, lambda file: (file, folder.holds(file)), num_workers=max_workers, stop=threading.Event()
    )
    held = dict(looked)
    present = tuple(file for file in snapshot.files if held[file])
    missing = tuple(file for file in snapshot.files if not held[file])
    return Plan(
        snapshot,
        present,
        missing,
        num_bytes=sum(file.size or 0 for file in snapshot.files),
        num_bytes_to_fetch=sum(max(0, (file.size or 0) - folder.partial_size(file)) for file in missing),
    )


def download(plan: Plan, *, folder: Folder, client: HubClient, progress: Progress, max_workers: int) -> Report:
    """Fetch what is missing. On any error the finished files stay, and the partial ones are continued next time."""
    folder.check_space(plan.num_bytes_to_fetch)
    folder.prepare()
    with folder.lock():
        fetch = _Fetch(plan, folder=folder, client=client, progress=progress)
        return fetch.run(max_workers)


class _Stopped(Exception):
    """Ends a worker whose download was given up; nobody waits for it."""


class _Fetch:
    """One download at work. Workers are daemon threads: Ctrl-C need not wait for a socket that is silent."""

    def __init__(self, plan: Plan, *, folder: Folder, client: HubClient, progress: Progress) -> None:
        self._plan, self._folder, self._client, self._progress = plan, folder, client, progress
        self._stop = threading.Event()
        self._telling = threading.Lock()
        self._num_bytes_left = plan.num_bytes_to_fetch
        self._furthest: dict[str, int] = {}

    def run(self, max_workers: int) -> Report:
        plan, done = self._plan, list(self._plan.present)
        self._progress.begin(plan.num_bytes, num_bytes_present=plan.num_bytes - plan.num_bytes_to_fetch)
        for file in plan.present:
            self._progress.finish(file, was_present=True)
        largest_first = sorted(plan.missing, key=lambda file: -(file.size or 0))
        try:
            for file in _in_parallel(largest_first, self._fetch, num_workers=max_workers, stop=self._stop):
                done.append(file)
                with self._telling:
                    self._progress.finish(file, was_present=False)
        except BaseException:
            # The record only saves work; the reason why the download ended matters more than a failure to write it.
            with contextlib.suppress(DownloadError):
                self._record(done)
            raise
        return self._record(done)

    def _record(self, done: Sequence[RemoteFile]) -> Report:
        source, commit = self._plan.snapshot.source, self._plan.snapshot.commit
        known = self._folder.record.get("files", {})
        entries = {file.path: self._folder.entry(file) for file in done}
        num_bytes = sum(entry["size"] for entry in entries.values())
        report = Report(self._folder.root, commit, len(done), num_bytes, len(self._plan.present))
        self._folder.write_record(
            {
                "repo": source.repo,
                "repo_type": source.repo_type,
                "revision": source.revision,
                "commit": commit,
                "complete": len(done) == len(self._plan.snapshot.files),
                "num_files": report.num_files,
                "num_bytes": report.num_bytes,
                "num_files_present": report.num_files_present,
                "files": dict(sorted({**known, **entries}.items())),
            }
        )
        return report

    def _fetch(self, file: RemoteFile) -> RemoteFile:
        path = self._plan.snapshot.url_path(file)
        self._furthest[file.path] = self._folder.partial_size(file)
        self._folder.drop_stale_partials(file)
        self._client.attempt(lambda: self._continue(file, path), path=path)
        self._check_stop()
        self._folder.publish(file)
        return file

    def _continue(self, file: RemoteFile, path: str) -> None:
        """One connection: append to the partial what the hub sends after its end."""
        self._check_stop()
        offset = self._folder.partial_size(file)
        with self._open_partial(file, offset) as out:
            if offset == file.size:
                return
            try:
                response = self._client.open(path, offset=offset)
            except PassingFailure as failure:
                if failure.is_bad_range:
                    self._restart(out, offset)
                raise
            with response:
                start, total = _span(response)
                if start != offset:
                    self._restart(out, offset)
                    if start != 0:
                        raise PassingFailure(f"the hub sent bytes from {start} on instead of {offset}")
                if file.size is not None and total is not None and total != file.size:
                    self._restart(out, start)
                    raise corrupt(file, f"the hub sends {total} bytes")
                self._copy(response, out, file, total if file.size is None else file.size)

    def _copy(self, response: http.client.HTTPResponse, out: io.FileIO, file: RemoteFile, expected: int | None) -> None:
        received = out.tell()
        while expected is None or received < expected:
            try:
                chunk = response.read1(_CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise self._cut(file, received, str(error) or type(error).__name__) from error
            self._check_stop()
            if not chunk:
                break
            self._write(out, chunk, file)
            received += len(chunk)
            self._advance(len(chunk))
        if expected is not None and received < expected:
            raise self._cut(file, received, "the connection ended")

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    def _cut(self, file: RemoteFile, received: int, reason: str) -> PassingFailure:
        """Only bytes never reached before count as progress, so a hub that ignores ranges cannot keep us for ever."""
        progressed = received > self._furthest[file.path]
        self._furthest[file.path] = max(received, self._furthest[file.path])
        of = "" if file.size is None else f" of {file.size}"
        return PassingFailure(f"{reason} after {received}{of} bytes", progressed=progressed)

    def _open_partial(self, file: RemoteFile, offset: int) -> io.FileIO:
        try:
            out = io.FileIO(self._folder.partial(file), "ab")
        except OSError as error:
            raise self._folder.write_failed(file, error, num_bytes_left=self._num_bytes_left) from error
        if out.tell() > offset:
            out.truncate(offset)
            out.seek(offset)
        return out

    def _write(self, out: io.FileIO, chunk: bytes, file: RemoteFile) -> None:
        rest = memoryview(chunk)
        try:
            while rest:
                rest = rest[out.write(rest) :]
        except OSError as error:
            raise self._folder.write_failed(file, error, num_bytes_left=self._num_bytes_left) from error

    def _restart(self, out: io.FileIO, offset: int) -> None:
        out.truncate(0)
        out.seek(0)
        self._advance(-offset)

    def _advance(self, num_bytes: int) -> None:
        with self._telling:
            self._num_bytes_left -= num_bytes
            self._progress.advance(num_bytes)


def _in_parallel(items: Sequence[A], work: Callable[[A], B], *, num_workers: int, stop: threading.Event) -> Iterator[B]:
    """Results as they come. The first exception is raised here, once `stop` is set and the workers had time to end."""
    todo: queue.SimpleQueue[A] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[B] | Exception] = queue.SimpleQueue()
    for item in items:
        todo.put(item)

    def take() -> None:
        while not stop.is_set():
            try:
                item = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((work(item),))
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


def _span(response: http.client.HTTPResponse) -> tuple[int, int | None]:
    """Where the body starts in the file, and how long the whole file is if the answer says so."""
    if response.status != 206:
        length = response.headers.get("Content-Length")
        return 0, int(length) if length is not None and length.isdecimal() else None
    span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    if span is None:
        raise PassingFailure("the hub sent a part of the file without saying which")
    return int(span[1]), None if span[2] == "*" else int(span[2])


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
