"""The process between the library and a program in a sandbox.

It starts the program behind the boundary that was asked for, and waits for its end or for the end of its leash, a pipe
whose other end the library holds: when that closes, because the time is up or because the library's process died, the
launcher kills everything it started. It goes only when nothing of that is left, so that whoever waits for the launcher
waits for all. It imports the standard library alone, and everything before it changes its root folder.

Words to the library go through a pipe, a JSON object on a line each: `started`, then `ended` with the wait status and
the processor time, or `failed` with the reason.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping
from typing import Any

from forge.runtime.sandbox import confine
from forge.runtime.sandbox.namespaces import leave, make_root

_NUM_OWN = 3
"""Processes of ours that count as the program's own where both have the same user: launcher, first process, a spare."""


def main() -> None:
    """`argv`: the descriptors of the plan, of the words and of the leash."""
    plan_fd, words_fd, leash_fd = (int(word) for word in sys.argv[1:4])
    for descriptor in (plan_fd, words_fd, leash_fd):
        os.set_inheritable(descriptor, False)
    with open(plan_fd, encoding="utf-8") as file:
        plan = json.load(file)
    try:
        confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
        report, status = _run(plan, words_fd, leash_fd)
    except OSError as error:
        _say(words_fd, event="failed", reason=str(error))
        return
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if report.startswith("failed "):
        _say(words_fd, event="failed", reason=report.removeprefix("failed "))
        return
    if report.startswith("ended "):
        status = int(report.removeprefix("ended "))
    elif plan["isolation"] == "bubblewrap" and os.WIFEXITED(status) and 128 < os.WEXITSTATUS(status) < 160:
        status = os.WEXITSTATUS(status) - 128  # how bwrap says that a signal ended the program
    _say(words_fd, event="ended", status=status, cpu_s=used.ru_utime + used.ru_stime)


def _say(words_fd: int, **word: Any) -> None:
    os.write(words_fd, json.dumps(word).encode() + b"\n")


def _run(plan: dict[str, Any], words_fd: int, leash_fd: int) -> tuple[str, int]:
    """Start the program and see to its end. What the first process reported, and its wait status."""
    plan["uid"] = confine.own_uid() if os.geteuid() == 0 else None
    owner = plan["uid"]
    if plan["isolation"] == "namespaces":
        leave(with_user=plan["with_user"])
        owner = confine.NOBODY if plan["with_user"] else owner
    if plan["with_user"]:
        plan["uid"] = None
    if plan["uid"] is None:
        plan["limits"]["processes"] += _NUM_OWN
    reading, writing = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(reading)
        _be_first(plan, words_fd, writing, owner)
    os.close(writing)
    _wait(first, leash_fd)
    status = os.waitpid(first, 0)[1]
    _end_all(plan)
    with open(reading, encoding="utf-8") as file:
        return file.read(), status


def _be_first(plan: Mapping[str, Any], words_fd: int, report: int, owner: int | None) -> None:
    """In the new process: become the program, or the first process of its namespaces. Never returns."""
    try:
        if plan["isolation"] == "namespaces":
            _make_namespaces(plan, report, owner)
        _say(words_fd, event="started")
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
    make_root(plan["readable"], folder_bytes=plan["folder_bytes"], owner=owner)
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
    _end_if_alone(report)
    with open("/tmp/main.py", "x", encoding="utf-8") as file:
        file.write(plan["program"])


def _in_namespaces(plan: Mapping[str, Any], report: int, owner: int | None) -> None:
    """Process 1: when it ends, the kernel kills whatever else is in the namespace."""
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


def _end_if_alone(report: int) -> None:
    """The launcher may have died before it could be told that we end with it."""
    poll = select.poll()
    poll.register(report, select.POLLERR)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        os._exit(1)


def _in_bubblewrap(plan: Mapping[str, Any], report: int, owner: int | None) -> None:
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
    _end_if_alone(report)
    program = os.memfd_create("program")
    os.write(program, plan["program"].encode())
    os.lseek(program, 0, os.SEEK_SET)
    os.set_inheritable(program, True)
    words = [plan["bwrap"], "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    if plan["with_user"]:
        words += ["--unshare-all"]
        if owner is not None:
            confine.become(owner)
    else:
        words += [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")] + ["--cap-drop", "ALL"]
        for name in ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN"):
            words += ["--cap-add", name]
    size = str(plan["folder_bytes"])
    words += ["--perms", "0700", "--size", size, "--tmpfs", "/tmp"]  # first: an interpreter may lie below it
    for path in plan["readable"]:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            for parent in _parents(path):
                words += ["--perms", "0755", "--dir", parent] if parent != "/tmp" else []
            words += ["--ro-bind", path, path]
    words += ["--dev", "/dev", "--perms", "1777", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    words += ["--proc", "/proc", "--file", str(program), "/tmp/main.py", "--remount-ro", "/"]
    inner = {name: plan[name] for name in ("command", "environment", "limits", "uid", "files")}
    with open(confine.__file__, encoding="utf-8") as file:
        source = file.read() + "\nmain()\n"
    words += ["--", plan["command"][0], "-I", "-S", "-B", "-c", source, json.dumps(inner)]
    os.execve(words[0], words, {})


def _parents(path: str) -> list[str]:
    """The folders above a path, the outermost first, without the root folder."""
    parts = path.strip("/").split("/")[:-1]
    return ["/" + "/".join(parts[: number + 1]) for number in range(len(parts))]


def _plainly(plan: Mapping[str, Any], report: int, owner: int | None) -> None:
    """No boundary: the program is bound by limits, by another user where we are root, and by what calls it may make."""
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
    _end_if_alone(report)
    folder = plan["folder"]
    with open(os.path.join(folder, "main.py"), "x", encoding="utf-8") as file:
        file.write(plan["program"])
    if owner is not None:
        os.chown(folder, owner, owner)
    os.setsid()
    confine.become_program(plan, folder=folder)


def _wait(first: int, leash_fd: int) -> None:
    """Until the first process ends. When the leash's other end closes, it is killed."""
    poll, process = select.poll(), os.pidfd_open(first)
    poll.register(process, select.POLLIN)
    poll.register(leash_fd, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if process in ready:
            os.close(process)
            return
        signal.pidfd_send_signal(process, signal.SIGKILL)
        poll.unregister(leash_fd)


def _end_all(plan: Mapping[str, Any]) -> None:
    """Kill what is left of the program, and wait for it. What lost its parent is our child."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        if plan["isolation"] == "process" and plan["uid"] is not None:
            _kill_user(plan["uid"])
        else:
            for pid in _children():
                os.kill(pid, signal.SIGKILL)
        os.waitpid(-1, 0)


def _kill_user(uid: int) -> None:
    """Everything of one user, at one moment: nothing that forks fast enough escapes."""
    killer = os.fork()
    if killer == 0:
        try:
            confine.become(uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(killer, 0)


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
