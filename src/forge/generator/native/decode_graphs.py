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
from forge.models.gpu_step import GpuSteps, StepOptions, parts_of
from forge.models.inference import PagedRow
from forge.observe.phases import phase

if TYPE_CHECKING:
    from forge.generator.native.runner import ModelRunner


def step_options() -> StepOptions | None:
    """Read from `FORGE_DECODE_STEP` how decode steps are computed: None for module by module, which is the default.

    `fused`, or settings of `StepOptions` such as `split=256,sms=44` or `joins=0,lt=1`, select the fused step.
    """
    word = os.environ.get("FORGE_DECODE_STEP", "")
    if not word:
        return None
    given = dict(each.split("=") for each in word.split(",") if "=" in each)
    return StepOptions(
        joins=given.get("joins", "1") == "1",
        split_from=int(given["split"]) if "split" in given else None,
        prioritises=given.get("prioritises", "1") == "1",
        with_lt=given.get("lt", "0") == "1",
        product_sms=int(given["sms"]) if "sms" in given else None,
    )


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
        options = step_options()
        is_fused = options is not None and runner.on_gpu and GpuSteps.supports(runner.model)
        self._steps = GpuSteps(runner.model, options) if is_fused and options is not None else None
        device = runner.device
        self._token_ids = torch.zeros(1, max_batch, dtype=torch.int64, device=device)
        self._positions = torch.zeros(1, max_batch, dtype=torch.int64, device=device)
        self._slots = torch.full((max_batch,), -1, dtype=torch.int64, device=device)
        self._contexts = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._table = torch.zeros(max_batch, runner.max_pages, dtype=torch.int32, device=device)
        self._shares = torch.zeros(max_batch + 2, 4, dtype=torch.int32, device=device)
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

    def _parts(self, size: int) -> tuple[tuple[int, int], ...]:
        """Return the sequences of each part of a step: all in one, unless parts run beside each other."""
        return ((0, size),) if self._steps is None else parts_of(size, self._steps.options)

    def _step(self, size: int) -> Tensor:
        parts = [self._part(place, *bounds) for place, bounds in enumerate(self._parts(size))]
        if self._steps is None:
            return self._runner.logits(self._runner.forward(parts[0]))
        hidden = self._steps.hidden([part.token_ids for part in parts], [part.row for part in parts])
        return self._runner.logits(hidden)

    def _part(self, place: int, start: int, end: int) -> StepRows:
        """Return the sequences [start, end) as a row of their own, in the buffers that a step fills."""
        device, own = self._runner.device, slice(start, end)
        starts = torch.arange(end - start + 1, dtype=torch.int32, device=device)
        shares = self._shares[start + place : end + place + 1]
        layout = PagedLayout(starts, self._contexts[own], self._table[own], self._slots[own], shares=shares)
        index = torch.arange(end - start, device=device)
        row = PagedRow(self._positions[:, own], index, layout, is_decode=True)
        return StepRows(self._token_ids[:, own], row)

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
        shares = self._shares_of(size, positions, pages)
        self._shares[: len(shares)].copy_(put(shares, device))
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:count]

    def _shares_of(self, size: int, positions: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Return which neighbours share a prefix, for each part in turn."""
        parts = self._parts(size)
        found = np.zeros((size + len(parts), 4), dtype=np.int32)
        for place, (start, end) in enumerate(parts):
            end = min(end, len(positions))
            if start < end:
                own = self._runner.shares(positions[start:end], pages[start:end])
                found[start + place : start + place + len(own)] = own
        return found
