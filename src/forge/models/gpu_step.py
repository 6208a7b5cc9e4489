"""A decode step on a GPU, with few and fused kernels, to be recorded in a CUDA graph.

Called module by module, a layer of a decode step is 18 kernels, of which 7 are matrix products. The others compute for
two microseconds each, and starting the next one takes as long. Here a layer is 11 kernels: products that read the same
input are one where their weights lie next to each other in memory; norms and rotations of heads and writing keys and
values are one kernel; so are a residual sum and the norm after it.

On an H200, a step of 512 sequences of 1,024 tokens on the shape of Qwen3-1.7B takes 11.5 ms so, and 12.1 ms module by
module; its products and its attention alone take 10.9. Computing half of the sequences' attention beside the other
half's products gained nothing: 11.6 ms at best.

The results are those of the modules, up to the order of sums. Experts are called as modules. A model that is not of
such a shape (adapters, weights in few bits) is computed by its modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common.attention import GQAttention, QKVLinear

from forge.kernels.paged import PAGE_TOKENS
from forge.models import gpu_attention
from forge.models.adapter_segments import LIVE
from forge.models.gpu_attention import device_of, power_of_two
from forge.models.gpu_layers import GpuNorm, normed
from forge.models.inference import PagedAttention, PagedRow
from forge.models.language_model import LanguageModel
from forge.models.layers import Rotary, RowFeedForward, RowLinear, SegmentedMoE

_GATE_NUMBERS: Final = 1024


def neighbours_first(names: Iterable[str]) -> list[str]:
    """Return names of parameters in an order in which weights that can be joined follow each other."""
    names = list(names)
    known = set(names)
    found: list[str] = []
    for name in names:
        if ".w3." in name and name.replace(".w3.", ".w1.") in known:
            continue
        found.append(name)
        if ".w1." in name and (other := name.replace(".w1.", ".w3.")) in known:
            found.append(other)
    return found


def joined(weights: Sequence[Tensor]) -> Tensor | None:
    """Return matrices [N_i, D] that follow each other in one memory as one matrix; None if they do not."""
    first, *others = weights
    end = first.data_ptr() + first.numel() * first.itemsize
    storage = first.untyped_storage().data_ptr()
    for weight in others:
        if weight.data_ptr() != end or weight.untyped_storage().data_ptr() != storage:
            return None
        end += weight.numel() * weight.itemsize
    if not all(weight.is_contiguous() and weight.shape[1:] == first.shape[1:] for weight in weights):
        return None
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """The modules of one layer, and joined weights where there are."""

    attention_norm: GpuNorm
    ffn_norm: GpuNorm
    attention: GQAttention
    forward: RowFeedForward | SegmentedMoE
    qkv: Tensor | None
    up_and_gate: Tensor | None


class GpuSteps:
    """Decode steps of a model that `supports` accepts, with the weights and the cache that it has now."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._layers = [_layer(layer) for layer in model.layers.values()]

    @staticmethod
    def supports(model: LanguageModel) -> bool:
        """Return whether decode steps of a model can be computed here."""
        norms = [model.norm, *(norm for layer in model.layers.values() for norm in _norms(layer))]
        return (
            model.tok_embeddings is not None
            and all(type(norm) is GpuNorm and norm.eps is not None for norm in norms)
            and all(map(_is_known, model.layers.values()))
        )

    def hidden(self, token_ids: Tensor, row: PagedRow) -> Tensor:
        """Return the hidden states [S, D] of the tokens [1, S], after the last norm."""
        if self._model.segments is not None:
            self._model.segments.current = ()  # those of another step may still be there
        x = F.embedding(token_ids[0], self._model.tok_embeddings.weight)
        first = self._layers[0].attention_norm
        hidden = normed(x, first.weight, first.eps)
        following = [layer.attention_norm for layer in self._layers[1:]]
        for layer, norm in zip(self._layers, [*following, None], strict=True):
            update = _attend(layer, hidden, row)
            add_norm(x, update, layer.ffn_norm, out=hidden)
            update = _forward(layer, hidden)
            add_norm(x, update, self._model.norm if norm is None else norm, out=hidden)
        return hidden


def _attend(layer: _Layer, hidden: Tensor, row: PagedRow) -> Tensor:
    attention, inner = layer.attention, layer.attention.inner_attention
    attended = gpu_attention.decode_attend(
        place_heads(layer, hidden, row),
        inner.k_cache,
        inner.v_cache,
        context_lens_S=row.layout.context_lens,
        table_SP=row.layout.table,
        scale=attention.head_dim**-0.5 if attention.scaling is None else attention.scaling,
        shares=row.layout.shares,
    )
    return F.linear(attended.flatten(1), attention.wo.weight)


def add_norm(x: Tensor, update: Tensor, norm: GpuNorm, *, out: Tensor) -> None:
    """Add an update to x [S, D] in place, and write the norm of the sum to `out`. All are contiguous."""
    from forge.models.gpu_step_program import add_and_normalize

    num_rows, width = x.shape
    if num_rows:
        padded = power_of_two(width)
        with device_of(x):
            add_and_normalize[(num_rows,)](
                x, update, norm.weight, out, width, norm.eps, WIDTH=padded, num_warps=4 if padded <= 4096 else 8
            )


