"""Runs one foreign server, keeps its output within bounds, and ends it with everything that it started.

A program of its own, without imports beyond the standard library:
`python -I -S server_guard.py OWNER_PID LOG_FILE LOG_BYTES GRACE_S [--keep-stdout] COMMAND…`. It ends with the server,
when it is terminated, or when its owner dies, even by SIGKILL. It adopts whatever the server leaves behind, and kills
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_READ_BYTES = 1 << 16


class BoundedLog:
    """The last `limit` bytes of an output, or a little fewer, in `path` and the older half in `path + ".1"`."""

    def __init__(self, path: str, limit: int) -> None:
        self._path, self._half = path, max(limit // 2, 1)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._size = 0

    def write(self, data: bytes) -> None:
        if self._size + len(data) > self._half:
            os.close(self._file)
            os.replace(self._path, self._path + ".1")
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._size = 0
        data = data[-self._half :]
        self._size += len(data)
        os.write(self._file, data)


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _start(command: list[str], output: int, *, keeps_stdout: bool) -> int:
    """Start the server in a session of its own and return its pid. It dies with this process."""
    guard, pid = os.getpid(), os.fork()
    if pid:
        return pid
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        os.setsid()
        if not keeps_stdout:
            os.dup2(output, 1)
        os.dup2(output, 2)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], command)
    except BaseException as error:  # noqa: BLE001 - this is the child: it must not return
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(127)


def _kill_all() -> None:
    """Kill all children, and theirs, which become children of this process as their parents end."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def main() -> int:
    owner, log_path, log_bytes, grace_s = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)  # the owner itself sends SIGTERM
    if os.getppid() != owner:
        return 1
    log = BoundedLog(log_path, log_bytes)
    output_read, output_write = os.pipe2(os.O_CLOEXEC)
    keeps_stdout = sys.argv[5] == "--keep-stdout"
    server = _start(sys.argv[5 + keeps_stdout :], output_write, keeps_stdout=keeps_stdout)
    os.close(output_write)
    status: int | None = None
    until: float | None = None
    sources, has_no_owner = [output_read, wake_read], False
    while status is None:
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            break
        ready, _, _ = select.select(sources, (), (), left)
        if output_read in ready:
            data = os.read(output_read, _READ_BYTES)
            if data:
                log.write(data)
            else:
                sources.remove(output_read)
        if wake_read in ready:
            signals = os.read(wake_read, 64)
            has_no_owner = has_no_owner or signal.SIGHUP in signals
            if any(number != signal.SIGCHLD for number in signals) and until is None:
                until = time.monotonic() + grace_s
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server, signal.SIGTERM)
            while status is None:
                pid, found = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                status = found if pid == server else None
    _kill_all()
    while output_read in sources and select.select([output_read], (), (), 0)[0]:
        data = os.read(output_read, _READ_BYTES)
        if not data:
            break
        log.write(data)
    if has_no_owner:  # nothing else removes this
        for path in (log_path, log_path + ".1"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        os.rmdir(os.path.dirname(log_path))
    code = 137 if status is None else os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
