"""The index of the store: which versions there are, who writes them, who reads them, and which memory is free again.

A state machine without input or output: sessions are numbers, time does not pass, and what others must hear is handed
to an `Outside`. That a version is visible whole or not at all, that no segment is reused while somebody reads it, and
that the death of a process loses nothing but its own, is decided here and nowhere else.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from forge.errors import StoreError
from forge.store import registry_state
from forge.store.proof import version_digest
from forge.store.records import (
    Acquire,
    Begin,
    Commit,
    Holder,
    Layout,
    Lease,
    Part,
    Ticket,
    Version,
    VersionInfo,
    label_of,
    packing,
)
from forge.store.registry_state import Key, PendingVersion, SpareSegment, StoredVersion, Writer, assign_pieces

SPARES = 1
"""How many free segments a process keeps for the next version of a key."""


class Outside(Protocol):
    """Whoever carries the registry's decisions to the processes that they concern."""

    def changed(self, key: Key) -> None:
        """Something that others may wait for has happened to this key."""

    def drop(self, session: int, segment: str) -> None:
        """This process need not keep the segment any longer."""


class Registry:
    """All keys of one run."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._ids = itertools.count(1)
        self._kept: dict[Key, dict[int, StoredVersion]] = {}
        self._building: dict[Key, list[PendingVersion]] = {}
        self._newest: dict[Key, int] = {}
        self._writers: dict[int, Writer] = {}
        self._leases: dict[int, tuple[int, Key, StoredVersion]] = {}
        self._layouts: dict[str, Layout] = {}
        self._layout_uses: Counter[str] = Counter()
        self._spares: dict[tuple[int, Key], list[SpareSegment]] = {}
        self._volumes: dict[int, Holder] = {}
        self._copies = 1
        self._shares: dict[tuple[str, ...], list[tuple[int, ...] | None]] = {}

    # writing

    def begin(self, session: int, wish: Begin) -> int | None:
        """A rank joins a version. Its ticket's number; None if its layout has to be told first."""
        key = (wish.kind, wish.key)
        if wish.layout is None and wish.layout_id not in self._layouts:
            return None
        building = self._join(key, wish)
        if wish.layout is not None:
            self._layouts.setdefault(wish.layout_id, wish.layout)
        writer = Writer(next(self._ids), session, wish.rank, wish.layout_id, building, wish.token)
        building.writers[wish.rank] = writer
        self._writers[writer.ticket] = writer
        self._layout_uses[wish.layout_id] += 1
        if len(building.writers) == building.world_size:
            self._share_out(building)
        return writer.ticket

    def _join(self, key: Key, wish: Begin) -> PendingVersion:
        if not 0 <= wish.rank < wish.world_size:
            raise registry_state.no_such_rank(wish)
        under_way = self._building.get(key, [])
        for building in under_way:
            if wish.version is None and (wish.rank in building.writers or wish.group != building.group):
                continue
            if wish.version is not None and building.number != wish.version:
                continue
            if building.world_size != wish.world_size:
                raise registry_state.other_world_size(wish, building)
            if wish.rank in building.writers:
                raise registry_state.rank_twice(wish, building)
            return building
        newest = self._newest.get(key, -1)
        number = wish.version
        if number is None:
            number = max([newest, *(building.number for building in under_way)]) + 1
        elif number <= newest:
            raise registry_state.too_late(wish, number, newest)
        building = PendingVersion(key, number, wish.world_size, wish.keep, wish.group)
        self._building.setdefault(key, []).append(building)
        return building

    def _share_out(self, building: PendingVersion) -> None:
        names = [building.writers[rank].layout for rank in range(building.world_size)]
        try:
            shares = self._shares.get(tuple(names))
            if shares is None:
                shares = assign_pieces(building.key[1], [self._layouts[name] for name in names])
                if len(self._shares) > 256:
                    self._shares.clear()
                self._shares[tuple(names)] = shares
            building.shares = shares
        except StoreError as error:
            self._fail(building, error)
        self._outside.changed(building.key)

    def ticket(self, number: int) -> Ticket | None:
        """What a rank is to write; None while other ranks have not joined yet."""
        writer = self._writers[number]
        building = writer.building
        if building.failure is not None:
            raise building.failure
        if building.shares is None:
            return None
        if not writer.has_share:
            writer.has_share = True
            self._make_room(building)
            writer.reuse = self._spare_for(writer, building.shares[writer.rank])
            writer.volumes = self._volumes_for(writer.rank)
        return Ticket(
            id=number,
            version=building.number,
            written=building.shares[writer.rank],
            reuse=writer.reuse.name if writer.reuse is not None else None,
            volumes=writer.volumes,
        )

    def waiting_for(self, ticket: int) -> str:
        """Which ranks a writer waits for, in words."""
        building = self._writers[ticket].building
        missing = sorted(set(range(building.world_size)) - set(building.writers))
        return f"rank(s) {missing} of {building.world_size} of version {building.number} of {building.key[1]!r}"

    def _make_room(self, building: PendingVersion) -> None:
        """The oldest version makes room for the one that is written, so that `keep` versions' memory is enough. One
        complete version is always left."""
        self.retire(building.key, keep=max(1, building.keep - 1))

    def _spare_for(self, writer: Writer, written: tuple[int, ...] | None) -> SpareSegment | None:
        """A free segment of the writer's that fits; those that do not are given up."""
        size = packing(self._layouts[writer.layout], written).size
        found: SpareSegment | None = None
        for spare in self._spares.pop((writer.session, writer.building.key), []):
            if found is None and size <= spare.size <= 2 * size:
                found = spare
            else:
                self._drop(spare.name, spare.openers | {writer.session})
        return found

    def commit(self, commit: Commit) -> None:
        """A rank's part is written. With the last one the version becomes visible."""
        writer = self._writers.get(commit.ticket)
        if writer is None:
            self._drop_part(commit.part)
            raise StoreError("a part was committed before it was begun", value=commit.ticket, rule="begin, then commit")
        building = writer.building
        building.parts[writer.rank] = commit.part
        took = {holder.session for holder in commit.part.segment.holders}
        self._drop(label_of(writer.ticket), [volume.session for volume in writer.volumes if volume.session not in took])
        if building.failure is not None:  # who holds the part hears of it when the ticket is closed
            raise building.failure
        building.extra = building.extra or commit.extra
        if len(building.parts) == building.world_size:
            self._complete(building)

    def _complete(self, building: PendingVersion) -> None:
        losses = self._without_lost_volumes(building)
        for rank, lost in losses.items():
            if not building.parts[rank].segment.holders:
                number, name = building.number, building.key[1]
                why = f"version {number} of {name!r} was abandoned: {lost}, which held rank {rank}'s part, has ended"
                self._fail(building, StoreError(why, path=name, value=number, repair="publish again, from every rank"))
                return
        parts = tuple(building.parts[rank] for rank in range(building.world_size))
        digest = version_digest(parts, self._layouts, building.extra)
        version = Version(building.key[1], building.number, parts, digest, building.extra)
        building.version = version
        self._not_under_way(building)
        owners = {rank: writer.session for rank, writer in building.writers.items()}
        openers: set[int] = set()
        for writer in building.writers.values():
            if writer.reuse is None:
                continue
            if any(holder.segment == writer.reuse.name for holder in building.parts[writer.rank].segment.holders):
                openers |= writer.reuse.openers
            else:  # it was not needed: the part is kept elsewhere
                self._drop(writer.reuse.name, writer.reuse.openers | {writer.session})
        has_spare = building.key[0] != "weights" or building.keep > 1
        kept = StoredVersion(version, owners, openers=openers, has_spare=has_spare, losses=losses)
        self._kept.setdefault(building.key, {})[building.number] = kept
        self._newest[building.key] = max(building.number, self._newest.get(building.key, -1))
        self.retire(building.key, keep=building.keep)
        self._outside.changed(building.key)

    def _without_lost_volumes(self, building: PendingVersion) -> dict[int, str]:
        """Forget copies on volumes that have ended since they took them. For each rank that lost one, who held it."""
        losses: dict[int, str] = {}
        for rank, part in building.parts.items():
            ended = {volume.session for volume in building.writers[rank].volumes} - self._volumes.keys()
            gone = [holder for holder in part.segment.holders if holder.session in ended]
            if gone:
                losses[rank] = gone[0].describe()
                left = tuple(holder for holder in part.segment.holders if holder not in gone)
                building.parts[rank] = replace(part, segment=replace(part.segment, holders=left))
        return losses

    def outcome(self, ticket: int) -> Version | None:
        """The version that a rank contributed to, once it is complete."""
        building = self._writers[ticket].building
        if building.failure is not None:
            raise building.failure
        return building.version

    def close_ticket(self, ticket: int, why: str = "") -> None:
        """A writer is done, or gives up: an unfinished version is then abandoned."""
        writer = self._writers.pop(ticket, None)
        if writer is None:
            return
        building = writer.building
        if building.version is None:
            number, name = building.number, building.key[1]
            reason = why or f"rank {writer.rank} gave up before version {number} of {name!r} was complete"
            self._fail(building, StoreError(reason, path=name, value=number, repair="publish again, from every rank"))
        if building.failure is not None or writer.rank not in building.parts:
            self._layout_done(writer.layout)
            self._take_back(writer)
            self._forget(building.key)

    def withdraw(self, session: int, token: str) -> None:
        """A rank does not wait for the others any longer."""
        for writer in [writer for writer in self._writers.values() if writer.session == session]:
            if writer.token == token:
                self.close_ticket(writer.ticket)

    def _take_back(self, writer: Writer) -> None:
        """A segment that a writer got for a version that came to nothing is free again; whoever took its part from it
        has it for nothing."""
        spare, part = writer.reuse, writer.building.parts.get(writer.rank)
        if spare is not None and part is not None:
            held = {holder.session for holder in part.segment.holders if holder.segment == spare.name}
            spare = replace(spare, openers=spare.openers | held)
        if part is not None:
            self._drop_part(part, but=spare)
        else:  # volumes may have taken it, or a part of it
            self._drop(label_of(writer.ticket), [volume.session for volume in writer.volumes])
        if spare is not None:
            self._spares.setdefault((writer.session, writer.building.key), []).append(spare)

    def _drop_part(self, part: Part, *, but: SpareSegment | None = None) -> None:
        for holder in part.segment.holders:
            if but is None or holder.segment != but.name:
                self._drop(holder.segment, {holder.session})

    def _fail(self, building: PendingVersion, failure: StoreError) -> None:
        if building.failure is None:
            building.failure = failure
            self._not_under_way(building)
            self._outside.changed(building.key)

    def _not_under_way(self, building: PendingVersion) -> None:
        under_way = self._building[building.key]
        under_way.remove(building)
        if not under_way:
            del self._building[building.key]

    # reading

    def acquire(self, session: int, wish: Acquire) -> Lease:
        """Give a reader a version, which stays as it is until the reader releases it."""
        key = (wish.kind, wish.key)
        kept = self._find(key, wish.version)
        number = next(self._ids)
        kept.leases.add(number)
        kept.openers.add(session)
        self._leases[number] = (session, key, kept)
        needed = {part.layout for part in kept.version.parts} - wish.known
        return Lease(number, kept.version, {name: self._layouts[name] for name in needed})

    def _find(self, key: Key, number: int | None) -> StoredVersion:
        usable = {number: kept for number, kept in self._kept.get(key, {}).items() if not kept.is_retired}
        if number is None and usable:
            number = max(usable)
        if number is None or number not in usable:
            near = [name for kind, name in self._kept if kind == key[0]]
            raise registry_state.nothing(key, number, usable=usable, near=near, under_way=self._building.get(key, ()))
        kept = usable[number]
        for part in kept.version.parts:
            if part.segment.inline is None and not part.segment.holders:
                raise registry_state.lost(key, number, part.rank, held_by=kept.losses.get(part.rank, "a process"))
        return kept

    def release(self, lease: int) -> None:
        """A reader lets go. Doing so twice is harmless."""
        entry = self._leases.pop(lease, None)
        if entry is None:
            return
        _, key, kept = entry
        kept.leases.discard(lease)
        if kept.is_retired and not kept.leases:
            self._free(key, kept)

    def newest(self, key: Key) -> int | None:
        """The newest version that can be read."""
        usable = [number for number, kept in self._kept.get(key, {}).items() if not kept.is_retired]
        return max(usable, default=None)

    def versions(self, key: Key) -> list[VersionInfo]:
        """The versions that can be read, oldest first."""
        found = []
        for number, kept in sorted(self._kept.get(key, {}).items()):
            if kept.is_retired:
                continue
            segments = [part.segment for part in kept.version.parts]
            is_lost = any(segment.inline is None and not segment.holders for segment in segments)
            size = sum(segment.size for segment in segments)
            found.append(VersionInfo(number, kept.version.digest, size, len(kept.leases), is_lost))
        return found

    def keys(self, kind: str, prefix: str = "") -> list[str]:
        return sorted(
            name
            for (its_kind, name), versions in self._kept.items()
            if its_kind == kind and name.startswith(prefix) and any(not kept.is_retired for kept in versions.values())
        )

    # letting go

    def retire(self, key: Key, *, keep: int) -> list[int]:
        """Keep the newest `keep` versions. Those that are being read stay until they are let go, but nobody new gets
        them. With 0 the memory that was kept for the next version goes too. Returns the numbers that were retired."""
        numbers = sorted(number for number, kept in self._kept.get(key, {}).items() if not kept.is_retired)
        retired = self._retire(key, numbers[: max(0, len(numbers) - keep)])
        if keep == 0:
            self._drop_spares(key)
        return retired

    def rewind(self, key: Key, *, to: int) -> list[int]:
        """Take back every version after `to`, so that the numbers after it can be published again."""
        for building in [b for b in self._building.get(key, ()) if b.number > to]:
            self._fail(building, StoreError(f"{key[1]!r} was rewound to version {to}", path=key[1], value=to))
        retired = self._retire(key, [number for number in self._kept.get(key, {}) if number > to])
        if key in self._newest:
            self._newest[key] = min(to, self._newest[key])
        return retired

    def delete(self, kind: str, names: Iterable[str]) -> int:
        """Forget keys; how many there were."""
        count = 0
        for name in names:
            count += bool(self._retire((kind, name), list(self._kept.get((kind, name), {}))))
        return count

    def _retire(self, key: Key, numbers: Iterable[int]) -> list[int]:
        retired = []
        for number in numbers:
            kept = self._kept[key][number]
            if kept.is_retired:
                continue
            retired.append(number)
            kept.is_retired = True
            if not kept.leases:
                self._free(key, kept)
        if retired:
            self._outside.changed(key)
        return retired

    def _free(self, key: Key, kept: StoredVersion) -> None:
        """Nobody reads a retired version any more: its memory goes back to its writers, or is given up."""
        versions = self._kept.get(key, {})
        if versions.get(kept.version.number) is kept:  # not where the number was published again meanwhile
            del versions[kept.version.number]
            if not versions:
                del self._kept[key]
        is_wanted = key[0] == "weights" or key in self._kept or key in self._building
        for part in kept.version.parts:
            self._layout_done(part.layout)
            owner = kept.owners[part.rank]
            owned = [holder.segment for holder in part.segment.holders if holder.session == owner]
            spare: SpareSegment | None = None
            if owned and is_wanted and kept.has_spare and len(self._spares.get((owner, key), ())) < SPARES:
                sessions = {holder.session for holder in part.segment.holders if holder.segment == owned[0]}
                spare = SpareSegment(owned[0], part.segment.size, frozenset(kept.openers | sessions))
                self._spares.setdefault((owner, key), []).append(spare)
            for segment in {holder.segment for holder in part.segment.holders}:
                if spare is None or segment != spare.name:
                    holding = {holder.session for holder in part.segment.holders if holder.segment == segment}
                    self._drop(segment, holding | kept.openers)
        self._forget(key)

    def _forget(self, key: Key) -> None:
        """Keep nothing of a value that is gone. Weights keep their newest number and their free segments."""
        if key[0] == "weights" or key in self._kept or key in self._building:
            return
        self._newest.pop(key, None)
        self._drop_spares(key)

    def _drop_spares(self, key: Key) -> None:
        for owner, name in [entry for entry in self._spares if entry[1] == key]:
            for spare in self._spares.pop((owner, name)):
                self._drop(spare.name, spare.openers | {owner})

    def _drop(self, segment: str, sessions: Iterable[int]) -> None:
        for session in sessions:
            self._outside.drop(session, segment)

    def _layout_done(self, name: str) -> None:
        self._layout_uses[name] -= 1
        if self._layout_uses[name] <= 0:
            del self._layout_uses[name]
            self._layouts.pop(name, None)

    # processes

    def left(self, session: int, who: str = "a process") -> None:
        """A process (`who`, for messages) has ended, or closed its line: what only it needed or held is let go."""
        for lease in [number for number, (its, _, _) in self._leases.items() if its == session]:
            self.release(lease)
        self._volumes.pop(session, None)
        for writer in [writer for writer in self._writers.values() if writer.session == session]:
            building = writer.building
            self.close_ticket(
                writer.ticket,
                f"version {building.number} of {building.key[1]!r} was abandoned: rank {writer.rank}, {who}, ended "
                "before it was complete",
            )
        for owner, key in [entry for entry in self._spares if entry[0] == session]:
            for spare in self._spares.pop((owner, key)):
                self._drop(spare.name, spare.openers - {session})
        known = {kept for versions in self._kept.values() for kept in versions.values()}
        for kept in known | {kept for _, _, kept in self._leases.values()}:  # also those whose number was used again
            kept.openers.discard(session)
            for part in kept.version.parts:
                gone = {holder.segment: holder for holder in part.segment.holders if holder.session == session}
                for holder in gone.values():
                    kept.losses[part.rank] = holder.describe()
                for segment in gone.keys() - {
                    holder.segment for holder in part.segment.holders if holder.session != session
                }:
                    self._drop(segment, kept.openers)  # nobody can be asked for it any more
            kept.version = _without(kept.version, session)

    def add_volume(self, session: int, volume: Holder) -> None:
        """A storage volume is ready."""
        self._volumes[session] = replace(volume, session=session)

    def set_copies(self, copies: int) -> None:
        """How many volumes hold each part."""
        self._copies = copies

    def _volumes_for(self, rank: int) -> tuple[Holder, ...]:
        volumes = sorted(self._volumes.values(), key=lambda volume: volume.volume)
        count = min(self._copies, len(volumes))
        return tuple(volumes[(rank + step) % len(volumes)] for step in range(count))


def _without(version: Version, session: int) -> Version:
    """The version without the copies that a process held."""
    if not any(holder.session == session for part in version.parts for holder in part.segment.holders):
        return version
    parts = []
    for part in version.parts:
        left = tuple(holder for holder in part.segment.holders if holder.session != session)
        parts.append(replace(part, segment=replace(part.segment, holders=left)))
    return replace(version, parts=tuple(parts))
