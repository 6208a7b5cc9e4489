"""Which process of a host gets a version for all its readers, and from which other host.

The first reader of a host that needs bytes of a version from elsewhere becomes the *relay* of its host: it gets what
the host's readers want, once, into memory that they map. Relays form a chain in the order in which they began: each
gets the bytes from the one before it, while that one still receives them, so that the host of the publisher sends each
byte once, however many hosts there are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Literal

from forge.errors import StoreError
from forge.store.records import Relay, Route, relay_label
from forge.store.registry_pins import PinningRegistry
from forge.store.registry_state import Key, PendingVersion, StoredVersion, VersionRelays

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
    """

    distribution: Distribution = "auto"

    def set_distribution(self, distribution: Distribution) -> None:
        """Set whether readers of a host share what comes from other hosts (`auto`), or each get it (`direct`)."""
        self.distribution = distribution

    def route(self, lease: int, reader: Relay, failed: Collection[int] = ()) -> Route | None:
        """Return how the version of a lease gets to a reader that could relay it; None where it is read directly.

        `failed` are relays through which the reader could not get it: they are not used for this version any more.
        """
        if lease not in self._leases:
            raise StoreError("there is no such lease", value=lease, rule="the lease of a version, until it is released")
        relays = self._leases[lease][2].relays
        relays.failed.update(failed)
        if self.distribution == "direct" or reader.session in relays.failed:
            return None
        relays.leases.add(lease)
        relays.sessions.add(reader.session)
        usable = [relay for relay in relays.order if relay.session not in relays.failed and relay.host == reader.host]
        if not usable:
            relays.order.append(reader)
            usable = [reader]
        return Route(usable[-1], upstreams_of(relays.order, usable[-1], failed=relays.failed))

    def release(self, lease: int) -> None:
        """Release a lease. What relays hold of an older version goes with its last reader on another host."""
        _, key, stored = self._leases.get(lease, (0, ("", ""), None))
        super().release(lease)
        if stored is not None and lease in stored.relays.leases:
            stored.relays.leases.discard(lease)
            self._drop_if_idle(key, stored)

    def _complete(self, pending: PendingVersion) -> None:
        super()._complete(pending)
        for stored in list(self._stored.get(pending.key, {}).values()):
            self._drop_if_idle(pending.key, stored)

    def _drop_if_idle(self, key: Key, stored: StoredVersion) -> None:
        """Drop what relays hold of a version that has no reader on another host now, unless it is the newest."""
        relays = stored.relays
        if relays.sessions and not relays.leases and not self._is_newest(key, relays):
            self._drop_relays(stored)

    def _is_newest(self, key: Key, relays: VersionRelays) -> bool:
        """Return whether it is the newest version under one of its names."""
        for name, versions in self._stored.items():
            usable = self._usable(name) if name[0] == key[0] else {}
            if usable and versions[max(usable)].relays is relays:
                return True
        return False

    def _drop_relays(self, stored: StoredVersion) -> None:
        for part in stored.version.parts:
            self._drop(relay_label(part.segment.stamp), stored.relays.sessions)
        stored.relays.order.clear()
        stored.relays.sessions.clear()

    def _free(self, key: Key, stored: StoredVersion) -> None:
        super()._free(key, stored)
        if stored.original is None:
            self._drop_relays(stored)

    def left(self, session: int, who: str = "a process") -> None:
        """Release what only a process needed or held that has ended, and use it as a relay no more."""
        super().left(session, who)
        known = {stored for versions in self._stored.values() for stored in versions.values()}
        for stored in known | {stored for _, _, stored in self._leases.values()}:
            if any(relay.session == session for relay in stored.relays.order):
                stored.relays.failed.add(session)
