"""Frames: numbered messages on a line, cut out of the stream without copying large ones twice.

A frame is a head (length of the body, kind, number) and a body, which is a pickle. The head stays readable when the
body is not: what went wrong can be told to the one whose request it was.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

from forge.runtime.lines import LineError

JOIN: Final = 1
REQUEST: Final = 2
TELL: Final = 3
CANCEL: Final = 4
ANSWER: Final = 5
ERROR: Final = 6
PUSH: Final = 7
BYE: Final = 8

Frame: TypeAlias = tuple[int, int, memoryview]
"""Kind, number and body. The body is valid until the next bytes are received."""

MAX_BODY: Final = 1 << 30
"""Lines are for words about data; data itself goes another way."""

CHUNK: Final = 256 << 10
_HEAD: Final = struct.Struct("<QBQ")
_SMALL: Final = 64 << 10


def pack(kind: int, number: int, body: bytes) -> list[bytes | memoryview]:
    """A frame, ready to be sent piece by piece. One that is too large raises `LineError`."""
    if len(body) > MAX_BODY:
        raise LineError(
            "a message is too large for a line",
            path="message",
            value=f"{len(body)} bytes",
            rule=f"at most {MAX_BODY} bytes",
            repair="put the data into the store and send its key",
        )
    head = _HEAD.pack(len(body), kind, number)
    if len(body) <= CHUNK:
        return [head + body]
    view = memoryview(body)
    return [head, *(view[start : start + CHUNK] for start in range(0, len(body), CHUNK))]


class FrameReader:
    """Cuts frames out of a stream: receive into `buffer()`, then take what `advance(n)` returns."""

    def __init__(self) -> None:
        self._small = memoryview(bytearray(_SMALL))
        self._filled = 0
        self._large: memoryview | None = None
        self._head = (0, 0, 0)

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        return (self._small if self._large is None else self._large)[self._filled :]

    def advance(self, count: int) -> list[Frame]:
        """The frames that the last `count` bytes have completed. An impossible head raises `LineError`."""
        self._filled += count
        if self._large is not None:
            if self._filled < len(self._large):
                return []
            body, self._large, self._filled = self._large, None, 0
            return [(self._head[1], self._head[2], body)]
        frames, start = [], 0
        while self._filled - start >= _HEAD.size:
            size, kind, number = head = _HEAD.unpack_from(self._small, start)
            if size > MAX_BODY or not JOIN <= kind <= BYE:
                raise LineError("received bytes are not a frame")
            begin = start + _HEAD.size
            if begin + size <= self._filled:
                frames.append((kind, number, self._small[begin : begin + size]))
                start = begin + size
                continue
            if size > _SMALL - _HEAD.size:
                self._begin_large(head, begin)
                return frames
            break
        self._keep(start, frames)
        return frames

    def _begin_large(self, head: tuple[int, int, int], begin: int) -> None:
        """The rest of this body is received where it will stay."""
        self._large, self._head = memoryview(bytearray(head[0])), head
        here = self._filled - begin
        self._large[:here] = self._small[begin : self._filled]
        self._filled = here

    def _keep(self, start: int, frames: list[Frame]) -> None:
        """Make room for the rest of a frame that has begun."""
        rest = self._filled - start
        if start and rest:
            fresh = memoryview(bytearray(_SMALL)) if frames else self._small  # frames still lie in the old one
            fresh[:rest] = self._small[start : self._filled]
            self._small = fresh
        self._filled = rest
