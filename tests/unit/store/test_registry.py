"""The registry: what is visible, who is told what, and which memory is free again."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from forge.errors import StoreError, StoreKeyError
from forge.store.proof import pack_digests
from forge.store.records import (
    Acquire,
    Assignment,
    Begin,
    Commit,
    Holder,
    Layout,
    Lease,
    Part,
    SegmentRecord,
    Version,
    packing,
)
from forge.store.registry import Key, Registry
from forge.store.sharding import Piece, Region, TensorShards

POLICY: Key = ("weights", "policy")
VALUE: Key = ("object", "value")
TABLES = ("_stored", "_pending", "_writers", "_leases", "_layouts", "_layout_uses", "_spares", "_volumes")
_numbers = itertools.count(1)


class Told:
    """Hears what the registry tells others."""

    def __init__(self) -> None:
        self.changes: list[Key] = []
        self.drops: Counter[tuple[int, str]] = Counter()

    def changed(self, key: Key) -> None:
        self.changes.append(key)

    def drop(self, session: int, segment: str) -> None:
        self.drops[session, segment] += 1

    def forget(self) -> None:
        self.changes.clear()
        self.drops.clear()


def whole(*names: str, numel: int = 48) -> Layout:
    """One rank holds every tensor whole."""
    held = TensorShards((numel,), "float32", (Piece(Region((0,), (numel,)), (0,)),))
    return Layout.of(names or ("w",), (held,) * max(1, len(names)))


def shard(rank: int, world_size: int, numel: int = 48) -> Layout:
    """Equal shards of one tensor."""
    each = numel // world_size
    return Layout.of(("w",), (TensorShards((numel,), "float32", (Piece(Region((rank * each,), (each,)), (0,)),)),))


def request(key: Key = POLICY, *, version: int | None = 1, rank: int = 0, world_size: int = 1, **more: Any) -> Begin:
    layout = more.pop("layout", None) or (whole() if world_size == 1 else shard(rank, world_size))
    told = more.pop("told", True)
    return Begin(key[1], key[0], version, rank, world_size, layout.id, layout if told else None, **more)


def here(session: int, segment: str, *, volume: str = "") -> Holder:
    return Holder("shm", "host", 1000 + session, session, segment=segment, volume=volume)


def part_of(assignment: Assignment, begun: Begin, holders: Sequence[Holder], *, inline: bytes | None = None) -> Part:
    layout = begun.layout
    assert layout is not None
    packed = packing(layout, assignment.written)
    record = SegmentRecord(packed.size, next(_numbers), tuple(holders), inline)
    return Part(begun.rank, layout.id, assignment.written, record, pack_digests([7] * len(packed.pieces)), b"")


class Driver:
    """A registry, driven as processes would drive it."""

    def __init__(self, make: type[Registry] = Registry) -> None:
        self.told = Told()
        self.registry = make(self.told)

    def begin(self, session: int, begun: Begin) -> int:
        number = self.registry.begin(session, begun)
        assert number is not None
        return number

    def commit(self, session: int, number: int, begun: Begin, holders: Sequence[Holder] | None = None) -> str:
        """Commit a part in the segment that is free, or in a new one; its name."""
        assignment = self.registry.assignment(number)
        assert assignment is not None
        name = assignment.reuse or f"segment-{next(_numbers)}"
        given = [here(session, name)] if holders is None else holders
        self.registry.commit(Commit(number, part_of(assignment, begun, given)))
        return name

    def publish(self, session: int, begun: Begin, holders: Sequence[Holder] | None = None) -> tuple[Version, str]:
        """Publish a whole version from one rank; the version, and the segment that it is in."""
        number = self.begin(session, begun)
        name = self.commit(session, number, begun, holders)
        version = self.registry.outcome(number)
        self.registry.close_assignment(number)
        assert version is not None
        return version, name

    def numbers(self, key: Key = POLICY) -> list[int]:
        return [info.number for info in self.registry.versions(key)]

    def acquire(self, session: int, key: Key = POLICY, version: int | None = None) -> Lease:
        return self.registry.acquire(session, Acquire(key[1], key[0], version))

    def tables(self) -> dict[str, Any]:
        """What the registry still remembers."""
        return {name: found for name in TABLES if (found := getattr(self.registry, name))}


@pytest.fixture
def driver() -> Driver:
    return Driver()


# writing


def test_a_version_of_one_rank_is_visible_when_it_is_committed(driver: Driver) -> None:
    begun = request()
    number = driver.begin(1, begun)
    assignment = driver.registry.assignment(number)
    assert assignment == Assignment(number, 1)
    assert (
        driver.numbers(),
        driver.registry.newest(POLICY),
        driver.registry.outcome(number),
    ) == ([], None, None)
    driver.told.forget()
    driver.commit(1, number, begun)
    assert POLICY in driver.told.changes
    version = driver.registry.outcome(number)
    assert version is not None
    assert (version.key, version.number, len(version.parts)) == ("policy", 1, 1)
    assert (driver.numbers(), driver.registry.newest(POLICY)) == ([1], 1)
    assert driver.registry.keys("weights") == ["policy"]
    assert driver.registry.keys("object") == driver.registry.keys("weights", "x") == []


def test_nobody_gets_a_share_before_every_rank_has_joined(driver: Driver) -> None:
    requests = [request(rank=rank, world_size=3) for rank in range(3)]
    numbers = [driver.begin(10 + rank, requests[rank]) for rank in (2, 0)]
    assert [driver.registry.assignment(number) for number in numbers] == [None, None]
    assert "rank(s) [1] of 3 of version 1 of 'policy'" in driver.registry.waiting_for(numbers[0])
    driver.told.forget()
    last = driver.begin(11, requests[1])
    assert driver.told.changes == [POLICY]
    assert [driver.registry.assignment(number) is not None for number in (*numbers, last)] == [True] * 3


def test_a_version_is_visible_with_its_last_part_only(driver: Driver) -> None:
    requests = [request(rank=rank, world_size=2) for rank in range(2)]
    numbers = [driver.begin(10 + rank, requests[rank]) for rank in range(2)]
    driver.commit(11, numbers[1], requests[1])
    assert driver.numbers() == []
    with pytest.raises(StoreKeyError, match="under way: version 1 has 1 of 2") as caught:
        driver.acquire(5)
    assert "missing [0]" in str(caught.value)
    driver.commit(10, numbers[0], requests[0])
    assert driver.numbers() == [1]
    assert [part.rank for part in driver.acquire(5).version.parts] == [0, 1]


def test_what_several_ranks_hold_is_written_once(driver: Driver) -> None:
    layout = whole("a", "b")
    numbers = [driver.begin(10 + rank, request(rank=rank, world_size=2, layout=layout)) for rank in range(2)]
    assignments = [driver.registry.assignment(number) for number in numbers]
    assert all(assignment is not None for assignment in assignments)
    written = [assignment.written for assignment in assignments if assignment is not None]
    assert sorted(number for share in written for number in share or ()) == [0, 1]
    assert [len(share or ()) for share in written] == [1, 1]


def test_a_layout_is_told_once_and_forgotten_with_its_last_version(driver: Driver) -> None:
    assert driver.registry.begin(1, request(told=False)) is None
    assert driver.tables() == {}
    driver.publish(1, request(version=1))
    for version in (2, 3, 4):
        number = driver.registry.begin(1, request(version=version, told=False))
        assert number is not None
        driver.commit(1, number, request(version=version))
        driver.registry.close_assignment(number)
    assert set(driver.registry._layouts) == {whole().id}
    assert driver.registry._layout_uses[whole().id] == 2
    lease = driver.acquire(5)
    assert set(lease.layouts) == {whole().id}
    known = Acquire("policy", "weights", None, frozenset(lease.layouts))
    again = driver.registry.acquire(5, known)
    assert again.layouts == {}
    driver.registry.retire(POLICY, keep=0)
    assert set(driver.registry._layouts) == {whole().id}, "two readers still read it"
    driver.registry.release(lease.id)
    driver.registry.release(again.id)
    assert (driver.registry._layouts, driver.registry._layout_uses) == ({}, Counter())
    assert driver.registry.begin(1, request(version=9, told=False)) is None


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (request(rank=0, world_size=2), request(rank=1, world_size=3), "disagree about how many"),
        (request(rank=0, world_size=2), request(rank=0, world_size=2), "already"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_and_changes_nothing(
    driver: Driver, first: Begin, second: Begin, what: str
) -> None:
    number = driver.begin(1, first)
    before = {name: dict(table) for name, table in driver.tables().items()}
    with pytest.raises(StoreError, match=what) as caught:
        driver.registry.begin(2, second)
    assert None not in (caught.value.path, caught.value.rule, caught.value.repair)
    assert driver.registry.assignment(number) is None
    assert driver.tables() == before, "the refused layout stays for ever"
    others = [request(rank=rank, world_size=2) for rank in (0, 1)]
    other = driver.begin(3, others[1])
    driver.commit(1, number, others[0])
    driver.commit(3, other, others[1])
    assert driver.numbers() == [1]


@pytest.mark.parametrize(("rank", "world_size"), [(3, 1), (-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_of_the_world_is_refused(driver: Driver, rank: int, world_size: int) -> None:
    with pytest.raises(StoreError, match="rank") as caught:
        driver.registry.begin(1, request(rank=rank, world_size=world_size, layout=whole()))
    assert None not in (caught.value.path, caught.value.rule, caught.value.repair)
    assert driver.tables() == {}


@pytest.mark.parametrize("number", [0, 4, 5])
def test_a_version_in_the_past_is_refused_and_leaves_nothing(driver: Driver, number: int) -> None:
    driver.publish(1, request(version=5))
    before = set(driver.tables())
    with pytest.raises(StoreError, match="is too old") as caught:
        driver.registry.begin(1, request(version=number, layout=whole("other")))
    assert (caught.value.value, driver.numbers()) == (number, [5])
    assert "rewind" in str(caught.value.repair)
    assert set(driver.tables()) == before
    assert set(driver.registry._layouts) == {whole().id}


def test_ranks_that_disagree_about_a_tensor_all_hear_it(driver: Driver) -> None:
    driver.publish(1, request(version=0))
    numbers = [driver.begin(rank, request(rank=rank, world_size=2, layout=whole(numel=8 + rank))) for rank in (0, 1)]
    for number in numbers:
        with pytest.raises(StoreError, match="disagree about 'w'"):
            driver.registry.assignment(number)
        driver.registry.close_assignment(number)
    assert driver.numbers() == [0]
    assert set(driver.registry._layouts) == {whole().id}
    assert driver.publish(1, request(version=1))[0].number == 1


def test_values_without_a_number_get_the_next_one_and_do_not_disturb_each_other(
    driver: Driver,
) -> None:
    requests = [request(VALUE, version=None, keep=1) for _ in range(3)]
    numbers = [driver.begin(session, begun) for session, begun in enumerate(requests)]
    assignments = [driver.registry.assignment(number) for number in numbers]
    assert [assignment.version for assignment in assignments if assignment is not None] == [0, 1, 2]
    for session in (2, 0, 1):
        driver.commit(session, numbers[session], requests[session])
        assert driver.numbers(VALUE) == [2], "an older value that comes late must not replace a newer one"
        version = driver.registry.outcome(numbers[session])
        assert version is not None
        assert (version.number, len(version.digest)) == (session, 64)
        driver.registry.close_assignment(numbers[session])


# giving up


def test_ranks_of_two_meshes_do_not_make_up_one_value(driver: Driver) -> None:
    """Each group of a hybrid-sharded job puts the same key: rank 0 of one and rank 1 of the other are no value."""
    key = ("object", "w")
    begun = [request(key, version=None, rank=rank, world_size=2, group=group) for group in "ab" for rank in (0, 1)]
    assignments = {session: driver.begin(session, begun[session]) for session in (0, 3, 2, 1)}
    found = {session: driver.registry.assignment(number) for session, number in assignments.items()}
    numbers = {session: assignment.version for session, assignment in found.items() if assignment is not None}
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]


def test_a_rank_that_gives_up_ends_the_version_for_all(driver: Driver) -> None:
    driver.publish(9, request(version=0, layout=whole("old")))
    requests = [request(rank=rank, world_size=3) for rank in range(3)]
    numbers = [driver.begin(10 + rank, requests[rank]) for rank in range(3)]
    driver.commit(10, numbers[0], requests[0])
    driver.registry.close_assignment(numbers[1], "rank 1 has no memory left")
    for number in (numbers[0], numbers[2]):
        with pytest.raises(StoreError, match="rank 1 has no memory left"):
            driver.registry.outcome(number)
    with pytest.raises(StoreError, match="no memory left"):
        driver.commit(12, numbers[2], requests[2])
    for number in numbers:
        driver.registry.close_assignment(number)
    assert (driver.numbers(), set(driver.registry._layouts)) == ([0], {whole("old").id})
    again = [driver.begin(10 + rank, requests[rank]) for rank in range(3)]
    for rank in range(3):
        driver.commit(10 + rank, again[rank], requests[rank])
    assert driver.numbers() == [0, 1]


def test_a_version_that_is_complete_is_not_abandoned_by_those_who_leave(driver: Driver) -> None:
    requests = [request(rank=rank, world_size=2) for rank in range(2)]
    numbers = [driver.begin(10 + rank, requests[rank]) for rank in range(2)]
    for rank in range(2):
        driver.commit(10 + rank, numbers[rank], requests[rank])
    driver.registry.close_assignment(numbers[0], "too late to give up")
    driver.registry.close_assignment(numbers[0], "and twice")
    assert driver.registry.outcome(numbers[1]) is not None
    assert driver.numbers() == [1]


def test_the_parts_of_an_abandoned_version_are_dropped_by_those_who_hold_them_for_others(
    driver: Driver,
) -> None:
    """The controller and the volumes hold a part from its commit on: they must hear that it came to nothing."""
    requests = [request(rank=rank, world_size=2) for rank in range(2)]
    numbers = [driver.begin(10 + rank, requests[rank]) for rank in range(2)]
    driver.commit(10, numbers[0], requests[0], [here(10, "s"), here(0, "s"), here(7, "s-copy", volume="v")])
    driver.registry.left(11, "rank 1")
    driver.registry.close_assignment(numbers[0])
    assert driver.told.drops[0, "s"] == driver.told.drops[7, "s-copy"] == 1
    assert driver.tables() == {}


def test_a_part_that_comes_after_the_failure_is_dropped_too(driver: Driver) -> None:
    requests = [request(rank=rank, world_size=2) for rank in range(2)]
    numbers = [driver.begin(10 + rank, requests[rank]) for rank in range(2)]
    assignments = [driver.registry.assignment(number) for number in numbers]
    driver.registry.left(11, "rank 1")
    assignment = assignments[0]
    assert assignment is not None
    with pytest.raises(StoreError, match="rank 1"):
        driver.registry.commit(Commit(numbers[0], part_of(assignment, requests[0], [here(10, "s"), here(0, "s")])))
    driver.registry.close_assignment(numbers[0])
    assert driver.told.drops[0, "s"] == 1
    assert driver.tables() == {}


# reading


def test_a_lease_keeps_its_version_while_newer_ones_come(driver: Driver) -> None:
    first, name = driver.publish(1, request(version=1))
    lease = driver.acquire(5, version=1)
    for version in range(2, 6):
        assert driver.publish(1, request(version=version))[1] != name
    assert (lease.version, driver.told.drops[5, name], driver.told.drops[1, name]) == (first, 0, 0)
    with pytest.raises(StoreKeyError, match="published versions: \\[4, 5\\]"):
        driver.acquire(6, version=1)
    driver.registry.release(lease.id)
    driver.registry.release(lease.id)
    free = driver.registry._spares[1, POLICY]
    assert len(free) == 1, "one segment stays for the next version, the other goes"
    assert name == free[0].name or driver.told.drops[1, name] == driver.told.drops[5, name] == 1


def test_the_newest_is_given_unless_a_number_is_asked_for(driver: Driver) -> None:
    for version in (3, 7):
        driver.publish(1, request(version=version))
    assert driver.acquire(5).version.number == 7
    assert driver.acquire(5, version=3).version.number == 3
    info = driver.registry.versions(POLICY)
    assert [(entry.number, entry.num_readers, entry.is_lost) for entry in info] == [(3, 1, False), (7, 1, False)]
    assert info[0].num_bytes == packing(whole(), None).size
    for key, number in ((POLICY, 4), (("weights", "other"), None), (VALUE, None)):
        with pytest.raises(StoreKeyError) as caught:
            driver.acquire(5, key, number)
        assert None not in (caught.value.path, caught.value.rule, caught.value.repair)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep_is_how_many_versions_there_is_memory_for(driver: Driver, keep: int) -> None:
    names: set[str] = set()
    for version in range(6):
        begun = request(version=version, keep=keep)
        number = driver.begin(1, begun)
        assert driver.registry.assignment(number) is not None
        left = max(1, keep - 1)
        assert driver.numbers() == list(range(version))[-left:], "room is made before it is written"
        names.add(driver.commit(1, number, begun))
        driver.registry.close_assignment(number)
        assert driver.numbers() == list(range(version + 1))[-keep:]
    if keep == 1:
        assert len(driver.told.drops) == len(names) - 1 == 5, "there is memory for one: none waits for the next"
    else:
        assert (len(names), driver.told.drops) == (keep, {}), "segments are used again"


def test_retire_rewind_and_delete(driver: Driver) -> None:
    for version in range(5):
        driver.publish(1, request(version=version, keep=9))
    assert driver.registry.retire(POLICY, keep=4) == [0]
    assert driver.registry.retire(POLICY, keep=9) == []
    assert driver.registry.rewind(POLICY, to=2) == [3, 4]
    assert driver.numbers() == [1, 2]
    assert driver.registry.rewind(POLICY, to=7) == []
    with pytest.raises(StoreError, match="version 2 is already published"):
        driver.begin(1, request(version=2))
    driver.publish(1, request(version=3, keep=9))
    assert driver.registry.delete("weights", ["policy", "nothing"]) == 1
    assert (driver.numbers(), driver.registry.keys("weights")) == ([], [])
    assert driver.registry.delete("weights", ["policy"]) == 0


def test_to_rewind_what_does_not_exist_leaves_nothing(driver: Driver) -> None:
    assert driver.registry.rewind(POLICY, to=3) == []
    assert driver.registry.retire(POLICY, keep=0) == []
    assert (driver.tables(), driver.registry._newest) == ({}, {})


def test_rewind_ends_what_is_being_written(driver: Driver) -> None:
    driver.publish(1, request(version=1))
    begun = request(version=2)
    number = driver.begin(1, begun)
    driver.registry.rewind(POLICY, to=1)
    with pytest.raises(StoreError, match="rewound to version 1"):
        driver.commit(1, number, begun)
    driver.registry.close_assignment(number)
    assert driver.publish(1, request(version=2))[0].number == 2


# memory


def test_a_segment_is_used_again_only_when_nobody_reads_it(driver: Driver) -> None:
    _, first = driver.publish(1, request(VALUE, version=None, keep=1))
    lease = driver.acquire(5, VALUE)
    _, second = driver.publish(1, request(VALUE, version=None, keep=1))
    _, third = driver.publish(1, request(VALUE, version=None, keep=1))
    assert len({first, second, third}) == 3
    driver.registry.release(lease.id)
    assert driver.publish(1, request(VALUE, version=None, keep=1))[1] in (first, second)
    assert driver.publish(2, request(VALUE, version=None, keep=1))[1] not in (first, second, third), (
        "another process's memory"
    )


def test_a_free_segment_that_does_not_fit_is_given_up_by_all_who_mapped_it(driver: Driver) -> None:
    _, name = driver.publish(1, request(VALUE, version=None, keep=1, layout=whole(numel=1 << 20)))
    driver.registry.release(driver.acquire(5, VALUE).id)
    driver.publish(1, request(VALUE, version=None, keep=1, layout=whole(numel=1 << 20)), [here(1, "other")])
    assert [spare.name for spare in driver.registry._spares[1, VALUE]] == [name]
    assert driver.publish(1, request(VALUE, version=None, keep=1))[1] != name
    assert (driver.told.drops[1, name], driver.told.drops[5, name]) == (1, 1)


def test_a_free_segment_that_is_too_small_is_given_up(driver: Driver) -> None:
    _, name = driver.publish(1, request(VALUE, version=None, keep=1))
    driver.publish(1, request(VALUE, version=None, keep=1))
    assert driver.publish(1, request(VALUE, version=None, keep=1, layout=whole(numel=1 << 20)))[1] != name
    assert driver.told.drops[1, name] == 1


def test_a_free_segment_that_a_part_did_not_need_is_given_up(driver: Driver) -> None:
    """A part that is so small that the registry itself keeps it leaves its segment unused."""
    _, name = driver.publish(1, request(VALUE, version=None, keep=1))
    driver.publish(1, request(VALUE, version=None, keep=1))
    begun = request(VALUE, version=None, keep=1)
    number = driver.begin(1, begun)
    assignment = driver.registry.assignment(number)
    assert assignment is not None
    assert assignment.reuse == name
    driver.registry.commit(Commit(number, part_of(assignment, begun, (), inline=b"small")))
    driver.registry.close_assignment(number)
    assert driver.told.drops[1, name] == 1


def test_a_free_segment_comes_back_from_a_version_that_failed(driver: Driver) -> None:
    _, name = driver.publish(1, request(VALUE, version=None, keep=1))
    driver.publish(1, request(VALUE, version=None, keep=1))
    for _ in range(3):
        number = driver.begin(1, request(VALUE, version=None, keep=1))
        assignment = driver.registry.assignment(number)
        assert assignment is not None
        assert assignment.reuse == name
        driver.registry.close_assignment(number, "no")
    assert driver.told.drops == {}


def test_of_two_free_segments_one_is_used_and_the_other_given_up(driver: Driver) -> None:
    for version in (1, 2, 3):
        driver.publish(1, request(version=version, keep=3))
    driver.registry.retire(POLICY, keep=2)
    begun = request(version=4, keep=9)
    number = driver.begin(1, begun)
    first = driver.registry.assignment(number)
    assert first is not None
    driver.registry.retire(POLICY, keep=1)
    driver.registry.close_assignment(number, "no")
    names = {spare.name for spare in driver.registry._spares[1, POLICY]} | {name for _, name in driver.told.drops}
    assert len(names) == 2
    _, used = driver.publish(1, begun)
    free = {spare.name for spare in driver.registry._spares.get((1, POLICY), ())}
    assert {used} | free | {name for _, name in driver.told.drops} == names, "a segment was forgotten"


def test_copies_under_other_names_are_dropped_when_the_publisher_keeps_its_own(driver: Driver) -> None:
    """A volume on another host has a segment of its own, which no later version is written to."""
    driver.publish(
        1, request(VALUE, version=None, keep=1), [here(1, "mine"), here(7, "mine", volume="a"), here(8, "theirs")]
    )
    driver.registry.release(driver.acquire(5, VALUE).id)
    driver.publish(1, request(VALUE, version=None, keep=1))
    assert [spare.name for spare in driver.registry._spares[1, VALUE]] == ["mine"]
    assert driver.told.drops[8, "theirs"] == 1
    assert driver.told.drops[7, "mine"] == driver.told.drops[5, "mine"] == 0, "they will see it filled again"


@pytest.mark.parametrize("num_puts", [1, 2, 3])
def test_a_deleted_value_leaves_nothing(driver: Driver, num_puts: int) -> None:
    names = {driver.publish(1, request(VALUE, version=None, keep=1))[1] for _ in range(num_puts)}
    lease = driver.acquire(5, VALUE)
    assert driver.registry.delete("object", ["value"]) == 1
    assert driver.registry.keys("object") == []
    assert lease.id in driver.registry._leases
    driver.registry.release(lease.id)
    assert {name for session, name in driver.told.drops if session == 1} == names, "memory stays with the publisher"
    assert (driver.tables(), driver.registry._newest) == ({}, {})


def test_a_value_whose_put_failed_leaves_nothing(driver: Driver) -> None:
    number = driver.begin(1, request(VALUE, version=None, rank=0, world_size=2))
    driver.registry.close_assignment(number, "no")
    assert (driver.tables(), driver.registry._newest) == ({}, {})
    driver.publish(1, request(VALUE, version=None, keep=1))
    driver.publish(1, request(VALUE, version=None, keep=1))
    number = driver.begin(1, request(VALUE, version=None, keep=1))
    assert driver.registry.assignment(number) is not None
    driver.registry.delete("object", ["value"])
    driver.registry.close_assignment(number, "no")
    assert (driver.tables(), driver.registry._newest) == ({}, {})


def test_a_number_that_is_published_again_does_not_disturb_who_reads_the_old_one(
    driver: Driver,
) -> None:
    _, old = driver.publish(1, request(version=1))
    lease = driver.acquire(5)
    driver.registry.rewind(POLICY, to=0)
    again, new = driver.publish(1, request(version=1, layout=whole("other")))
    assert new != old
    assert driver.acquire(6).version == again
    driver.registry.left(6)
    driver.registry.retire(POLICY, keep=0)
    assert driver.told.drops[1, old] == 0
    driver.registry.release(lease.id)
    assert {spare.name for spare in driver.registry._spares[1, POLICY]} == {old}
    assert (driver.told.drops[1, new], driver.told.drops[5, old]) == (1, 0)


def test_retiring_everything_frees_what_was_kept_for_the_next_version(driver: Driver) -> None:
    _, first = driver.publish(1, request(version=1))
    _, second = driver.publish(1, request(version=2))
    _, third = driver.publish(1, request(version=3))
    assert third == first, "the first was recycled"
    assert driver.registry.retire(POLICY, keep=0) == [2, 3]
    assert driver.told.drops[1, first] == driver.told.drops[1, second] == 1
    assert not driver.registry._spares


def test_the_death_of_a_publisher_reaches_a_version_whose_number_was_used_again(
    driver: Driver,
) -> None:
    driver.publish(1, request(version=1), [here(1, "old"), here(0, "old")])
    lease = driver.acquire(5)
    driver.registry.rewind(POLICY, to=0)
    driver.publish(2, request(version=1))
    driver.registry.left(1)
    driver.registry.release(lease.id)
    assert (1, POLICY) not in driver.registry._spares
    assert driver.told.drops[0, "old"] == driver.told.drops[5, "old"] == 1


# processes that leave


@pytest.mark.parametrize("after", ["begin", "assignment", "commit"])
@pytest.mark.parametrize("who", [10, 11])
def test_a_rank_that_leaves_before_the_end_ends_the_version(driver: Driver, after: str, who: int) -> None:
    driver.publish(10, request(version=0, layout=whole("old")))
    requests = [request(rank=rank, world_size=2) for rank in range(2)]
    numbers = {10: driver.begin(10, requests[0])}
    if after != "begin" or who == 11:
        numbers[11] = driver.begin(11, requests[1])
    if after == "assignment":
        assert driver.registry.assignment(numbers[who]) is not None
    if after == "commit":
        driver.commit(who, numbers[who], requests[who - 10], [here(who, "part"), here(0, "part")])
    driver.registry.left(who, "pid 77 on host h")
    other = 21 - who
    if other in numbers:
        with pytest.raises(StoreError, match=f"rank {who - 10}, pid 77 on host h, ended"):
            driver.registry.assignment(numbers[other])
        driver.registry.close_assignment(numbers[other])
    assert driver.told.drops[0, "part"] == (after == "commit")
    assert driver.registry._writers == driver.registry._pending == {}
    assert set(driver.registry._layouts) == {whole("old").id}
    assert driver.numbers() == [0]


def test_what_only_a_dead_process_had_is_lost_and_said_so(driver: Driver) -> None:
    driver.publish(1, request(version=1))
    driver.registry.release(driver.acquire(5).id)
    name = driver.acquire(5).version.parts[0].segment.holders[0].segment
    driver.registry.left(1, "pid 77 on host h")
    assert driver.told.drops[5, name] == 1, "a reader keeps the dead publisher's memory mapped"
    assert [(info.number, info.is_lost) for info in driver.registry.versions(POLICY)] == [(1, True)]
    with pytest.raises(StoreError, match="pid 1001 on host host\\), which has ended") as caught:
        driver.acquire(6)
    assert "copies=2" in str(caught.value.repair)
    driver.publish(2, request(version=2))
    assert driver.acquire(6).version.number == 2


def test_another_copy_outlives_the_publisher(driver: Driver) -> None:
    driver.publish(1, request(version=1), [here(1, "s"), here(0, "s"), here(7, "s", volume="v")])
    lease = driver.acquire(5)
    driver.registry.left(1)
    driver.registry.left(7)
    assert [holder.session for holder in driver.acquire(6).version.parts[0].segment.holders] == [0]
    assert not driver.registry.versions(POLICY)[0].is_lost
    driver.registry.retire(POLICY, keep=0)
    assert driver.told.drops == {}
    driver.registry.left(6)
    driver.registry.release(lease.id)
    assert driver.told.drops == {(0, "s"): 1, (5, "s"): 1}
    assert driver.tables() == {}


def test_a_value_that_the_registry_keeps_itself_outlives_everybody(driver: Driver) -> None:
    begun = request(VALUE, version=None, keep=1)
    number = driver.begin(1, begun)
    assignment = driver.registry.assignment(number)
    assert assignment is not None
    driver.registry.commit(Commit(number, part_of(assignment, begun, (), inline=b"bytes"), extra=b"more"))
    driver.registry.close_assignment(number)
    driver.registry.left(1)
    version = driver.acquire(2, VALUE).version
    assert (version.parts[0].segment.inline, version.extra) == (b"bytes", b"more")


def test_a_reader_that_leaves_lets_go(driver: Driver) -> None:
    _, name = driver.publish(1, request(VALUE, version=None, keep=1))
    driver.acquire(5, VALUE)
    driver.acquire(5, VALUE)
    driver.acquire(6, VALUE)
    driver.publish(1, request(VALUE, version=None, keep=1))
    driver.registry.left(5)
    assert (1, VALUE) not in driver.registry._spares
    driver.registry.left(6)
    assert [spare.name for spare in driver.registry._spares[1, VALUE]] == [name]
    driver.registry.left(1)
    assert driver.registry._spares == {}
    assert driver.registry._leases == {}


# volumes


@pytest.mark.parametrize(
    ("copies", "expected"), [(1, ["a", "b", "a"]), (2, ["ab", "ba", "ab"]), (9, ["ab", "ba", "ab"])]
)
def test_parts_are_spread_over_the_volumes(driver: Driver, copies: int, expected: list[str]) -> None:
    driver.registry.set_copies(copies)
    for session, volume in ((21, "b"), (20, "a")):
        driver.registry.add_volume(session, Holder("tcp", "host", 1, 0, address="there", volume=volume))
    numbers = [driver.begin(10 + rank, request(rank=rank, world_size=3)) for rank in range(3)]
    assignments = [driver.registry.assignment(number) for number in numbers]
    found = [
        "".join(holder.volume for holder in assignment.volumes) for assignment in assignments if assignment is not None
    ]
    assert found == expected
    assert {
        holder.session for assignment in assignments if assignment is not None for holder in assignment.volumes
    } == {20, 21}
    driver.registry.left(21)
    again = driver.registry.assignment(driver.begin(3, request(("weights", "other"), version=0)))
    assert again is not None
    assert [holder.volume for holder in again.volumes] == ["a"]


def begun_on_volumes(driver: Driver, *, copies: int) -> tuple[list[Begin], list[int]]:
    """Two ranks that publish to the volumes 20 and 21."""
    driver.registry.set_copies(copies)
    for session, volume in ((20, "a"), (21, "b")):
        driver.registry.add_volume(session, Holder("tcp", "host", 1, 0, address="there", volume=volume))
    requests = [request(rank=rank, world_size=2) for rank in range(2)]
    numbers = [driver.begin(10 + rank, begun) for rank, begun in enumerate(requests)]
    assert all(driver.registry.assignment(number) is not None for number in numbers)
    return requests, numbers


def test_a_version_whose_only_copy_went_before_it_was_complete_is_abandoned(driver: Driver) -> None:
    requests, numbers = begun_on_volumes(driver, copies=1)
    driver.commit(10, numbers[0], requests[0], [here(20, "x", volume="a")])
    driver.registry.left(20)
    driver.told.forget()
    driver.commit(11, numbers[1], requests[1], [here(21, "y", volume="b")])
    with pytest.raises(StoreError, match=r"volume a .* held rank 0's part, has ended"):
        driver.registry.outcome(numbers[1])
    for number in numbers:
        driver.registry.close_assignment(number)
    assert driver.numbers() == []
    assert driver.told.drops[21, "y"] == 1


def test_a_copy_that_went_before_the_version_was_complete_is_forgotten(driver: Driver) -> None:
    requests, numbers = begun_on_volumes(driver, copies=2)
    for rank in range(2):
        if rank == 1:
            driver.registry.left(20)
        holders = [here(20, f"x{rank}", volume="a"), here(21, f"y{rank}", volume="b")]
        driver.commit(10 + rank, numbers[rank], requests[rank], holders)
    version = driver.registry.outcome(numbers[0])
    assert version is not None
    assert {holder.session for part in version.parts for holder in part.segment.holders} == {21}
    driver.registry.left(21)
    assert [info.is_lost for info in driver.registry.versions(POLICY)] == [True]


@pytest.mark.parametrize("how", ["dies", "gives up", "was not taken by one"])
def test_volumes_hear_that_what_they_took_for_a_ticket_came_to_nothing(driver: Driver, how: str) -> None:
    requests, numbers = begun_on_volumes(driver, copies=2)
    if how == "dies":
        driver.registry.left(10)
    elif how == "gives up":
        driver.registry.close_assignment(numbers[0])
    else:
        driver.commit(10, numbers[0], requests[0], [here(21, "y", volume="b")])
    told = {session for session, what in driver.told.drops if what == f"assignment/{numbers[0]}"}
    assert told == ({20} if how == "was not taken by one" else {20, 21})
