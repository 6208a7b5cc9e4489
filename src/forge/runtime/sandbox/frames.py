"""The messages between the library and the first process of a long-lived sandbox: a JSON header and bytes.

It imports the standard library alone: it also travels as text into a sandbox in which the library does not exist.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

SIZES = struct.Struct(">II")
"""The number of bytes of the header and of the payload."""


def pack(header: Mapping[str, Any], *, num_payload: int = 0) -> bytes:
    """Return the beginning of a message, which a payload of so many bytes follows."""
    text = json.dumps(header).encode("ascii")
    return SIZES.pack(len(text), num_payload) + text


class Unpacker:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """Take what arrived and return the messages that it completes."""
        self._data += data
        found = []
        while len(self._data) >= SIZES.size:
            num_header, num_payload = SIZES.unpack_from(self._data)
            end = SIZES.size + num_header + num_payload
            if len(self._data) < end:
                break
            middle = SIZES.size + num_header
            found.append((json.loads(self._data[SIZES.size : middle]), bytes(self._data[middle:end])))
            del self._data[:end]
        return found


class Spool:
    """Output of a program, of which only the beginning and the end are kept."""

    def __init__(self, limit: int) -> None:
        self._head_limit, self._tail_limit = limit - limit // 2, limit // 2
        self._head, self._tail = bytearray(), bytearray()
        self.num_bytes = 0

    def add(self, data: bytes) -> None:
        """Take more output."""
        self.num_bytes += len(data)
        room = self._head_limit - len(self._head)
        self._head += data[:room] if room > 0 else b""
        self._tail += data[max(room, 0) :]
        if len(self._tail) > 2 * self._tail_limit + 65536:
            self._cut()

    def take(self) -> tuple[bytes, bytes, int]:
        """Return the beginning, the end and the number of bytes left out between them, and start anew."""
        self._cut()
        head, tail, num_bytes = bytes(self._head), bytes(self._tail), self.num_bytes
        self._head, self._tail, self.num_bytes = bytearray(), bytearray(), 0
        return head, tail, num_bytes - len(head) - len(tail)

    def _cut(self) -> None:
        if len(self._tail) > self._tail_limit:
            del self._tail[: len(self._tail) - self._tail_limit]


def send_all(descriptor: int, data: bytes) -> None:
    """Write everything to a descriptor that blocks."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
