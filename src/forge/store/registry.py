"""The index of the store: which versions there are, who writes them, who reads them, and which memory is free again.

A state machine without input or output: sessions are numbers, time does not pass, and what others must hear goes to a
`RegistryListener`. Only this module decides that a version is visible whole or not at all, that no segment is reused
while it is read, and that the death of a process loses nothing but its own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from forge.errors import StoreError
from forge.store import registry_state
from forge.store.proof import version_digest
from forge.store.records import (
    Acquire,
    Assignment,
    Begin,
    Commit,
    Holder,
    Layout,
    Lease,
    Part,
    Version,
    VersionInfo,
    label_of,
    packing,
)
from forge.store.registry_state import (
    SPARES,
    Key,
    PendingVersion,
    RankWriter,
    RegistryListener,
    SpareSegment,
    StoredVersion,
    assign_pieces,
)


class Registry:
    """All keys of one run."""

    def __init__(self, listener: RegistryListener) -> None:
        self._listener = listener
        self._ids = itertools.count(1)
        self._stored: dict[Key, dict[int, StoredVersion]] = {}
        self._pending: dict[Key, list[PendingVersion]] = {}
        self._newest: dict[Key, int] = {}
        self._writers: dict[int, RankWriter] = {}
        self._leases: dict[int, tuple[int, Key, StoredVersion]] = {}
        self._layouts: dict[str, Layout] = {}
        self._layout_uses: Counter[str] = Counter()
        self._spares: dict[tuple[int, Key], list[SpareSegment]] = {}
        self._volumes: dict[int, Holder] = {}
        self._copies = 1

    # writing

    def begin(self, session: int, request: Begin) -> int | None:
        """Let a rank join a version. Return its assignment's number; None if the layout has to be sent first."""
        key = (request.kind, request.key)
        if request.layout is None and request.layout_id not in self._layouts:
            return None
        pending = self._join(key, request)
        if request.layout is not None:
            self._layouts.setdefault(request.layout_id, request.layout)
        writer = RankWriter(next(self._ids), session, request.rank, request.layout_id, pending, request.token)
        pending.writers[request.rank] = writer
        self._writers[writer.assignment] = writer
        self._layout_uses[request.layout_id] += 1
        if len(pending.writers) == pending.world_size:
            self._assign(pending)
        return writer.assignment

    def _join(self, key: Key, request: Begin) -> PendingVersion:
        if not 0 <= request.rank < request.world_size:
            raise registry_state.no_such_rank(request)
        under_way = self._pending.get(key, [])
        for pending in under_way:
            is_taken = request.rank in pending.writers or request.group != pending.group
            if is_taken if request.version is None else pending.number != request.version:
                continue
            if pending.world_size != request.world_size:
                raise registry_state.other_world_size(request, pending)
            if request.rank in pending.writers:
                raise registry_state.rank_twice(request, pending)
            return pending
        newest = self._newest.get(key, -1)
        number = request.version
        if number is None:
            number = max([newest, *(pending.number for pending in under_way)]) + 1
        elif number <= newest:
            raise registry_state.too_late(request, number, newest)
        pending = PendingVersion(key, number, request.world_size, request.keep, request.group)
        self._pending.setdefault(key, []).append(pending)
        return pending

    def _assign(self, pending: PendingVersion) -> None:
        layouts = tuple(self._layouts[pending.writers[rank].layout] for rank in range(pending.world_size))
        try:
            pending.assigned = assign_pieces(pending.key[1], layouts)
        except StoreError as error:
            self._fail(pending, error)
        self._listener.changed(pending.key)

    def assignment(self, number: int) -> Assignment | None:
        """Return what a rank is to write; None while other ranks have not joined yet."""
        writer = self._writers[number]
        pending = writer.pending
        if pending.failure is not None:
            raise pending.failure
        if pending.assigned is None:
            return None
        if not writer.has_pieces:
            writer.has_pieces = True
            # The oldest version makes room, so that `keep` versions' memory is enough. One complete version stays.
            self.retire(pending.key, keep=max(1, pending.keep - 1))
            writer.reuse = self._spare_for(writer, pending.assigned[writer.rank])
            writer.volumes = self._volumes_for(writer.rank)
        return Assignment(
            id=number,
            version=pending.number,
            written=pending.assigned[writer.rank],
            reuse=writer.reuse.name if writer.reuse is not None else None,
            volumes=writer.volumes,
        )

    def waiting_for(self, assignment: int) -> str:
        """Return which ranks a writer waits for, in words."""
        pending = self._writers[assignment].pending
        missing = sorted(set(range(pending.world_size)) - set(pending.writers))
        return f"rank(s) {missing} of {pending.world_size} of version {pending.number} of {pending.key[1]!r}"

    def _spare_for(self, writer: RankWriter, written: tuple[int, ...] | None) -> SpareSegment | None:
        """Return a free segment of the writer that fits; drop those that do not."""
        size = packing(self._layouts[writer.layout], written).size
        found: SpareSegment | None = None
        for spare in self._spares.pop((writer.session, writer.pending.key), []):
            if found is None and size <= spare.size <= 2 * size:
                found = spare
            else:
                self._drop(spare.name, spare.openers | {writer.session})
        return found

    def commit(self, commit: Commit) -> None:
        """Add a rank's written part. With the last one the version becomes visible."""
        writer = self._writers.get(commit.assignment)
        if writer is None:
            self._drop_part(commit.part)
            raise StoreError(
                "a part was committed before it was begun", value=commit.assignment, rule="begin, then commit"
            )
        pending = writer.pending
        pending.parts[writer.rank] = commit.part
        took = {holder.session for holder in commit.part.segment.holders}
        self._drop(
            label_of(writer.assignment), [volume.session for volume in writer.volumes if volume.session not in took]
        )
        if pending.failure is not None:  # who holds the part hears of it when the assignment is closed
            raise pending.failure
        pending.extra = pending.extra or commit.extra
        if len(pending.parts) == pending.world_size:
            self._complete(pending)

    def _complete(self, pending: PendingVersion) -> None:
        losses = self._without_lost_volumes(pending)
        for rank, lost in losses.items():
            if not pending.parts[rank].segment.holders:
                self._abandon(pending, f"was abandoned: {lost}, which held rank {rank}'s part, has ended")
                return
        parts = tuple(pending.parts[rank] for rank in range(pending.world_size))
        digest = version_digest(parts, self._layouts, pending.extra)
        version = Version(pending.key[1], pending.number, parts, digest, pending.extra)
        pending.version = version
        self._no_longer_pending(pending)
        owners = {rank: writer.session for rank, writer in pending.writers.items()}
        openers: set[int] = set()
        for writer in pending.writers.values():
            if writer.reuse is None:
                continue
            if any(holder.segment == writer.reuse.name for holder in pending.parts[writer.rank].segment.holders):
                openers |= writer.reuse.openers
            else:  # it was not needed: the part is stored elsewhere
                self._drop(writer.reuse.name, writer.reuse.openers | {writer.session})
        has_spare = pending.key[0] != "weights" or pending.keep > 1
        stored = StoredVersion(version, owners, openers=openers, has_spare=has_spare, losses=losses)
        self._stored.setdefault(pending.key, {})[pending.number] = stored
        self._newest[pending.key] = max(pending.number, self._newest.get(pending.key, -1))
        self.retire(pending.key, keep=pending.keep)
        self._listener.changed(pending.key)

    def _without_lost_volumes(self, pending: PendingVersion) -> dict[int, str]:
        """Forget copies on volumes that have ended meanwhile. Return, for each rank that lost one, who held it."""
        losses: dict[int, str] = {}
        for rank, part in list(pending.parts.items()):
            ended = {volume.session for volume in pending.writers[rank].volumes} - self._volumes.keys()
            gone = [holder for holder in part.segment.holders if holder.session in ended]
            if gone:
                losses[rank] = gone[0].describe()
                pending.parts[rank] = part.without(ended)
        return losses

    def outcome(self, assignment: int) -> Version | None:
        """Return the version that a rank contributed to, once it is complete."""
        pending = self._writers[assignment].pending
        if pending.failure is not None:
            raise pending.failure
        return pending.version

    def close_assignment(self, assignment: int, why: str = "") -> None:
        """Close a writer's assignment. A version that is not complete is abandoned."""
        writer = self._writers.pop(assignment, None)
        if writer is None:
            return
        pending = writer.pending
        if pending.version is None:
            self._abandon(pending, f"was abandoned: rank {writer.rank} gave up before it was complete", why)
        if pending.failure is not None or writer.rank not in pending.parts:
            self._layout_done(writer.layout)
            self._reclaim(writer)
            self._forget(pending.key)

    def withdraw(self, session: int, token: str) -> None:
        """Close the assignments of a rank that does not wait for the others any longer."""
        for writer in [w for w in self._writers.values() if (w.session, w.token) == (session, token)]:
            self.close_assignment(writer.assignment)

    def _reclaim(self, writer: RankWriter) -> None:
        """Free the segment that a writer got for an abandoned version; drop the copies of its part elsewhere."""
        spare, part = writer.reuse, writer.pending.parts.get(writer.rank)
        if spare is not None and part is not None:
            held = {holder.session for holder in part.segment.holders if holder.segment == spare.name}
            spare = replace(spare, openers=spare.openers | held)
        if part is not None:
            self._drop_part(part, but=spare)
        else:  # volumes may have taken it, or a part of it
            self._drop(label_of(writer.assignment), [volume.session for volume in writer.volumes])
        if spare is not None:
            self._spares.setdefault((writer.session, writer.pending.key), []).append(spare)

    def _drop_part(self, part: Part, *, but: SpareSegment | None = None) -> None:
        for holder in part.segment.holders:
            if but is None or holder.segment != but.name:
                self._drop(holder.segment, {holder.session})

    def _abandon(self, pending: PendingVersion, what: str, why: str = "") -> None:
        number, name = pending.number, pending.key[1]
        message = why or f"version {number} of {name!r} {what}"
        self._fail(pending, StoreError(message, path=name, value=number, repair="publish again, from every rank"))

    def _fail(self, pending: PendingVersion, failure: StoreError) -> None:
        if pending.failure is None:
            pending.failure = failure
            self._no_longer_pending(pending)
            self._listener.changed(pending.key)

    def _no_longer_pending(self, pending: PendingVersion) -> None:
        self._pending[pending.key].remove(pending)
        if not self._pending[pending.key]:
            del self._pending[pending.key]

    # reading

    def acquire(self, session: int, request: Acquire) -> Lease:
        """Give a reader a version, which stays as it is until the reader releases it."""
        key = (request.kind, request.key)
        stored = self._find(key, request.version)
        number = next(self._ids)
        stored.leases.add(number)
        stored.openers.add(session)
        self._leases[number] = (session, key, stored)
        needed = {part.layout for part in stored.version.parts} - request.known
        return Lease(number, stored.version, {name: self._layouts[name] for name in needed})

    def _find(self, key: Key, number: int | None) -> StoredVersion:
        usable = self._usable(key)
        if number is None:
            number = max(usable, default=None)
        if number is None or number not in usable:
            near = [name for kind, name in self._stored if kind == key[0]]
            raise registry_state.not_found(key, number, usable=usable, near=near, under_way=self._pending.get(key, ()))
        stored = usable[number]
        for part in stored.version.parts:
            if part.segment.is_lost:
                raise registry_state.lost(key, number, part.rank, held_by=stored.losses.get(part.rank, "a process"))
        return stored

    def release(self, lease: int) -> None:
        """Release a lease. Doing so twice is harmless."""
        if lease in self._leases:
            _, key, stored = self._leases.pop(lease)
            stored.leases.discard(lease)
            if stored.is_retired and not stored.leases:
                self._free(key, stored)

    def newest(self, key: Key) -> int | None:
        """Return the newest version that can be read."""
        return max(self._usable(key), default=None)

    def _usable(self, key: Key) -> dict[int, StoredVersion]:
        return {number: stored for number, stored in self._stored.get(key, {}).items() if not stored.is_retired}

    def versions(self, key: Key) -> list[VersionInfo]:
        """Return the versions that can be read, oldest first."""
        found = []
        for number, stored in sorted(self._usable(key).items()):
            segments = [part.segment for part in stored.version.parts]
            size, is_lost = sum(segment.size for segment in segments), any(segment.is_lost for segment in segments)
            num_readers, num_pins = len(stored.leases - stored.pins), len(stored.pins)
            found.append(VersionInfo(number, stored.version.digest, size, num_readers, is_lost, num_pins))
        return found

    def keys(self, kind: str, prefix: str = "") -> list[str]:
        return sorted(
            key[1] for key in self._stored if key[0] == kind and key[1].startswith(prefix) and self._usable(key)
        )

    # letting go

    def retire(self, key: Key, *, keep: int) -> list[int]:
        """Keep the newest `keep` versions. Those that are being read stay until they are let go, but nobody new gets
        them. With 0 the memory that was stored for the next version goes too. Returns the numbers that were retired."""
        numbers = sorted(self._usable(key))
        retired = self._retire(key, numbers[: max(0, len(numbers) - keep)])
        if keep == 0:
            self._drop_spares(key)
        return retired

    def rewind(self, key: Key, *, to: int) -> list[int]:
        """Take back every version after `to`, so that the numbers after it can be published again."""
        for pending in [b for b in self._pending.get(key, ()) if b.number > to]:
            self._fail(pending, StoreError(f"{key[1]!r} was rewound to version {to}", path=key[1], value=to))
        retired = self._retire(key, [number for number in self._stored.get(key, {}) if number > to])
        if key in self._newest:
            self._newest[key] = min(to, self._newest[key])
        return retired

    def delete(self, kind: str, names: Iterable[str]) -> int:
        """Delete keys; return how many there were."""
        return sum(bool(self._retire((kind, name), list(self._stored.get((kind, name), {})))) for name in names)

    def _retire(self, key: Key, numbers: Iterable[int]) -> list[int]:
        retired = []
        for number in numbers:
            stored = self._stored[key][number]
            if stored.is_retired:
                continue
            retired.append(number)
            stored.is_retired = True
            if not stored.leases:
                self._free(key, stored)
        if retired:
            self._listener.changed(key)
        return retired

    def _free(self, key: Key, stored: StoredVersion) -> None:
        """Free a retired version that has no reader left: its memory goes back to its writers, or is dropped."""
        versions = self._stored.get(key, {})
        if versions.get(stored.version.number) is stored:  # not where the number was published again meanwhile
            del versions[stored.version.number]
            if not versions:
                del self._stored[key]
        is_wanted = key[0] == "weights" or key in self._stored or key in self._pending
        for part in stored.version.parts:
            self._layout_done(part.layout)
            owner = stored.owners[part.rank]
            owned = [holder.segment for holder in part.segment.holders if holder.session == owner]
            spare: SpareSegment | None = None
            if owned and is_wanted and stored.has_spare and len(self._spares.get((owner, key), ())) < SPARES:
                sessions = {holder.session for holder in part.segment.holders if holder.segment == owned[0]}
                spare = SpareSegment(owned[0], part.segment.size, frozenset(stored.openers | sessions))
                self._spares.setdefault((owner, key), []).append(spare)
            for segment in {holder.segment for holder in part.segment.holders}:
                if spare is None or segment != spare.name:
                    holding = {holder.session for holder in part.segment.holders if holder.segment == segment}
                    self._drop(segment, holding | stored.openers)
        self._forget(key)

    def _forget(self, key: Key) -> None:
        """Keep nothing of a value that is gone. Weights keep their newest number and their free segments."""
        if key[0] == "weights" or key in self._stored or key in self._pending:
            return
        self._newest.pop(key, None)
        self._drop_spares(key)

    def _drop_spares(self, key: Key) -> None:
        for owner, name in [entry for entry in self._spares if entry[1] == key]:
            for spare in self._spares.pop((owner, name)):
                self._drop(spare.name, spare.openers | {owner})

    def _drop(self, segment: str, sessions: Iterable[int]) -> None:
        for session in sessions:
            self._listener.drop(session, segment)

    def _layout_done(self, name: str) -> None:
        self._layout_uses[name] -= 1
        if self._layout_uses[name] <= 0:
            del self._layout_uses[name]
            self._layouts.pop(name, None)

    # processes

    def left(self, session: int, who: str = "a process") -> None:
        """Release what only a process needed or held that has ended (`who`, for messages)."""
        for lease in [number for number, (its, _, _) in self._leases.items() if its == session]:
            self.release(lease)
        self._volumes.pop(session, None)
        for writer in [writer for writer in self._writers.values() if writer.session == session]:
            pending = writer.pending
            self.close_assignment(
                writer.assignment,
                f"version {pending.number} of {pending.key[1]!r} was abandoned: rank {writer.rank}, {who}, ended "
                "before it was complete",
            )
        for owner, key in [entry for entry in self._spares if entry[0] == session]:
            for spare in self._spares.pop((owner, key)):
                self._drop(spare.name, spare.openers - {session})
        known = {stored for versions in self._stored.values() for stored in versions.values()}
        for stored in known | {
            stored for _, _, stored in self._leases.values()
        }:  # also those whose number was used again
            stored.openers.discard(session)
            for part in stored.version.parts:
                gone = {holder.segment: holder for holder in part.segment.holders if holder.session == session}
                for holder in gone.values():
                    stored.losses[part.rank] = holder.describe()
                for segment in gone.keys() - {
                    holder.segment for holder in part.segment.holders if holder.session != session
                }:
                    self._drop(segment, stored.openers)  # no process that could serve it is left
            if any(holder.session == session for part in stored.version.parts for holder in part.segment.holders):
                parts = tuple(part.without({session}) for part in stored.version.parts)
                stored.version = replace(stored.version, parts=parts)

    def add_volume(self, session: int, volume: Holder) -> None:
        """Add a storage volume that is ready."""
        self._volumes[session] = replace(volume, session=session)

    def set_copies(self, copies: int) -> None:
        """Set how many volumes hold each part."""
        self._copies = copies

    def _volumes_for(self, rank: int) -> tuple[Holder, ...]:
        volumes = sorted(self._volumes.values(), key=lambda volume: volume.volume)
        count = min(self._copies, len(volumes))
        return tuple(volumes[(rank + step) % len(volumes)] for step in range(count))
