"""What a step is about, as arrays of the host and as tensors of the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from forge.generator.native.pages import PAGE
from forge.generator.native.schedule import Piece
from forge.models.paged_attention import PagedRow


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """What one step is about, on the device: tokens int64 [1, T], and the row that tells the layers the rest."""

    token_ids: Tensor
    row: PagedRow


@dataclass(frozen=True, slots=True, eq=False)
class LastDraw:
    """The tokens of a decode step that only the device knows: int64 [R], and the place of each piece's among them."""

    token_ids: Tensor
    places: Sequence[int]


def places_of(pieces: Sequence[Piece], table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For pieces of one token each: positions and slots, int64 [S], and the pages of their sequences, int32 [S, W]."""
    positions = np.array([piece.start for piece in pieces], dtype=np.int64)
    pages = table[[piece.sequence.slot for piece in pieces]][:, : int(positions.max()) // PAGE + 1]
    slots = pages[np.arange(len(pieces)), positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
    return positions, slots, pages


def tokens_of(pieces: Sequence[Piece], last: LastDraw | None) -> np.ndarray:
    """The tokens of pieces of one token each; or where they are among those of the last draw. Int64 [S]."""
    found = last.places if last is not None else [piece.sequence.ids[piece.start] for piece in pieces]
    return np.array(found, dtype=np.int64)
