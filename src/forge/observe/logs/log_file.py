"""A log file that takes a bounded part of the disk.

Only the standard library is imported here, and nothing of `forge`: `forge.runtime.rank_stub`, which starts in
milliseconds, loads this file by its path.
"""

from __future__ import annotations

import json
import os
import time


class BoundedFile:
    """Appends to a file. When it has reached half of `max_bytes` it becomes `PATH.1`, in place of the one before.

    What cannot be written, because the disk is full, is dropped; the file says how much when it can be written again.
    A program does not end because its log cannot be written.
    """

    def __init__(self, path: str, *, max_bytes: int) -> None:
        self.path = os.path.abspath(path)
        self._limit = max(1, max_bytes // 2)
        self._num_lost = 0
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._file = self._open()
        self._size = os.fstat(self._file).st_size

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes) -> None:
        """Append bytes, which are one or several whole lines where the file is to have no line in two parts."""
        if self._size and self._size + len(data) > self._limit:
            self._turn()
        if self._num_lost:
            data = b"[%d bytes could not be written here]\n" % self._num_lost + data
        try:
            written = os.write(self._file, data)
        except OSError:
            written = 0
        self._size += written
        self._num_lost = len(data) - written if written < len(data) else 0

    def _turn(self) -> None:
        """Start the file anew; go on in the old one if that fails."""
        try:
            os.replace(self.path, f"{self.path}.1")
            file = self._open()
        except OSError:
            return
        os.close(self._file)
        self._file, self._size = file, 0

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_end(path: str, *, num_lines: int, max_bytes: int = 16384) -> list[str]:
    """Return the last lines of a file, cut to 400 characters each; nothing where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    return [line[:400] for line in lines if line][-num_lines:]


def notice(process: str, text: str, *, is_json: bool) -> bytes:
    """Return the line that a log file has where a process begins or ends."""
    where = f"process {os.getpid()} on {os.uname().nodename}"
    now = time.time()
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    if not is_json:
        return f"==== {moment}.{int(now % 1 * 1000):03} {process} ({where}): {text} ====\n".encode()
    fields = {"time": _utc(now), "level": "info", "logger": "forge.log", "process": process, "pid": os.getpid()}
    return json.dumps({**fields, "message": f"{text} ({where})"}).encode() + b"\n"


def as_record(line: bytes, process: str) -> bytes:
    """Return a line of output as a JSON object; one that is such an object stays as it is."""
    if line.startswith(b'{"time"') and _is_object(line):
        return line
    fields = {"time": _utc(time.time()), "level": "info", "logger": "output", "process": process, "pid": None}
    text = line.rstrip(b"\r\n").decode("utf-8", "replace")
    return json.dumps({**fields, "message": text}, ensure_ascii=False).encode() + b"\n"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _utc(seconds: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1e6):06}+00:00"
