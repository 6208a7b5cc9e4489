"""Pinned versions in the store's index: versions that stay readable, whatever becomes of the weights they are of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from forge.errors import StoreError
from forge.store.records import Acquire, Lease, VersionInfo, pinned_name, pinned_version
from forge.store.registry import Registry
from forge.store.registry_state import Key, StoredVersion

NO_SESSION: Final = -1
"""The session of leases that no process holds: those of a pinned version on the version whose memory it shares."""


class PinningRegistry(Registry):
    """The registry, with pins.

    A pin is a lease that also gives the version a second name (`pinned_name`), under which readers get it. It copies
    nothing: both names stand for the same memory, which is free when neither needs it. A version that was published
    under its pinned name, such as one restored from a file, is pinned as it is. With its last pin a version is retired
    under its pinned name; a process that ends releases its pins.
    """

    def pin(self, session: int, key: Key, number: int, is_copy: bool = False) -> Lease:
        """Pin a version of weights. The lease that is returned is the pin: `release` ends it.

        With `is_copy`, it is the version that was published under the pinned name, whatever has the number else.
        """
        name = (key[0], pinned_name(key[1], number))
        pinned, published = self._usable(name).get(number), None if is_copy else self._usable(key).get(number)
        if pinned is None:
            pinned = self._add_alias(name, key, self._find(name if is_copy else key, number))
        elif published is not None and pinned.version.digest != published.version.digest:
            raise StoreError(
                f"another version {number} of {key[1]!r} is pinned: the weights went back, and the number was "
                "published again",
                path=name[1],
                value=number,
                rule="one pinned version for each number",
                repair=f"release the pin of the earlier version {number} first",
            )
        lease = self.acquire(session, Acquire(name[1], name[0], number))
        pinned.pins.add(lease.id)
        return lease

    def pinned(self, key: Key) -> list[VersionInfo]:
        """Return the pinned versions of weights, oldest first."""
        names = [name for kind, name in self._stored if kind == key[0] and pinned_version(key[1], name) is not None]
        found = [info for name in names for info in self.versions((key[0], name)) if info.num_pins]
        return sorted(found, key=lambda info: info.number)

    def _add_alias(self, name: Key, key: Key, original: StoredVersion) -> StoredVersion:
        """Give the memory of a version a second name. A lease on the version keeps the memory as it is."""
        lease = next(self._ids)
        original.leases.add(lease)
        self._leases[lease] = (NO_SESSION, key, original)
        version = original.version
        owners, losses = dict(original.owners), dict(original.losses)
        alias = StoredVersion(version, owners, losses=losses, original=lease, relays=original.relays)
        self._stored.setdefault(name, {})[version.number] = alias
        for part in version.parts:
            self._layout_uses[part.layout] += 1
        self._listener.changed(name)
        return alias

    def release(self, lease: int) -> None:
        """Release a lease. If it is the last pin of a version, the version is retired under its pinned name."""
        _, key, stored = self._leases.get(lease, (NO_SESSION, ("", ""), None))
        super().release(lease)
        if stored is not None and lease in stored.pins:
            stored.pins.discard(lease)
            if not stored.pins:
                self._newest.pop(key, None)  # the number may be published under this name again
                self._retire_pinned(key, stored)

    def _retire_pinned(self, key: Key, stored: StoredVersion) -> None:
        """Retire this very version: another one may have been published under the name meanwhile."""
        stored.is_retired = True
        if not stored.leases:
            self._free(key, stored)
        self._listener.changed(key)

    def _retire(self, key: Key, numbers: Iterable[int]) -> list[int]:
        return super()._retire(key, [number for number in numbers if not self._stored[key][number].pins])

    def _free(self, key: Key, stored: StoredVersion) -> None:
        if stored.original is None:
            super()._free(key, stored)
            return
        versions = self._stored.get(key, {})
        if versions.get(stored.version.number) is stored:  # not where it was pinned again meanwhile
            del versions[stored.version.number]
            if not versions:
                del self._stored[key]
        for part in stored.version.parts:
            self._layout_done(part.layout)
        _, _, original = self._leases[stored.original]
        original.openers |= stored.openers  # they may have mapped the memory
        self.release(stored.original)
