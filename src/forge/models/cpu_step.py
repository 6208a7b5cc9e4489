"""A step of a dense model on a CPU as one call, with the bits of the same model computed layer by layer.

Layer by layer, a step of a small model spends as much time between its operations as in them: a hundred modules and
two hundred products are called from Python, and at each one threads wait for each other, which on a busy machine takes
far longer than what they compute. Here the calls of the kernels are written down once for each part of a step
(`forge.kernels.cpu_step`), and C goes through them. Sequences do not depend on each other, so a part is some of
the sequences through *all* layers, and each thread takes a part: threads meet once in a step.

Nothing is derived from weights, and none is copied: the kernels read them where they lie, so they may change in place
between two steps. The kernels are those that compute layer by layer too (`cpu_linear`, `cpu_attention`,
`cpu_layers`); what torch did between them is in `cpu_step.c`, and is tried against torch before it is used.

What is not of such a shape goes layer by layer as before: experts, biases other than those of queries, keys and values,
other precisions than float32, weights in few bits, kernels that could not be compiled, weights too large for every
thread to read all of them, and steps in which one long text would keep one thread busy while the others wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import forge.models.titan_setup  # noqa: F401

# isort: split
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchtitan.models.common.attention import GQAttention, QKVLinear

from forge.kernels import cpu_attention, cpu_layers, cpu_linear
from forge.kernels.cpu_linear import is_rowwise
from forge.kernels.cpu_step import Calls, LayerTensors, Part, Step, Tensors, library, norms_as_torch
from forge.models.adapter_segments import BASE, LIVE, AdapterSegment
from forge.models.gpu_layers import GpuNorm
from forge.models.inference import PagedAttention, PagedRow
from forge.models.language_model import LanguageModel
from forge.models.layers import Rotary, RowFeedForward, RowLinear

_LANES: Final = 8  # rows that a product computes at least
_MOST_WEIGHTS: Final = 1 << 22
"""Of a layer, where several threads each read all of them: more would come from memory once for each thread."""
_MOST_LOST: Final = 1 << 25
"""Multiplications of a layer for which one thread may be waited for: about what calling its modules costs."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Sequences [first, last) of a step, with the rows [start, end)."""

    first: int
    last: int
    start: int
    end: int


def cut(starts: NDArray[np.int32], costs: NDArray[np.int64], num_parts: int) -> tuple[list[_Cut], int]:
    """Cut sequences into at most so many parts of about equal cost; return them and the highest cost of a part.

    `starts` [S + 1] are the rows at which sequences begin, `costs` [S] what each takes. No part is empty.
    """
    sums = np.concatenate(([0], np.cumsum(costs)))
    wanted = sums[-1] * np.arange(1, num_parts) // num_parts
    edges = np.unique(np.concatenate(([0], np.searchsorted(sums, wanted), [len(costs)]))).tolist()
    rows = starts[edges].tolist()
    parts = [_Cut(*each) for each in zip(edges, edges[1:], rows, rows[1:], strict=False)]
    return parts, int(np.diff(sums[edges]).max(initial=0))


