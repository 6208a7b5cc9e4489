"""The trainer's model, built for generation: the same definition, with a paged cache in place of whole documents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
from torch import Tensor, nn
from torchtitan.models.common.nn_modules import RMSNorm

from forge.config import ModelConfig
from forge.errors import ModelError
from forge.kernels.paged import PAGE_TOKENS
from forge.models.gpu_layers import GpuNorm
from forge.models.language_model import LanguageModel, titan_config
from forge.models.paged_attention import PagedAttention
from forge.models.rows import RowTask
from forge.models.weights import named_parameters


def build_for_inference(
    model: ModelConfig,
    *,
    max_seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
    shared: Mapping[str, Tensor] | None = None,
) -> LanguageModel:
    """The model with paged attention, without gradients. Its weights are empty, to be loaded next.

    With `shared`, parameters by name, it computes with those very tensors and has no weights of its own: whoever
    changes them changes what it computes. They must be whole, and of the dtype and on the device that are asked for.
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
    if shared is None:
        built.to_empty(device=device)
    else:
        _adopt(built, shared, dtype=dtype, device=device)
    with torch.no_grad():
        built.init_states(buffer_device=device)
    _share_rotary(built)
    built.eval()
    built.requires_grad_(False)
    built.use(built.book, _hidden_states)
    return built


def _norm(config: RMSNorm.Config) -> GpuNorm.Config:
    return GpuNorm.Config(**{field.name: getattr(config, field.name) for field in fields(config) if field.init})


def _share_rotary(model: LanguageModel) -> None:
    """One table of rotations for all layers: at 32,000 positions each of its own would take gigabytes."""
    tables = [layer.attention.rope for layer in model.layers.values()]
    for table in tables[1:]:
        table.cache = tables[0].cache


def _hidden_states(hidden: Tensor, weight: Tensor, row: RowTask, group: object) -> Tensor:
    """What the head returns for a generator, which has more than one use for the rows that were asked for."""
    return hidden


def parameters_once(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters, each under the first of its names (tied weights have two): as a trainer publishes them."""
    names: dict[int, str] = {}
    for name, parameter in (named := named_parameters([model])):
        names.setdefault(id(parameter), name)
    return {name: parameter for name, parameter in named if names[id(parameter)] == name}


def paged_layers(model: LanguageModel) -> list[PagedAttention]:
    """The attention of every layer, in order: whoever owns the cache hands each its part."""
    return [layer.attention.inner_attention for layer in model.layers.values()]


def cache_shapes(model: ModelConfig, *, num_pages: int, on_gpu: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of one layer's cached keys and values."""
    heads = model.num_kv_heads or 1
    width = model.head_dim or (model.hidden_size or 1) // (model.num_heads or 1)
    rows = (num_pages, heads, PAGE_TOKENS, width)
    return (rows if on_gpu else (num_pages, heads, width, PAGE_TOKENS)), rows


def page_bytes(model: ModelConfig, *, item_bytes: int) -> int:
    """The memory of one page, over all layers."""
    keys, values = cache_shapes(model, num_pages=1, on_gpu=False)
    per_layer = sum(math.prod(shape) for shape in (keys, values))
    return per_layer * item_bytes * (model.num_layers or 1)


def _adopt(model: nn.Module, shared: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device) -> None:
    own = parameters_once(model)
    if set(own) != set(shared):
        raise _unlike("names", sorted(set(own) ^ set(shared))[:4], "the same parameters as the model's")
    tied: dict[int, nn.Parameter] = {}
    for name, parameter in own.items():
        tensor = shared[name]
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
            module._buffers[name] = torch.empty_like(buffer, device=device)


def _unlike(path: str, value: object, rule: str) -> ModelError:
    return ModelError(
        "These weights cannot be shared with a generator in this process.",
        path=f"shared {path}",
        value=value,
        rule=rule,
        repair="share only with a trainer of one rank in the same precision, or publish through the store",
    )
