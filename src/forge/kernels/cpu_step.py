"""The kernel calls that make up one part of a generation step, written once and then only pointed at other rows."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from forge.kernels import cpu_attention, cpu_layers, cpu_linear, native_build
from forge.kernels.cpu_attention import Attention, Writing
from forge.kernels.cpu_layers import Gating, Rotation
from forge.kernels.cpu_linear import Product
from forge.kernels.paged import PAGE_TOKENS

KERNEL: Final = native_build.Kernel(
    Path(__file__).with_name("cpu_step.c"),
    without="generation on a CPU is slower, with the same results",
    libraries=("-lm",),
)

_PROBE_ROWS: Final = 24


class Call(ctypes.Structure):
    _fields_ = (("function", ctypes.c_void_p), ("argument", ctypes.c_void_p))


class Part(ctypes.Structure):
    _fields_ = (("calls", ctypes.c_void_p), ("num_calls", ctypes.c_int64))


class Step(ctypes.Structure):
    _fields_ = (("parts", ctypes.c_void_p), ("num_parts", ctypes.c_int64), ("num_threads", ctypes.c_int32))


class Norm(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        ("eps", ctypes.c_float),
    )


class _Addition(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "y_row")),
    )


class _LowRank(ctypes.Structure):
    _fields_ = (("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("rank", ctypes.c_int64), ("scale", ctypes.c_float))


class _Segment(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("start", "rows", "adapter"))


class _Segments(ctypes.Structure):
    _fields_ = (("each", ctypes.c_void_p), ("count", ctypes.c_int64))


class _Update(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("linear", "adapters", "segments", "x", "low", "added", "out")),
        *((name, ctypes.c_int64) for name in ("width", "outputs")),
    )


class _Lookup(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "ids", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "size")),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernel of this process, compiled if it is not in the cache; None: the model computes by layers."""
    functions = ("forge_run", "forge_norm", "forge_add", "forge_update", "forge_look_up")
    return native_build.load(KERNEL, functions, level=logging.INFO)


