"""The process between the library and a program in a sandbox.

It starts the program behind the boundary that was asked for, and waits for its end or for the end of a pipe
whose other end the library holds: when that closes, because the time is up or because the library's process died, the
launcher kills everything it started. It exits only when nothing of that is left, so that what waits for the launcher
waits for all. It imports the standard library alone, and everything before it changes its root folder.

Events go to the library through a pipe, a JSON object on a line each: `started`, then `ended` with the wait status and
the processor time, or `failed` with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from forge.runtime.sandbox import confine

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

_NUM_OWN = 3
"""Processes of ours that count as the program's own where both have the same user: launcher, first process, a spare."""


def main() -> None:
    """Run a plan. `argv` has the descriptors of the plan, of the events, and of a pipe that the library holds open."""
    plan_fd, events_fd, alive_fd = (int(word) for word in sys.argv[1:4])
    for descriptor in (plan_fd, events_fd, alive_fd):
        os.set_inheritable(descriptor, False)
    with open(plan_fd, encoding="utf-8") as file:
        plan = json.load(file)
    run_plan(plan, events_fd, alive_fd)


def run_plan(plan: dict[str, Any], events_fd: int, alive_fd: int) -> None:
    """Run a plan to its end and report it."""
    try:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # where memory runs out, what runs here goes first
        confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
        report, status = _run(plan, events_fd, alive_fd)
    except OSError as error:
        send_event(events_fd, event="failed", reason=str(error))
        return
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if report.startswith("failed "):
        send_event(events_fd, event="failed", reason=report.removeprefix("failed "))
        return
    if report.startswith("ended "):
        status = int(report.removeprefix("ended "))
    elif plan["isolation"] == "bubblewrap" and os.WIFEXITED(status) and 128 < os.WEXITSTATUS(status) < 160:
        status = os.WEXITSTATUS(status) - 128  # how bwrap says that a signal ended the program
    send_event(events_fd, event="ended", status=status, cpu_s=used.ru_utime + used.ru_stime)


def send_event(events_fd: int, **event: Any) -> None:
    """Send an event to the library."""
    os.write(events_fd, json.dumps(event).encode() + b"\n")


def _run(plan: dict[str, Any], events_fd: int, alive_fd: int) -> tuple[str, int]:
    """Start the program and see to its end. What the first process reported, and its wait status."""
    plan["uid"] = confine.own_uid() if os.geteuid() == 0 else None
    owner = plan["uid"]
    if plan["isolation"] == "namespaces":
        leave_namespaces(with_user=plan["with_user"])
        owner = confine.NOBODY if plan["with_user"] else owner
    if plan["with_user"]:
        plan["uid"] = None
    if plan["uid"] is None:
        plan["limits"]["processes"] += _NUM_OWN
    reading, writing = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(reading)
        _be_first(plan, events_fd, writing, owner)
    os.close(writing)
    if plan.get("box") is not None:  # only the guest holds the connection to the library
        empty = os.open("/dev/null", os.O_RDWR)
        os.dup2(empty, 0)
        os.close(empty)
    _wait(first, alive_fd)
    status = os.waitpid(first, 0)[1]
    _end_all(plan)
    if plan["isolation"] == "process":
        remove(plan["folder"])
    with open(reading, encoding="utf-8") as file:
        return file.read(), status


def _be_first(plan: Mapping[str, Any], events_fd: int, report: int, owner: int | None) -> None:
    """In the new process: become the program, or the first process of its namespaces. Never returns."""
    try:
        if plan["isolation"] == "namespaces":
            _make_namespaces(plan, report, owner)
        send_event(events_fd, event="started")
        {"namespaces": _in_namespaces, "bubblewrap": _in_bubblewrap, "process": _plainly}[plan["isolation"]](
            plan, report, owner
        )
    except OSError as error:
        os.write(report, f"failed {error}".encode())
    finally:
        os._exit(1)


def _make_namespaces(plan: Mapping[str, Any], report: int, owner: int | None) -> None:
    """Set up what the program will see. It takes a while on a busy machine, and the program's time has not begun."""
    assert owner is not None
    make_root(plan["readable"], folder_bytes=plan["folder_bytes"], owner=owner, work=_work(plan))
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
    _end_if_alone(report)
    if plan.get("box") is None:
        with open("/tmp/main.py", "x", encoding="utf-8") as file:
            file.write(plan["program"])


def _in_namespaces(plan: Mapping[str, Any], report: int, owner: int | None) -> None:
    """Process 1: when it ends, the kernel kills whatever else is in the namespace."""
    if plan.get("box") is not None:
        _become_guest(plan, report)
    confine.prctl(confine.PR_SET_DUMPABLE, 0)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(report)
        confine.become_program(plan, folder="/tmp")
    while True:
        ended, status = os.wait()
        if ended == child:
            os.write(report, f"ended {status}".encode())
            os._exit(0)


