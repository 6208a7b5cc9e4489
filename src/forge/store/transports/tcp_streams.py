"""A client's connections to one data server: a stream is one of them, a lot is the few that a client keeps."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from forge.errors import StoreError
from forge.runtime import sockets
from forge.runtime.serialization import decode
from forge.store.transports import tcp_frames as frames
from forge.store.transports.base import Range


class Refusal(Exception):
    """Carries the exception that the server answered with: the request failed, the stream is in order."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class Stream:
    """One connection. Requests may be sent ahead; answers come in their order. For one thread at a time."""

    def __init__(self, address: str, secret: bytes, *, stall_s: float) -> None:
        self._sock = sockets.connect(address, secret)
        self.address = address
        # A peer that pauses is waited for as long as `set_stall` says; keepalive alone notices that a host has gone.
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self.set_stall(stall_s)

    def set_stall(self, seconds: float) -> None:
        """Raise `TimeoutError` when nothing at all moves for so long."""
        self._stall_s = seconds
        limit = struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1e6)))  # all zero would mean for ever
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def ask_ranges(self, name: str, batch: Sequence[Range]) -> None:
        """Request the bytes of a batch; `take_ranges` receives them."""
        table = [(offset, len(target)) for offset, target in batch]
        with self._limited():
            self._sock.sendall(frames.Request(frames.READ, name, table).pack())

    def take_ranges(self, batch: Sequence[Range]) -> None:
        """Receive the bytes that were asked for, into their targets."""
        with self._limited():
            status, size = frames.receive_answer(self._sock)
            if status == frames.ERROR:
                raise Refusal(self._received(size))
            if status != frames.DATA or size != sum(len(target) for _, target in batch):
                raise frames.BadFrame("an answer is not as long as the ranges that were asked for", value=size)
            frames.receive_views(self._sock, [target for _, target in batch])

    def send_ranges(self, name: str, batch: Sequence[Range]) -> None:
        """Send the bytes of a batch; `take_receipt` receives the acknowledgement."""
        table = [(offset, len(source)) for offset, source in batch]
        request = frames.Request(frames.WRITE, name, table, body=sum(size for _, size in table))
        with self._limited():
            frames.send_views(self._sock, [request.pack(), *(source for _, source in batch)])

    def send(self, request: frames.Request, payload: bytes = b"") -> None:
        with self._limited():
            frames.send_views(self._sock, [request.pack(), payload] if payload else [request.pack()])

    def take_value(self) -> Any:
        """The answer to anything but a read."""
        with self._limited():
            status, size = frames.receive_answer(self._sock)
            value = self._received(size)
        if status == frames.ERROR:
            raise Refusal(value)
        return value

    def take_receipt(self, batch: Sequence[Range]) -> None:
        """The acknowledgement of a batch that was sent."""
        self.take_value()

    def hang_up(self) -> None:
        """End the connection under whoever uses it."""
        with contextlib.suppress(OSError):  # it has ended by itself
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _received(self, size: int) -> Any:
        data = frames.receive(self._sock, size)
        try:
            return decode(data)
        except Exception as error:
            raise Refusal(
                StoreError(
                    f"what the data server at {self.address} answered cannot be read here: {error!r}",
                    path=self.address,
                    rule="a value or an exception whose class can be imported in this process",
                )
            ) from error

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        try:
            yield
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise TimeoutError(f"nothing moved for {self._stall_s:g} s") from error


class Lot:
    """At most `limit` streams to one address, opened when wanted and kept. Safe for threads."""

    def __init__(self, address: str, secret: bytes, *, limit: int, stall_s: float) -> None:
        self.address = address
        self._secret, self._limit, self._stall_s = secret, limit, stall_s
        self._changed = threading.Condition()
        self._idle: list[Stream] = []
        self._out: set[Stream] = set()
        self._num_out = 0
        self._is_closed = False

    def take(self, at_most: int = 1) -> list[Stream]:
        """Between one and `at_most` streams, for the caller alone until `give_back`; waits for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_out < self._limit)
            self._check_open()
            number = min(at_most, self._limit - self._num_out)
            self._num_out += number
            taken = [self._idle.pop() for _ in range(min(number, len(self._idle)))]
        try:
            while len(taken) < number:
                taken.append(Stream(self.address, self._secret, stall_s=self._stall_s))
            with self._changed:
                self._check_open()
                self._out.update(taken)
        except BaseException:
            self._put(taken, number, is_sound=False)
            raise
        return taken

    def give_back(self, streams: Sequence[Stream], *, is_sound: bool) -> None:
        """Return what was taken. Where one is broken the others of the lot are not trusted either: all are closed."""
        self._put(streams, len(streams), is_sound=is_sound)

    def close(self) -> None:
        """Close what is idle and hang up under whoever uses the rest."""
        with self._changed:
            self._is_closed = True
            for stream in self._out:
                stream.hang_up()
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for stream in idle:
            stream.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"the data client of {self.address} was closed", path=self.address)

    def _put(self, streams: Sequence[Stream], number: int, *, is_sound: bool) -> None:
        with self._changed:
            self._num_out -= number
            self._out.difference_update(streams)
            self._idle.extend(streams)
            broken = []
            if self._is_closed or not is_sound:
                broken, self._idle = self._idle, []
            self._changed.notify_all()
        for stream in broken:
            stream.close()
