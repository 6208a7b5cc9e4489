"""Segments: packed memory that other processes can map.

A segment is an anonymous file (a memfd, or an unlinked file on disk where memory is short), so that nothing has to be
swept up after a crash: the kernel frees it with the last process that has it open. Others on the host open it through
`/proc/<pid>/fd/<fd>`. Its name, which says which run and key it belongs to, shows in `/proc/<pid>/maps`.

The first page holds a stamp, which is another one after every filling. A reader that finds the stamp it was told,
before and after it has read, has read one filling and not parts of two.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import re
import resource
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from forge.errors import StoreError

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("forge.store")
_MAGIC = b"forgeseg"
_STAMP = struct.Struct("<8sQ")
STAMP_SIZE = _STAMP.size
_numbers = itertools.count(1)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python's mmap has no name for
LIMIT = "FORGE_STORE_MEMORY_GB"
"""How much memory one process may use for segments; more goes to disk. Unset: what the machine has."""


def pack_stamp(stamp: int) -> bytes:
    return _STAMP.pack(_MAGIC, stamp)


def unpack_stamp(data: bytes) -> int:
    """Return the stamp; 0 if there is none."""
    magic, stamp = _STAMP.unpack_from(data, 0)
    return int(stamp) if magic == _MAGIC else 0


class Segment:
    """A segment of this process, or of another that was opened here."""

    def __init__(
        self, name: str, fd: int, size: int, *, is_own: bool, is_private: bool = False, is_sparse: bool = False
    ) -> None:
        self.name, self.size = name, size
        self.num_used = 0 if is_sparse else size
        """Bytes that have memory, or are to have it."""
        self.is_on_disk = False
        self.is_writable = is_own or is_private
        if is_own:
            self.map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            if not is_sparse:
                _populate(self.map)
        elif is_private:
            # Written pages become the reader's own: it may change what it got without anybody else seeing that.
            self.map = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        else:
            self.map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        self.fd = fd  # last: whoever made it closes it if it could not be mapped

    def flat(self) -> Tensor:
        """Return the whole segment as bytes. The tensor keeps the mapping alive; write only to own segments."""
        import warnings

        import torch

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self.map, dtype=torch.uint8)

    @property
    def stamp(self) -> int:
        return unpack_stamp(self.map[:STAMP_SIZE])

    def set_stamp(self, stamp: int) -> None:
        """Mark what is in the segment now; 0 while it is being written."""
        self.map[:STAMP_SIZE] = pack_stamp(stamp)

    def close_fd(self) -> None:
        """Close the descriptor: no other process can open the segment through this one any more; mappings stay."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            with contextlib.suppress(OSError):
                self.close_fd()

    def __repr__(self) -> str:
        return f"Segment({self.name!r}, {self.size} bytes{', on disk' if self.is_on_disk else ''})"


