"""The gradient of attention within the documents of a row on a CPU, in float32: one call for all documents.

Documents may begin with tokens that the row holds once, for earlier documents. What a document adds to a gradient
does not depend on what else is in the row, and nothing depends on the number of threads. The work is done in C that is
compiled at first use; without a compiler the trainer's attention is torch's own, forward and backward.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from forge.errors import ModelError
from forge.kernels import native_build
from forge.kernels.paged import PagedLayout, num_pages_of, shared_places

KERNEL: Final = native_build.Kernel(
    Path(__file__).with_name("cpu_attention_backward.c"),
    without="training on a CPU is slower, and logprobs of trainer and generator differ in the last bits",
)


class _Backward(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "grad", "out", "lse", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("starts", "lengths", "roots", "sources")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "k_token", "k_head")),
        *((name, ctypes.c_int64) for name in ("v_token", "v_head", "grad_token", "grad_head")),
        *((name, ctypes.c_int64) for name in ("num_places", "num_documents", "heads", "kv_heads", "width")),
        ("scale", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class SharedLayout:
    """S documents in a row of P places, where a document may begin with tokens of the one before it.

    That one may have taken them itself. Documents that are linked in this way form a tree; the first of them, which
    takes nothing, is its root.

    Attributes:
        paged: each document in pages of its own. Its query rows are the places of the row, so that a document has as
            many as it has tokens for itself; its slots are those of all T tokens of the documents.
        roots: int32 [S]: the first document of the tree that a document belongs to; itself if it takes nothing.
        sources: int64 [T]: the place of the row that each token of the documents is computed at; None where documents
            take nothing, and lie as they are.
        num_places: P.
        num_pages: how many pages `paged` names.
    """

    paged: PagedLayout
    roots: Tensor
    sources: Tensor | None
    num_places: int
    num_pages: int

    @classmethod
    def of(cls, lengths: tuple[int, ...], prefixes: tuple[int, ...] = ()) -> SharedLayout:
        """Lay out documents, of which each takes its first `prefix` tokens from the document before it."""
        paged, num_pages = PagedLayout.of_documents(lengths), num_pages_of(lengths)
        if not any(prefixes):
            roots = torch.arange(len(lengths), dtype=torch.int32)
            return cls(paged, roots, None, sum(lengths), num_pages)
        starts, roots_S = [0], list[int]()
        for document, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
            most = min(length, lengths[document - 1]) if document else 0
            if not 0 <= prefix <= most:
                raise _bad_prefix(document, prefix, most)
            roots_S.append(roots_S[-1] if prefix else document)
            starts.append(starts[-1] + length - prefix)
        own = PagedLayout(torch.tensor(starts, dtype=torch.int32), paged.context_lens, paged.table, paged.slots)
        sources, _ = shared_places(lengths, prefixes)
        return cls(own, torch.tensor(roots_S, dtype=torch.int32), sources, starts[-1], num_pages)


def build(flag_sets: tuple[tuple[str, ...], ...] = native_build.EXACT_FLAG_SETS) -> ctypes.CDLL | None:
    """Load the kernel as these flags compile it; None where it cannot be built."""
    return native_build.load(KERNEL, ["forge_attend_backward"], flag_sets=flag_sets)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernel of this process, compiled if it is not in the cache; None where torch computes."""
    return build()


def differentiate(
    grad_PHD: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    found: tuple[Tensor, Tensor],
    *,
    layout: SharedLayout,
    scale: float,
    num_threads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, contiguous, of the P places of `layout`.

    Args:
        grad_PHD: of the outputs.
        qkv: float32 [P, H, D], [P, Hkv, D], [P, Hkv, D], of any strides if the last is 1.
        found: what the forward pass gave: outputs [P, H, D] and the logarithms of sums of exponentials [P, H],
            contiguous.
        scale: what scores were multiplied by.
        num_threads: at most so many threads of torch's own pool; None for torch.get_num_threads().
    """
    native = library()
    assert native is not None, "the kernel was there in the forward pass"
    heads, kv_heads, width = qkv[0].shape[1], qkv[1].shape[1], qkv[0].shape[2]
    gradients = tuple(torch.empty(tensor.shape) for tensor in qkv)
    given = (*qkv, grad_PHD if grad_PHD.stride(-1) == 1 else grad_PHD.contiguous())
    tables = (layout.paged.query_starts, layout.paged.context_lens, layout.roots)
    job = _Backward(
        *(tensor.data_ptr() for tensor in (*given, *found, *gradients, *tables)),
        None if layout.sources is None else layout.sources.data_ptr(),
        *(stride for tensor in given for stride in tensor.stride()[:2]),
        *(qkv[0].shape[0], layout.roots.shape[0], heads, kv_heads, width),
        scale,
        torch.get_num_threads() if num_threads is None else num_threads,
    )
    status = native.forge_attend_backward(ctypes.addressof(job))
    if status == 2:
        raise MemoryError("there is no memory for the gradient of attention")
    if status:
        raise _bad_layout(layout, qkv[0].shape[0])
    return gradients[0], gradients[1], gradients[2]


def _bad_prefix(document: int, prefix: int, most: int) -> ModelError:
    return ModelError(
        "a document's shared prefix is longer than the document before it",
        path=f"prefixes[{document}]",
        value=prefix,
        rule=f"at least 0 and at most {most}, the shorter of its length and that of the document before it",
        repair="take the prefixes from forge.trainer.microbatches, which plans rows with shared prefixes",
    )


def _bad_layout(layout: SharedLayout, num_places: int) -> ModelError:
    return ModelError(
        "the gradient of these documents cannot be taken",
        path="layout",
        value=(layout.paged.query_starts.tolist(), layout.paged.context_lens.tolist(), layout.roots.tolist()),
        rule=f"documents that fill {num_places} places in order, and take tokens from the document before them",
        repair="build the layout with forge.kernels.cpu_attention_backward.SharedLayout.of",
    )
