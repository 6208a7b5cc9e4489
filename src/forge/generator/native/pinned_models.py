"""Models with the weights of pinned versions, beside the live one.

On a CPU such a model computes with the tensors in the store's shared memory: it has no weights of its own, unless they
must be converted. On a GPU it has a copy, at addresses that stay, so that its decode steps are recorded once; another
version is copied into the same memory. In both cases there are at most so many models, and the one that was used least
recently makes room. Versions of an adapter share the weights below it with the live model.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from forge.config import GenerationConfig
from forge.generator.native.decode_graphs import DecodeGraphs
from forge.generator.native.memory import Caches
from forge.generator.native.pinned import PinnedWeights
from forge.models.cpu_step import CpuSteps
from forge.models.inference import paged_layers, parameters_once
from forge.models.language_model import LanguageModel
from forge.runtime.device_memory import OutOfDeviceMemory

if TYPE_CHECKING:
    from forge.generator.native.runner import ModelRunner

_ON_GPU: Final = 1
_ON_CPU: Final = 4
"""Pinned versions that are loaded at once where the configuration does not say. On a CPU they share memory."""


def max_pinned(config: GenerationConfig, *, on_gpu: bool) -> int:
    """Return how many pinned versions are loaded at once."""
    return config.pinned_versions or (_ON_GPU if on_gpu else _ON_CPU)


def no_room(weights: PinnedWeights, config: GenerationConfig) -> OutOfDeviceMemory:
    """Return the error for a pinned version that does not fit on the GPU."""
    return OutOfDeviceMemory(
        f"there is no room on the GPU for pinned version {weights.version} beside the live weights",
        path="generator.pinned_versions",
        value=config.pinned_versions,
        rule="the number of pinned versions for which the KV cache leaves memory",
        repair="set generator.pinned_versions=1, or lower generator.kv_cache_gb",
    )


@dataclass(slots=True, eq=False)
class ModelCopy:
    """A model, and what was prepared to compute with it."""

    model: LanguageModel
    cpu_steps: CpuSteps | None = None
    graphs: DecodeGraphs | None = None

    def set_caches(self, caches: Caches | None) -> None:
        """Let it read and write these keys and values; None for none."""
        layers = paged_layers(self.model)
        if self.cpu_steps is not None:
            self.cpu_steps.forget()
        for layer, (keys, values) in zip(layers, caches or [(None, None)] * len(layers), strict=True):
            layer.k_cache, layer.v_cache = keys, values


class PinnedModels:
    """The models of one runner, used by its thread."""

    def __init__(self, runner: ModelRunner, *, most: int) -> None:
        self._runner, self.most = runner, most
        self._models: OrderedDict[PinnedWeights, ModelCopy] = OrderedDict()

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that are loaded now."""
        return tuple(sorted(weights.version for weights in tuple(self._models)))

    def find(self, weights: PinnedWeights, caches: Caches) -> ModelCopy:
        """Return the model of a version, loading it if need be."""
        found = self._models.get(weights)
        if found is None:
            found = self._load(weights)
            found.set_caches(caches)
            self._models[weights] = found
        self._models.move_to_end(weights)
        return found

    @torch.no_grad()
    def _load(self, weights: PinnedWeights) -> ModelCopy:
        runner, spare = self._runner, None
        while len(self._models) >= self.most:
            _, spare = self._models.popitem(last=False)
        base = {name: each for name, each in runner.parameters.items() if name not in runner.updated} | runner.quantized
        if not runner.on_gpu:
            own = {name: tensor.to(runner.dtype) for name, tensor in weights.tensors.items()}
            model = runner.build(shared=base | own)
            return ModelCopy(model, CpuSteps(model))
        copy = ModelCopy(runner.build(shared=base or None)) if spare is None else spare
        found = parameters_once(copy.model)
        torch._foreach_copy_([found[name] for name in weights.tensors], list(weights.tensors.values()))
        torch.cuda.synchronize(runner.device)
        return copy

    def set_caches(self, caches: Caches | None, *, keeps_graphs: bool) -> None:
        """Let all models use a cache; recorded steps are valid only for the addresses at which they were recorded."""
        for copy in self._models.values():
            copy.set_caches(caches)
            if not keeps_graphs:
                copy.graphs = None

    def drop(self, weights: PinnedWeights) -> None:
        """Forget a version: its tensors are not used afterwards."""
        self._models.pop(weights, None)

    def clear(self) -> None:
        """Forget all versions, and free their memory."""
        self._models.clear()
