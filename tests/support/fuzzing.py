"""Seeded inputs for fuzz tests: what is valid, damaged in many ways, and what never was valid."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

NUM_INPUTS = 100_000
LENGTHS = (0, 1, 2**16, 2**20, 2**30, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1)


def damaged(rng: random.Random, valid: bytes) -> bytes:
    """Return something like `valid` that differs from it."""
    data = bytearray(valid)
    kind = rng.randrange(6)
    if kind == 0:  # truncated
        del data[rng.randrange(len(data)) :]
    elif kind == 1:  # bits flipped
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 2:  # a length that is not the right one, with nothing behind it
        at = rng.randrange(len(data))
        data[at : at + 8] = struct.pack(rng.choice(("<Q", ">Q")), rng.choice(LENGTHS))
    elif kind == 3:  # random
        data = bytearray(rng.randbytes(rng.randrange(len(valid) + 64)))
    elif kind == 4:  # a piece moved or repeated
        start, end = sorted((rng.randrange(len(data)), rng.randrange(len(data) + 1)))
        at = rng.randrange(len(data))
        data[at:at] = data[start:end] or b"\0"
    else:  # text that parsers stumble over
        at = rng.randrange(len(data))
        data[at:at] = rng.choice((b"\0", b"\xff\xfe", b"\r\n\r\n", b"[" * 2000, b'{"a":' * 500, b"9" * 5000, b"NaN"))
    return bytes(data) if bytes(data) != valid else bytes(data) + b"\1"


def inputs(seed: int, valid: Sequence[bytes], count: int = NUM_INPUTS) -> Iterator[bytes]:
    """Yield `count` damaged inputs, the same ones for a seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield damaged(rng, rng.choice(valid))


def resident_bytes(pid: int | str = "self") -> int:
    """Return the memory that a process occupies."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def send_and_leave(place: str | tuple[str, int], data: bytes) -> bytes:
    """Connect, send, and return what the other side says before it closes the connection."""
    family = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
    said = b""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(600)
        sock.connect(place)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(65536):
                said += part
        except TimeoutError:
            raise
        except OSError:
            return said  # it was closed while we spoke
    return said


def silent_connections(place: str | tuple[str, int], count: int) -> list[socket.socket]:
    """Return connections that say nothing."""
    family = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
    opened = []
    for _ in range(count):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(600)
        sock.connect(place)
        opened.append(sock)
    return opened
