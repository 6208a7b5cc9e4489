"""Which process of a host gets a version for all its readers, and from which other host.

The first reader of a host that needs bytes of a version from elsewhere becomes the *relay* of its host: it gets what
the host's readers want, once, into memory that they map. Relays form a chain in the order in which they began: each
gets the bytes from the one before it, while that one still receives them, so that the host of the publisher sends each
byte once, however many hosts there are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final, Literal

from forge.errors import StoreError
from forge.store.records import Acquire, Lease, Relay, Route, memory_label
from forge.store.registry_pins import PinningRegistry
from forge.store.registry_state import (
    Key,
    PendingVersion,
    RegistryListener,
    RelayMemory,
    StoredVersion,
    VersionRelays,
)

Distribution = Literal["auto", "direct"]
MOST_UPSTREAMS: Final = 3
"""How many relays of other hosts a relay may try, one after the other, before it asks those who hold the version."""


def upstreams_of(order: Sequence[Relay], relay: Relay, *, failed: Collection[int] = ()) -> tuple[Relay, ...]:
    """Return the relays from which a relay gets its bytes: those that began before it, the last of them first.

    Bytes flow from earlier to later relays only, so they cannot wait for each other in a circle. Of a host that had
    several relays only the last one counts.
    """
    found: dict[str, Relay] = {}
    for other in reversed(order[: order.index(relay)]):
        if other.host != relay.host and other.session not in failed:
            found.setdefault(other.host, other)
    return tuple(found.values())[:MOST_UPSTREAMS]


class RelayingRegistry(PinningRegistry):
    """The registry, with relays.

    A relay keeps its copy of a version while readers use it, and of the newest version, which more readers may want.
    The memory of an older version that no reader uses is free for the next one: so a host needs memory for one version,
    and its pages stay warm.
    """

    distribution: Distribution = "auto"

    def __init__(self, listener: RegistryListener) -> None:
        super().__init__(listener)
        self._relay_spares: dict[tuple[Key, str], RelayMemory] = {}

    def set_distribution(self, distribution: Distribution) -> None:
        """Set whether readers of a host share what comes from other hosts (`auto`), or each get it (`direct`)."""
        self.distribution = distribution

    def acquire(self, session: int, request: Acquire) -> Lease:
        """Give a reader a version, and say whether it may share what comes from other hosts."""
        return replace(super().acquire(session, request), is_direct=self.distribution == "direct")

    def route(self, lease: int, reader: Relay, failed: Collection[int] = ()) -> Route | None:
        """Return how the version of a lease gets to a reader that could relay it; None where it is read directly.

        `failed` are relays through which the reader could not get it: they are not used for this version any more.
        """
        if lease not in self._leases:
            raise StoreError("there is no such lease", value=lease, rule="the lease of a version, until it is released")
        _, key, stored = self._leases[lease]
        relays = stored.relays
        relays.failed.update(failed)
        if self.distribution == "direct" or reader.session in relays.failed:
            return None
        usable = [relay for relay in relays.order if relay.session not in relays.failed and relay.host == reader.host]
        relay = usable[-1] if usable else self._new_relay(key, relays, reader)
        relays.leases.add(lease)
        relays.openers[relay.memory].add(reader.session)
        return Route(relay, upstreams_of(relays.order, relay, failed=relays.failed))

    def _new_relay(self, key: Key, relays: VersionRelays, reader: Relay) -> Relay:
        """Choose a relay for a host: the process that has memory from an earlier version, or this reader's."""
        spare = self._relay_spares.pop((key, reader.host), None)
        if spare is not None and spare.relay.session in relays.failed:
            self._drop_memory(spare)
            spare = None
        copy = next(self._ids)
        relay = replace(reader, copy=copy, memory=copy) if spare is None else replace(spare.relay, copy=copy)
        relays.order.append(relay)
        relays.openers[relay.memory] = {relay.session} if spare is None else spare.openers
        return relay

    def release(self, lease: int) -> None:
        """Release a lease. What relays hold of an older version goes with its last reader on another host."""
        _, key, stored = self._leases.get(lease, (0, ("", ""), None))
        super().release(lease)
        if stored is not None and lease in stored.relays.leases:
            stored.relays.leases.discard(lease)
            self._free_if_idle(key, stored)

    def _complete(self, pending: PendingVersion) -> None:
        super()._complete(pending)
        for stored in list(self._stored.get(pending.key, {}).values()):
            self._free_if_idle(pending.key, stored)

    def _free_if_idle(self, key: Key, stored: StoredVersion) -> None:
        """Free what relays hold of a version that no reader on another host uses now, unless it is the newest."""
        relays = stored.relays
        if relays.order and not relays.leases and not self._is_newest(key, relays):
            self._free_relays(key, stored)

    def _is_newest(self, key: Key, relays: VersionRelays) -> bool:
        """Return whether it is the newest version under one of its names."""
        for name, versions in self._stored.items():
            usable = self._usable(name) if name[0] == key[0] else {}
            if usable and versions[max(usable)].relays is relays:
                return True
        return False

    def _free_relays(self, key: Key, stored: StoredVersion) -> None:
        """Free the memory of a version's relays: for the next version of its key, if one may come there."""
        relays, newest = stored.relays, self.newest(key)
        is_wanted = stored.has_spare and newest is not None and newest > stored.version.number
        for relay in relays.order:
            memory = RelayMemory(relay, relays.openers.pop(relay.memory))
            if is_wanted and relay.session not in relays.failed and (key, relay.host) not in self._relay_spares:
                self._relay_spares[key, relay.host] = memory
            else:
                self._drop_memory(memory)
        relays.order.clear()

    def _drop_memory(self, memory: RelayMemory) -> None:
        self._drop(memory_label(memory.relay.memory), memory.openers)

    def _free(self, key: Key, stored: StoredVersion) -> None:
        super()._free(key, stored)
        if stored.original is None:
            self._free_relays(key, stored)

    def _drop_spares(self, key: Key) -> None:
        super()._drop_spares(key)
        for name in [name for name in self._relay_spares if name[0] == key]:
            self._drop_memory(self._relay_spares.pop(name))

    def left(self, session: int, who: str = "a process") -> None:
        """Release what only a process needed or held that has ended, and use it as a relay no more."""
        super().left(session, who)
        known = {stored for versions in self._stored.values() for stored in versions.values()}
        for stored in known | {stored for _, _, stored in self._leases.values()}:
            if any(relay.session == session for relay in stored.relays.order):
                stored.relays.failed.add(session)
        for name in [name for name, spare in self._relay_spares.items() if spare.relay.session == session]:
            self._drop_memory(self._relay_spares.pop(name))
