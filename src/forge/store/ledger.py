"""What the registry writes down: versions that are being written, those that are complete, and free segments."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge.errors import StoreError
from forge.store.records import Holder, Part, Version

Key = tuple[str, str]
"""Kind and name."""


@dataclass(eq=False)
class Building:
    """A version that is being written."""

    key: Key
    number: int
    world_size: int
    keep: int
    group: str = ""
    writers: dict[int, Writer] = field(default_factory=dict)
    shares: list[tuple[int, ...] | None] | None = None
    parts: dict[int, Part] = field(default_factory=dict)
    extra: bytes = b""
    failure: StoreError | None = None
    version: Version | None = None
    """Once it is complete."""


@dataclass(eq=False)
class Writer:
    """One rank of a version that is being written."""

    ticket: int
    session: int
    rank: int
    layout: str
    building: Building
    token: str = ""
    reuse: Spare | None = None
    volumes: tuple[Holder, ...] = ()
    has_share: bool = False


@dataclass(frozen=True, slots=True)
class Spare:
    """A segment that can be written again, and the sessions that may have mapped it."""

    name: str
    size: int
    openers: frozenset[int]


@dataclass(eq=False)
class Kept:
    """A complete version."""

    version: Version
    owners: dict[int, int]
    """The session that wrote each rank's part."""
    leases: set[int] = field(default_factory=set)
    openers: set[int] = field(default_factory=set)
    """Sessions that may have mapped its segments."""
    is_retired: bool = False
    """Nobody new gets it; it goes with its last reader."""
    has_spare: bool = True
    """Whether its memory stays for the next version. With keep=1 it does not: that needs twice the memory for good."""
    losses: dict[int, str] = field(default_factory=dict)
    """For each rank whose part lost a copy, who held that."""
