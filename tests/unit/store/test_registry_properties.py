"""The registry under anything that processes can do to it, in any order, against a model of who has what mapped."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_registry import TABLES, here, part_of, request, shard, whole

from forge.errors import StoreError, StoreKeyError
from forge.store.records import Acquire, Begin, Commit, Holder, Relay, Version, memory_label
from forge.store.registry import Key
from forge.store.registry_relays import RelayingRegistry

HERE = 0
VOLUME = 1
WORLDS: dict[Key, int] = {("weights", "p"): 2, ("weights", "q"): 1, ("object", "o"): 1, ("object", "d"): 2}
KEEP = {"weights": 2, "object": 1}
KEYS = st.sampled_from(list(WORLDS))
PICK = st.integers(0, 11)
NUMELS = st.sampled_from((32, 64, 4096))
KINDS = st.sampled_from(("own", "driver", "volume", "inline"))


class Ranks:
    """One version in the making: what was committed to it, and by whom."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.stamps: dict[int, int] = {}


class Store(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.registry = RelayingRegistry(self)
        self.names = itertools.count(1)
        self.sessions = [2, 3, 4]
        self.next_session = 5
        self.wishes: dict[int, tuple[int, Begin]] = {}
        self.shared_out: set[int] = set()
        self.committed: set[int] = set()
        self.buildings: dict[int, Ranks] = {}
        self.visible: dict[Key, list[int]] = {key: [] for key in WORLDS}
        self.known: dict[tuple[Key, int], Version] = {}
        self.leases: dict[int, tuple[int, Version]] = {}
        self.routed: dict[int, tuple[int, int]] = {}
        """For each lease that is read through a relay, the copy and its memory."""
        self.mapped: set[tuple[int, str]] = set()
        """Who has which segment, made or opened."""
        self.dropped: list[tuple[int, str]] = []

    # what the registry tells others

    def changed(self, key: Key) -> None:
        pass

    def drop(self, session: int, segment: str) -> None:
        self.dropped.append((session, segment))

    # what processes do

    @rule(key=KEYS, session=PICK, rank=st.integers(0, 1), ahead=st.integers(-1, 2), numel=NUMELS)
    def begin(self, key: Key, session: int, rank: int, ahead: int, numel: int) -> None:
        self._begin(key, session, rank, ahead, numel)

    def _begin(self, key: Key, session: int, rank: int, ahead: int, numel: int) -> int | None:
        world_size = WORLDS[key]
        rank %= world_size
        layout = whole(numel=numel) if world_size == 1 else shard(rank, world_size, numel)
        number = None if key[0] == "object" else max(0, self.registry._newest.get(key, -1) + ahead)
        begun = request(key, version=number, rank=rank, world_size=world_size, keep=KEEP[key[0]], layout=layout)
        who = self.sessions[session % len(self.sessions)]
        try:
            assignment = self.registry.begin(who, begun)
        except StoreError:
            return None
        assert assignment is not None
        self.wishes[assignment] = (who, begun)
        pending: Any = self.registry._writers[assignment].pending
        mates = [other for other, writer in self.registry._writers.items() if writer.pending is pending]
        self.buildings[assignment] = next((self.buildings[m] for m in mates if m in self.buildings), None) or Ranks(key)
        return assignment

    @rule(key=KEYS, session=PICK, numel=NUMELS, kind=KINDS)
    def publish(self, key: Key, session: int, numel: int, kind: str) -> None:
        """All ranks at once, without a mistake, unless others are in the way."""
        assignments = [self._begin(key, session + rank, rank, 1, numel) for rank in range(WORLDS[key])]
        for assignment in assignments:
            if assignment is not None:
                self._commit(assignment, kind)
        for assignment in assignments:
            if assignment is not None:
                self._close(assignment)

    @precondition(lambda self: self.wishes)
    @rule(pick=PICK)
    def take_share(self, pick: int) -> None:
        self._share(self._pick(self.wishes, pick))

    def _share(self, number: int) -> Any:
        who, begun = self.wishes[number]
        key = (begun.kind, begun.key)
        before = self.mapped.copy()
        try:
            assignment = self.registry.assignment(number)
        except StoreError:
            return None
        if assignment is not None and number not in self.shared_out:
            self.shared_out.add(number)
            self.visible[key] = self.visible[key][-max(1, begun.keep - 1) :]
            if assignment.reuse is not None:
                assert (who, assignment.reuse) in before, "somebody else's memory is given out"
                assert assignment.reuse not in self._needed(), "memory that somebody reads is given out"
        return assignment

    @precondition(lambda self: self.wishes)
    @rule(pick=PICK, kind=KINDS)
    def commit(self, pick: int, kind: str) -> None:
        self._commit(self._pick(self.wishes, pick), kind)

    def _commit(self, number: int, kind: str) -> None:
        who, begun = self.wishes[number]
        assignment = self._share(number)
        if assignment is None or number in self.committed:
            return
        self.committed.add(number)
        name = assignment.reuse or f"s{next(self.names)}"
        holders: list[Holder] = [] if kind == "inline" else [here(who, name)]
        if kind == "driver":
            holders.append(here(HERE, name))
        if kind == "volume":
            holders.append(here(VOLUME, f"{name}-{next(self.names)}", volume="v"))
        part = part_of(assignment, begun, holders, inline=b"" if kind == "inline" else None)
        self.mapped |= {(holder.session, holder.segment) for holder in holders}
        ranks, key = self.buildings[number], (begun.kind, begun.key)
        self.registry.commit(Commit(number, part))
        ranks.stamps[begun.rank] = part.segment.stamp
        version = self.registry.outcome(number)
        assert (version is not None) == (len(ranks.stamps) == begun.world_size), "seen before it is whole, or not then"
        if version is None:
            return
        assert {part.rank: part.segment.stamp for part in version.parts} == ranks.stamps, "a mixture of versions"
        if not version.digest:
            raise AssertionError("the digest of a version got lost")
        self.visible[key] = sorted({*self.visible[key], version.number})[-begun.keep :]
        self.known[key, version.number] = version

    @precondition(lambda self: self.wishes)
    @rule(pick=PICK)
    def close(self, pick: int) -> None:
        self._close(self._pick(self.wishes, pick))

    def _close(self, number: int) -> None:
        who, _ = self.wishes.pop(number)
        writer: Any = self.registry._writers[number]
        part = writer.pending.parts.get(writer.rank)
        reuse = writer.reuse.name if writer.reuse is not None else None
        self.registry.close_assignment(number)
        if writer.pending.failure is not None and part is not None:  # a process drops itself what it made in vain
            self.mapped -= {(who, holder.segment) for holder in part.segment.holders if holder.segment != reuse}

    @rule(key=KEYS, session=PICK, ago=st.none() | st.integers(0, 2))
    def acquire(self, key: Key, session: int, ago: int | None) -> None:
        who = self.sessions[session % len(self.sessions)]
        number = None if ago is None else self.registry._newest.get(key, -1) - ago
        try:
            lease = self.registry.acquire(who, Acquire(key[1], key[0], number))
        except StoreKeyError:
            assert number not in self.visible[key] if ago is not None else not self.visible[key]
            return
        except StoreError:
            assert any(info.is_lost for info in self.registry.versions(key))
            return
        assert lease.version.number == (self.visible[key][-1] if number is None else number)
        self.leases[lease.id] = (who, self.known[key, lease.version.number])
        self._check_same(lease.version, self.known[key, lease.version.number])
        assert set(lease.layouts) == {part.layout for part in lease.version.parts}
        self.mapped |= {(who, holder.segment) for part in lease.version.parts for holder in part.segment.holders}

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        lease = self._pick(self.leases, pick)
        del self.leases[lease]
        self.registry.release(lease)

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, fails=st.booleans())
    def relay(self, pick: int, fails: bool) -> None:
        """Read through the relay of the reader's host, one of two; it may fail, and then another one."""
        lease = self._pick(self.leases, pick)
        who, _ = self.leases[lease]
        failed: set[int] = set()
        while True:
            offer = Relay(f"host{who % 2}", who, who, "")
            route = self.registry.route(lease, offer, tuple(failed))
            if route is None:
                return
            copy, memory = self.routed[lease] = route.relay.copy, route.relay.memory
            others = {self.routed[other] for other in self.leases if other in self.routed}
            assert all(used == copy for used, where in others if where == memory), "memory that is read is used again"
            assert route.relay.host == offer.host
            assert route.relay.session in {*self.sessions} - failed, "a process that has ended, or failed, relays"
            self.mapped |= {(session, memory_label(memory)) for session in (who, route.relay.session)}
            if not fails:
                return
            failed.add(route.relay.session)

    @rule(key=KEYS, keep=st.integers(0, 2))
    def retire(self, key: Key, keep: int) -> None:
        gone = self.visible[key][: max(0, len(self.visible[key]) - keep)]
        assert self.registry.retire(key, keep=keep) == gone
        self.visible[key] = self.visible[key][len(gone) :]

    @rule(key=KEYS, back=st.integers(0, 3))
    def rewind(self, key: Key, back: int) -> None:
        to = self.registry._newest.get(key, -1) - back
        gone = self.registry.rewind(key, to=to)
        assert sorted(gone) == [number for number in self.visible[key] if number > to]
        self.visible[key] = [number for number in self.visible[key] if number <= to]

    @rule(key=KEYS)
    def delete(self, key: Key) -> None:
        assert self.registry.delete(key[0], [key[1]]) == bool(self.visible[key])
        self.visible[key] = []

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        who = self.sessions[pick % len(self.sessions)]
        self._leave(who)
        self.sessions.append(self.next_session)
        self.next_session += 1

    def _leave(self, who: int) -> None:
        self.sessions.remove(who)
        self.mapped = {entry for entry in self.mapped if entry[0] != who}
        self.leases = {lease: entry for lease, entry in self.leases.items() if entry[0] != who}
        self.wishes = {assignment: entry for assignment, entry in self.wishes.items() if entry[0] != who}
        self.registry.left(who)

    # what must hold

    def _pick(self, table: dict[int, Any], pick: int) -> int:
        return list(table)[pick % len(table)]

    def _check_same(self, found: Version, expected: Version) -> None:
        """Everything but who holds it stays as it was."""
        assert (found.number, found.digest, found.extra) == (expected.number, expected.digest, expected.extra)
        for part, other in zip(found.parts, expected.parts, strict=True):
            assert part.segment.stamp == other.segment.stamp
            assert (part.layout, part.written, part.digests) == (other.layout, other.written, other.digests)
            assert set(part.segment.holders) <= set(other.segment.holders)

    def _needed(self) -> set[str]:
        """Segments of versions that are read or can be read, as long as somebody has them to give."""
        versions = [self.known[key, number] for key, numbers in self.visible.items() for number in numbers]
        versions += [version for _, version in self.leases.values()]
        memories = {self.routed[lease][1] for lease in self.leases if lease in self.routed}
        alive = {*self.sessions, HERE, VOLUME}
        return {memory_label(memory) for memory in memories} | {
            holder.segment
            for version in versions
            for part in version.parts
            for holder in part.segment.holders
            if holder.session in alive
        }

    @invariant()
    def nothing_is_dropped_that_is_needed(self) -> None:
        dropped, self.dropped = self.dropped, []
        needed = self._needed()
        for session, segment in dropped:
            assert segment not in needed, "memory that somebody reads is dropped"
            self.mapped.discard((session, segment))

    @invariant()
    def nobody_keeps_memory_in_vain(self) -> None:
        """What is mapped is read, can be read, is being written, or waits for the next version."""
        self.nothing_is_dropped_that_is_needed()
        writers: list[Any] = list(self.registry._writers.values())
        spares = [spare.relay.memory for spare in self.registry._relay_spares.values()]
        newest = [self.registry._stored[key][numbers[-1]] for key, numbers in self.visible.items() if numbers]
        spares += [relay.memory for stored in newest for relay in stored.relays.order]
        kept = self._needed() | {memory_label(memory) for memory in spares}
        kept |= {spare.name for spares in self.registry._spares.values() for spare in spares}
        kept |= {writer.reuse.name for writer in writers if writer.reuse is not None}
        for writer in writers:
            kept |= {holder.segment for part in writer.pending.parts.values() for holder in part.segment.holders}
        assert {segment for _, segment in self.mapped} <= kept, "somebody was not told to let go"

    @invariant()
    def what_is_seen_is_what_was_published(self) -> None:
        for key, numbers in self.visible.items():
            assert [info.number for info in self.registry.versions(key)] == numbers
            assert self.registry.newest(key) == (numbers[-1] if numbers else None)
        for key in WORLDS:
            for number, kept in self.registry._stored.get(key, {}).items():
                if not kept.is_retired:
                    self._check_same(kept.version, self.known[key, number])
        for _, _, kept in self.registry._leases.values():
            assert kept.version.parts

    def teardown(self) -> None:
        """All leave and everything is deleted, in either order: nothing is left, and nobody keeps memory mapped."""
        ends = [self._delete_all, self._leave_all]
        for end in ends if self.next_session % 2 else reversed(ends):
            end()
            self.nothing_is_dropped_that_is_needed()
            self.nobody_keeps_memory_in_vain()
        assert {name: table for name in TABLES if (table := getattr(self.registry, name))} == {}
        assert {key for key in self.registry._newest if key[0] != "weights"} == set()
        assert self.mapped == set(), "somebody was not told to let go"

    def _delete_all(self) -> None:
        for key in WORLDS:
            self.delete(key)

    def _leave_all(self) -> None:
        for who in list(self.sessions):
            self._leave(who)


TestStore = Store.TestCase
TestStore.settings = settings(derandomize=True, deadline=None, database=None, max_examples=120, stateful_step_count=50)
