"""LoRA adapters on a built model: attach them, draw their first weights, switch them off.

`forge.models.adapter_names` says which layers have one; `forge.models.layers` computes with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import forge.models.titan_setup  # noqa: F401

# isort: split
import spmd_types as spmd
import torch
from torch import Tensor, nn
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.protocols.sharding import ShardingConfig

from forge.config.schema import ModelConfig
from forge.kernels.cpu_step import LowRank
from forge.models.adapter_names import AdapterSlot, AdapterSpec, B, adapter_map, is_adapter
from forge.models.adapter_segments import StepSegments
from forge.models.layers import Experts, RowLinear, SegmentedMoE
from forge.models.quantized import attach_quantized
from forge.models.weights import initialise, named_parameters


def attach_adapters(model: nn.Module, config: ModelConfig, spec: AdapterSpec, *, dtype: torch.dtype) -> None:
    """Give the layers of a model that has no memory yet (device meta) their adapters, in `dtype`, and keep its linear
    weights in few bits where the spec says so.

    Call it before the model is split over ranks: adapters are then split as their layers are.
    """
    if spec.base_dtype is not None:
        attach_quantized(model, config, spec.base_dtype)
    for slot in adapter_map(config, spec):
        module = model.get_submodule(slot.module)
        for name, shape in zip(slot.attributes, slot.shapes, strict=True):
            module.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
        module.lora_scale = spec.scale
        if module._sharding_config is not None:
            module._sharding_config = _with_adapter(module._sharding_config, slot)


def _with_adapter(sharding: ShardingConfig, slot: AdapterSlot) -> ShardingConfig:
    """Return how a layer and its adapter are split over tensor and expert parallel ranks.

    The matrix on the side that the weight is split on is split with it; every rank has the other one whole.
    """
    layout = sharding.state_shardings[slot.base.name.rpartition(".")[2]]
    whole = dense_param_placement(tp=spmd.R)
    both = (layout, layout)  # experts are spread over ranks, and their adapters with them
    if layout == dense_param_placement(tp=spmd.S(0)):
        both = (whole, layout)
    elif layout == dense_param_placement(tp=spmd.S(1)):
        both = (layout, whole)
    return replace(sharding, state_shardings=sharding.state_shardings | dict(zip(slot.attributes, both, strict=True)))


def named_adapters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of this rank's adapters, by name."""
    return {name: parameter for name, parameter in named_parameters(parts) if is_adapter(name)}


@torch.no_grad()
def draw_adapters(parts: Sequence[nn.Module], *, seed: int) -> None:
    """Fill adapters as PEFT does those of a new one: A uniform in ±1/sqrt(in), B zero, so that nothing changes.

    Every layout on one kind of device starts with the same adapter.
    """
    for name, parameter in named_adapters(parts).items():
        if name.endswith(B):
            parameter.zero_()
        else:
            initialise(f"{seed} {name}", parameter, seed=seed, bound=parameter.shape[-1] ** -0.5)


@contextmanager
def adapters_off(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Let the model compute without its adapters inside the block: it is then the model that they were made for."""
    layers = [module for part in parts for module in part.modules() if isinstance(module, RowLinear | Experts)]
    before = [layer.is_adapter_on for layer in layers]
    for layer in layers:
        layer.is_adapter_on = False
    try:
        yield
    finally:
        for layer, is_on in zip(layers, before, strict=True):
            layer.is_adapter_on = is_on


# ---- Several adapters in one generator -------------------------------------------------------------------------------


def share_segments(model: nn.Module) -> None:
    """Let the layers of a generator's model share one record of which rows are of which adapter."""
    segments = StepSegments()
    for module in model.modules():
        if module is model or isinstance(module, RowLinear | Experts | SegmentedMoE):
            module.segments = segments


def attach_numbered(
    model: nn.Module, number: int, tensors: Mapping[str, Tensor], *, config: ModelConfig, spec: AdapterSpec
) -> None:
    """Give a generator's model one more adapter: rows of segments of this number are computed with it.

    `tensors` has its matrices by name, in the dtype and on the device of the model. They are no parameters of the
    model.
    """
    for slot in adapter_map(config, spec):
        module = model.get_submodule(slot.module)
        a, b = (tensors[name] for name in slot.names)
        own = LowRank(a, b, spec.scale)
        if isinstance(module, Experts):
            module.adapters.setdefault(number, {})[slot.base.name.rpartition(".")[2]] = own
        else:
            module.adapters[number] = own
    model.segments.revision += 1


def detach_numbered(model: nn.Module, number: int) -> None:
    """Undo `attach_numbered`."""
    for module in model.modules():
        if isinstance(module, RowLinear | Experts):
            module.adapters.pop(number, None)
    model.segments.revision += 1
