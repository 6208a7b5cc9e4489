"""The trainer's model, built for generation: the same definition, with a paged cache in place of whole documents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
from torch import Tensor, nn
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.module import Module

from forge.config import ModelConfig
from forge.errors import ModelError
from forge.kernels import cpu_attention
from forge.kernels.paged import PAGE_TOKENS, PagedLayout
from forge.models import gpu_attention
from forge.models.adapter_names import AdapterSpec, is_adapter
from forge.models.adapter_segments import AdapterSegment
from forge.models.adapters import attach_adapters, share_segments
from forge.models.gpu_attention import Extents
from forge.models.gpu_layers import GpuNorm
from forge.models.language_model import LanguageModel, titan_config
from forge.models.quantized_names import is_quantized
from forge.models.rows import RowRegistry, RowTask
from forge.models.weights import named_parameters


@dataclass(frozen=True, slots=True, eq=False)
class PagedRow:
    """One step of a generator, as the layers of the model see it. T tokens of S sequences lie in one row.

    Attributes:
        positions: int64 [1, T]: the place of each token in its sequence.
        index: int64 [R]: the tokens whose hidden states are asked for.
        layout: whose tokens they are, and where keys and values lie.
        is_decode: whether every sequence has exactly one token.
        extents: the lengths on the host, for steps on a GPU that are not decodes.
        segments: which rows are of which adapter; empty where the model computes all of them by itself.
    """

    positions: Tensor
    index: Tensor
    layout: PagedLayout
    is_decode: bool = False
    extents: Extents | None = None
    segments: tuple[AdapterSegment, ...] = ()


class PagedAttention(Module):  # type: ignore[misc]
    """Writes the keys and values of new tokens into the layer's pages and attends to all that its sequences have.

    `k_cache` and `v_cache` are set by the owner of the memory; on a CPU in the layout of `cpu_attention`, on a GPU in
    that of `gpu_attention`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.row_registry = RowRegistry()
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend to the cache. `attention_masks`, TorchTitan's name, holds the key of the row."""
        row: PagedRow = self.row_registry.find(attention_masks)
        k_cache, v_cache = self.k_cache, self.v_cache
        assert k_cache is not None, "the cache has not been allocated"
        assert v_cache is not None
        q, k, v = q_BLNH[0], k_BLNH[0], v_BLNH[0]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        attend = _on_gpu if q.is_cuda else _on_cpu
        return attend(q, k, v, (k_cache, v_cache), row, scale).unsqueeze(0)


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], row: PagedRow, scale: float) -> Tensor:
    wide = torch.float32
    cpu_attention.write_kv(k.to(wide), v.to(wide), row.layout.slots, *caches)
    return cpu_attention.attend(q.to(wide), *caches, layout=row.layout, scale=scale).to(q.dtype)


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], row: PagedRow, scale: float) -> Tensor:
    layout = row.layout
    gpu_attention.write_kv(k, v, layout.slots, *caches)
    if row.is_decode:
        return gpu_attention.decode_attend(
            q,
            *caches,
            context_lens_S=layout.context_lens,
            table_SP=layout.table,
            scale=scale,
            shares=layout.shares,
        )
    assert row.extents is not None
    return gpu_attention.prefill_attend(q, *caches, layout=layout, extents=row.extents, scale=scale)


def build_for_inference(
    model: ModelConfig,
    *,
    max_seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
    shared: Mapping[str, Tensor] | None = None,
    adapter: AdapterSpec | None = None,
) -> LanguageModel:
    """Return the model with paged attention, without gradients. Its weights are empty, to be loaded next.

    With `shared`, parameters by name, it computes with those very tensors and has no weights of its own: changing
    them changes what it computes. They must be whole, and of the dtype and on the device that are asked for. Only an
    `adapter` may be missing there: a trainer may keep it in another precision than the rest. Weights in few bits are
    among them as `quantized_tensors` names them.
    """
    config = titan_config(model, max_seq_len=max_seq_len)
    for layer in config.layers:
        layer.attention.inner_attention = PagedAttention.Config()
        layer.attention_norm, layer.ffn_norm = _norm(layer.attention_norm), _norm(layer.ffn_norm)
        if layer.attention.qk_norm is not None:
            layer.attention.qk_norm = _norm(layer.attention.qk_norm)
    config.norm = _norm(config.norm)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            built: LanguageModel = config.build()
    finally:
        torch.set_default_dtype(before)
    if adapter is not None:
        attach_adapters(built, model, adapter, dtype=dtype)
    if shared is None:
        built.to_empty(device=device)
    else:
        _adopt(built, shared, dtype=dtype, device=device)
    with torch.no_grad():
        built.init_states(buffer_device=device)
    _share_rotary(built)
    built.eval()
    built.requires_grad_(False)
    built.use(built.row_registry, _hidden_states)
    share_segments(built)
    return built


