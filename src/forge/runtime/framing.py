"""The one framing of byte streams between processes: TCP, Unix sockets and pipes.

A frame is a header (length of the body, kind, number) and a body. What kinds and numbers mean is the protocol's affair.
The header stays readable when the body is not, so an error can be reported to the process whose request it was. Every
length is checked before memory is allocated for it.

Blocking sockets use `send` and `receive`, or the parts of them for bodies that are scattered in memory; asyncio streams
use `read`; event-driven code receives into a `FrameReader`.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from forge.runtime.sockets import ConnectionFailure

if TYPE_CHECKING:
    import asyncio

Frame: TypeAlias = tuple[int, int, memoryview]
"""Kind, number and body. The body is valid until the next bytes are received."""

MAX_BODY: Final = 1 << 30
CHUNK: Final = 256 << 10
HEADER: Final = struct.Struct("<QBQ")
_SMALL: Final = 64 << 10
_SCRATCH: Final = 1 << 20


def pack(kind: int, number: int, body: bytes) -> list[bytes | memoryview]:
    """Return a frame in pieces of at most CHUNK bytes. Raise `ConnectionFailure` when the body is too large."""
    head = pack_header(kind, number, len(body))
    if len(body) <= CHUNK:
        return [head + body]
    view = memoryview(body)
    return [head, *(view[start : start + CHUNK] for start in range(0, len(body), CHUNK))]


def pack_header(kind: int, number: int, size: int) -> bytes:
    if size > MAX_BODY:
        raise ConnectionFailure(
            "a message is too large",
            path="message",
            value=f"{size} bytes",
            rule=f"at most {MAX_BODY} bytes",
            repair="put the data into the store and send its key",
        )
    return HEADER.pack(size, kind, number)


def send(sock: socket.socket, kind: int, number: int, *views: Any) -> None:
    """Send a frame on a blocking socket; its body is the buffers, back to back."""
    send_views(sock, [pack_header(kind, number, sum(memoryview(view).nbytes for view in views)), *views])


def send_views(sock: socket.socket, views: Sequence[Any]) -> None:
    """Send buffers back to back, gathered into as few system calls as it takes."""
    if isinstance(sock, ssl.SSLSocket):
        for view in views:
            sock.sendall(view)
        return
    left = [memoryview(view) for view in views]
    sent = sock.sendmsg(left)
    while left := _rest(left, sent):
        sent = sock.sendmsg(left)


def receive(sock: socket.socket, *, max_body: int = MAX_BODY) -> tuple[int, int, bytes] | None:
    """Receive the next frame from a blocking socket; None when the peer closed it between two frames."""
    head = receive_header(sock, max_body=max_body)
    return None if head is None else (*head[:2], receive_exactly(sock, head[2]))


def receive_header(sock: socket.socket, *, max_body: int = MAX_BODY) -> tuple[int, int, int] | None:
    """Receive a frame's kind, number and size of the body; None when the peer closed the socket between two frames."""
    first = sock.recv(HEADER.size)
    if not first:
        return None
    size, kind, number = HEADER.unpack(first + receive_exactly(sock, HEADER.size - len(first)))
    _check_size(size, max_body)
    return kind, number, size


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    if size:
        receive_views(sock, [memoryview(buffer)])
    return bytes(buffer)


def receive_views(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill all the views (none of them empty) from the socket; `ConnectionError` if the peer closes it before."""
    if isinstance(sock, ssl.SSLSocket):
        for view in views:
            filled = 0
            while filled < len(view):
                filled += _some(sock.recv_into(view[filled:]))
        return
    left = list(views)
    while left:
        left = _rest(left, _some(sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]))


def discard(sock: socket.socket, size: int) -> None:
    """Receive `size` bytes and drop them."""
    scratch = memoryview(bytearray(min(size, _SCRATCH)))
    while size:
        take = min(size, len(scratch))
        receive_views(sock, [scratch[:take]])
        size -= take


async def read(stream: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """Read the next frame from an asyncio stream; `asyncio.IncompleteReadError` when it ends."""
    size, kind, number = HEADER.unpack(await stream.readexactly(HEADER.size))
    _check_size(size, MAX_BODY)
    return kind, number, await stream.readexactly(size)


class FrameReader:
    """Cuts frames out of a stream without copying large bodies twice.

    Receive into `buffer()`, then handle the frames that `advance(n)` returns.
    """

    def __init__(self) -> None:
        self._small = memoryview(bytearray(_SMALL))
        self._filled = 0
        self._large: memoryview | None = None
        self._head = (0, 0, 0)

    def buffer(self) -> memoryview:
        """Return where the next bytes belong; never empty."""
        return (self._small if self._large is None else self._large)[self._filled :]

    def advance(self, count: int) -> list[Frame]:
        """Return the frames that the last `count` bytes completed. Raise `ConnectionFailure` for a bad header."""
        self._filled += count
        if self._large is not None:
            if self._filled < len(self._large):
                return []
            body, self._large, self._filled = self._large, None, 0
            return [(self._head[1], self._head[2], body)]
        frames, start = [], 0
        while self._filled - start >= HEADER.size:
            size, kind, number = head = HEADER.unpack_from(self._small, start)
            _check_size(size, MAX_BODY)
            begin = start + HEADER.size
            if begin + size <= self._filled:
                frames.append((kind, number, self._small[begin : begin + size]))
                start = begin + size
                continue
            if size > _SMALL - HEADER.size:
                self._begin_large(head, begin)
                return frames
            break
        self._keep(start, frames)
        return frames

    def _begin_large(self, head: tuple[int, int, int], begin: int) -> None:
        """Receive the rest of this body where it will stay."""
        self._large, self._head = memoryview(bytearray(head[0])), head
        here = self._filled - begin
        self._large[:here] = self._small[begin : self._filled]
        self._filled = here

    def _keep(self, start: int, frames: list[Frame]) -> None:
        """Make room for the rest of an incomplete frame."""
        rest = self._filled - start
        if start and rest:
            fresh = memoryview(bytearray(_SMALL)) if frames else self._small  # frames still lie in the old one
            fresh[:rest] = self._small[start : self._filled]
            self._small = fresh
        self._filled = rest


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise ConnectionFailure("a frame breaks the protocol", value=f"{size} bytes", rule=f"at most {most} bytes")


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of the views after their first `done` bytes."""
    for position, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[position + 1 :]]
        done -= len(view)
    return []


def _some(num_bytes: int) -> int:
    if not num_bytes:
        raise ConnectionError("the peer closed the connection")
    return num_bytes