def place_heads(layer: _Layer, hidden: Tensor, row: PagedRow) -> Tensor:
    """Compute queries, keys and values; put the latter two into the cache, and return the queries [S, H, D]."""
    from forge.models.gpu_step_program import place_heads as program

    attention = layer.attention
    inner, width = attention.inner_attention, attention.head_dim
    q, k, v = (part.unflatten(1, (-1, width)) for part in _projections(layer, hidden))
    k_cache, v_cache = inner.k_cache, inner.v_cache
    table = attention.rope.cache
    is_normed = attention.q_norm is not None
    weights = (attention.q_norm.weight, attention.k_norm.weight) if is_normed else (table, table)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not len(out):
        return out
    with device_of(q):
        program[(len(q),)](
            q,
            k,
            v,
            *weights,
            table,
            row.positions[0],
            row.layout.slots,
            out,
            k_cache,
            v_cache,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *k_cache.stride()[:3],
            table.shape[0],
            q.shape[1],
            k.shape[1],
            width // 2,
            attention.q_norm.eps if is_normed else 0.0,
            PAGE=PAGE_TOKENS,
            Q_HEADS=power_of_two(q.shape[1]),
            K_HEADS=power_of_two(k.shape[1]),
            HALF=power_of_two(width // 2),
            NORMED=is_normed,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def _projections(layer: _Layer, hidden: Tensor) -> Sequence[Tensor]:
    qkv = layer.attention.qkv_linear
    if layer.qkv is not None:
        sizes = [len(linear.weight) for linear in (qkv.wq, qkv.wk, qkv.wv)]
        return list(F.linear(hidden, layer.qkv).split(sizes, dim=1))
    return [F.linear(hidden, linear.weight, linear.bias) for linear in (qkv.wq, qkv.wk, qkv.wv)]


def _forward(layer: _Layer, hidden: Tensor) -> Tensor:
    from forge.models.gpu_step_program import gate_rows

    forward = layer.forward
    if isinstance(forward, SegmentedMoE):
        answer: Tensor = forward(hidden.unsqueeze(0))
        return answer.squeeze(0)
    if layer.up_and_gate is not None:
        gate, up = F.linear(hidden, layer.up_and_gate).chunk(2, dim=1)
    else:
        gate, up = F.linear(hidden, forward.w1.weight), F.linear(hidden, forward.w3.weight)
    num_rows, width = gate.shape
    inner = torch.empty(num_rows, width, dtype=gate.dtype, device=gate.device)
    if num_rows:
        with device_of(gate):
            gate_rows[(-(-width // _GATE_NUMBERS), num_rows)](
                gate, up, inner, width, gate.stride(0), up.stride(0), BLOCK=_GATE_NUMBERS, num_warps=4
            )
    return F.linear(inner, forward.w2.weight)


# ---- What can be computed here


def _norms(layer: Any) -> list[Any]:
    attention = layer.attention
    heads = [attention.q_norm, attention.k_norm] if attention.q_norm is not None else []
    return [layer.attention_norm, layer.ffn_norm, *heads]


def _is_known(layer: Any) -> bool:
    attention, forward = layer.attention, _forward_of(layer)
    if type(attention) is not GQAttention or type(forward) not in (RowFeedForward, SegmentedMoE):
        return False
    rope, qkv = attention.rope, attention.qkv_linear
    if type(attention.inner_attention) is not PagedAttention or type(rope) is not Rotary or type(qkv) is not QKVLinear:
        return False
    width = attention.head_dim
    if width % 2 or tuple(rope.cache.shape[1:]) != (2 * width,) or not rope.cache.is_contiguous():
        return False
    dense = (forward.w1, forward.w3, forward.w2) if isinstance(forward, RowFeedForward) else ()
    plain = (attention.wo, *dense)
    return all(map(_is_plain, (qkv.wq, qkv.wk, qkv.wv, *plain))) and all(each.bias is None for each in plain)


def _forward_of(layer: Any) -> Any:
    return layer.moe if layer.moe_enabled else layer.feed_forward


def _is_plain(linear: nn.Module) -> bool:
    """Return whether it is one product with a weight as it lies in memory."""
    return bool(type(linear) is RowLinear and not linear.quantized and linear.adapter(LIVE) is None)


def _layer(layer: Any) -> _Layer:
    qkv, forward = layer.attention.qkv_linear, _forward_of(layer)
    has_biases = qkv.wq.bias is not None
    is_dense = isinstance(forward, RowFeedForward)
    return _Layer(
        attention_norm=layer.attention_norm,
        ffn_norm=layer.ffn_norm,
        attention=layer.attention,
        forward=forward,
        qkv=None if has_biases else joined([qkv.wq.weight, qkv.wk.weight, qkv.wv.weight]),
        up_and_gate=joined([forward.w1.weight, forward.w3.weight]) if is_dense else None,
    )
