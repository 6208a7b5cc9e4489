"""The messages between the store's processes, and how a layout's pieces are packed into a segment. No torch."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from forge.store.sharding import Piece, TensorShards

ALIGN: Final = 256
"""Every piece begins at a multiple of this: good for vector loads, for views as any dtype, and for DMA."""

_COPY: Final = "relay-copy/"
_MEMORY: Final = "relay-memory/"

HEADER: Final = 4096
"""Bytes at the beginning of a segment that hold its stamp."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What one rank holds of a state dict: the tensors' names, and for each what the rank has of it.

    The pieces of a layout are numbered through, tensor by tensor; everything else refers to those numbers.
    """

    names: tuple[str, ...]
    shards: tuple[TensorShards, ...]
    id: str
    """Equal for equal layouts, in every process."""

    @classmethod
    def of(cls, names: tuple[str, ...], shards: tuple[TensorShards, ...]) -> Layout:
        return cls(names, shards, hashlib.sha256(repr((names, shards)).encode()).hexdigest()[:32])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that can give out the bytes of a segment, and how it is asked."""

    transport: str
    """`shm`: open `/proc/<pid>/fd/<fd>` on the same host; `tcp`: ask the data server at `address`; `cuda`: open the
    CUDA IPC handle in `token`; `rdma`: read through the descriptor in `token`."""
    host: str
    pid: int
    session: int
    """The process's session at the registry: it is told when the segment is no longer needed."""
    segment: str = ""
    """The segment's name there."""
    fd: int = -1
    address: str = ""
    token: bytes = b""
    volume: str = ""
    """The storage volume that this is; empty for the process that published."""

    def describe(self) -> str:
        """Describe the process for messages."""
        who = f"volume {self.volume}" if self.volume else "the publisher"
        where = f"pid {self.pid} on host {self.host.split('/')[0]}"
        return f"{who} ({where}, {self.address})" if self.address else f"{who} ({where})"


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """A packed segment: where its bytes can be had, and the stamp that tells this filling of it from the next."""

    size: int
    stamp: int
    holders: tuple[Holder, ...] = ()
    inline: bytes | None = None
    """The bytes themselves, where they are so few that a segment would cost more."""

    @property
    def is_lost(self) -> bool:
        """Whether no process holds the bytes any more."""
        return self.inline is None and not self.holders


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank contributed to a version."""

    rank: int
    layout: str
    written: tuple[int, ...] | None
    """The numbers of the pieces that are in the segment; None means all. The others are written by other ranks."""
    segment: SegmentRecord
    digests: bytes
    """One 64-bit digest for each written piece."""
    samples: bytes
    """A few elements of each written piece."""

    def without(self, sessions: Collection[int]) -> Part:
        """Return the part without the copies that these sessions hold."""
        left = tuple(holder for holder in self.segment.holders if holder.session not in sessions)
        return replace(self, segment=replace(self.segment, holders=left))


@dataclass(frozen=True, slots=True)
class Version:
    """A published version, whole."""

    key: str
    number: int
    parts: tuple[Part, ...]
    digest: str
    """Of all tensors together, independent of how they are laid out."""
    extra: bytes = b""
    """What belongs to the value but is not a tensor."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A rank wants to contribute to a version."""

    key: str
    kind: str
    """`weights` or `object`."""
    version: int | None
    """None: the next one of this key."""
    rank: int = 0
    world_size: int = 1
    layout_id: str = ""
    layout: Layout | None = None
    """None where the registry may know it already; it asks again if it does not."""
    keep: int = 2
    """For how many versions there is memory."""
    timeout_s: float | None = None
    """How long to wait for the other ranks; None: without limit, with a warning in the log."""
    token: str = ""
    """By which the rank can withdraw, also before it knows its assignment."""
    group: str = ""
    """Whose rank this is, where no version says so: ranks of different groups do not make up one value."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The answer to `Begin`: what to write, and where."""

    id: int
    version: int
    needs_layout: bool = False
    written: tuple[int, ...] | None = None
    reuse: str | None = None
    """A segment of this process that is free again."""
    volumes: tuple[Holder, ...] = ()
    """The storage volumes that shall hold the part; empty: the publisher itself does."""


def label_of(assignment: int) -> str:
    """Return the name that stands for all segments that a volume took for an assignment."""
    return f"assignment/{assignment}"