def _work(plan: Mapping[str, Any]) -> str | None:
    """Return the folder that a long-lived sandbox has besides /tmp."""
    return plan["work"] if plan.get("box") is not None else None


def _become_guest(plan: Mapping[str, Any], report: int) -> None:
    """Serve a long-lived sandbox. Never returns."""
    from forge.runtime.sandbox import guest  # whatever forks launchers imported it, before the root folder changed

    guest.serve({**plan, "report": report})


def _end_if_alone(report: int) -> None:
    """Exit if the launcher died before it was arranged that this process ends with it."""
    poll = select.poll()
    poll.register(report, select.POLLERR)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        os._exit(1)


def _in_bubblewrap(plan: Mapping[str, Any], report: int, owner: int | None) -> None:
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
    _end_if_alone(report)
    is_box = plan.get("box") is not None
    command = [plan["bwrap"], "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    if plan["with_user"]:
        command += ["--unshare-all"]
        if owner is not None:
            confine.become(owner)
    else:
        command += [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")] + ["--cap-drop", "ALL"]
        for name in ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN", *(["CAP_KILL"] if is_box else [])):
            command += ["--cap-add", name]
    size = str(plan["folder_bytes"])
    command += ["--perms", "0700", "--size", size, "--tmpfs", "/tmp"]  # first: an interpreter may lie below it
    if is_box:
        command += ["--as-pid-1", "--perms", "0700", "--size", size, "--tmpfs", plan["work"]]
    for path in plan["readable"]:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            for parent in _parents(path):
                command += ["--perms", "0755", "--dir", parent] if parent != "/tmp" else []
            command += ["--ro-bind", path, path]
    command += ["--dev", "/dev", "--perms", "1777", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    command += ["--proc", "/proc"]
    if not is_box:
        command += ["--file", str(_readable_text(plan["program"])), "/tmp/main.py"]
    else:
        os.set_inheritable(report, True)
    command += [
        "--remount-ro",
        "/",
        "--",
        plan["command"][0],
        "-I",
        "-S",
        "-B",
        "-c",
        *_inner_command({**plan, "report": report}),
    ]
    os.execve(command[0], command, {})


def _readable_text(text: str) -> int:
    """Return a descriptor from which a text can be read by what is executed next."""
    descriptor = os.memfd_create("program")
    os.write(descriptor, text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.set_inheritable(descriptor, True)
    return descriptor


def _inner_command(plan: Mapping[str, Any]) -> tuple[str, str]:
    """Return the source and the argument of what confines the program, or serves, inside bubblewrap."""
    names = ["command", "environment", "limits", "uid", "files"]
    if plan.get("box") is None:
        with open(confine.__file__, encoding="utf-8") as file:
            return file.read() + "\nmain()\n", json.dumps({name: plan[name] for name in names})
    from forge.runtime.sandbox import frames, guest, guest_files, guest_programs, network

    sources = {}
    for module in (confine, frames, network, guest_files, guest_programs, guest):
        with open(str(module.__file__), encoding="utf-8") as file:
            sources[module.__name__] = file.read()
    names += ["isolation", "folder", "work", "box", "report"]
    return f"{_TRAVEL}\nload({sources!r}).serve_in_bubblewrap()\n", json.dumps({name: plan[name] for name in names})


_TRAVEL = """
import sys, types
def load(sources):
    for name in ("forge", "forge.runtime", "forge.runtime.sandbox", *sources):
        module = sys.modules[name] = types.ModuleType(name)
        above, _, own = name.rpartition(".")
        if above:
            setattr(sys.modules[above], own, module)
        if name in sources:
            exec(compile(sources[name], name, "exec"), module.__dict__)
        else:
            module.__path__ = []
    return module
"""
"""Makes modules of their texts, where the library does not exist, and returns the last."""


def _parents(path: str) -> list[str]:
    """Return the folders above a path, the outermost first, without the root folder."""
    parts = path.strip("/").split("/")[:-1]
    return ["/" + "/".join(parts[: number + 1]) for number in range(len(parts))]


def _plainly(plan: Mapping[str, Any], report: int, owner: int | None) -> None:
    """No boundary: the program is bound by limits, by another user where we are root, and by what calls it may make."""
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
    _end_if_alone(report)
    folder = plan["folder"]
    os.setsid()
    os.mkdir(folder, 0o700)
    if plan.get("box") is not None:
        os.mkdir(plan["work"], 0o700)
        if owner is not None:
            os.chown(folder, owner, owner)
            os.chown(plan["work"], owner, owner)
        _become_guest(plan, report)
    with open(os.path.join(folder, "main.py"), "x", encoding="utf-8") as file:
        file.write(plan["program"])
    if owner is not None:
        os.chown(folder, owner, owner)
    confine.become_program(plan, folder=folder)


def _wait(first: int, alive_fd: int) -> None:
    """Wait until the first process ends; kill it when the other end of the pipe closes."""
    poll, process = select.poll(), os.pidfd_open(first)
    poll.register(process, select.POLLIN)
    poll.register(alive_fd, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if process in ready:
            os.close(process)
            return
        signal.pidfd_send_signal(process, signal.SIGKILL)
        poll.unregister(alive_fd)


def _end_all(plan: Mapping[str, Any]) -> None:
    """Kill what is left of the program, and wait for it. What lost its parent is our child."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        if plan["isolation"] == "process" and plan["uid"] is not None:
            confine.kill_user(plan["uid"])
        else:
            for pid in _children():
                os.kill(pid, signal.SIGKILL)
        os.waitpid(-1, 0)


def _children() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid():
            found.append(int(name))
    return found


def remove(folder: str) -> None:
    """Remove a folder with hostile contents: follow no link, and restore permissions first."""
    import shutil  # only where there is no boundary

    if not os.path.exists(folder):
        return
    for parent, names, _ in os.walk(folder):
        os.chmod(parent, 0o700)
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(folder)


# ---- namespaces, made with plain system calls: no network, an own host name and System V objects, and a file system
# with an interpreter and system libraries to read, and one folder, /tmp, to write


def unshare(flags: int) -> None:
    """Leave some of the namespaces that this process shares."""
    confine.checked(_libc.unshare(flags), "unshare")


def leave_namespaces(*, with_user: bool) -> None:
    """Let the next fork be the first process of a PID namespace, in a user namespace where that is needed."""
    if not with_user:
        unshare(NEW_PID)
        return
    if os.geteuid() == 0:  # limits on processes do not bind root, whatever it is called inside
        confine.become(confine.own_uid())
        confine.prctl(confine.PR_SET_DUMPABLE, 1)
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEW_USER | NEW_PID)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{confine.NOBODY} {uid} 1"),
        ("gid_map", f"{confine.NOBODY} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def make_root(readable: Sequence[str], *, folder_bytes: int, owner: int, work: str | None = None) -> None:
    """Replace the root folder. `readable` are paths, links and folders, that stay as they are; /tmp, and `work` where
    programs in it may be executed, belong to `owner` and hold at most `folder_bytes` each."""
    unshare(_NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_NET)
    name = b"sandbox"
    confine.checked(_libc.sethostname(name, len(name)), "sethostname")
    _mount(None, "/", None, _PRIVATE | _RECURSIVE)
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "size=1m,nr_inodes=4096,mode=755")
    os.mkdir(f"/tmp{_OLD}", 0o755)
    confine.syscall(_PIVOT_ROOT[os.uname().machine], b"/tmp", f"/tmp{_OLD}".encode())
    os.chdir("/")
    os.mkdir("/tmp", 0o755)  # before what is shown: an interpreter may lie below it
    options = f"size={folder_bytes},nr_inodes=16384,mode=700,uid={owner},gid={owner}"
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV | _NOEXEC, options)
    if work is not None:
        os.mkdir(work, 0o755)
        _mount("tmpfs", work, "tmpfs", _NOSUID | _NODEV, options)
    for path in readable:
        _show(path)
    _make_devices()
    _make_proc()
    os.symlink("/tmp", "/dev/shm")
    confine.checked(_libc.umount2(_OLD.encode(), _DETACH), "umount2")
    os.rmdir(_OLD)
    _restrict("/", _RDONLY, recursive=False)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    confine.checked(
        _libc.mount(arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3]), f"mount {target}"
    )


def _restrict(path: str, attributes: int, *, recursive: bool = True) -> None:
    """Add read-only, nosuid, nodev to what is mounted at a path, and to what is mounted below it."""
    record = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = ctypes.c_uint(_AT_RECURSIVE if recursive else 0)
    at_path = ctypes.c_int(-100)
    confine.syscall(_MOUNT_SETATTR, at_path, os.fsencode(path), flags, record, ctypes.c_size_t(len(record)))


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
    """Mount the processes of this namespace. Where the old /proc is partly hidden, as in many containers, the kernel
    refuses a new one inside a user namespace; programs then find /proc empty."""
    os.makedirs("/proc", mode=0o755, exist_ok=True)
    with contextlib.suppress(PermissionError):
        _mount("proc", "/proc", "proc", _RDONLY | _NOSUID | _NODEV | _NOEXEC)
