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
    Begin,
    Commit,
    Holder,
    Layout,
    Lease,
    Part,
    SegmentRecord,
    Ticket,
    Version,
    packing,
)
from forge.store.registry import Key, Registry
from forge.store.sharding import Piece, Region, TensorShards

POLICY: Key = ("weights", "policy")
VALUE: Key = ("object", "value")
TABLES = ("_kept", "_building", "_writers", "_leases", "_layouts", "_layout_uses", "_spares", "_volumes")
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


def wish(key: Key = POLICY, *, version: int | None = 1, rank: int = 0, world_size: int = 1, **more: Any) -> Begin:
    layout = more.pop("layout", None) or (whole() if world_size == 1 else shard(rank, world_size))
    told = more.pop("told", True)
    return Begin(key[1], key[0], version, rank, world_size, layout.id, layout if told else None, **more)


def here(session: int, segment: str, *, volume: str = "") -> Holder:
    return Holder("shm", "host", 1000 + session, session, segment=segment, volume=volume)


def part_of(ticket: Ticket, begun: Begin, holders: Sequence[Holder], *, inline: bytes | None = None) -> Part:
    layout = begun.layout
    assert layout is not None
    packed = packing(layout, ticket.written)
    record = SegmentRecord(packed.size, next(_numbers), tuple(holders), inline)
    return Part(begun.rank, layout.id, ticket.written, record, pack_digests([7] * len(packed.pieces)), b"")


class Desk:
    """A registry, driven as processes would drive it."""

    def __init__(self) -> None:
        self.told = Told()
        self.registry = Registry(self.told)

    def begin(self, session: int, begun: Begin) -> int:
        number = self.registry.begin(session, begun)
        assert number is not None
        return number

    def commit(self, session: int, number: int, begun: Begin, holders: Sequence[Holder] | None = None) -> str:
        """Commit a part in the segment that is free, or in a new one; its name."""
        ticket = self.registry.ticket(number)
        assert ticket is not None
        name = ticket.reuse or f"segment-{next(_numbers)}"
        given = [here(session, name)] if holders is None else holders
        self.registry.commit(Commit(number, part_of(ticket, begun, given)))
        return name

    def publish(self, session: int, begun: Begin, holders: Sequence[Holder] | None = None) -> tuple[Version, str]:
        """Publish a whole version from one rank; the version, and the segment that it is in."""
        number = self.begin(session, begun)
        name = self.commit(session, number, begun, holders)
        version = self.registry.outcome(number)
        self.registry.close_ticket(number)
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
def desk() -> Desk:
    return Desk()


# writing


def test_a_version_of_one_rank_is_visible_when_it_is_committed(desk: Desk) -> None:
    begun = wish()
    number = desk.begin(1, begun)
    ticket = desk.registry.ticket(number)
    assert ticket == Ticket(number, 1)
    assert (desk.numbers(), desk.registry.newest(POLICY), desk.registry.outcome(number)) == ([], None, None)
    desk.told.forget()
    desk.commit(1, number, begun)
    assert POLICY in desk.told.changes
    version = desk.registry.outcome(number)
    assert version is not None
    assert (version.key, version.number, len(version.parts)) == ("policy", 1, 1)
    assert (desk.numbers(), desk.registry.newest(POLICY)) == ([1], 1)
    assert desk.registry.keys("weights") == ["policy"]
    assert desk.registry.keys("object") == desk.registry.keys("weights", "x") == []


def test_nobody_gets_a_share_before_every_rank_has_joined(desk: Desk) -> None:
    wishes = [wish(rank=rank, world_size=3) for rank in range(3)]
    numbers = [desk.begin(10 + rank, wishes[rank]) for rank in (2, 0)]
    assert [desk.registry.ticket(number) for number in numbers] == [None, None]
    assert "rank(s) [1] of 3 of version 1 of 'policy'" in desk.registry.waiting_for(numbers[0])
    desk.told.forget()
    last = desk.begin(11, wishes[1])
    assert desk.told.changes == [POLICY]
    assert [desk.registry.ticket(number) is not None for number in (*numbers, last)] == [True] * 3


