"""A root folder of its own: what a program sees when namespaces are made with plain system calls.

Called in the first process of a new PID namespace. Afterwards it has no network, its own host name and System V
objects, and a file system with an interpreter and system libraries to read, and one folder, `/tmp`, to write.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Sequence

from forge.runtime.sandbox.confine import NOBODY, PR_SET_DUMPABLE, become, checked, own_uid, prctl, syscall

NEW_USER, NEW_PID = 0x1000_0000, 0x2000_0000
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC, _NEW_NET = 0x0002_0000, 0x0400_0000, 0x0800_0000, 0x4000_0000
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_DETACH = 2
_AT_RECURSIVE = 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_OLD = "/old-root"
_DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Leave some of the namespaces that this process shares."""
    checked(_libc.unshare(flags), "unshare")


def leave(*, with_user: bool) -> None:
    """Let the next fork be the first process of a PID namespace, in a user namespace where that is needed."""
    if not with_user:
        unshare(NEW_PID)
        return
    if os.geteuid() == 0:  # limits on processes do not bind root, whatever it is called inside
        become(own_uid())
        prctl(PR_SET_DUMPABLE, 1)
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEW_USER | NEW_PID)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {uid} 1"),
        ("gid_map", f"{NOBODY} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def make_root(readable: Sequence[str], *, folder_bytes: int, owner: int) -> None:
    """Replace the root folder. `readable` are paths, links and folders, that stay as they are; /tmp belongs to
    `owner` and holds at most `folder_bytes`."""
    unshare(_NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_NET)
    name = b"sandbox"
    checked(_libc.sethostname(name, len(name)), "sethostname")
    _mount(None, "/", None, _PRIVATE | _RECURSIVE)
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "size=1m,nr_inodes=4096,mode=755")
    os.mkdir(f"/tmp{_OLD}", 0o755)
    syscall(_PIVOT_ROOT[os.uname().machine], b"/tmp", f"/tmp{_OLD}".encode())
    os.chdir("/")
    os.mkdir("/tmp", 0o755)  # before what is shown: an interpreter may lie below it
    options = f"size={folder_bytes},nr_inodes=16384,mode=700,uid={owner},gid={owner}"
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV | _NOEXEC, options)
    for path in readable:
        _show(path)
    _make_devices()
    _make_proc()
    os.symlink("/tmp", "/dev/shm")
    checked(_libc.umount2(_OLD.encode(), _DETACH), "umount2")
    os.rmdir(_OLD)
    _restrict("/", _RDONLY, recursive=False)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    checked(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def _restrict(path: str, attributes: int, *, recursive: bool = True) -> None:
    """Add read-only, nosuid, nodev to what is mounted at a path, and to what is mounted below it."""
    record = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = ctypes.c_uint(_AT_RECURSIVE if recursive else 0)
    at_path = ctypes.c_int(-100)
    syscall(_MOUNT_SETATTR, at_path, os.fsencode(path), flags, record, ctypes.c_size_t(len(record)))


def _show(path: str) -> None:
    """Make a path of the old root visible at its place, read-only."""
    source = _OLD + path
    if os.path.islink(source):
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        if not os.path.lexists(path):
            os.symlink(os.readlink(source), path)
        return
    if not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(path, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        open(path, "x").close()
    _mount(source, path, None, _BIND | _RECURSIVE)
    _restrict(path, _RDONLY | _NOSUID | _NODEV)


def _make_devices() -> None:
    os.makedirs("/dev", mode=0o755, exist_ok=True)
    for name in _DEVICES:
        open(f"/dev/{name}", "x").close()
        _mount(f"{_OLD}/dev/{name}", f"/dev/{name}", None, _BIND)
        _restrict(f"/dev/{name}", _NOSUID | _NOEXEC)
    os.symlink("/proc/self/fd", "/dev/fd")


def _make_proc() -> None:
    """The processes of this namespace. Where the old /proc is partly hidden, as in many containers, the kernel refuses
    a new one inside a user namespace; programs then find /proc empty."""
    os.makedirs("/proc", mode=0o755, exist_ok=True)
    with contextlib.suppress(PermissionError):
        _mount("proc", "/proc", "proc", _RDONLY | _NOSUID | _NODEV | _NOEXEC)
