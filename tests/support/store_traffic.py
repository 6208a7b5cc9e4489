"""What the tensor store moved, as tests look at it inside a rank: `await rank.run.call_one(function)`."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any

from store_actors import Rank


async def used(rank: Rank) -> dict[str, bool]:
    """Which ways of reading this process has used so far."""
    from forge.store.client import client

    data_plane, found = client().data_plane, await relaying(rank)
    return {
        "shm": found["publishers"] > 0,
        "relayed": found["relays"] + found["maps"] > 0,
        "tcp": bool(data_plane._readers),
        "rdma": data_plane._rdma_reader is not None,
    }


async def relaying(_: Rank) -> dict[str, int]:
    """How many parts of other hosts this process relays, how many it maps that another process of its host relays, and
    how many segments it maps of those who published."""
    from forge.store.client import client
    from forge.store.records import memory_label

    here = client()
    relayed = [name for name in here._opened if name.startswith(memory_label(0)[:-1])]
    return {
        "relays": len(here.data_plane.relayed._copies),
        "maps": len(relayed),
        "publishers": len(here._opened) - len(relayed),
    }


def sent_over(connection: socket.socket) -> int:
    """Bytes that were sent over a TCP connection, as the kernel counts. What TCP sent once more, as it does on a busy
    machine, does not count."""
    sent_at = 200  # of tcpi_bytes_sent in the kernel's struct tcp_info; tcpi_bytes_retrans follows
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    sent, sent_again = struct.unpack_from("<QQ", info, sent_at)
    return int(sent - sent_again)


_sent_before_end: dict[threading.Thread, int] = {}
"""For each connection of the data server that has ended, by its thread, the bytes that it sent."""


async def num_bytes_sent(_: Rank) -> int:
    """Bytes that this process's data server has sent, over connections that have ended since the first call too: a
    relay closes its own when it has all that it wants."""
    from forge.store.client import client
    from forge.store.transports.tcp_server import DataServer

    serve: Any = DataServer._serve
    if serve.__name__ != "counted":

        def counted(server: Any, connection: socket.socket) -> None:
            try:
                serve(server, connection)
            finally:
                _sent_before_end[threading.current_thread()] = sent_over(connection)

        DataServer._serve = counted  # type: ignore[method-assign]
    server, found = client().data_plane.serve(), {}
    with server._lock:
        running = list(server._connections.items())
    for thread, handle in running:
        with contextlib.suppress(OSError):  # it has just ended, and was counted before
            found[thread] = sent_over(handle)
    return sum((found | _sent_before_end).values())