def _populate(mapped: mmap.mmap) -> None:
    """Enter all pages of a mapping at once, as MAP_POPULATE does, which would stop every thread of the process for half
    a second per GiB, and with them whatever answers for it. Where the kernel cannot (before 5.14), they come one by one
    as they are touched."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), _POPULATE_WRITE)


def open_segment(
    name: str, *, pid: int, fd: int, size: int, is_private: bool = False, keep_fd: bool = False
) -> Segment:
    """Open a segment of another process on this host. OSError if that process has ended or closed it.

    With `keep_fd` it can be opened by others through this process in turn.
    """
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(own).st_size < size:
            raise FileNotFoundError(f"descriptor {fd} of process {pid} is not segment {name}")
        segment = Segment(name, own, size, is_own=False, is_private=is_private)
    except BaseException:
        os.close(own)
        raise
    if not keep_fd:
        segment.close_fd()
    return segment


class SegmentPool:
    """The segments that this process has made."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._segments: dict[str, Segment] = {}
        self._guard = threading.Lock()
        self._has_warned = False

    def create(self, key: str, size: int, *, name: str = "") -> Segment:
        """Return a new segment, in memory where that is left, else on disk."""
        name = name or self._name(key)
        room = self.room()
        try:
            if size > room:
                self._warn(name, size, room)
            segment = _make(name, size, is_on_disk=size > room)
        except OSError as error:
            raise StoreError(
                f"no segment of {size / 2**30:.2f} GiB can be made: {error.strerror}",
                path=key,
                value=size,
                rule=f"{room / 2**30:.2f} GiB of memory, or as much on the disk of {tempfile.gettempdir()}, are free",
                repair="keep fewer versions (keep=1), publish in bfloat16, or give the machine or container more memory"
                if error.errno != 24
                else "raise the limit of open files: `ulimit -n`; or put many small tensors as one dict",
            ) from None
        with self._guard:
            self._segments[name] = segment
        return segment

    def create_sparse(self, key: str, size: int) -> Segment:
        """Return a new segment whose pages take memory as they are written. Whoever writes them asks for `room` before,
        and adds to the segment's `num_used`."""
        name = self._name(key)
        fd = _memory(name)
        try:
            os.ftruncate(fd, size)
            segment = Segment(name, fd, size, is_own=True, is_sparse=True)
        except BaseException:
            os.close(fd)
            raise
        with self._guard:
            self._segments[name] = segment
        return segment

    def _name(self, key: str) -> str:
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", key)[-60:]
        return f"forge-{self._run}-{plain}-{os.getpid()}-{next(_numbers)}"

    def room(self) -> int:
        """Return the bytes of memory that segments of this process may still take."""
        with self._guard:
            used = sum(segment.num_used for segment in self._segments.values() if not segment.is_on_disk)
        return _room(used)

    def _warn(self, name: str, size: int, room: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "segment %s needs %.2f GiB of memory and %.2f GiB are left: it goes to %s, which is slower. Keep fewer "
                "versions, publish in bfloat16, or raise the memory limit (%s, or that of the container).",
                name,
                size / 2**30,
                room / 2**30,
                tempfile.gettempdir(),
                LIMIT,
            )

    def get(self, name: str) -> Segment | None:
        with self._guard:
            return self._segments.get(name)

    def drop(self, name: str) -> None:
        """Release a segment; its memory is freed when no process has it mapped any more."""
        with self._guard:
            segment = self._segments.pop(name, None)
        if segment is not None:
            segment.close_fd()

    def close(self) -> None:
        with self._guard:
            names = list(self._segments)
        for name in names:
            self.drop(name)

    def __len__(self) -> int:
        return len(self._segments)


def _make(name: str, size: int, *, is_on_disk: bool) -> Segment:
    fd = _on_disk() if is_on_disk else _memory(name)
    try:
        os.posix_fallocate(fd, 0, size)  # all pages at once: one by one, as they are touched, costs five times as much
        segment = Segment(name, fd, size, is_own=True)
    except BaseException:
        os.close(fd)
        raise
    segment.is_on_disk = is_on_disk
    return segment


def _on_disk() -> int:
    """Return the descriptor of an unlinked file."""
    return os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _memory(name: str) -> int:
    """Return the descriptor of an anonymous file in memory."""
    _raise_file_limit()
    return os.memfd_create(name, os.MFD_CLOEXEC)


def _raise_file_limit() -> None:
    """Raise the limit of open files: segments are files, and 1024 of them, a usual limit, are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _room(used: int) -> int:
    """Return the bytes of memory that segments may still take."""
    limit = os.environ.get(LIMIT)
    room = _available() - (256 << 20)  # something must be left for everybody else
    if limit:
        try:
            room = min(room, int(float(limit) * 2**30) - used)
        except ValueError:
            raise StoreError(
                f"{LIMIT} is not a number", path=LIMIT, value=limit, rule="GiB, such as 16 or 0.5", repair="unset it"
            ) from None
    return max(0, room)


def _available() -> int:
    """Return the bytes of memory that are available, on the machine and in the container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int(Path(limit).read_text()) - int(Path(usage).read_text()))
    return free


def when_unmapped(segment: Segment, callback: Callable[[], object]) -> None:
    """Call back when the last tensor that looks at this mapping is gone."""
    weakref.finalize(segment.map, callback)