def normed(x_RK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of plain float32 rows without gaps, by the kernel, which must be there."""
    native = library()
    assert native is not None, "there is no kernel"
    out = torch.empty_like(x_RK)
    job = Norm(x_RK.data_ptr(), weight_K.data_ptr(), out.data_ptr(), *x_RK.shape, eps)
    native.forge_norm(ctypes.addressof(job))
    return out


@functools.cache
def norms_as_torch(width: int, num_threads: int) -> bool:
    """Return whether the kernel's norm has the bits of torch's here, found out by trying."""
    draw = torch.Generator().manual_seed(0)
    rows = max(_PROBE_ROWS, 2 * num_threads * (1 << 15) // width)  # torch shares out the work of so many
    x, weight = torch.randn(rows, width, generator=draw), torch.randn(width, generator=draw)
    with torch.inference_mode():
        whole = torch.rms_norm(x, (width,), weight, 1e-6)
        few = torch.rms_norm(x[:_PROBE_ROWS], (width,), weight, 1e-6)
    found = normed(x, weight, 1e-6)
    return bool(torch.equal(found, whole) and torch.equal(found[:_PROBE_ROWS], few))


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The LoRA adapter of one product: it adds (scale * x a^T) b^T."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """What one layer computes with.

    The norms of queries and keys may be missing; so may the biases of queries, keys and values. `adapters` has for each
    of `products` what every adapter of the model adds to it, None where it adds nothing.
    """

    attention_norm: nn.RMSNorm
    wq: Tensor
    wk: Tensor
    wv: Tensor
    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None
    wo: Tensor
    ffn_norm: nn.RMSNorm
    w1: Tensor
    w3: Tensor
    w2: Tensor
    rotations: Tensor
    k_cache: Tensor
    v_cache: Tensor
    scale: float
    biases: tuple[Tensor, Tensor, Tensor] | None = None
    adapters: tuple[tuple[LowRank | None, ...], ...] = ((),) * 7

    @property
    def products(self) -> tuple[Tensor, ...]:
        return self.wq, self.wk, self.wv, self.wo, self.w1, self.w3, self.w2

    @property
    def norms(self) -> tuple[nn.RMSNorm, ...]:
        found = (self.attention_norm, self.q_norm, self.k_norm, self.ffn_norm)
        return tuple(norm for norm in found if norm is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """What a whole model computes with. `adapters` are the numbers of its adapters, in the order of the layers'."""

    embeddings: Tensor
    layers: tuple[LayerTensors, ...]
    norm: nn.RMSNorm
    head: Tensor
    adapters: tuple[int, ...] = ()


_ROWS: Final = "rows"


class Calls:
    """A part of a step, of up to `capacity` rows: from tokens to hidden states or to logits.

    It keeps addresses. Its owner makes it again when a tensor of the model has moved.

    Args:
        model: what is computed with.
        native: the library of `cpu_step.c`.
        capacity: the most rows.
        has_head: whether the head is among the calls. Without it there are no logits.
    """

    def __init__(self, model: Tensors, *, native: ctypes.CDLL, capacity: int, has_head: bool) -> None:
        self.capacity = capacity
        self._native = native
        self._calls: list[Call] = []
        self._jobs: list[ctypes.Structure] = []
        self._links: list[tuple[ctypes.Structure, str, str, int]] = []
        width, first = model.embeddings.shape[1], model.layers[0]
        queries, keys, inner = len(first.wq), len(first.wk), len(first.w1)
        sizes = {"x": width, "normed": width, "y": width, "gate": inner, "up": inner, "gated": inner}
        sizes |= {"q": queries, "turned_q": queries, "attended": queries, "k": keys, "turned_k": keys, "v": keys}
        low = [each for layer in model.layers for every in layer.adapters for each in every if each is not None]
        sizes |= {"low": max((len(each.a) for each in low), default=0)}
        sizes |= {"added": max((len(each.b) for each in low), default=0)}
        self._segments, self._kept = _Segments(), list[object]()
        self._space = {name: torch.empty(capacity, size) for name, size in sizes.items()}
        lookup = _Lookup(table=model.embeddings.data_ptr(), out=self._at("x"), width=width, size=len(model.embeddings))
        self._add(native.forge_look_up, lookup, rows=_ROWS, ids="ids")
        for layer in model.layers:
            self._attention(layer)
            self._feed_forward(layer)
        self._norm("x", model.norm, None)
        self._num_before_head = len(self._calls)
        if has_head:
            self._product("normed", model.head, None)
        self._array = (Call * len(self._calls))(*self._calls)
        self.part = Part(ctypes.addressof(self._array), len(self._array))

    def aim(self, values: Mapping[str, int], segments: Sequence[tuple[int, int, int]] = ()) -> None:
        """Say which rows it computes, and which of them adapters update.

        `values` has the numbers `rows`, `sequences` and `table_width`, and the addresses `ids`, `positions`, `slots`,
        `starts`, `contexts` and `table`: the part's own of what `PagedLayout` describes. They are kept alive by the
        caller. `hidden` is where hidden states go, or else, with `hidden` 0, `logits` where logits go. A segment is its
        first row, the number of its rows, and the index of the adapter among the model's.
        """
        self._each = (_Segment * len(segments))(*(_Segment(*each) for each in segments))
        self._segments.each, self._segments.count = ctypes.addressof(self._each), len(segments)
        wants_logits = not values["hidden"]
        if wants_logits:
            values = {**values, "hidden": self._at("normed")}
        self.part.num_calls = self._num_before_head + wants_logits
        for job, field, name, factor in self._links:
            setattr(job, field, values[name] * factor)

    def _at(self, name: str) -> int:
        return int(self._space[name].data_ptr())

    def _add(self, function: object, job: ctypes.Structure, **links: str | tuple[str, int]) -> None:
        self._calls.append(Call(_address(function), ctypes.addressof(job)))
        self._jobs.append(job)
        for field, link in links.items():
            name, factor = link if isinstance(link, tuple) else (link, 1)
            self._links.append((job, field, name, factor))

    def _attention(self, layer: LayerTensors) -> None:
        self._norm("x", layer.attention_norm, "normed")
        for weight, name in ((layer.wq, "q"), (layer.wk, "k"), (layer.wv, "v")):
            self._product("normed", weight, name)
        for bias, name in zip(layer.biases or (), ("q", "k", "v"), strict=False):
            self._add_to(name, bias.data_ptr(), y_row=0)
        for adapter, name in zip(layer.adapters, ("q", "k", "v"), strict=False):
            self._low_rank("normed", adapter, name)
        if layer.q_norm is not None and layer.k_norm is not None:
            self._norm("q", layer.q_norm, "q")
            self._norm("k", layer.k_norm, "k")
        num_pages, kv_heads, width, _ = layer.k_cache.shape
        heads = len(layer.wq) // width
        rotate = _loaded(cpu_layers.library()).forge_rotate
        for name, count in (("q", heads), ("k", kv_heads)):
            job = Rotation(x=self._at(name), table=layer.rotations.data_ptr(), out=self._at(f"turned_{name}"))
            job.heads, job.width, job.x_token, job.x_head = count, width, count * width, width
            job.num_positions, job.num_threads = len(layer.rotations), 1
            self._add(rotate, job, tokens=_ROWS, positions="positions")
        caches = {"k_cache": layer.k_cache.data_ptr(), "v_cache": layer.v_cache.data_ptr()}
        writing = Writing(k=self._at("turned_k"), v=self._at("v"), kv_heads=kv_heads, width=width, **caches)
        writing.k_token = writing.v_token = kv_heads * width
        writing.k_head = writing.v_head = width
        writing.num_slots = num_pages * PAGE_TOKENS
        attention = _loaded(cpu_attention.library())
        self._add(attention.forge_write, writing, num_tokens=_ROWS, slots="slots")
        attending = Attention(q=self._at("turned_q"), out=self._at("attended"), lse=None, **caches)
        attending.q_token = attending.out_token = heads * width
        attending.q_head = attending.out_head = attending.width = width
        attending.heads, attending.kv_heads, attending.num_pages = heads, kv_heads, num_pages
        attending.scale, attending.num_threads = layer.scale, 1
        links = {"query_starts": "starts", "context_lens": "contexts", "table": "table", "table_width": "table_width"}
        self._add(attention.forge_attend, attending, num_tokens=_ROWS, num_sequences="sequences", **links)
        self._product("attended", layer.wo, "y")
        self._low_rank("attended", layer.adapters[3], "y")
        self._add_y_to_x()

    def _feed_forward(self, layer: LayerTensors) -> None:
        self._norm("x", layer.ffn_norm, "normed")
        self._product("normed", layer.w1, "gate")
        self._product("normed", layer.w3, "up")
        self._low_rank("normed", layer.adapters[4], "gate")
        self._low_rank("normed", layer.adapters[5], "up")
        job = Gating(gate=self._at("gate"), up=self._at("up"), out=self._at("gated"), num_threads=1)
        self._add(_loaded(cpu_layers.library()).forge_gate, job, count=(_ROWS, len(layer.w1)))
        self._product("gated", layer.w2, "y")
        self._low_rank("gated", layer.adapters[6], "y")
        self._add_y_to_x()

    def _norm(self, source: str, norm: nn.RMSNorm, target: str | None) -> None:
        """Add the norm of whole rows, or of heads. Without a target the result is the hidden states."""
        width, weight = len(norm.weight), norm.weight.data_ptr()
        job = Norm(x=self._at(source), weight=weight, width=width, eps=norm.eps)
        links: dict[str, str | tuple[str, int]] = {"rows": (_ROWS, self._space[source].shape[1] // width)}
        if target is None:
            links["out"] = "hidden"
        else:
            job.out = self._at(target)
        self._add(self._native.forge_norm, job, **links)

    def _low_rank(self, source: str, adapters: Sequence[LowRank | None], target: str) -> None:
        """Add what adapters add to the product that is in `target`, with a bias if it has one."""
        if not any(adapters):
            return
        table = (_LowRank * len(adapters))(*(_LowRank() if each is None else _addresses(each) for each in adapters))
        self._kept.append(table)
        job = _Update(linear=_address(_loaded(cpu_linear.library()).forge_linear), adapters=ctypes.addressof(table))
        job.segments, job.low, job.added = ctypes.addressof(self._segments), self._at("low"), self._at("added")
        job.x, job.out = self._at(source), self._at(target)
        job.width, job.outputs = self._space[source].shape[1], self._space[target].shape[1]
        self._add(self._native.forge_update, job)

    def _product(self, source: str, weight: Tensor, target: str | None) -> None:
        """Add a product. Its rows have no gaps, whatever the widest is. Without a target the result is the logits."""
        outputs, width = weight.shape
        job = Product(x=self._at(source), weight=weight.data_ptr(), width=width, outputs=outputs)
        job.x_row, job.out_row, job.num_threads = width, outputs, 1
        links = {"rows": _ROWS}
        if target is None:
            links["out"] = "logits"
        else:
            job.out = self._at(target)
        self._add(_loaded(cpu_linear.library()).forge_linear, job, **links)

    def _add_y_to_x(self) -> None:
        self._add_to("x", self._at("y"), y_row=self._space["y"].shape[1])

    def _add_to(self, target: str, address: int, *, y_row: int) -> None:
        job = _Addition(x=self._at(target), y=address, width=self._space[target].shape[1], y_row=y_row)
        self._add(self._native.forge_add, job, rows=_ROWS)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def _addresses(adapter: LowRank) -> _LowRank:
    return _LowRank(adapter.a.data_ptr(), adapter.b.data_ptr(), len(adapter.a), adapter.scale)


def _loaded(library: ctypes.CDLL | None) -> ctypes.CDLL:
    assert library is not None, "it was there when the model was looked at"
    return library
