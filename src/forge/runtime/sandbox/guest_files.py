"""Reading and writing the work folder of a long-lived sandbox, whose contents the policy controls.

Every path is resolved by the kernel below the work folder: no link leads out of it, no device or pipe is opened, and
nothing waits. It imports the standard library alone: it also travels as text into a sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import signal
import stat
import struct
from collections.abc import Iterator
from typing import Any

from forge.runtime.sandbox import confine

_OPENAT2 = 437
_BENEATH = 0x08 | 0x02
"""RESOLVE_BENEATH and RESOLVE_NO_MAGICLINKS."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

_MOST_ENTRIES = 10_000
"""The most files and folders that are read at once."""

_libc = ctypes.CDLL(None, use_errno=True)


class WorkFolder:
    """The work folder, used as the sandbox's own user."""

    def __init__(self, path: str, *, uid: int | None, most_bytes: int, most_entries: int = _MOST_ENTRIES) -> None:
        self.path, self._uid = path, uid
        self._most_bytes, self._most_entries = most_bytes, most_entries

    def unlock(self, folder: str) -> None:
        """Make a folder usable again that the policy locked, or removed where it can."""
        with self._as_owner():
            try:
                os.chmod(folder, 0o700)
            except FileNotFoundError:
                os.mkdir(folder, 0o700)

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        """Open the folder, and act as its owner meanwhile."""
        self.unlock(self.path)
        with self._as_owner():
            root = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                yield root
            finally:
                os.close(root)

    @contextlib.contextmanager
    def _as_owner(self) -> Iterator[None]:
        if self._uid is None:
            yield
            return
        _libc.setfsgid(self._uid)
        _libc.setfsuid(self._uid)
        try:
            yield
        finally:
            _libc.setfsuid(0)
            _libc.setfsgid(0)
            confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user undoes both
            confine.prctl(confine.PR_SET_DUMPABLE, 0)

    def read(self, path: str, *, most_bytes: int) -> bytes:
        """Return what is in a file."""
        with self._root() as root, _opened(root, path, os.O_RDONLY) as file:
            return _read_regular(file, path, most_bytes)

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace what is in a file; the folders above it are made."""
        if not path or path == ".":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        with self._root() as root:
            _make_folders(root, path.split("/")[:-1])
            with _opened(root, path, os.O_WRONLY | os.O_CREAT, mode) as file:
                _check_regular(file, path)
                os.ftruncate(file, 0)
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(file, rest) :]
                os.fchmod(file, mode)

    def put(self, entries: list[list[Any]], payload: bytes) -> None:
        """Write entries as `collect` gives them."""
        place, view = 0, memoryview(payload)
        for path, kind, mode, size in entries:
            data = bytes(view[place : place + size])
            place += size
            try:
                if kind == "file":
                    self.write(path, data, mode=mode)
                elif kind == "folder":
                    with self._root() as root:
                        _make_folders(root, path.split("/"))
                else:
                    self._link(path, data)
            except OSError as error:
                error.filename = path
                raise

    def _link(self, path: str, target: bytes) -> None:
        *above, name = path.split("/")
        with self._root() as root:
            _make_folders(root, above)
            with _opened(root, "/".join(above) or ".", os.O_PATH | os.O_DIRECTORY) as folder:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                os.symlink(target, os.fsencode(name), dir_fd=folder)

    def collect(self) -> tuple[list[list[Any]], list[list[str]], bytes]:
        """Return entries `[path, kind, mode, size]`, what was left out with the reason, and their bytes one after the
        other. Kinds are file, folder and link."""
        entries: list[list[Any]] = []
        left_out: list[list[str]] = []
        parts: list[bytes] = []
        room = self._most_bytes
        with self._root() as root:
            for path, error in _walk(root):
                if error is None and len(entries) >= self._most_entries:
                    error = f"more than {self._most_entries} files"
                if error is not None:
                    left_out.append([path, error])
                    if len(left_out) >= 100:
                        break
                    continue
                try:
                    kind, mode, data = _take(root, path, room)
                except OSError as problem:
                    left_out.append([path, problem.strerror or str(problem)])
                    continue
                entries.append([path, kind, mode, len(data)])
                parts.append(data)
                room -= len(data)
        return entries, left_out, b"".join(parts)


@contextlib.contextmanager
def _opened(root: int, path: str, flags: int, mode: int = 0) -> Iterator[int]:
    how = struct.pack("QQQ", flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode, _BENEATH)
    if flags & os.O_PATH:
        how = struct.pack("QQQ", flags | os.O_CLOEXEC, 0, _BENEATH)
    name = os.fsencode(path or ".")
    if b"\0" in name:
        raise OSError(errno.EINVAL, "the path contains a NUL byte", path)
    found = int(_libc.syscall(ctypes.c_long(_OPENAT2), ctypes.c_int(root), name, how, ctypes.c_size_t(len(how))))
    if found < 0:
        number = ctypes.get_errno()
        text = "the path leads out of the work folder" if number == errno.EXDEV else os.strerror(number)
        raise OSError(number, text, path)
    try:
        yield found
    finally:
        os.close(found)


def _make_folders(root: int, names: list[str]) -> None:
    done = ""
    for name in names:
        path = f"{done}/{name}" if done else name
        try:
            with _opened(root, path, os.O_PATH | os.O_DIRECTORY):
                pass
        except FileNotFoundError:
            with _opened(root, done, os.O_PATH | os.O_DIRECTORY) as folder:
                os.mkdir(name, 0o755, dir_fd=folder)
        done = path


def _check_regular(file: int, path: str) -> os.stat_result:
    found = os.fstat(file)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return found


def _read_regular(file: int, path: str, most_bytes: int) -> bytes:
    if _check_regular(file, path).st_size > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes", path)
    parts, room = [], most_bytes
    while room > 0:
        data = os.read(file, min(room, 1 << 20))
        if not data:
            break
        parts.append(data)
        room -= len(data)
    return b"".join(parts)


def _take(root: int, path: str, room: int) -> tuple[str, int, bytes]:
    """Return the kind, mode and bytes of one entry."""
    above, _, name = path.rpartition("/")
    with _opened(root, above, os.O_PATH | os.O_DIRECTORY) as folder:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        mode = stat.S_IMODE(found.st_mode) & 0o777
        if stat.S_ISLNK(found.st_mode):
            return "link", mode, os.readlink(os.fsencode(name), dir_fd=folder)
        if stat.S_ISDIR(found.st_mode):
            return "folder", mode, b""
    with _opened(root, path, os.O_RDONLY | os.O_NOFOLLOW) as file:
        return "file", mode, _read_regular(file, path, room)


def _walk(root: int) -> Iterator[tuple[str, str | None]]:
    """Return every path below a folder, each folder before what is in it, in an order that depends on names alone; with
    the reason for a folder that cannot be read."""
    waiting = [""]
    while waiting:
        above = waiting.pop()
        try:
            with _opened(root, above, _FOLDER) as folder, os.scandir(folder) as scan:
                found = itertools.islice(scan, _MOST_ENTRIES + 100)
                entries = sorted((each.name, each.is_dir(follow_symlinks=False)) for each in found)
        except OSError as error:
            yield above, error.strerror or str(error)
            continue
        folders = []
        for name, is_folder in entries:
            path = f"{above}/{name}" if above else name
            yield path, None
            if is_folder:
                folders.append(path)
        waiting += reversed(folders)


def describe(error: OSError | ValueError) -> dict[str, Any]:
    """Return an error for the library."""
    if isinstance(error, ValueError):  # a path that is none
        return {"errno": errno.EINVAL, "error": str(error), "path": None}
    name = error.filename if isinstance(error.filename, str) else None
    return {"errno": error.errno or errno.EIO, "error": error.strerror or str(error), "path": name}