def test_a_version_is_visible_with_its_last_part_only(desk: Desk) -> None:
    wishes = [wish(rank=rank, world_size=2) for rank in range(2)]
    numbers = [desk.begin(10 + rank, wishes[rank]) for rank in range(2)]
    desk.commit(11, numbers[1], wishes[1])
    assert desk.numbers() == []
    with pytest.raises(StoreKeyError, match="under way: version 1 has 1 of 2") as caught:
        desk.acquire(5)
    assert "missing [0]" in str(caught.value)
    desk.commit(10, numbers[0], wishes[0])
    assert desk.numbers() == [1]
    assert [part.rank for part in desk.acquire(5).version.parts] == [0, 1]


def test_what_several_ranks_hold_is_written_once(desk: Desk) -> None:
    layout = whole("a", "b")
    numbers = [desk.begin(10 + rank, wish(rank=rank, world_size=2, layout=layout)) for rank in range(2)]
    tickets = [desk.registry.ticket(number) for number in numbers]
    assert all(ticket is not None for ticket in tickets)
    written = [ticket.written for ticket in tickets if ticket is not None]
    assert sorted(number for share in written for number in share or ()) == [0, 1]
    assert [len(share or ()) for share in written] == [1, 1]


def test_a_layout_is_told_once_and_forgotten_with_its_last_version(desk: Desk) -> None:
    assert desk.registry.begin(1, wish(told=False)) is None
    assert desk.tables() == {}
    desk.publish(1, wish(version=1))
    for version in (2, 3, 4):
        number = desk.registry.begin(1, wish(version=version, told=False))
        assert number is not None
        desk.commit(1, number, wish(version=version))
        desk.registry.close_ticket(number)
    assert set(desk.registry._layouts) == {whole().id}
    assert desk.registry._layout_uses[whole().id] == 2
    lease = desk.acquire(5)
    assert set(lease.layouts) == {whole().id}
    known = Acquire("policy", "weights", None, frozenset(lease.layouts))
    again = desk.registry.acquire(5, known)
    assert again.layouts == {}
    desk.registry.retire(POLICY, keep=0)
    assert set(desk.registry._layouts) == {whole().id}, "two readers still read it"
    desk.registry.release(lease.id)
    desk.registry.release(again.id)
    assert (desk.registry._layouts, desk.registry._layout_uses) == ({}, Counter())
    assert desk.registry.begin(1, wish(version=9, told=False)) is None


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (wish(rank=0, world_size=2), wish(rank=1, world_size=3), "disagree about how many"),
        (wish(rank=0, world_size=2), wish(rank=0, world_size=2), "already"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_and_changes_nothing(
    desk: Desk, first: Begin, second: Begin, what: str
) -> None:
    number = desk.begin(1, first)
    before = {name: dict(table) for name, table in desk.tables().items()}
    with pytest.raises(StoreError, match=what) as caught:
        desk.registry.begin(2, second)
    assert None not in (caught.value.path, caught.value.rule, caught.value.repair)
    assert desk.registry.ticket(number) is None
    assert desk.tables() == before, "the refused layout stays for ever"
    others = [wish(rank=rank, world_size=2) for rank in (0, 1)]
    other = desk.begin(3, others[1])
    desk.commit(1, number, others[0])
    desk.commit(3, other, others[1])
    assert desk.numbers() == [1]


@pytest.mark.parametrize(("rank", "world_size"), [(3, 1), (-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_of_the_world_is_refused(desk: Desk, rank: int, world_size: int) -> None:
    with pytest.raises(StoreError, match="rank") as caught:
        desk.registry.begin(1, wish(rank=rank, world_size=world_size, layout=whole()))
    assert None not in (caught.value.path, caught.value.rule, caught.value.repair)
    assert desk.tables() == {}


@pytest.mark.parametrize("number", [0, 4, 5])
def test_a_version_in_the_past_is_refused_and_leaves_nothing(desk: Desk, number: int) -> None:
    desk.publish(1, wish(version=5))
    before = set(desk.tables())
    with pytest.raises(StoreError, match="too late") as caught:
        desk.registry.begin(1, wish(version=number, layout=whole("other")))
    assert (caught.value.value, desk.numbers()) == (number, [5])
    assert "rewind" in str(caught.value.repair)
    assert set(desk.tables()) == before
    assert set(desk.registry._layouts) == {whole().id}


def test_ranks_that_disagree_about_a_tensor_all_hear_it(desk: Desk) -> None:
    desk.publish(1, wish(version=0))
    numbers = [desk.begin(rank, wish(rank=rank, world_size=2, layout=whole(numel=8 + rank))) for rank in (0, 1)]
    for number in numbers:
        with pytest.raises(StoreError, match="disagree about 'w'"):
            desk.registry.ticket(number)
        desk.registry.close_ticket(number)
    assert desk.numbers() == [0]
    assert set(desk.registry._layouts) == {whole().id}
    assert desk.publish(1, wish(version=1))[0].number == 1


def test_values_without_a_number_get_the_next_one_and_do_not_disturb_each_other(desk: Desk) -> None:
    wishes = [wish(VALUE, version=None, keep=1) for _ in range(3)]
    numbers = [desk.begin(session, begun) for session, begun in enumerate(wishes)]
    tickets = [desk.registry.ticket(number) for number in numbers]
    assert [ticket.version for ticket in tickets if ticket is not None] == [0, 1, 2]
    for session in (2, 0, 1):
        desk.commit(session, numbers[session], wishes[session])
        assert desk.numbers(VALUE) == [2], "an older value that comes late must not replace a newer one"
        version = desk.registry.outcome(numbers[session])
        assert version is not None
        assert (version.number, len(version.digest)) == (session, 64)
        desk.registry.close_ticket(numbers[session])


# giving up


def test_ranks_of_two_meshes_do_not_make_up_one_value(desk: Desk) -> None:
    """Each group of a hybrid-sharded job puts the same key: rank 0 of one and rank 1 of the other are no value."""
    key = ("object", "w")
    begun = [wish(key, version=None, rank=rank, world_size=2, group=group) for group in "ab" for rank in (0, 1)]
    tickets = {session: desk.begin(session, begun[session]) for session in (0, 3, 2, 1)}
    found = {session: desk.registry.ticket(number) for session, number in tickets.items()}
    numbers = {session: ticket.version for session, ticket in found.items() if ticket is not None}
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]


def test_a_rank_that_gives_up_ends_the_version_for_all(desk: Desk) -> None:
    desk.publish(9, wish(version=0, layout=whole("old")))
    wishes = [wish(rank=rank, world_size=3) for rank in range(3)]
    numbers = [desk.begin(10 + rank, wishes[rank]) for rank in range(3)]
    desk.commit(10, numbers[0], wishes[0])
    desk.registry.close_ticket(numbers[1], "rank 1 has no memory left")
    for number in (numbers[0], numbers[2]):
        with pytest.raises(StoreError, match="rank 1 has no memory left"):
            desk.registry.outcome(number)
    with pytest.raises(StoreError, match="no memory left"):
        desk.commit(12, numbers[2], wishes[2])
    for number in numbers:
        desk.registry.close_ticket(number)
    assert (desk.numbers(), set(desk.registry._layouts)) == ([0], {whole("old").id})
    again = [desk.begin(10 + rank, wishes[rank]) for rank in range(3)]
    for rank in range(3):
        desk.commit(10 + rank, again[rank], wishes[rank])
    assert desk.numbers() == [0, 1]


def test_a_version_that_is_complete_is_not_abandoned_by_those_who_leave(desk: Desk) -> None:
    wishes = [wish(rank=rank, world_size=2) for rank in range(2)]
    numbers = [desk.begin(10 + rank, wishes[rank]) for rank in range(2)]
    for rank in range(2):
        desk.commit(10 + rank, numbers[rank], wishes[rank])
    desk.registry.close_ticket(numbers[0], "too late to give up")
    desk.registry.close_ticket(numbers[0], "and twice")
    assert desk.registry.outcome(numbers[1]) is not None
    assert desk.numbers() == [1]


def test_the_parts_of_an_abandoned_version_are_dropped_by_those_who_hold_them_for_others(desk: Desk) -> None:
    """The controller and the volumes hold a part from its commit on: they must hear that it came to nothing."""
    wishes = [wish(rank=rank, world_size=2) for rank in range(2)]
    numbers = [desk.begin(10 + rank, wishes[rank]) for rank in range(2)]
    desk.commit(10, numbers[0], wishes[0], [here(10, "s"), here(0, "s"), here(7, "s-copy", volume="v")])
    desk.registry.left(11, "rank 1")
    desk.registry.close_ticket(numbers[0])
    assert desk.told.drops[0, "s"] == desk.told.drops[7, "s-copy"] == 1
    assert desk.tables() == {}


def test_a_part_that_comes_after_the_failure_is_dropped_too(desk: Desk) -> None:
    wishes = [wish(rank=rank, world_size=2) for rank in range(2)]
    numbers = [desk.begin(10 + rank, wishes[rank]) for rank in range(2)]
    tickets = [desk.registry.ticket(number) for number in numbers]
    desk.registry.left(11, "rank 1")
    ticket = tickets[0]
    assert ticket is not None
    with pytest.raises(StoreError, match="rank 1"):
        desk.registry.commit(Commit(numbers[0], part_of(ticket, wishes[0], [here(10, "s"), here(0, "s")])))
    desk.registry.close_ticket(numbers[0])
    assert desk.told.drops[0, "s"] == 1
    assert desk.tables() == {}


# reading


def test_a_lease_keeps_its_version_while_newer_ones_come(desk: Desk) -> None:
    first, name = desk.publish(1, wish(version=1))
    lease = desk.acquire(5, version=1)
    for version in range(2, 6):
        assert desk.publish(1, wish(version=version))[1] != name
    assert (lease.version, desk.told.drops[5, name], desk.told.drops[1, name]) == (first, 0, 0)
    with pytest.raises(StoreKeyError, match="published versions: \\[4, 5\\]"):
        desk.acquire(6, version=1)
    desk.registry.release(lease.id)
    desk.registry.release(lease.id)
    free = desk.registry._spares[1, POLICY]
    assert len(free) == 1, "one segment stays for the next version, the other goes"
    assert name == free[0].name or desk.told.drops[1, name] == desk.told.drops[5, name] == 1


def test_the_newest_is_given_unless_a_number_is_asked_for(desk: Desk) -> None:
    for version in (3, 7):
        desk.publish(1, wish(version=version))
    assert desk.acquire(5).version.number == 7
    assert desk.acquire(5, version=3).version.number == 3
    info = desk.registry.versions(POLICY)
    assert [(entry.number, entry.num_readers, entry.is_lost) for entry in info] == [(3, 1, False), (7, 1, False)]
    assert info[0].num_bytes == packing(whole(), None).size
    for key, number in ((POLICY, 4), (("weights", "other"), None), (VALUE, None)):
        with pytest.raises(StoreKeyError) as caught:
            desk.acquire(5, key, number)
        assert None not in (caught.value.path, caught.value.rule, caught.value.repair)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep_is_how_many_versions_there_is_memory_for(desk: Desk, keep: int) -> None:
    names: set[str] = set()
    for version in range(6):
        begun = wish(version=version, keep=keep)
        number = desk.begin(1, begun)
        assert desk.registry.ticket(number) is not None
        left = max(1, keep - 1)
        assert desk.numbers() == list(range(version))[-left:], "room is made before it is written"
        names.add(desk.commit(1, number, begun))
        desk.registry.close_ticket(number)
        assert desk.numbers() == list(range(version + 1))[-keep:]
    if keep == 1:
        assert len(desk.told.drops) == len(names) - 1 == 5, "there is memory for one: none waits for the next"
    else:
        assert (len(names), desk.told.drops) == (keep, {}), "segments are used again"


def test_retire_rewind_and_delete(desk: Desk) -> None:
    for version in range(5):
        desk.publish(1, wish(version=version, keep=9))
    assert desk.registry.retire(POLICY, keep=4) == [0]
    assert desk.registry.retire(POLICY, keep=9) == []
    assert desk.registry.rewind(POLICY, to=2) == [3, 4]
    assert desk.numbers() == [1, 2]
    assert desk.registry.rewind(POLICY, to=7) == []
    with pytest.raises(StoreError, match="version 2 is published"):
        desk.begin(1, wish(version=2))
    desk.publish(1, wish(version=3, keep=9))
    assert desk.registry.delete("weights", ["policy", "nothing"]) == 1
    assert (desk.numbers(), desk.registry.keys("weights")) == ([], [])
    assert desk.registry.delete("weights", ["policy"]) == 0


def test_to_rewind_what_does_not_exist_leaves_nothing(desk: Desk) -> None:
    assert desk.registry.rewind(POLICY, to=3) == []
    assert desk.registry.retire(POLICY, keep=0) == []
    assert (desk.tables(), desk.registry._newest) == ({}, {})


def test_rewind_ends_what_is_being_written(desk: Desk) -> None:
    desk.publish(1, wish(version=1))
    begun = wish(version=2)
    number = desk.begin(1, begun)
    desk.registry.rewind(POLICY, to=1)
    with pytest.raises(StoreError, match="rewound to version 1"):
        desk.commit(1, number, begun)
    desk.registry.close_ticket(number)
    assert desk.publish(1, wish(version=2))[0].number == 2


# memory


def test_a_segment_is_used_again_only_when_nobody_reads_it(desk: Desk) -> None:
    _, first = desk.publish(1, wish(VALUE, version=None, keep=1))
    lease = desk.acquire(5, VALUE)
    _, second = desk.publish(1, wish(VALUE, version=None, keep=1))
    _, third = desk.publish(1, wish(VALUE, version=None, keep=1))
    assert len({first, second, third}) == 3
    desk.registry.release(lease.id)
    assert desk.publish(1, wish(VALUE, version=None, keep=1))[1] in (first, second)
    assert desk.publish(2, wish(VALUE, version=None, keep=1))[1] not in (first, second, third), (
        "another process's memory"
    )


def test_a_free_segment_that_does_not_fit_is_given_up_by_all_who_mapped_it(desk: Desk) -> None:
    _, name = desk.publish(1, wish(VALUE, version=None, keep=1, layout=whole(numel=1 << 20)))
    desk.registry.release(desk.acquire(5, VALUE).id)
    desk.publish(1, wish(VALUE, version=None, keep=1, layout=whole(numel=1 << 20)), [here(1, "other")])
    assert [spare.name for spare in desk.registry._spares[1, VALUE]] == [name]
    assert desk.publish(1, wish(VALUE, version=None, keep=1))[1] != name
    assert (desk.told.drops[1, name], desk.told.drops[5, name]) == (1, 1)


def test_a_free_segment_that_is_too_small_is_given_up(desk: Desk) -> None:
    _, name = desk.publish(1, wish(VALUE, version=None, keep=1))
    desk.publish(1, wish(VALUE, version=None, keep=1))
    assert desk.publish(1, wish(VALUE, version=None, keep=1, layout=whole(numel=1 << 20)))[1] != name
    assert desk.told.drops[1, name] == 1


def test_a_free_segment_that_a_part_did_not_need_is_given_up(desk: Desk) -> None:
    """A part that is so small that the registry itself keeps it leaves its segment unused."""
    _, name = desk.publish(1, wish(VALUE, version=None, keep=1))
    desk.publish(1, wish(VALUE, version=None, keep=1))
    begun = wish(VALUE, version=None, keep=1)
    number = desk.begin(1, begun)
    ticket = desk.registry.ticket(number)
    assert ticket is not None
    assert ticket.reuse == name
    desk.registry.commit(Commit(number, part_of(ticket, begun, (), inline=b"small")))
    desk.registry.close_ticket(number)
    assert desk.told.drops[1, name] == 1


def test_a_free_segment_comes_back_from_a_version_that_failed(desk: Desk) -> None:
    _, name = desk.publish(1, wish(VALUE, version=None, keep=1))
    desk.publish(1, wish(VALUE, version=None, keep=1))
    for _ in range(3):
        number = desk.begin(1, wish(VALUE, version=None, keep=1))
        ticket = desk.registry.ticket(number)
        assert ticket is not None
        assert ticket.reuse == name
        desk.registry.close_ticket(number, "no")
    assert desk.told.drops == {}


def test_of_two_free_segments_one_is_used_and_the_other_given_up(desk: Desk) -> None:
    for version in (1, 2, 3):
        desk.publish(1, wish(version=version, keep=3))
    desk.registry.retire(POLICY, keep=2)
    begun = wish(version=4, keep=9)
    number = desk.begin(1, begun)
    first = desk.registry.ticket(number)
    assert first is not None
    desk.registry.retire(POLICY, keep=1)
    desk.registry.close_ticket(number, "no")
    names = {spare.name for spare in desk.registry._spares[1, POLICY]} | {name for _, name in desk.told.drops}
    assert len(names) == 2
    _, used = desk.publish(1, begun)
    free = {spare.name for spare in desk.registry._spares.get((1, POLICY), ())}
    assert {used} | free | {name for _, name in desk.told.drops} == names, "a segment was forgotten"


def test_copies_under_other_names_are_dropped_when_the_publisher_keeps_its_own(desk: Desk) -> None:
    """A volume on another host has a segment of its own, which no later version is written to."""
    desk.publish(
        1, wish(VALUE, version=None, keep=1), [here(1, "mine"), here(7, "mine", volume="a"), here(8, "theirs")]
    )
    desk.registry.release(desk.acquire(5, VALUE).id)
    desk.publish(1, wish(VALUE, version=None, keep=1))
    assert [spare.name for spare in desk.registry._spares[1, VALUE]] == ["mine"]
    assert desk.told.drops[8, "theirs"] == 1
    assert desk.told.drops[7, "mine"] == desk.told.drops[5, "mine"] == 0, "they will see it filled again"


@pytest.mark.parametrize("num_puts", [1, 2, 3])
def test_a_deleted_value_leaves_nothing(desk: Desk, num_puts: int) -> None:
    names = {desk.publish(1, wish(VALUE, version=None, keep=1))[1] for _ in range(num_puts)}
    lease = desk.acquire(5, VALUE)
    assert desk.registry.delete("object", ["value"]) == 1
    assert desk.registry.keys("object") == []
    assert lease.id in desk.registry._leases
    desk.registry.release(lease.id)
    assert {name for session, name in desk.told.drops if session == 1} == names, "memory stays with the publisher"
    assert (desk.tables(), desk.registry._newest) == ({}, {})


def test_a_value_whose_put_failed_leaves_nothing(desk: Desk) -> None:
    number = desk.begin(1, wish(VALUE, version=None, rank=0, world_size=2))
    desk.registry.close_ticket(number, "no")
    assert (desk.tables(), desk.registry._newest) == ({}, {})
    desk.publish(1, wish(VALUE, version=None, keep=1))
    desk.publish(1, wish(VALUE, version=None, keep=1))
    number = desk.begin(1, wish(VALUE, version=None, keep=1))
    assert desk.registry.ticket(number) is not None
    desk.registry.delete("object", ["value"])
    desk.registry.close_ticket(number, "no")
    assert (desk.tables(), desk.registry._newest) == ({}, {})


def test_a_number_that_is_published_again_does_not_disturb_who_reads_the_old_one(desk: Desk) -> None:
    _, old = desk.publish(1, wish(version=1))
    lease = desk.acquire(5)
    desk.registry.rewind(POLICY, to=0)
    again, new = desk.publish(1, wish(version=1, layout=whole("other")))
    assert new != old
    assert desk.acquire(6).version == again
    desk.registry.left(6)
    desk.registry.retire(POLICY, keep=0)
    assert desk.told.drops[1, old] == 0
    desk.registry.release(lease.id)
    assert {spare.name for spare in desk.registry._spares[1, POLICY]} == {old}
    assert (desk.told.drops[1, new], desk.told.drops[5, old]) == (1, 0)


def test_retiring_everything_frees_what_was_kept_for_the_next_version(desk: Desk) -> None:
    _, first = desk.publish(1, wish(version=1))
    _, second = desk.publish(1, wish(version=2))
    _, third = desk.publish(1, wish(version=3))
    assert third == first, "the first was recycled"
    assert desk.registry.retire(POLICY, keep=0) == [2, 3]
    assert desk.told.drops[1, first] == desk.told.drops[1, second] == 1
    assert not desk.registry._spares


def test_the_death_of_a_publisher_reaches_a_version_whose_number_was_used_again(desk: Desk) -> None:
    desk.publish(1, wish(version=1), [here(1, "old"), here(0, "old")])
    lease = desk.acquire(5)
    desk.registry.rewind(POLICY, to=0)
    desk.publish(2, wish(version=1))
    desk.registry.left(1)
    desk.registry.release(lease.id)
    assert (1, POLICY) not in desk.registry._spares
    assert desk.told.drops[0, "old"] == desk.told.drops[5, "old"] == 1


# processes that leave


@pytest.mark.parametrize("after", ["begin", "ticket", "commit"])
@pytest.mark.parametrize("who", [10, 11])
def test_a_rank_that_leaves_before_the_end_ends_the_version(desk: Desk, after: str, who: int) -> None:
    desk.publish(10, wish(version=0, layout=whole("old")))
    wishes = [wish(rank=rank, world_size=2) for rank in range(2)]
    numbers = {10: desk.begin(10, wishes[0])}
    if after != "begin" or who == 11:
        numbers[11] = desk.begin(11, wishes[1])
    if after == "ticket":
        assert desk.registry.ticket(numbers[who]) is not None
    if after == "commit":
        desk.commit(who, numbers[who], wishes[who - 10], [here(who, "part"), here(0, "part")])
    desk.registry.left(who, "pid 77 on host h")
    other = 21 - who
    if other in numbers:
        with pytest.raises(StoreError, match=f"rank {who - 10}, pid 77 on host h, ended"):
            desk.registry.ticket(numbers[other])
        desk.registry.close_ticket(numbers[other])
    assert desk.told.drops[0, "part"] == (after == "commit")
    assert desk.registry._writers == desk.registry._building == {}
    assert set(desk.registry._layouts) == {whole("old").id}
    assert desk.numbers() == [0]


def test_what_only_a_dead_process_had_is_lost_and_said_so(desk: Desk) -> None:
    desk.publish(1, wish(version=1))
    desk.registry.release(desk.acquire(5).id)
    name = desk.acquire(5).version.parts[0].segment.holders[0].segment
    desk.registry.left(1, "pid 77 on host h")
    assert desk.told.drops[5, name] == 1, "a reader keeps the dead publisher's memory mapped"
    assert [(info.number, info.is_lost) for info in desk.registry.versions(POLICY)] == [(1, True)]
    with pytest.raises(StoreError, match="pid 1001 on host host\\), which has ended") as caught:
        desk.acquire(6)
    assert "copies=2" in str(caught.value.repair)
    desk.publish(2, wish(version=2))
    assert desk.acquire(6).version.number == 2


def test_another_copy_outlives_the_publisher(desk: Desk) -> None:
    desk.publish(1, wish(version=1), [here(1, "s"), here(0, "s"), here(7, "s", volume="v")])
    lease = desk.acquire(5)
    desk.registry.left(1)
    desk.registry.left(7)
    assert [holder.session for holder in desk.acquire(6).version.parts[0].segment.holders] == [0]
    assert not desk.registry.versions(POLICY)[0].is_lost
    desk.registry.retire(POLICY, keep=0)
    assert desk.told.drops == {}
    desk.registry.left(6)
    desk.registry.release(lease.id)
    assert desk.told.drops == {(0, "s"): 1, (5, "s"): 1}
    assert desk.tables() == {}


def test_a_value_that_the_registry_keeps_itself_outlives_everybody(desk: Desk) -> None:
    begun = wish(VALUE, version=None, keep=1)
    number = desk.begin(1, begun)
    ticket = desk.registry.ticket(number)
    assert ticket is not None
    desk.registry.commit(Commit(number, part_of(ticket, begun, (), inline=b"bytes"), extra=b"more"))
    desk.registry.close_ticket(number)
    desk.registry.left(1)
    version = desk.acquire(2, VALUE).version
    assert (version.parts[0].segment.inline, version.extra) == (b"bytes", b"more")


def test_a_reader_that_leaves_lets_go(desk: Desk) -> None:
    _, name = desk.publish(1, wish(VALUE, version=None, keep=1))
    desk.acquire(5, VALUE)
    desk.acquire(5, VALUE)
    desk.acquire(6, VALUE)
    desk.publish(1, wish(VALUE, version=None, keep=1))
    desk.registry.left(5)
    assert (1, VALUE) not in desk.registry._spares
    desk.registry.left(6)
    assert [spare.name for spare in desk.registry._spares[1, VALUE]] == [name]
    desk.registry.left(1)
    assert desk.registry._spares == {}
    assert desk.registry._leases == {}


# volumes


@pytest.mark.parametrize(
    ("copies", "expected"), [(1, ["a", "b", "a"]), (2, ["ab", "ba", "ab"]), (9, ["ab", "ba", "ab"])]
)
def test_parts_are_spread_over_the_volumes(desk: Desk, copies: int, expected: list[str]) -> None:
    desk.registry.set_copies(copies)
    for session, volume in ((21, "b"), (20, "a")):
        desk.registry.add_volume(session, Holder("tcp", "host", 1, 0, address="there", volume=volume))
    numbers = [desk.begin(10 + rank, wish(rank=rank, world_size=3)) for rank in range(3)]
    tickets = [desk.registry.ticket(number) for number in numbers]
    found = ["".join(holder.volume for holder in ticket.volumes) for ticket in tickets if ticket is not None]
    assert found == expected
    assert {holder.session for ticket in tickets if ticket is not None for holder in ticket.volumes} == {20, 21}
    desk.registry.left(21)
    again = desk.registry.ticket(desk.begin(3, wish(("weights", "other"), version=0)))
    assert again is not None
    assert [holder.volume for holder in again.volumes] == ["a"]


def begun_on_volumes(desk: Desk, *, copies: int) -> tuple[list[Begin], list[int]]:
    """Two ranks that publish to the volumes 20 and 21."""
    desk.registry.set_copies(copies)
    for session, volume in ((20, "a"), (21, "b")):
        desk.registry.add_volume(session, Holder("tcp", "host", 1, 0, address="there", volume=volume))
    wishes = [wish(rank=rank, world_size=2) for rank in range(2)]
    numbers = [desk.begin(10 + rank, begun) for rank, begun in enumerate(wishes)]
    assert all(desk.registry.ticket(number) is not None for number in numbers)
    return wishes, numbers


def test_a_version_whose_only_copy_went_before_it_was_complete_is_abandoned(desk: Desk) -> None:
    wishes, numbers = begun_on_volumes(desk, copies=1)
    desk.commit(10, numbers[0], wishes[0], [here(20, "x", volume="a")])
    desk.registry.left(20)
    desk.told.forget()
    desk.commit(11, numbers[1], wishes[1], [here(21, "y", volume="b")])
    with pytest.raises(StoreError, match=r"volume a .* held rank 0's part, has ended"):
        desk.registry.outcome(numbers[1])
    for number in numbers:
        desk.registry.close_ticket(number)
    assert desk.numbers() == []
    assert desk.told.drops[21, "y"] == 1


def test_a_copy_that_went_before_the_version_was_complete_is_forgotten(desk: Desk) -> None:
    wishes, numbers = begun_on_volumes(desk, copies=2)
    for rank in range(2):
        if rank == 1:
            desk.registry.left(20)
        holders = [here(20, f"x{rank}", volume="a"), here(21, f"y{rank}", volume="b")]
        desk.commit(10 + rank, numbers[rank], wishes[rank], holders)
    version = desk.registry.outcome(numbers[0])
    assert version is not None
    assert {holder.session for part in version.parts for holder in part.segment.holders} == {21}
    desk.registry.left(21)
    assert [info.is_lost for info in desk.registry.versions(POLICY)] == [True]


@pytest.mark.parametrize("how", ["dies", "gives up", "was not taken by one"])
def test_volumes_hear_that_what_they_took_for_a_ticket_came_to_nothing(desk: Desk, how: str) -> None:
    wishes, numbers = begun_on_volumes(desk, copies=2)
    if how == "dies":
        desk.registry.left(10)
    elif how == "gives up":
        desk.registry.close_ticket(numbers[0])
    else:
        desk.commit(10, numbers[0], wishes[0], [here(21, "y", volume="b")])
    told = {session for session, what in desk.told.drops if what == f"ticket/{numbers[0]}"}
    assert told == ({20} if how == "was not taken by one" else {20, 21})