class CpuSteps:
    """Steps of one model, built by `forge.models.inference`, whose cache has been allocated. Used by one thread.

    Parts of a step are computed at the same time, so no sequence may have a page that another one writes in that step.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model, self._parameters = model, tuple(model.parameters())
        self._inner = tuple(layer.attention.inner_attention for layer in model.layers.values())
        self.forget()

    def forget(self) -> None:
        """Let go of the cache and of all memory; the next step looks at the model again."""
        self._key: tuple[int, ...] | None = None
        self._tensors: Tensors | None = None
        self._has_head = False
        self._parts: list[Calls] = []
        self._logits = torch.empty(0)

    def hidden(self, token_ids_T: Tensor, row: PagedRow) -> Tensor | None:
        """Return the hidden states [R, D] that `row` asks for, its keys and values being in the cache afterwards.

        None where the model has to be called instead, which then computes the same: also where the row asks for what
        does not exist, and the model says what.
        """
        if not self._is_ready():
            return None
        hidden = torch.empty(len(token_ids_T), self._model.tok_embeddings.weight.shape[1])
        return hidden.index_select(0, row.index) if self._run(token_ids_T, row, hidden=hidden) else None

    def logits(self, token_ids_T: Tensor, row: PagedRow) -> Tensor | None:
        """Return the logits [T, V] of a row that asks for all its tokens, in order; the next call overwrites them.

        None also if it is only the head that has to be computed by itself.
        """
        if not self._is_ready() or not self._has_head:
            return None
        num_rows, vocabulary = len(token_ids_T), len(self._model.lm_head.weight)
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, vocabulary)
        logits = self._logits[:num_rows]
        return logits if self._run(token_ids_T, row, logits=logits) else None

    def _is_ready(self) -> bool:
        """Look at the model again if a tensor of it has moved or threads have become more or fewer."""
        if library() is None:
            return False
        caches = (cache for inner in self._inner for cache in (inner.k_cache, inner.v_cache) if cache is not None)
        addresses = [tensor.data_ptr() for tensor in (*self._parameters, *caches)]
        segments = self._model.segments
        key = (torch.get_num_threads(), 0 if segments is None else segments.revision, *addresses)
        if key != self._key:
            self.forget()
            tensors = tensors_of(self._model)
            if tensors is not None and _has_norms_of_torch(tensors):
                self._tensors, self._has_head = tensors, _takes_head(tensors.head)
            self._key = key
        return self._tensors is not None

    def _cuts(self, row: PagedRow) -> list[_Cut] | None:
        assert self._tensors is not None
        layer, num_threads = self._tensors.layers[0], torch.get_num_threads()
        weights = sum(weight.numel() for weight in layer.products)
        if num_threads > 1 and weights > _MOST_WEIGHTS:
            return None
        starts, contexts = row.layout.query_starts.numpy(), row.layout.context_lens.numpy()
        num_parts = max(1, min(num_threads, int(starts[-1]) // _LANES))
        costs = np.diff(starts) * (weights + 2 * len(layer.wq) * contexts.astype(np.int64))
        parts, dearest = cut(starts, costs, num_parts)
        return parts if dearest - int(costs.sum()) // num_threads <= _MOST_LOST else None

    def _run(
        self, token_ids: Tensor, row: PagedRow, *, hidden: Tensor | None = None, logits: Tensor | None = None
    ) -> bool:
        """Fill one of the two. Whether that could be done."""
        layout, native, cuts = row.layout, library(), self._cuts(row)
        if cuts is None or native is None:
            return False
        starts = [layout.query_starts[part.first : part.last + 1] - part.start for part in cuts]
        segments = row.segments or (AdapterSegment(LIVE, 0, len(token_ids)),)
        for place, part in enumerate(cuts):
            self._calls(place, num_rows=part.end - part.start).aim(
                {
                    "rows": part.end - part.start,
                    "sequences": part.last - part.first,
                    "table_width": layout.table.shape[1],
                    "ids": _row(token_ids, part.start),
                    "positions": _row(row.positions[0], part.start),
                    "slots": _row(layout.slots, part.start),
                    "starts": starts[place].data_ptr(),
                    "contexts": _row(layout.context_lens, part.first),
                    "table": _row(layout.table, part.first),
                    "hidden": _row(hidden, part.start),
                    "logits": _row(logits, part.start),
                },
                self._within(part, segments),
            )
        parts = (Part * len(cuts))(*(calls.part for calls in self._parts[: len(cuts)]))
        step = Step(ctypes.addressof(parts), len(cuts), torch.get_num_threads())
        return bool(native.forge_run(ctypes.addressof(step)) == 0)

    def _within(self, part: _Cut, segments: Sequence[AdapterSegment]) -> list[tuple[int, int, int]]:
        """Return what of each segment is in a part, and the index of its adapter. Those that add nothing are left
        out."""
        assert self._tensors is not None
        numbers, found = self._tensors.adapters, []
        for segment in segments:
            start, end = max(segment.start, part.start), min(segment.end, part.end)
            if start < end and (segment.adapter in numbers or segment.adapter not in (LIVE, BASE)):
                found.append((start - part.start, end - start, numbers.index(segment.adapter)))
        return found

    def _calls(self, place: int, *, num_rows: int) -> Calls:
        """Return the calls of the part at a place among the others, with room for so many rows."""
        tensors, native = self._tensors, library()
        assert tensors is not None
        assert native is not None
        if place == len(self._parts) or self._parts[place].capacity < num_rows:
            capacity = 1 << (num_rows - 1).bit_length()
            calls = Calls(tensors, native=native, capacity=capacity, has_head=self._has_head)
            self._parts[place : place + 1] = [calls]
        return self._parts[place]


def _row(tensor: Tensor | None, place: int) -> int:
    """Return the address of a row of a tensor; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr() + place * tensor.stride(0) * tensor.itemsize


