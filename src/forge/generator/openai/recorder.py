"""Writes exchanges to a file as they end, and finds out which conversation each belongs to."""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from forge.errors import ConfigError, ForgeError
from forge.generator.openai.prompts import PrefixIndex
from forge.generator.openai.records import Exchange, join_ids
from forge.types import Completion


class RecordError(ForgeError, RuntimeError):
    """An exchange could not be written down. The client is told, and gets no answer that the record lacks."""


class Recorder:
    """Appends each exchange to a file, whole: one write to a line, with nothing held back in memory.

    A file belongs to one server at a time. What an earlier one wrote is kept.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        self._ends: PrefixIndex[bytes, Exchange] = PrefixIndex()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise self._unusable(
                f"a file that can be written: {error.strerror}", "check the path and its rights"
            ) from None
        try:
            self._take()
        except BaseException:
            self._file.close()
            raise

    def write(
        self, completion: Completion, *, id: str, request: Mapping[str, Any], conversation: str | None = None
    ) -> Exchange:
        """Write down an exchange. When this returns, the system has the line; what cannot be written raises
        `RecordError`, and the file is as it was."""
        scope = f"{conversation or ''}\0".encode("utf-8", "backslashreplace")
        found = self._ends.find(scope + join_ids([completion.prompt_ids]))
        earlier = None if found is None else found[1]
        if conversation is None:
            conversation = f"conv-{uuid.uuid4().hex}" if earlier is None else earlier.conversation
        exchange = Exchange.of(
            completion,
            id=id,
            conversation=conversation,
            continues=None if earlier is None else earlier.id,
            time=self._clock(),
            request=request,
        )
        self._append(exchange)
        self._ends.put(scope + join_ids([completion.prompt_ids, completion.token_ids]), exchange)
        return exchange

    def close(self) -> None:
        self._file.close()

    def _append(self, exchange: Exchange) -> None:
        start = os.fstat(self._file.fileno()).st_size
        try:
            line = exchange.to_line()
            num_written = self._file.write(line) or 0
            if num_written < len(line):
                os.ftruncate(self._file.fileno(), start)
                raise OSError(f"only {num_written} of {len(line)} bytes were taken: is the disk full?")
        except (OSError, ValueError) as error:
            raise RecordError(
                "an exchange could not be written down, so it is not given out",
                path=str(self.path),
                value=exchange.id,
                rule=f"every exchange is recorded: {error}",
                repair="make room, or serve without serve.record",
            ) from error

    def _take(self) -> None:
        """Make the file ours, and see that it ends with a whole line."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise self._unusable("one server writes to a file", "give another file, or end the other server") from None
        last = _last_line(self._file)
        if last and not last.endswith(b"\n"):
            if not _is_json(last):
                raise self._unusable(
                    f"ends with a whole line; its last one is cut off: {last[:80]!r}",
                    "remove that line, or give another file",
                )
            self._file.write(b"\n")

    def _unusable(self, rule: str, repair: str) -> ConfigError:
        return ConfigError(
            "the record of exchanges cannot be written",
            path="serve.record",
            value=str(self.path),
            rule=rule,
            repair=repair,
        )


def _last_line(file: BinaryIO) -> bytes:
    """What stands after the last end of a line but one, read from the end in blocks."""
    if not file.seekable() or (end := file.seek(0, os.SEEK_END)) == 0:
        return b""
    start, found = end, b""
    while start > 0 and b"\n" not in found[:-1]:
        size = min(start, 1 << 16)
        start -= size
        file.seek(start)
        found = file.read(size) + found
    return found[found.rfind(b"\n", 0, len(found) - 1) + 1 :]


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
