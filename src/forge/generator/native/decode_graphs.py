"""Decode steps of a GPU, recorded once and replayed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forge.generator.native.cache_size import graph_sizes
from forge.generator.native.pages import PAGE
from forge.generator.native.schedule import Piece
from forge.generator.native.transfer import put
from forge.kernels.paged import PagedLayout
from forge.models.gpu_step import GpuSteps
from forge.models.inference import PagedRow
from forge.observe.phases import phase

if TYPE_CHECKING:
    from forge.generator.native.runner import ModelRunner


def computes_fused() -> bool:
    """Return whether decode steps have fused kernels, rather than being computed module by module.

    Only the latter if `FORGE_DECODE_STEP=modules`, for comparison.
    """
    return os.environ.get("FORGE_DECODE_STEP", "") != "modules"


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The input of one step, on the device: tokens int64 [1, T], and the row for the layers."""

    token_ids: Tensor
    row: PagedRow


@dataclass(frozen=True, slots=True, eq=False)
class LastSampled:
    """Sampled tokens that only the device knows: int64 [R], and the index of each piece's token among them."""

    token_ids: Tensor
    places: Sequence[int]


def places_of(pieces: Sequence[Piece], table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for pieces of one token each, positions and slots, int64 [S], and their pages, int32 [S, W]."""
    positions = np.array([piece.start for piece in pieces], dtype=np.int64)
    pages = table[[piece.sequence.slot for piece in pieces]][:, : int(positions.max()) // PAGE + 1]
    slots = pages[np.arange(len(pieces)), positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
    return positions, slots, pages


def tokens_of(pieces: Sequence[Piece], last: LastSampled | None) -> np.ndarray:
    """Return the tokens of pieces of one token each; or their indices among those sampled last. Int64 [S]."""
    found = last.places if last is not None else [piece.sequence.ids[piece.start] for piece in pieces]
    return np.array(found, dtype=np.int64)


class DecodeGraphs:
    """Decode steps on a GPU, recorded once for several numbers of sequences and replayed.

    A step is padded up to the next recorded size with sequences that have no context and write nowhere. So the shapes
    of the matrix products, and with them the last bits of logits, depend on the number of sequences.

    Args:
        runner: whose model and cache are in use.
        max_batch: most sequences of a step.
        sizes: numbers of sequences to record; None for the usual ones.
    """

    def __init__(self, runner: ModelRunner, *, max_batch: int, sizes: Sequence[int] | None = None) -> None:
        self.max_batch = max_batch
        self._runner = runner
        self._sizes = graph_sizes(max_batch) if sizes is None else tuple(sorted(sizes))
        is_fused = computes_fused() and runner.on_gpu and GpuSteps.supports(runner.model)
        self._steps = GpuSteps(runner.model) if is_fused else None
        device = runner.device
        self._token_ids = torch.zeros(1, max_batch, dtype=torch.int64, device=device)
        self._positions = torch.zeros(1, max_batch, dtype=torch.int64, device=device)
        self._slots = torch.full((max_batch,), -1, dtype=torch.int64, device=device)
        self._contexts = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._table = torch.zeros(max_batch, runner.max_pages, dtype=torch.int32, device=device)
        self._shares = torch.zeros(max_batch + 1, 4, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._record()

    @torch.inference_mode()
    def _record(self) -> None:
        stream = torch.cuda.Stream(self._runner.device)
        pool = None
        with phase("capturing graphs", total=len(self._sizes)) as progress:
            for size in reversed(self._sizes):
                with torch.cuda.stream(stream):
                    self._step(size)
                torch.cuda.synchronize(self._runner.device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    logits = self._step(size)
                pool = pool or graph.pool()
                self._graphs[size] = (graph, logits)
                progress.advance()

    def _step(self, size: int) -> Tensor:
        rows = self._rows(size)
        if self._steps is None:
            return self._runner.logits(self._runner.forward(rows))
        return self._runner.logits(self._steps.hidden(rows.token_ids, rows.row))

    def _rows(self, size: int) -> StepRows:
        """Return sequences as a row, in the buffers that a step fills."""
        device = self._runner.device
        starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        shares = self._shares[: size + 1]
        layout = PagedLayout(starts, self._contexts[:size], self._table[:size], self._slots[:size], shares=shares)
        row = PagedRow(self._positions[:, :size], torch.arange(size, device=device), layout, is_decode=True)
        return StepRows(self._token_ids[:, :size], row)

    def run(self, pieces: Sequence[Piece], table: np.ndarray, *, last: LastSampled | None = None) -> Tensor:
        """Return the logits [S, V] of pieces of one token each.

        Nothing here waits for the device: a step may be launched while the previous one is computed. The buffers are
        written in the stream's order, after it.
        """
        count, device = len(pieces), self._runner.device
        size = next(size for size in self._sizes if size >= count)
        positions, slots, pages = places_of(pieces, table)
        numbers = np.zeros((4, size), dtype=np.int64)
        numbers[0, :count] = tokens_of(pieces, last)
        numbers[1, :count] = positions
        numbers[2] = -1
        numbers[2, :count] = slots
        numbers[3, :count] = positions + 1
        on_device = put(numbers, device)
        token_ids = on_device[0] if last is None else last.token_ids.index_select(0, on_device[0])
        self._token_ids[0, :size].copy_(token_ids)
        self._positions[0, :size].copy_(on_device[1])
        self._slots[:size].copy_(on_device[2])
        self._contexts[:size].copy_(on_device[3])
        self._table[:count, : pages.shape[1]].copy_(put(pages, device))
        shares = np.zeros((size + 1, 4), dtype=np.int32)
        own = self._runner.shares(positions, pages)
        shares[: len(own)] = own
        self._shares[: len(shares)].copy_(put(shares, device))
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:count]