def _is_small(weight: Tensor) -> bool:
    return bool(weight.numel() <= _MOST_WEIGHTS)


def _takes_head(weight: Tensor) -> bool:
    return is_rowwise(weight) and weight.is_contiguous() and (torch.get_num_threads() == 1 or _is_small(weight))


def _has_norms_of_torch(tensors: Tensors) -> bool:
    """Return whether the kernel's norms have the bits of torch's for every width of this model."""
    norms = [norm for layer in tensors.layers for norm in layer.norms]
    num_threads = torch.get_num_threads()
    return all(norms_as_torch(len(norm.weight), num_threads) for norm in (*norms, tensors.norm))


def tensors_of(model: LanguageModel) -> Tensors | None:
    """Return what a model computes with; None if it is not of the shape that is computed here."""
    if any(module.library() is None for module in (cpu_attention, cpu_linear, cpu_layers)):
        return None
    numbers = _adapter_numbers(model)
    layers = [_layer(layer, numbers) for layer in model.layers.values()]
    found = tuple(layer for layer in layers if layer is not None)
    norm, embeddings = model.norm, model.tok_embeddings
    shapes = {tuple(weight.shape for weight in layer.products) for layer in found}
    if len(found) < len(layers) or len(shapes) != 1 or embeddings is None or model.lm_head is None:
        return None
    norms = [norm, *(norm for layer in found for norm in layer.norms)]
    if not all(type(norm) is GpuNorm and norm.eps is not None for norm in norms):
        return None
    every = [embeddings.weight, *(norm.weight for norm in norms)]
    every += [each for layer in found for each in (*layer.products, *(layer.biases or ()))]
    low = (each for layer in found for those in layer.adapters for each in those if each is not None)
    every += [matrix for each in low for matrix in (each.a, each.b)]
    if not all(is_rowwise(tensor) and tensor.is_contiguous() for tensor in every):
        return None
    return Tensors(embeddings.weight, found, norm, model.lm_head.weight, adapters=numbers)


def _adapter_numbers(model: LanguageModel) -> tuple[int, ...]:
    """Return the numbers of the model's adapters: its own, if it has one, and those that were attached."""
    linears = [module for module in model.modules() if type(module) is RowLinear]
    own = {LIVE for linear in linears if linear.adapter(LIVE) is not None}
    return tuple(sorted(own.union(*(linear.adapters for linear in linears))))


def _layer(layer: nn.Module, adapters: Sequence[int]) -> LayerTensors | None:
    """Return attention and feed-forward of the kinds that are known; None for others, such as experts."""
    attention, forward = layer.attention, getattr(layer, "feed_forward", None)
    if type(attention) is not GQAttention or type(forward) is not RowFeedForward:
        return None
    inner, rope, qkv = attention.inner_attention, attention.rope, attention.qkv_linear
    if type(inner) is not PagedAttention or type(rope) is not Rotary or type(qkv) is not QKVLinear:
        return None
    projections, others = (qkv.wq, qkv.wk, qkv.wv), (attention.wo, forward.w1, forward.w3, forward.w2)
    has_biases = qkv.wq.bias is not None
    are_known = all(_is_linear(linear, bias=has_biases) for linear in projections)
    if not are_known or not all(_is_linear(linear, bias=False) for linear in others):
        return None
    if inner.k_cache is None or inner.v_cache is None:
        return None
    width = attention.head_dim
    if not cpu_attention.takes(width) or tuple(rope.cache.shape[1:]) != (2 * width,) or not rope.cache.is_contiguous():
        return None
    return LayerTensors(
        attention_norm=layer.attention_norm,
        wq=qkv.wq.weight,
        wk=qkv.wk.weight,
        wv=qkv.wv.weight,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        wo=attention.wo.weight,
        ffn_norm=layer.ffn_norm,
        w1=forward.w1.weight,
        w3=forward.w3.weight,
        w2=forward.w2.weight,
        rotations=rope.cache,
        k_cache=inner.k_cache,
        v_cache=inner.v_cache,
        scale=width**-0.5 if attention.scaling is None else attention.scaling,
        biases=(qkv.wq.bias, qkv.wk.bias, qkv.wv.bias) if has_biases else None,
        adapters=tuple(tuple(map(linear.adapter, adapters)) for linear in (*projections, *others)),
    )


def _is_linear(linear: nn.Module, *, bias: bool) -> bool:
    """Return whether it is one product with a weight as it lies in memory, with or without a bias."""
    return bool(type(linear) is RowLinear and (linear.bias is not None) == bias and not linear.quantized)
