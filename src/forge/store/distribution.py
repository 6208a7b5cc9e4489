"""Reading a version of another host through the relay of this one, so that each byte comes to the host once.

The reader tells the relay which bytes it needs, maps the memory in which they arrive, and reads them there when all
have arrived. Where a relay does not work, another process of the host takes its place; where that does not help either,
the reader gets the bytes directly from those who hold them. It waits for a relay in vain for a few seconds at most.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from forge.errors import StoreError, WeightMismatch
from forge.store.client import StoreClient
from forge.store.intervals import Intervals
from forge.store.part_sources import Source, open_source
from forge.store.records import Lease, Relay, Route, Version
from forge.store.relay_copies import NoRoom, Progress, Wanted
from forge.store.relay_sources import FASTER, NoSource, NotHere, PartRanges, check_filling
from forge.store.segments import Segment

T = TypeVar("T")
_log = logging.getLogger("forge.store")
DISTRIBUTION: Final = "FORGE_STORE_DISTRIBUTION"
"""How readers of this process get versions from other hosts: `auto` or `direct`. Unset: as the run says."""
_TICK_S: Final = 1.0
"""A relay answers at least so often while a reader waits."""
_LOOK_S: Final = 10.0
"""A reader compares its relay with the holder of the bytes so often. The relay itself needs less time to find that one
of another host does not answer."""
_PROBE_BYTES: Final = 512 << 10
_MOST_RELAYS: Final = 3
"""So many relays are tried, one after the other."""


class RelayFailure(StoreError):
    """No relay of this host can get what a reader needs."""


class SlowRelay(StoreError):
    """A relay gets bytes much more slowly than its readers would."""


class OpenedParts:
    """The parts of a leased version, opened for one reader."""

    def __init__(self, client: StoreClient, lease: Lease) -> None:
        self._client, self._lease = client, lease
        self.version: Version = lease.version
        self.sources: list[Source] = [open_source(client, lease.version, part) for part in lease.version.parts]
        self.num_received = 0
        """Bytes that came from other hosts because of this reader."""
        self.relay: Relay | None = None
        """Through which they came, if through one."""
        self._came_from: set[Relay] = set()
        self._wanted: dict[int, Wanted] = {}
        self._there: dict[int, Intervals] = {}
        self._route: Route | None = None

    def take_relay(self) -> bool:
        """Read what is on other hosts through the relay of this one, if it has one. Return whether it has."""
        remote = [source for source in self.sources if source.holder is not None and source.holder.transport == "tcp"]
        if not remote or self._lease.is_direct or is_direct() or "shm" not in self._client.transports():
            return False
        self._route = self._find_route(())
        if self._route is not None:
            for source in remote:
                source.is_relayed = True
        return self._route is not None

    def _find_route(self, failed: tuple[int, ...]) -> Route | None:
        here = self._client
        try:
            address = here.data_plane.serve().address
        except (OSError, StoreError) as error:
            _log.warning("readers of this host cannot share what they get from other hosts: %s", error)
            return None
        offer = Relay(here.host, here.pid, here.session, address)
        route: Route | None = here.line.call("route", (self._lease.id, offer, failed))
        return route

    def bring(self, needs: Callable[[int], Intervals]) -> None:
        """Wait until the bytes that are needed of each part that is relayed are there, and map them."""
        needed = {index: needs(index) for index, source in enumerate(self.sources) if source.is_relayed}
        needed = {
            index: ranges
            for index, ranges in needed.items()
            if index not in self._there or not self._there[index].covers(ranges)
        }
        failed: list[int] = []
        tried: list[str] = []
        while needed and len(tried) < _MOST_RELAYS and self._route is not None:
            relay = self._route.relay
            try:
                self._bring(self._route, needed)
            except (NoRoom, NoSource) as error:
                raise RelayFailure(error.message, path=self.version.key) from error
            except Exception as error:  # noqa: BLE001 - whatever is wrong with a relay, the reader can do without it
                tried.append(f"{relay.describe()}: {error}")
                _log.warning(
                    "version %d of %r is not read through %s", self.version.number, self.version.key, tried[-1]
                )
                self._client.data_plane.forget_relay(relay.address)
                if not isinstance(error, NotHere):  # it has just released the version: another reader may want it again
                    failed.append(relay.session)
                self._route = self._find_route(tuple(failed))
            else:
                self.relay = relay
                return
        if needed:
            raise RelayFailure(
                f"no process of this host could relay version {self.version.number} of {self.version.key!r}",
                path=self.version.key,
                value=tried,
                rule="a process that relays answers, and is not much slower than the holder",
            )

    def _bring(self, route: Route, needed: Mapping[int, Intervals]) -> None:
        relay = _relay_at(self._client, route.relay)
        opened = [self.sources[index].part for index in needed]
        parts = [PartRanges(part.rank, part.segment, needed[i]) for i, part in zip(needed, opened, strict=True)]
        answers: list[Wanted] = relay("relay", (self.version.key, route.relay, route.upstreams, parts))
        wanted = dict(zip(needed, answers, strict=True))
        for index, each in wanted.items():
            self.num_received += each.num_new
            source = self.sources[index]
            watch = None if route.relay.session == self._client.session else _Watch(self._client, source, needed[index])
            while True:
                progress: Progress = relay("relayed", ((each.copy, each.rank), each.ticket, _TICK_S))
                self._came_from.update(progress.relays)
                if not progress.num_missing:
                    break
                if watch is not None:
                    watch.look(progress)
            source.segment = self._client.open_relayed(each, source.part.segment.size)
            source.memory = source.segment.flat()
            self._wanted[index], self._there[index] = each, needed[index]

    def open_private(self, index: int) -> Segment:
        """Map a part that is there once more, for views that the reader may write to."""
        return self._client.open_relayed(self._wanted[index], self.sources[index].part.segment.size, is_private=True)

    def blame(self, error: WeightMismatch) -> None:
        """Report that what came through the relay was not what was published, and that it was when read directly."""
        if self.relay is None:
            return
        relays = [self.relay, *self._came_from]
        _log.warning(
            "version %d of %r was damaged on its way through %s: it was read directly, and other relays are used (%s)",
            self.version.number,
            self.version.key,
            " or ".join(relay.describe() for relay in relays),
            error.message,
        )
        self._find_route(tuple(relay.session for relay in relays))


def read_version(client: StoreClient, lease: Lease, attempt: Callable[[OpenedParts], T], *, is_shared: bool) -> T:
    """Read a version: through the relay of this host if there is one, else directly. With `is_shared`, other readers of
    this host are likely to want the same bytes."""
    parts = OpenedParts(client, lease)
    if not is_shared or not parts.take_relay():
        return attempt(parts)
    damage: WeightMismatch | None = None
    try:
        return attempt(parts)
    except RelayFailure as error:
        _log.warning("version %d of %r is read directly: %s", lease.version.number, lease.version.key, error.message)
    except WeightMismatch as error:
        if parts.relay is None:
            raise
        damage = error
    direct = OpenedParts(client, lease)
    direct.num_received = parts.num_received
    found = attempt(direct)
    if damage is not None:
        parts.blame(damage)
    return found


def is_direct() -> bool:
    """Return whether the environment says that readers of this process share nothing."""
    chosen = os.environ.get(DISTRIBUTION, "auto")
    if chosen not in ("auto", "direct"):
        raise StoreError(
            f"{DISTRIBUTION} has a value that means nothing",
            path=DISTRIBUTION,
            value=chosen,
            rule="auto or direct",
            repair=f"unset {DISTRIBUTION}: the run's `store.distribution` then holds",
        )
    return chosen == "direct"


def _relay_at(client: StoreClient, relay: Relay) -> Callable[[str, Any], Any]:
    """Return how a relay is asked: in this process, or through its data server."""
    if relay.session == client.session:
        return client.data_plane.answer
    return client.data_plane.relay_client(relay.address).ask


class _Watch:
    """Looks at how fast the bytes that a reader waits for come to its relay."""

    def __init__(self, client: StoreClient, source: Source, wanted: Intervals) -> None:
        self._client, self._source, self._wanted = client, source, wanted
        self._seen, self._looked_at = Progress(wanted.num_bytes, (), 0), time.monotonic()

    def look(self, progress: Progress) -> None:
        """Raise if much less comes to it than this process could get by itself."""
        elapsed_s = time.monotonic() - self._looked_at
        if progress.num_dropped != self._seen.num_dropped:  # it has just found that a source does not answer
            self._seen, self._looked_at = progress, time.monotonic()
        if elapsed_s < _LOOK_S or self._seen is progress:
            return
        speed, own = (self._seen.num_missing - progress.num_missing) / elapsed_s, self._probe()
        self._seen, self._looked_at = progress, time.monotonic()
        if own > 2 * FASTER * speed:
            raise SlowRelay(
                f"it gets {speed / 2**20:.1f} MiB/s, and this process {own / 2**20:.1f} MiB/s from the holder",
                value=progress.num_missing,
            )

    def _probe(self) -> float:
        """Return how many bytes a second come from the holder of the part to this process."""
        holder = self._source.holder
        assert holder is not None
        end = int(self._wanted.ends[-1])
        target = memoryview(bytearray(min(_PROBE_BYTES, end)))
        client = self._client.data_plane.relay_client(holder.address)
        try:
            check_filling(client, holder.segment, self._source.part.segment.stamp)  # it opens the connection
            began = time.monotonic()
            client.read(holder.segment, [(end - len(target), target)])
        except (OSError, StoreError):
            return 0.0
        return len(target) / max(time.monotonic() - began, 1e-9)
