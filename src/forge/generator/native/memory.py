"""The device memory of the native engine's weights and cache: allocate, release and restore it.

`EngineMemory` uses torch's allocator, which chooses new addresses each time, so recorded CUDA graphs are lost.
`FixedAddressMemory` restores everything at the same addresses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from forge.runtime.device_memory import DeviceMemory, Purpose, open_driver

_log = logging.getLogger("forge.generator")

Caches = list[tuple[Tensor, Tensor]]
Shape = tuple[int, ...]
MakeMemory = Callable[[int, Purpose], DeviceMemory]

_ALIGNMENT = 512
_CACHE = Purpose(
    "the cache for keys and values",
    "generator.kv_cache_gb",
    "lower generator.kv_cache_gb or generator.max_batch; or look which process holds the rest",
)
_WEIGHTS = Purpose(
    "the generator's weights", "model", "choose a smaller model, or look which process holds the rest of the GPU"
)


class EngineMemory:
    """Weights and cache in memory of torch's allocator.

    Args:
        parameters: the weights that go to host memory in `release_weights`; none where they are a trainer's.
    """

    keeps_addresses: bool = False
    """Whether recorded steps stay valid while weights and cache are released."""

    def __init__(self, device: torch.device, parameters: Mapping[str, Tensor]) -> None:
        self.device, self.parameters = device, parameters
        self._on_host: dict[str, Tensor] = {}

    def allocate_cache(self, shapes: tuple[Shape, Shape], *, num_layers: int, dtype: torch.dtype) -> Caches:
        """Return uninitialised memory for each layer's keys and values."""
        keys, values = shapes
        make = {"dtype": dtype, "device": self.device}
        return [(torch.empty(keys, **make), torch.empty(values, **make)) for _ in range(num_layers)]

    def release_cache(self) -> None:
        """Release the cache's memory. Here the caller does so by dropping its tensors."""

    def release_weights(self) -> None:
        """Move the weights to pinned host memory, which is kept for the next time. They can be updated there."""
        for name, parameter in self.parameters.items():
            if name not in self._on_host:
                self._on_host[name] = torch.empty_like(parameter.data, device="cpu", pin_memory=True)
            parameter.data = self._on_host[name].copy_(parameter.data, non_blocking=True)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def restore_weights(self) -> None:
        """Move the weights back to the device."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(self.device, non_blocking=True)


class FixedAddressMemory(EngineMemory):
    """Weights and cache at fixed addresses: two ranges of `forge.runtime.device_memory`.

    While memory is released no tensor refers to it: the weights are tensors in host memory, and the cache has none.

    Args:
        device: the GPU.
        parameters: the weights, which are moved into a range, and are uninitialised afterwards.
        make: creates a range for a number of bytes.
    """

    keeps_addresses = True

    def __init__(self, device: torch.device, parameters: Mapping[str, Tensor], *, make: MakeMemory) -> None:
        super().__init__(device, parameters)
        self._make = make
        self._cache: DeviceMemory | None = None
        self._caches: Caches = []
        self._weights: DeviceMemory | None = None
        self._whole = self._host = torch.empty(0, dtype=torch.uint8)
        self._on_device: dict[str, Tensor] = {}
        self._on_host_views: dict[str, Tensor] = {}
        if parameters:
            self._place_weights()

    def _place_weights(self) -> None:
        """Move the weights into their range. Torch's memory is freed first, so that they never exist twice."""
        forms = {name: (tuple(each.shape), each.dtype) for name, each in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)
        _free_unused()
        self._weights = self._make(sum(map(_room, forms.values())), _WEIGHTS)
        self._weights.restore()
        self._whole = self._weights.tensor()
        self._on_device = dict(zip(forms, carve(self._whole, forms.values()), strict=True))
        self._point_to(self._on_device)

    def _point_to(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.data = tensors[name]

    def allocate_cache(self, shapes: tuple[Shape, Shape], *, num_layers: int, dtype: torch.dtype) -> Caches:
        """Return the same tensors each time."""
        if self._cache is None:
            forms = [(shape, dtype) for _ in range(num_layers) for shape in shapes]
            cache = self._make(sum(map(_room, forms)), _CACHE)
            cache.restore()
            views = carve(cache.tensor(), forms)
            self._cache, self._caches = cache, list(zip(views[::2], views[1::2], strict=True))
        self._cache.restore()
        return self._caches

    def release_cache(self) -> None:
        """Release the cache's memory."""
        if self._cache is not None:
            self._cache.release()

    def release_weights(self) -> None:
        """Move the weights to one block of pinned host memory, in one copy. The block is kept for the next time."""
        if self._weights is not None:
            if not self._on_host_views:
                self._host = torch.empty(self._whole.shape, dtype=torch.uint8, pin_memory=self._whole.is_cuda)
                forms = [(tuple(each.shape), each.dtype) for each in self._on_device.values()]
                self._on_host_views = dict(zip(self._on_device, carve(self._host, forms), strict=True))
            self._host.copy_(self._whole)
            self._point_to(self._on_host_views)
            self._weights.release()
        _free_unused()

    def restore_weights(self) -> None:
        """Move the weights back to their addresses."""
        if self._weights is not None and not self._weights.is_held:
            self._weights.restore()
            self._whole.copy_(self._host)
            self._point_to(self._on_device)


def choose_memory(device: torch.device, parameters: Mapping[str, Tensor]) -> EngineMemory:
    """Return fixed addresses where the driver supports them. On a GPU the parameters are uninitialised afterwards."""
    if device.type != "cuda":
        return EngineMemory(device, {})
    torch.cuda.synchronize(device)  # torch has its context
    driver = open_driver(device.index)
    if driver is None:
        _log.info("this GPU's driver cannot map memory: CUDA graphs are captured again whenever the generator wakes")
        return EngineMemory(device, parameters)

    def make(num_bytes: int, purpose: Purpose) -> DeviceMemory:
        return DeviceMemory(driver, num_bytes, purpose=purpose, spare=_free_unused)

    return FixedAddressMemory(device, parameters, make=make)


def carve(memory: Tensor, forms: Iterable[tuple[Shape, torch.dtype]]) -> list[Tensor]:
    """Return tensors one after the other in memory, uint8 [N], each contiguous and aligned."""
    found: list[Tensor] = []
    start = 0
    for shape, dtype in forms:
        end = start + math.prod(shape) * dtype.itemsize
        found.append(memory[start:end].view(dtype).view(shape))
        start += _room((shape, dtype))
    return found


def _room(form: tuple[Sequence[int], torch.dtype]) -> int:
    num_bytes = math.prod(form[0]) * int(form[1].itemsize)
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _free_unused() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
