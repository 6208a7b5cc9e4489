"""Which weights of a frozen base are kept in 8 or 4 bits, in what form, and how many bytes that takes. Needs no torch.

A weight W of a linear layer is then two buffers of its module: `W_packed` and `W_scales`.

    int8    packed: int8, of the weight's shape     scales: float32, one for each row
    nf4     packed: uint8, two values in a byte     scales: float32, one for each block of 64 values
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Final

from forge.config.adapter import TARGET_NAMES, BaseDtype
from forge.config.schema import ModelConfig
from forge.errors import ConfigError
from forge.models.adapter_names import layer_of
from forge.models.weight_names import WeightSlot, weight_map

PACKED: Final = "_packed"
SCALES: Final = "_scales"
BLOCK: Final = 64
"""Values of `nf4` that have one scale. They are consecutive in memory; zeros complete the last block."""
INT8_PIECE: Final = 1 << 24
"""Values of `int8` that are dequantised at once: the library makes them in float32, twice."""
_LIBRARY: Final = "bitsandbytes"


def quantized_slots(model: ModelConfig) -> tuple[WeightSlot, ...]:
    """Return the weights that are kept in few bits: those of all linear layers in attention, feed-forward and experts.

    Whether a layer has an adapter does not matter. Embedding, output layer, router, norms and biases stay as they are.
    """
    return tuple(slot for slot in weight_map(model) if len(slot.shape) > 1 and layer_of(slot) in TARGET_NAMES)


def is_quantized(name: str) -> bool:
    """Return whether a tensor is a part of a weight in few bits, by its name."""
    return name.endswith((PACKED, SCALES))


def packed_shape(shape: tuple[int, ...], base_dtype: BaseDtype) -> tuple[int, ...]:
    """Return the shape of the packed values of a weight."""
    return shape if base_dtype == "int8" else (num_blocks(shape) * BLOCK // 2,)


def num_scales(shape: tuple[int, ...], base_dtype: BaseDtype) -> int:
    """Return how many scales a weight has."""
    return math.prod(shape[:-1]) if base_dtype == "int8" else num_blocks(shape)


def num_blocks(shape: tuple[int, ...]) -> int:
    """Return how many blocks the values of a weight fill, the last one with zeros."""
    return -(-math.prod(shape) // BLOCK)


def quantized_bytes(shape: tuple[int, ...], base_dtype: BaseDtype) -> int:
    """Return the memory of a weight in few bits, its scales included."""
    return math.prod(packed_shape(shape, base_dtype)) + 4 * num_scales(shape, base_dtype)


@dataclass(frozen=True, slots=True)
class QuantizedSizes:
    """What one layer of a model keeps in few bits.

    Attributes:
        numbers: how many weights; `num_bytes` the memory that they take, scales included.
        largest: how many the largest of them has. It exists in full for the moment of its product.
        base_dtype: their form.
    """

    numbers: int
    num_bytes: int
    largest: int
    base_dtype: BaseDtype

    @classmethod
    def of(cls, model: ModelConfig, base_dtype: BaseDtype) -> QuantizedSizes:
        """Count a layer of a model; all are alike."""
        shapes = [slot.shape for slot in quantized_slots(model.model_copy(update={"num_layers": 1}))]
        sizes = [math.prod(shape) for shape in shapes]
        return cls(sum(sizes), sum(quantized_bytes(shape, base_dtype) for shape in shapes), max(sizes), base_dtype)

    def dequantized_bytes(self, item: int) -> int:
        """Return the memory of the largest weight in numbers of `item` bytes, with what is made on the way to it."""
        on_the_way = 8 * min(self.largest, INT8_PIECE) if self.base_dtype == "int8" else 0
        return item * self.largest + on_the_way


def check_library(base_dtype: BaseDtype | None, *, package: str = _LIBRARY) -> None:
    """Raise `ConfigError` if weights are to be quantised and the package for it is not installed."""
    if base_dtype is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"the package {package}, which quantises the weights below the adapter, is not installed",
            path="adapter.base_dtype",
            value=base_dtype,
            rule="null, unless the extra `quantized` is installed",
            repair="pip install 'torchforge[quantized]', or remove adapter.base_dtype",
        )
