"""Delays the frames of one link of a test network. Run by `networks`, in the network namespace of the switch.

usage: network_delay.py TAP TAP SECONDS SECONDS, the delays of frames from the first TAP device, and of those to it

It opens both devices, prints `ready`, and copies frames between them until its standard input is closed. Frames of one
direction keep their order. It works on kernels without `netem`.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_MAX_FRAME = 65536


def open_tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return device


class Direction:
    """Frames on their way from one device to the other."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self.source, self._target, self._delay_s = source, target, delay_s
        self._frames: deque[tuple[float, bytes]] = deque()

    def receive(self) -> None:
        """Take what has arrived."""
        while True:
            try:
                frame = os.read(self.source, _MAX_FRAME)
            except BlockingIOError:
                return
            except OSError:  # the device is down
                return
            self._frames.append((time.monotonic() + self._delay_s, frame))

    def deliver(self) -> None:
        """Send what is due. A frame that the other device refuses is lost, as on a real link."""
        while self._frames and self._frames[0][0] <= time.monotonic():
            _, frame = self._frames.popleft()
            try:
                os.write(self._target, frame)
            except OSError:
                continue

    def due_s(self) -> float | None:
        """Return the seconds until the next frame is due."""
        return max(0.0, self._frames[0][0] - time.monotonic()) if self._frames else None


def main(first: str, second: str, forth_s: float, back_s: float) -> None:
    one, two = open_tap(first), open_tap(second)
    directions = (Direction(one, two, forth_s), Direction(two, one, back_s))
    print("ready", flush=True)
    while True:
        waits = [wait for direction in directions if (wait := direction.due_s()) is not None]
        readable, _, _ = select.select([0, one, two], [], [], min(waits, default=None))
        if 0 in readable and not os.read(0, 4096):
            return
        for direction in directions:
            if direction.source in readable:
                direction.receive()
            direction.deliver()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
