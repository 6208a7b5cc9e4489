"""What a relay holds, with real servers: bytes come once, are passed on as they come, and come elsewhere if need be."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forge.errors import StoreError
from forge.store.data_plane import ServedSegments
from forge.store.intervals import Intervals
from forge.store.records import HEADER, Holder, Relay, SegmentRecord, copy_label
from forge.store.relay_copies import FIRST_CHUNK, MOST_CHUNK, NoRoom, RelayCopies, RelayCopy, Wanted, adapted
from forge.store.relay_sources import LEAST_PACE_S, NoSource, NotHere, PartRanges
from forge.store.segments import SegmentPool, pack_stamp
from forge.store.transports.tcp_client import DataClient
from forge.store.transports.tcp_server import DataServer
from memory_segments import MemorySegments

SECRET = b"secret"
STAMP = 77
RANK = 3
SIZE = HEADER + 4 * FIRST_CHUNK
LIMIT_S = 300.0
HEAD = Intervals.of([(HEADER, FIRST_CHUNK)])
ALL = Intervals.of([(HEADER, SIZE - HEADER)])


class GatedSegments(MemorySegments):
    """Gives out what is before an offset, and the rest later."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = SIZE
        self._changed = threading.Condition()
        self.asked: list[tuple[int, int]] = []

    def open_until(self, limit: int) -> None:
        with self._changed:
            self._limit = limit
            self._changed.notify_all()

    def wait_for(self, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        self.asked.extend(ranges)
        with self._changed:
            assert self._changed.wait_for(lambda: all(sum(each) <= self._limit for each in ranges), LIMIT_S)


class Origin:
    """A process that holds a part. What is after an offset can be held back."""

    def __init__(self, stamp: int = STAMP) -> None:
        self.data = pack_stamp(stamp).ljust(HEADER, b"\0") + os.urandom(SIZE - HEADER)
        self._segments = GatedSegments()
        self._segments.add("part", self.data)
        self._server = DataServer(SECRET, segments=self._segments, on_ask=lambda name, payload: None)
        holder = Holder("tcp", "a", 1, 1, segment="part", address=self._server.address)
        self.record = SegmentRecord(SIZE, STAMP, (holder,))

    def hold_back(self, limit: int = HEADER) -> None:
        self._segments.open_until(limit)

    def give_all(self) -> None:
        self._segments.open_until(SIZE)

    @property
    def asked(self) -> list[tuple[int, int]]:
        """The ranges that were asked for, but for stamps."""
        return [(start, size) for start, size in self._segments.asked if start]

    def close(self) -> None:
        self.give_all()
        self._server.close()
        self._segments.close()


class Host:
    """A process that relays."""

    def __init__(self, name: str) -> None:
        self.pool = SegmentPool("run")
        self.copies = RelayCopies(self.pool, lambda: SECRET)
        self.questions: list[str] = []
        segments = ServedSegments(self.pool, self.copies)
        self.server = DataServer(SECRET, segments=segments, on_ask=lambda name, _: self.questions.append(name))
        self.relay = Relay(name, os.getpid(), 5, self.server.address, copy=7, memory=7)

    def want(self, record: SegmentRecord, ranges: Intervals = ALL, *upstreams: Host) -> Wanted:
        relays = [upstream.relay for upstream in upstreams]
        (wanted,) = self.copies.want("policy", self.relay, relays, [PartRanges(RANK, record, ranges)])
        return wanted

    def begin_next_version(self) -> None:
        """From here on another version is wanted, in the same memory."""
        self.relay = replace(self.relay, copy=self.relay.copy + 1)

    def finish(self, wanted: Wanted) -> tuple[Relay, ...]:
        """Wait for what is wanted; return the relays that it came from."""
        progress = self.copies.wait((wanted.copy, wanted.rank), wanted.ticket, LIMIT_S)
        assert progress.num_missing == 0
        return progress.relays

    @property
    def copy(self) -> RelayCopy:
        return self.copies.find((self.relay.copy, RANK))

    def content(self, ranges: Intervals = ALL) -> bytes:
        return b"".join(self.copy.segment.map[start : start + size] for start, size in ranges)

    def close(self) -> None:
        self.copies.close()
        self.server.close()
        self.pool.close()


def cut(data: bytes, ranges: Intervals = ALL) -> bytes:
    return b"".join(data[start : start + size] for start, size in ranges)


@pytest.fixture
def origin() -> Iterator[Origin]:
    made = Origin()
    yield made
    made.close()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    made = Host("b"), Host("c")
    yield made
    for host in made:
        host.close()


def test_only_what_is_wanted_comes_and_once(origin: Origin, hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    first, second = Intervals.of([(HEADER, 1000), (9000, 10)]), Intervals.of([(HEADER + 500, 1000)])
    wanted = host.want(origin.record, first)
    assert wanted.num_new == 1010
    host.finish(wanted)
    assert host.content(first) == cut(origin.data, first)
    assert host.content(Intervals.of([(HEADER + 1000, 500)])) == bytes(500)
    again = host.want(origin.record, second)
    assert (again.num_new, again.segment) == (500, wanted.segment)
    host.finish(again)
    more = host.want(origin.record, first)
    assert more.num_new == 0
    host.finish(more)
    assert host.content(second) == cut(origin.data, second)
    assert sorted(origin.asked) == [(HEADER, 1000), (HEADER + 1000, 500), (9000, 10)]
    assert host.copy.segment.num_used == HEADER + 1510


def test_bytes_are_passed_on_while_others_are_still_to_come(origin: Origin, hosts: tuple[Host, Host]) -> None:
    near, far = hosts
    origin.hold_back(HEADER + FIRST_CHUNK)
    first, second = near.want(origin.record), far.want(origin.record, ALL, near)
    assert far.finish(far.want(origin.record, HEAD, near)) == (near.relay,)
    assert near.copies.wait((7, RANK), first.ticket, 0.0).num_missing > 0, "the near one does not have everything yet"
    origin.give_all()
    near.finish(first)
    assert far.finish(second) == (near.relay,)
    assert far.content() == near.content() == cut(origin.data)


def test_what_no_reader_of_a_relay_wants_comes_from_the_holder(origin: Origin, hosts: tuple[Host, Host]) -> None:
    near, far = hosts
    near.finish(near.want(origin.record, Intervals.of([(HEADER, 100)])))
    far.finish(far.want(origin.record, ALL, near))
    assert far.content() == cut(origin.data)
    with pytest.raises(NotHere, match="no reader here wants these bytes"):
        near.copy.wait_for([(HEADER, 101)])
    near.copy.wait_for([(HEADER, 100)])


def test_a_relay_that_has_nothing_is_passed_over(origin: Origin, hosts: tuple[Host, Host]) -> None:
    near, far = hosts
    assert far.finish(far.want(origin.record, ALL, near)) == ()
    assert far.content() == cut(origin.data)


def test_a_relay_that_ends_in_the_middle_is_passed_over(origin: Origin, hosts: tuple[Host, Host]) -> None:
    near, far = hosts
    origin.hold_back(HEADER + FIRST_CHUNK)
    near.want(origin.record)
    wanted = far.want(origin.record, ALL, near)
    far.finish(far.want(origin.record, HEAD, near))
    near.close()
    origin.give_all()
    far.finish(wanted)
    assert far.content() == cut(origin.data)


def test_a_holder_with_another_version_is_not_read(hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    other = Origin(stamp=STAMP + 1)
    wanted = host.want(other.record)
    with pytest.raises(NoSource, match="holds another version now"):
        host.finish(wanted)
    other.close()
    assert host.copy.num_coming == 0


def test_what_failed_may_be_wanted_again(origin: Origin, hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    gone = Origin()
    gone.close()
    wanted = host.want(gone.record)
    with pytest.raises(NoSource, match=r"the publisher \(pid 1 on host a, tcp:.*could not open the connection"):
        host.finish(wanted)
    host.begin_next_version()
    host.finish(host.want(origin.record))
    assert host.content() == cut(origin.data)


def test_without_memory_nothing_is_relayed(
    origin: Origin, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _ = hosts
    monkeypatch.setenv("FORGE_STORE_MEMORY_GB", str(FIRST_CHUNK / 2**30))
    small = Intervals.of([(HEADER, FIRST_CHUNK // 2)])
    host.finish(host.want(origin.record, small))
    with pytest.raises(NoRoom, match=r"are needed to relay 'policy', and 0\.00 GiB are left"):
        host.want(origin.record, ALL)
    with pytest.raises(NoRoom):
        host.want(origin.record, Intervals.of([(HEADER, FIRST_CHUNK)]))
    host.finish(host.want(origin.record, small))


def test_bytes_on_their_way_take_room(
    origin: Origin, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _ = hosts
    origin.hold_back()
    half = (SIZE - HEADER) // 2
    host.want(origin.record, Intervals.of([(HEADER, half)]))
    monkeypatch.setattr(host.pool, "room", lambda: half + HEADER)  # what has not come takes no memory yet
    with pytest.raises(NoRoom):
        host.want(origin.record, ALL)


def test_a_copy_that_is_dropped_ends_its_transfer(
    origin: Origin, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge.store.relay_sources.STALL_S", 2 * LIMIT_S)  # nothing else ends it
    host, _ = hosts
    origin.hold_back()
    wanted = host.want(origin.record)
    failures: list[type[StoreError]] = []

    def wait() -> None:
        try:
            host.finish(wanted)
        except StoreError as error:
            failures.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    streams = [thread for thread in threading.enumerate() if thread.name == "forge-relay"]
    assert len(streams) == 2
    host.copies.drop(7)
    waiting.join(LIMIT_S)
    assert failures == [NotHere]
    for stream in streams:
        stream.join(LIMIT_S)
        assert not stream.is_alive()
    assert len(host.pool) == 0
    assert f"memfd:{wanted.segment}" not in "".join(os.readlink(f"/proc/self/fd/{fd}") for fd in open_files())
    with pytest.raises(NotHere, match="does not relay this version"):
        host.copies.wait((7, RANK), wanted.ticket, 0)


def open_files() -> list[str]:
    import gc

    gc.collect()
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


def test_a_ticket_is_used_once(origin: Origin, hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    wanted = host.want(origin.record)
    host.finish(wanted)
    with pytest.raises(StoreError, match="nothing under this ticket"):
        host.finish(wanted)


def test_a_copy_takes_no_memory_for_what_is_not_wanted(origin: Origin, hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    host.finish(host.want(origin.record, Intervals.of([(HEADER, 100)])))
    blocks = os.fstat(host.copy.segment.fd).st_blocks * 512
    assert blocks <= 16 * HEADER
    assert Path("/proc/self/maps").read_text().count(f"memfd:{host.copy.segment.name}") == 1


def test_others_find_it_by_its_label(origin: Origin, hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    host.finish(host.want(origin.record))
    served = ServedSegments(host.pool, host.copies)
    fd, size = served.open(copy_label(7, RANK))
    assert (os.fstat(fd).st_ino, size) == (os.fstat(host.copy.segment.fd).st_ino, SIZE)
    served.release(copy_label(7, RANK))
    whole = served.mapped(copy_label(7, RANK))
    assert whole is not None
    assert bytes(whole[HEADER:]) == cut(origin.data)
    whole.release()


def test_the_memory_of_an_earlier_version_is_used_again(
    origin: Origin, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _ = hosts
    first = host.want(origin.record)
    host.finish(first)
    newer = Origin(stamp=STAMP + 1)
    host.begin_next_version()
    monkeypatch.setattr(host.pool, "room", lambda: 0)  # it has its memory
    second = host.want(replace(newer.record, stamp=STAMP + 1), HEAD)
    host.finish(second)
    assert (second.segment, second.memory, second.copy) == (first.segment, 7, 8)
    assert len(host.pool) == 1
    assert host.copy.segment.stamp == STAMP + 1
    assert host.content(HEAD) == cut(newer.data, HEAD)
    with pytest.raises(NotHere, match="does not relay this version"):
        host.copies.find((7, RANK))
    with pytest.raises(NotHere, match="no reader here wants"):
        host.copy.wait_for([(HEADER + FIRST_CHUNK, 1)])
    host.copies.drop(7)
    assert len(host.pool) == 0
    newer.close()


def test_memory_that_is_still_written_to_is_not_used_again(origin: Origin, hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    origin.hold_back()
    first = host.want(origin.record)
    held_up = host.copy
    newer = Origin(stamp=STAMP + 1)
    host.begin_next_version()
    second = host.want(replace(newer.record, stamp=STAMP + 1))
    assert second.segment != first.segment
    host.finish(second)
    origin.give_all()
    with pytest.raises(NotHere, match="was released"):
        held_up.wait(first.ticket, LIMIT_S)
    assert host.content() == cut(newer.data)
    assert len(host.pool) == 1
    newer.close()


def test_a_late_request_does_not_take_memory_from_a_newer_version(origin: Origin, hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    host.finish(host.want(origin.record))
    late = host.relay
    newer = Origin(stamp=STAMP + 1)
    host.begin_next_version()
    host.finish(host.want(replace(newer.record, stamp=STAMP + 1)))
    with pytest.raises(NotHere, match="was released"):
        host.copies.want("policy", late, [], [PartRanges(RANK, origin.record, ALL)])
    assert host.copy.segment.stamp == STAMP + 1
    assert host.content() == cut(newer.data)
    newer.close()


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_late_request_does_not_bring_back_what_was_dropped(
    origin: Origin, hosts: tuple[Host, Host], *, is_closed: bool
) -> None:
    host, _ = hosts
    if is_closed:
        host.copies.close()
    else:
        host.copies.drop(7)
    with pytest.raises(NotHere, match="was released"):
        host.want(origin.record)
    assert len(host.pool) == 0
    assert origin.asked == []


def test_a_stranger_gets_nothing_from_a_relay(origin: Origin, hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    host.finish(host.want(origin.record))
    stranger = DataClient(host.server.address, b"another")
    target = bytearray(16)
    with pytest.raises(StoreError, match="could not open the connection"):
        stranger.read(copy_label(7, RANK), [(HEADER, memoryview(target))])
    with pytest.raises(StoreError, match="could not open the connection"):
        stranger.ask("relay", ("policy", host.relay, (), [PartRanges(RANK, origin.record, ALL)]))
    assert not any(target)
    assert host.questions == []
    stranger.close()


def test_memory_that_does_not_fit_is_not_used_again(origin: Origin, hosts: tuple[Host, Host]) -> None:
    host, _ = hosts
    first = host.want(origin.record, HEAD)
    host.finish(first)
    host.begin_next_version()
    small = replace(origin.record, size=SIZE // 3)
    second = host.want(small, Intervals.of([(HEADER, 10)]))
    host.finish(second)
    assert second.segment != first.segment
    host.copies.drop(7)
    assert len(host.pool) == 0


def test_chunks_grow_until_they_take_a_while() -> None:
    pace = LEAST_PACE_S
    size = FIRST_CHUNK
    for _ in range(10):
        size = adapted(size, pace / 4, pace)
    assert size == MOST_CHUNK
    assert adapted(size, pace, pace) == size
    for _ in range(10):
        size = adapted(size, 3 * pace, pace)
    assert size == 128 << 10
