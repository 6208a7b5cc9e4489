"""The one connection that a sandbox may have: a loopback address on which the library itself accepts.

A socket belongs to the network namespace that it was made in, whatever process holds it. So the first process of a
sandbox makes a listening socket in the sandbox's own, otherwise empty network, and hands it to the library through the
Unix socket between them. Programs in the sandbox connect to 127.0.0.1, the library accepts, and there is nothing
between them: no relay that can die, and no other address to reach.

It imports the standard library alone: it also travels as text into a sandbox in which the library does not exist.
"""

from __future__ import annotations

import fcntl
import socket
import struct

PORT = 8471
"""The port inside each sandbox. Every sandbox has a network of its own, so all of them use the same."""

MARK = b"\1"
"""The byte that the socket comes with. Messages to the library begin with a zero."""

_BACKLOG = 128
_GET_FLAGS, _SET_FLAGS = 0x8913, 0x8914
_IS_UP = 1


def hand_over_listener(control: int, port: int) -> None:
    """Make the listening socket and send it through the Unix socket whose descriptor is `control`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        _raise_loopback(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(_BACKLOG)
        connection = socket.socket(fileno=control)
        try:
            socket.send_fds(connection, [MARK], [listener.fileno()])
        finally:
            connection.detach()


def _raise_loopback(any_socket: socket.socket) -> None:
    """Switch the loopback interface on, where whatever made the namespace has not done so."""
    asked = struct.pack("16s24x", b"lo")
    (flags,) = struct.unpack_from("16xh", fcntl.ioctl(any_socket, _GET_FLAGS, asked))
    if not flags & _IS_UP:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh22x", b"lo", flags | _IS_UP))