@dataclass(frozen=True, slots=True)
class Commit:
    """A rank's part is written and can be read."""

    assignment: int
    part: Part
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class Acquire:
    """A reader wants a version, and will hold it until it says otherwise or its process ends."""

    key: str
    kind: str
    version: int | None
    """None: the newest."""
    known: frozenset[str] = frozenset()
    """Layouts that the reader has already."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The answer to `Acquire`."""

    id: int
    version: Version
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Those of the version's layouts that the reader did not have."""
    is_direct: bool = False
    """Whether the run says that readers get it from where it was published, and share nothing."""


@dataclass(frozen=True, slots=True)
class Relay:
    """A process that gets the bytes of a version from other hosts, once, for all readers on its host."""

    host: str
    pid: int
    session: int
    address: str
    """Of its data server."""
    copy: int = 0
    """Names what it holds of the version; 0 for a process that offers to relay."""
    memory: int = 0
    """Names the memory in which that is. It is used again for later versions."""

    def describe(self) -> str:
        """Describe the process for messages."""
        return f"pid {self.pid} on host {self.host.split('/')[0]} ({self.address})"


@dataclass(frozen=True, slots=True)
class Route:
    """How a version gets to the readers of a host."""

    relay: Relay
    """The process on this host that the readers share."""
    upstreams: tuple[Relay, ...] = ()
    """Relays of other hosts from which it gets the bytes, the nearest first. Those who hold the version come last."""


def copy_label(copy: int, rank: int) -> str:
    """Return the name under which other hosts read a relay's copy of one rank's part."""
    return f"{_COPY}{copy}/{rank}"


def copied_part(label: str) -> tuple[int, int] | None:
    """Return the copy and the rank that `copy_label` named; None for other names."""
    if not label.startswith(_COPY):
        return None
    copy, _, rank = label.removeprefix(_COPY).partition("/")
    return int(copy), int(rank)


def memory_label(memory: int) -> str:
    """Return the name that stands for all segments of a relay's memory, and for their mappings in other processes."""
    return f"{_MEMORY}{memory}"


def labelled_memory(label: str) -> int | None:
    """Return the memory that `memory_label` named; None for other names."""
    return int(label.removeprefix(_MEMORY)) if label.startswith(_MEMORY) else None


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version, as `Weights.versions()` shows it."""

    number: int
    digest: str
    num_bytes: int
    num_readers: int
    is_lost: bool = False
    """Whether a part of it was only in processes that have died."""
    num_pins: int = 0
    """Pins that keep it: see `Weights.pin`."""


def pinned_name(name: str, version: int) -> str:
    """Return the name under which a pinned version can be read, as long as it is pinned.

    It is a name of weights of its own: `rewind` and `keep` of the weights `name` do not reach it, and a number that is
    published again after a rewind does not replace it.
    """
    return f"{name}@{version}"


def pinned_version(name: str, pinned: str) -> int | None:
    """Return the version that `pinned_name(name, version)` names; None for other names."""
    prefix, _, number = pinned.rpartition("@")
    return int(number) if prefix == name and number.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Packed:
    """One written piece and its place in the segment."""

    number: int
    """Of the piece in its layout."""
    tensor: int
    """Of its tensor in its layout."""
    piece: Piece
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Where every written piece of a layout is, and how large the segment must be."""

    pieces: tuple[Packed, ...]
    size: int


@functools.cache
def itemsize(dtype: str) -> int:
    """Return the bytes of one element, from the dtype's name alone: the registry has no torch."""
    if dtype == "bool":
        return 1
    bits = re.match(r"[a-z]+(\d+)", dtype)
    if bits is None:
        raise ValueError(f"no dtype is named {dtype!r}")
    return max(8, int(bits[1])) // 8


def numbered_pieces(layout: Layout) -> Iterator[tuple[int, int, TensorShards, Piece]]:
    """Yield the number of each piece of a layout, the number of its tensor, the tensor's shards, and the piece."""
    number = 0
    for tensor, shards in enumerate(layout.shards):
        for piece in shards.pieces:
            yield number, tensor, shards, piece
            number += 1


@functools.lru_cache(maxsize=64)
def packing(layout: Layout, written: tuple[int, ...] | None) -> Packing:
    """Return where the `written` pieces of `layout` (all, if None) lie in the segment."""
    chosen = None if written is None else frozenset(written)
    packed, at = [], HEADER
    for number, tensor, shards, piece in numbered_pieces(layout):
        if chosen is not None and number not in chosen:
            continue
        num_bytes = piece.region.numel * itemsize(shards.dtype)
        packed.append(Packed(number, tensor, piece, at, num_bytes))
        at += -(-num_bytes // ALIGN) * ALIGN
    return Packing(tuple(packed), at)
