"""The directory that a download fills: which files are there, which are partial, and when one may appear.

Partial files live in `DIR/.forge-download/` under names made of the file's path and its digest, so that a partial of an
older content is never continued with a newer one. A file gets its final name only after its size and digest were
verified and it was flushed to disk. `DIR/.forge-download.json` records what was verified; it saves reading every byte
again on the next call, and nothing breaks when it is missing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forge.errors import DownloadError

PARTIALS: Final = ".forge-download"
RECORD: Final = ".forge-download.json"
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CHUNK: Final = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub lists it.

    `digest` names the content: `sha256:…` for large files, `git:…` (the git blob id) for others, and `commit:…` where
    the hub gives neither; the last can be compared but not computed. `size` is None where the hub does not say.
    """

    path: str
    size: int | None
    digest: str


class Folder:
    """The output directory. Nothing is created before `prepare`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with self._accessing():
            if root.exists() and not root.is_dir():
                raise DownloadError(
                    "The output directory is a file.",
                    path="--output-dir",
                    value=str(root),
                    rule="a directory, or a path where one can be made",
                    repair="choose another --output-dir, or move the file away",
                )
        self.record: dict[str, Any] = self._read_record()

    def target(self, name: str) -> Path:
        """Return where the file `name` goes. Refuse a name that would leave the directory or touch our own files."""
        parts = name.split("/")
        is_plain = name.isprintable() and "\\" not in name and not any(part in {"", ".", ".."} for part in parts)
        path = self.root / name
        if (
            not is_plain
            or parts[0] in {PARTIALS, RECORD}
            or not path.parent.resolve().is_relative_to(self.root.resolve())
        ):
            raise DownloadError(
                "The hub lists a file whose name is not allowed.",
                path=str(self.root),
                value=name,
                rule="a relative path that stays inside the output directory",
                repair="do not trust this repository; or leave the file out with --ignore-patterns",
            )
        return path

    def partial(self, file: RemoteFile) -> Path:
        return self.root / PARTIALS / f"{_key(file.path)}.{_key(file.digest)}.partial"

    def partial_size(self, file: RemoteFile) -> int:
        """Return the number of bytes that need not be fetched again."""
        try:
            size = self.partial(file).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return 0
        return size if file.size is None or size <= file.size else 0

    def holds(self, file: RemoteFile) -> bool:
        """Return whether the right content is there: by the record if untouched since, else by its digest."""
        path = self.target(file.path)
        with self._accessing(file.path):
            try:
                stat = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return False
            if not path.is_file() or (file.size is not None and stat.st_size != file.size):
                return False
            if self.record.get("files", {}).get(file.path) == self.entry(file):
                return True
            return compute_digest(path, like=file.digest) == file.digest

    def free_bytes(self) -> int:
        """Return the free space on the file system that holds the directory, or will."""
        existing = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free

    def prepare(self) -> None:
        with self._accessing():
            (self.root / PARTIALS).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory against a second download; the lock ends with the process, however that ends."""
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DownloadError(
                    "Another download is using the output directory.",
                    path="--output-dir",
                    value=str(self.root),
                    rule="one download at a time per directory",
                    repair="wait for it to end, or choose another --output-dir",
                ) from error
            except OSError as error:
                # Some network file systems have no flock; a download there goes without.
                if error.errno not in {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF}:
                    raise
            yield
        finally:
            os.close(descriptor)

    def drop_stale_partials(self, file: RemoteFile) -> None:
        """Remove what was fetched of other contents of the same path."""
        keep = self.partial(file)
        for path in keep.parent.glob(f"{_key(file.path)}.*.partial"):
            if path != keep:
                path.unlink()

    def open_partial(self, file: RemoteFile) -> io.FileIO:
        """Open the partial at its end; one that is longer than the file is emptied first."""
        offset = self.partial_size(file)
        with self._accessing(file.path):
            out = io.FileIO(self.partial(file), "ab")
            if out.tell() > offset:
                out.truncate(offset)
                out.seek(offset)
        return out

    def append(self, out: io.FileIO, chunk: bytes, file: RemoteFile) -> None:
        """Write all of `chunk`; on a full disk the partial keeps what fitted."""
        rest = memoryview(chunk)
        with self._accessing(file.path, num_bytes_missing=(file.size or 0) - out.tell()):
            while rest:
                rest = rest[out.write(rest) :]

    def publish(self, file: RemoteFile) -> None:
        """Verify the partial, flush it, and give it its final name. A wrong one is removed and never appears."""
        partial, target = self.partial(file), self.target(file.path)
        size = partial.stat().st_size
        found = compute_digest(partial, like=file.digest)
        if (file.size is not None and size != file.size) or (found is not None and found != file.digest):
            partial.unlink()
            raise DownloadError(
                "A file did not match the hub's description; it was discarded.",
                path=file.path,
                value=f"{size} bytes, {found or 'no digest'}",
                rule=f"{'any number of' if file.size is None else file.size} bytes, {file.digest}",
                repair="run the command again; if it fails again, the copy on the hub or on a proxy is damaged",
            )
        with self._accessing(file.path):
            with partial.open("rb") as content:
                os.fsync(content.fileno())
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial, target)

    def check_space(self, num_bytes: int) -> None:
        free = self.free_bytes()
        if num_bytes > free:
            raise DownloadError(
                "There is not enough space for the download.",
                path=str(self.root),
                value=f"{free} bytes free",
                rule=f"{num_bytes} more bytes are needed",
                repair="make room, choose another --output-dir, or leave files out with --ignore-patterns",
            )

    def entry(self, file: RemoteFile) -> dict[str, Any]:
        """Return what the record says about a verified file; while size and time stay the same, so does the digest."""
        with self._accessing(file.path):
            stat = self.target(file.path).stat()
        return {"size": stat.st_size, "digest": file.digest, "mtime_ns": stat.st_mtime_ns}

    def write_record(self, record: Mapping[str, object]) -> None:
        """Replace the record atomically, and remove the directory of partials if none is left."""
        draft = self.root / PARTIALS / "record"
        with self._accessing(RECORD):
            draft.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            os.replace(draft, self.root / RECORD)
            if not any(draft.parent.iterdir()):
                draft.parent.rmdir()

    def _read_record(self) -> dict[str, Any]:
        try:
            record = json.loads((self.root / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) and isinstance(record.get("files"), dict) else {}

    @contextlib.contextmanager
    def _accessing(self, name: str = "", *, num_bytes_missing: int = 0) -> Iterator[None]:
        """Turn what the file system refuses inside into a `DownloadError`."""
        try:
            yield
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise DownloadError(
                    "No space is left for the download; fetched files are kept.",
                    path=str(self.root / name),
                    value=f"{error.strerror}; {self.free_bytes()} bytes free",
                    rule=f"{num_bytes_missing} more bytes are needed for this file",
                    repair="make room, then run the same command again: it resumes",
                ) from error
            raise DownloadError(
                "The output directory cannot be read or written.",
                path=str(self.root / name),
                value=error.strerror or str(error),
                rule="its files must be readable and writable, and no directory may stand where a file goes",
                repair="choose another --output-dir, or repair its permissions",
            ) from error


def compute_digest(path: Path, *, like: str) -> str | None:
    """Return the digest of a file in the form of `like`, or None for a form that says nothing about the bytes."""
    kind = like.split(":", 1)[0]
    if kind not in {"sha256", "git"}:
        return None
    with path.open("rb") as source:
        if kind == "sha256":
            digest = hashlib.sha256()
        else:
            digest = hashlib.sha1(b"blob %d\0" % os.fstat(source.fileno()).st_size, usedforsecurity=False)
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
    return f"{kind}:{digest.hexdigest()}"


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