def _norm(config: RMSNorm.Config) -> GpuNorm.Config:
    return GpuNorm.Config(**{field.name: getattr(config, field.name) for field in fields(config) if field.init})


def _share_rotary(model: LanguageModel) -> None:
    """Share one table of rotations among all layers: at 32,000 positions a table each would take gigabytes."""
    tables = [layer.attention.rope for layer in model.layers.values()]
    for table in tables[1:]:
        table.cache = tables[0].cache


def _hidden_states(hidden: Tensor, weight: Tensor, row: RowTask, group: object) -> Tensor:
    """Return what the head returns for a generator, which has more than one use for the rows that were asked for."""
    return hidden


def parameters_once(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters, each under the first of its names (tied weights have two): as a trainer publishes them."""
    names: dict[int, str] = {}
    for name, parameter in (named := named_parameters([model])):
        names.setdefault(id(parameter), name)
    return {name: parameter for name, parameter in named if names[id(parameter)] == name}


def paged_layers(model: LanguageModel) -> list[PagedAttention]:
    """Return the attention of every layer, in order; the owner of the cache gives each its part."""
    return [layer.attention.inner_attention for layer in model.layers.values()]


def cache_shapes(model: ModelConfig, *, num_pages: int, on_gpu: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of one layer's cached keys and values."""
    heads = model.num_kv_heads or 1
    width = model.head_dim or (model.hidden_size or 1) // (model.num_heads or 1)
    rows = (num_pages, heads, PAGE_TOKENS, width)
    return (rows if on_gpu else (num_pages, heads, width, PAGE_TOKENS)), rows


def page_bytes(model: ModelConfig, *, item_bytes: int) -> int:
    """Return the memory of one page, over all layers."""
    keys, values = cache_shapes(model, num_pages=1, on_gpu=False)
    per_layer = sum(math.prod(shape) for shape in (keys, values))
    return per_layer * item_bytes * (model.num_layers or 1)


def _adopt(model: nn.Module, shared: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device) -> None:
    own = parameters_once(model)
    shared = _adopt_quantized(model, shared, device=device)
    missing = {name for name in own if is_adapter(name) and name not in shared}
    if set(own) - missing != set(shared):
        raise _unlike("names", sorted(set(own) ^ set(shared))[:4], "the same parameters as the model's")
    tied: dict[int, nn.Parameter] = {}
    for name, parameter in own.items():
        tensor = torch.empty_like(parameter, device=device) if name in missing else shared[name]
        if tensor.shape != parameter.shape or tensor.dtype != dtype or tensor.device.type != device.type:
            value = f"{name}: {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            raise _unlike(
                "parameters", value, f"{list(parameter.shape)} {dtype} on {device.type}, not split over ranks"
            )
        tied[id(parameter)] = nn.Parameter(tensor.detach(), requires_grad=False)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module._parameters[name] = tied[id(parameter)]
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _adopt_quantized(model: nn.Module, shared: Mapping[str, Tensor], *, device: torch.device) -> dict[str, Tensor]:
    """Let a model compute with shared weights in few bits, and return the other shared tensors."""
    rest = dict(shared)
    for path, module in model.named_modules():
        for name, own in list(module.named_buffers(recurse=False)):
            if not is_quantized(name):
                continue
            tensor = rest.pop(f"{path}.{name}", None)
            if tensor is None or tensor.shape != own.shape or tensor.device.type != device.type:
                raise _unlike("weights in few bits", f"{path}.{name}", f"{list(own.shape)} on {device.type}")
            module._buffers[name] = tensor
    return rest


def _unlike(path: str, value: object, rule: str) -> ModelError:
    return ModelError(
        "These weights cannot be shared with a generator in this process.",
        path=f"shared {path}",
        value=value,
        rule=rule,
        repair="share only with a trainer of one rank in the same precision, or publish through the store",
    )
