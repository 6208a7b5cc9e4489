"""Makes a metrics file smaller that has reached its bound, and keeps all of its history at a coarser resolution.

The newest quarter of the lines stays as it is. Of the older ones those are kept that are the first in equal parts of
their time, so that the history is spread evenly, however often this is done.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from forge.observe.jsonl import decode_line

_LATEST: Final = 1e18
"""No clock is so late."""


def thin_file(path: Path, max_bytes: int) -> None:
    """Leave at most half of `max_bytes` of a metrics file. The file is replaced atomically.

    A kill at any moment leaves the old file or the new one. What is not a line of metrics is left out.
    """
    lines: list[tuple[float, int, int]] = []
    start = 0
    with open(path, "rb") as file:
        for line in file:
            found = decode_line(line) if line.endswith(b"\n") else None
            if found is not None:
                lines.append((found.time, start, len(line)))
            start += len(line)
        recent = _recent(lines, max_bytes // 4)
        older = lines[: len(lines) - recent]
        kept = [*spread(older, max_bytes // 4), *lines[len(older) :]]
        part = path.with_name(f"{path.name}.part")
        try:
            with open(part, "wb") as new:
                for _, start, length in kept:
                    file.seek(start)
                    new.write(file.read(length))
                new.flush()
                os.fsync(new.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def _recent(lines: Sequence[tuple[float, int, int]], max_bytes: int) -> int:
    """Return how many of the last lines have so many bytes; at least one."""
    count = total = 0
    for _, _, length in reversed(lines):
        total += length
        if count and total > max_bytes:
            break
        count += 1
    return count


def spread(lines: Sequence[tuple[float, int, int]], max_bytes: int) -> list[tuple[float, int, int]]:
    """Return lines of at most so many bytes, evenly spread over the time of all. A line is time, start and length."""
    times = [time for time, _, _ in lines if abs(time) < _LATEST]
    first, last = min(times, default=0.0), max(times, default=0.0)
    num_bytes = sum(length for _, _, length in lines)
    num_parts = min(len(lines), int(len(lines) * max_bytes / max(1, num_bytes)))
    while num_parts:
        width = (last - first) / num_parts or 1.0
        kept, part = [], -1
        for line in lines:
            at = min(num_parts - 1, int((line[0] - first) / width)) if abs(line[0]) < _LATEST else part
            if at != part:
                kept.append(line)
                part = at
        if sum(length for _, _, length in kept) <= max_bytes:
            return kept
        num_parts = num_parts * 3 // 4
    return []
