"""The frames that data servers and their clients exchange, and how they are put on and taken off a socket.

A request is a header, the name of a segment (or of a question), a table of byte ranges and a body; an answer is a
status and a body. Every length is bounded and checked before memory is set aside for it. Nothing is unpickled but the
body of a question or of its answer, and both ends have proved by then that they know the run's secret.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from forge.errors import StoreError

READ: Final = 1
WRITE: Final = 2
CREATE: Final = 3
ASK: Final = 4

DATA: Final = 0
VALUE: Final = 1
ERROR: Final = 2

MAX_NAME: Final = 1024
MAX_RANGES: Final = 1000
"""Ranges of one request: with its header they fit into one scatter/gather call (1024 on Linux)."""
MAX_BATCH: Final = 1 << 30
"""Bytes that one request may read or write."""
MAX_PICKLE: Final = 256 << 20
"""Bytes of a question or an answer. Tensors never travel this way."""

_REQUEST: Final = struct.Struct("<BHIQ")
_ANSWER: Final = struct.Struct("<BQ")
_SCRATCH: Final = 1 << 20


class BadFrame(StoreError):
    """A frame that breaks the protocol: where the next one begins is not known, so the connection ends."""


@dataclass(slots=True)
class Request:
    operation: int
    name: str
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """(offset, nbytes) each; for CREATE one with the size."""
    body: int = 0
    """How many bytes follow."""

    @property
    def num_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.ranges)

    def pack(self) -> bytes:
        name = self.name.encode()
        flat = [number for pair in self.ranges for number in pair]
        head = _REQUEST.pack(self.operation, len(name), len(self.ranges), self.body)
        return head + name + struct.pack(f"<{len(flat)}Q", *flat)


def receive_request(sock: socket.socket) -> Request | None:
    """The next request, without its body; None when the peer has hung up between two."""
    first = sock.recv(_REQUEST.size)
    if not first:
        return None
    head = first + receive(sock, _REQUEST.size - len(first))
    operation, name_size, count, body = _REQUEST.unpack(head)
    limit = MAX_BATCH if operation == WRITE else MAX_PICKLE if operation == ASK else 0
    if not READ <= operation <= ASK or name_size > MAX_NAME or count > MAX_RANGES or body > limit:
        raise BadFrame(
            "a request breaks the protocol of data servers",
            value={"operation": operation, "name": name_size, "ranges": count, "body": body},
            rule=f"at most {MAX_NAME} bytes of name, {MAX_RANGES} ranges and {limit} bytes of body",
            repair="run the same version of torchforge everywhere",
        )
    rest = receive(sock, name_size + 16 * count)
    numbers = struct.unpack_from(f"<{2 * count}Q", rest, name_size)
    ranges = list(zip(numbers[::2], numbers[1::2], strict=True))
    request = Request(operation, rest[:name_size].decode(errors="replace"), ranges, body)
    total = request.num_bytes
    if (operation in (READ, WRITE) and total > MAX_BATCH) or (operation == WRITE and body != total):
        raise BadFrame(
            f"a request for segment {request.name!r} breaks the protocol of data servers",
            value={"bytes": total, "body": body},
            rule=f"ranges of at most {MAX_BATCH} bytes; the body of a write is as long as its ranges",
            repair="run the same version of torchforge everywhere",
        )
    return request


def pack_answer(status: int, size: int) -> bytes:
    return _ANSWER.pack(status, size)


def receive_answer(sock: socket.socket) -> tuple[int, int]:
    """The status of the next answer, and how many bytes follow."""
    status, size = _ANSWER.unpack(receive(sock, _ANSWER.size))
    if status not in (DATA, VALUE, ERROR) or size > (MAX_BATCH if status == DATA else MAX_PICKLE):
        raise BadFrame("an answer breaks the protocol of data servers", value={"status": status, "bytes": size})
    return status, size


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


def receive_views(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill all the views (none of them empty) straight from the socket; `ConnectionError` if the peer hangs up."""
    if isinstance(sock, ssl.SSLSocket):
        for view in views:
            filled = 0
            while filled < len(view):
                filled += _some(sock.recv_into(view[filled:]))
        return
    left = list(views)
    while left:
        left = _rest(left, _some(sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]))


def receive(sock: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes."""
    buffer = bytearray(size)
    if size:
        receive_views(sock, [memoryview(buffer)])
    return bytes(buffer)


def discard(sock: socket.socket, size: int) -> None:
    """Take `size` bytes off the socket that nobody wants."""
    scratch = memoryview(bytearray(min(size, _SCRATCH)))
    while size:
        take = min(size, len(scratch))
        receive_views(sock, [scratch[:take]])
        size -= take


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the views after their first `done` bytes."""
    for position, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[position + 1 :]]
        done -= len(view)
    return []


def _some(num_bytes: int) -> int:
    if not num_bytes:
        raise ConnectionError("the other side hung up")
    return num_bytes
