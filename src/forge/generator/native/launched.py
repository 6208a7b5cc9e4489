"""A step that was launched on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forge.generator.native.sampler import Sampled
from forge.generator.native.schedule import Piece
from forge.generator.native.sequences import SequenceState


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step that was launched on the device, and whose tokens are still to be processed.

    Attributes:
        sequences: the sequences that get a token; sampled: those tokens.
        version: the version of the weights, which are live or pinned.
        pieces: what is computed of each, where it was launched ahead and is still to be noted as computed.
        drafted: pieces with a draft, by sequence. Such a sequence is there once for each place of its piece.
    """

    sequences: Sequence[SequenceState]
    sampled: Sampled
    version: int
    pieces: Sequence[Piece] = ()
    drafted: Mapping[SequenceState, Piece] = field(default_factory=dict)

    @property
    def is_of_use(self) -> bool:
        return any(sequence.slot >= 0 for sequence in self.sequences)
