"""What a program is confined by from inside: limits, another user, no new privileges, and system calls it may not make.

This module imports nothing of the library, because it also travels as text into a sandbox in which the library does not
exist. Everything here is called after a fork, in a process that then becomes the program, or ends.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_FIRST_UID = 0x7000_0000
"""Above every range that distributions and container engines hand out, and below 2**31."""

NOBODY = 65534

_NEW_NAMESPACES = 0x7E02_0000
_ERRNO = 0x0005_0000
_KILL_PROCESS = 0x8000_0000
_ALLOW = 0x7FFF_0000

_NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "shmget": 29, "socket": 41, "clone": 56, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103,
        "personality": 135, "modify_ldt": 154, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163,
        "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
        "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176,
        "quotactl": 179, "clock_settime": 227, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249,
        "keyctl": 250, "unshare": 272, "vmsplice": 278, "perf_event_open": 298, "fanotify_init": 300,
        "prlimit64": 302,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320,
        "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "vmsplice": 75, "acct": 89,
        "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106,
        "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162,
        "settimeofday": 170, "adjtimex": 171, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194,
        "socket": 198, "add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220, "swapon": 224, "swapoff": 225,
        "perf_event_open": 241, "prlimit64": 261, "fanotify_init": 262, "name_to_handle_at": 264,
        "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
        "kcmp": 272, "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
_NEWER: dict[str, int] = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442,
    "quotactl_fd": 443, "memfd_secret": 447,
}  # fmt: skip
_CLONE3 = 435
_ARCHITECTURE = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """Raise what the C library's errno says when a call failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int) -> None:
    """Call prctl(2) with one value."""
    zero = ctypes.c_ulong(0)
    checked(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl({option})")


def syscall(number: int, *arguments: Any) -> int:
    """Make a system call that the C library has no function for."""
    return checked(int(_libc.syscall(ctypes.c_long(number), *arguments)), f"system call {number}")


def own_uid() -> int:
    """Return a user that no other process has, where one exists: limits on the processes of a user then bind this run
    and no other. Else `nobody`."""
    wanted = _FIRST_UID + os.getpid()
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return wanted if any(first <= wanted < first + length for first, _, length in ranges) else NOBODY


def become(uid: int) -> None:
    """Give up root, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def kill_user(uid: int) -> None:
    """Kill everything of one user, at one moment: nothing that forks fast enough escapes."""
    killer = os.fork()
    if killer == 0:
        try:
            become(uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(killer, 0)


def set_limits(limits: Mapping[str, int]) -> None:
    """Bind this process and what it starts. A program that ignores SIGXCPU is killed a second later."""
    bounds = {
        resource.RLIMIT_CPU: (limits["cpu_s"], limits["cpu_s"] + 1),
        resource.RLIMIT_AS: (limits["memory"], limits["memory"]),
        resource.RLIMIT_FSIZE: (limits["file_size"], limits["file_size"]),
        resource.RLIMIT_NOFILE: (limits["open_files"], limits["open_files"]),
        resource.RLIMIT_NPROC: (limits["processes"], limits["processes"]),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    for kind, (soft, hard) in bounds.items():
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def filter_calls(*, has_tcp: bool = False) -> None:
    """Refuse system calls that reach for the network, for other processes' memory, for mounts and new namespaces, and
    for memory that no limit counts. Needs no privilege after PR_SET_NO_NEW_PRIVS, and cannot be undone. With `has_tcp`
    TCP sockets can be made, for a network of which the sandbox has nothing but its own loopback address."""
    program = calls_filter(os.uname().machine, has_tcp=has_tcp)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    zero = ctypes.c_ulong(0)
    checked(_libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), header, zero, zero), "prctl(PR_SET_SECCOMP)")


def calls_filter(machine: str, *, has_tcp: bool = False) -> bytes:
    """Return the filter as a classic BPF program, eight bytes an instruction."""
    if machine not in _NUMBERS:
        raise OSError(errno.ENOSYS, f"there is no system call filter for {machine}")
    load, equal, at_least, any_bit, mask, answer = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    numbers = {**_NUMBERS[machine], **_NEWER}
    clone, socket, prlimit = (numbers.pop(name) for name in ("clone", "socket", "prlimit64"))
    code = [(load, 0, 0, 4), (equal, 1, 0, _ARCHITECTURE[machine]), (answer, 0, 0, _KILL_PROCESS), (load, 0, 0, 0)]
    if machine == "x86_64":  # the calls of the x32 interface have numbers of their own
        code += [(at_least, 0, 1, 0x4000_0000), (answer, 0, 0, _ERRNO | errno.ENOSYS)]
    for number in numbers.values():
        code += [(equal, 0, 1, number), (answer, 0, 0, _ERRNO | errno.EPERM)]
    code += [(equal, 0, 1, _CLONE3), (answer, 0, 0, _ERRNO | errno.ENOSYS)]
    refuse, allow = (answer, 0, 0, _ERRNO | errno.EPERM), (answer, 0, 0, _ALLOW)
    code += [(equal, 0, 4, clone), (load, 0, 0, 16), (any_bit, 0, 1, _NEW_NAMESPACES), refuse, allow]
    code += [(equal, 0, 4, prlimit), (load, 0, 0, 16), (equal, 1, 0, 0), refuse, allow]  # of another process
    if has_tcp:  # a Unix socket, or IPv4, a stream, TCP or the default
        code += [(equal, 0, 10, socket), (load, 0, 0, 16), (equal, 8, 0, 1), (equal, 0, 6, 2)]
        code += [(load, 0, 0, 24), (mask, 0, 0, 0xF), (equal, 0, 3, 1)]
        code += [(load, 0, 0, 32), (equal, 2, 0, 0), (equal, 1, 0, 6), refuse, allow]
    else:
        code += [(equal, 0, 4, socket), (load, 0, 0, 16), (equal, 1, 0, 1), refuse, allow, allow]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def restrict_files(*, read: Sequence[str], write: Sequence[str]) -> bool:
    """Let this process see only some paths, through Landlock; False where the kernel has none."""
    try:
        version = syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return False
    every = (1 << (13 + min(version, 3) - 1)) - 1
    reading, of_files = 0b1101, 0b0111 | (every & 1 << 14)
    rules = struct.pack("Q", every)
    ruleset = syscall(444, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
    for path, wanted in [*((path, reading) for path in read), *((path, every) for path in write)]:
        if not os.path.exists(path):
            continue
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = wanted if os.path.isdir(path) else (wanted | 0b10) & of_files
        rule = struct.pack("=Qi", allowed, place)
        syscall(445, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
        os.close(place)
    syscall(446, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)
    return True


def become_program(plan: Mapping[str, Any], *, folder: str) -> None:
    """Confine this process and turn it into the program. Returns only by an exception.

    `plan` has the fields `command`, `environment`, `limits`, `uid` (null where there is no root to give up) and
    `files` (the paths to see, or null where a namespace has settled it). `start` is the folder to start in, where that
    is not `folder`.
    """
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    set_limits(plan["limits"])
    if plan["uid"] is not None:
        become(plan["uid"])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user undoes an earlier one
    os.chdir(plan.get("start") or folder)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if plan["files"] is not None:
        restrict_files(read=plan["files"], write=[folder])
    filter_calls(has_tcp=has_tcp(plan))
    os.execve(plan["command"][0], plan["command"], plan["environment"])


def has_tcp(plan: Mapping[str, Any]) -> bool:
    """Return whether programs may connect to the loopback address of their sandbox."""
    return bool((plan.get("box") or {}).get("port"))


def main() -> None:
    """Inside bubblewrap: the plan is the first argument, the folder is /tmp."""
    plan = json.loads(sys.argv[1])
    if plan["uid"] is not None:
        os.chown("/tmp", plan["uid"], plan["uid"])
    become_program(plan, folder="/tmp")
