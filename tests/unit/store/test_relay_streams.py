"""The threads that read for all relayed parts: few, in turns, and only while there is something to read."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from forge.store.relay_sources import Connections
from forge.store.relay_streams import MOST_STREAMS, StreamThreads

LIMIT_S = 600.0


class Chunks:
    """A stream of some chunks, which reports when it has been read."""

    def __init__(self, number: int, log: list[int], *, num_chunks: int = 3) -> None:
        self._number, self._log, self._left = number, log, num_chunks
        self.is_read = threading.Event()

    def read_chunk(self, connections: Connections) -> bool:
        assert isinstance(connections, Connections)
        self._left -= 1
        self._log.append(self._number)
        if not self._left:
            self.is_read.set()
        return self._left > 0


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "forge-relay"]


def wait_until_ended() -> None:
    for thread in threads():
        thread.join(LIMIT_S)
    assert threads() == []


def test_all_streams_are_read_to_their_end_by_a_few_threads() -> None:
    log: list[int] = []
    pool = StreamThreads(lambda: b"secret")
    for _ in range(2):  # after they have ended, others start
        log.clear()
        streams = [Chunks(number, log) for number in range(5 * MOST_STREAMS)]
        for stream in streams:
            pool.add(stream)
            assert len(threads()) <= MOST_STREAMS
        for stream in streams:
            assert stream.is_read.wait(LIMIT_S)
        assert Counter(log) == dict.fromkeys(range(5 * MOST_STREAMS), 3)
        wait_until_ended()


def test_streams_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge.store.relay_streams.MOST_STREAMS", 1)
    log: list[int] = []
    may_start = threading.Event()

    class First(Chunks):
        def read_chunk(self, connections: Connections) -> bool:
            assert may_start.wait(LIMIT_S)
            return super().read_chunk(connections)

    pool = StreamThreads(lambda: b"secret")
    pool.add(First(0, log))
    for number in (1, 2):
        pool.add(Chunks(number, log))
    may_start.set()
    wait_until_ended()
    assert log == [0, 1, 2] * 3


def test_without_a_thread_nothing_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = StreamThreads(lambda: b"secret")
    log: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.add(Chunks(0, log))
    pool.add(Chunks(1, log))
    wait_until_ended()
    assert log == [1] * 3
