"""Which part of the devices' peak goes into the model, while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge.config import ModelConfig
from forge.models.sizes import flops_per_token, mean_context, model_flops_utilization
from forge.observe import device_peak_flops


class Utilization:
    """Computes it for the steps of one trainer. `state` is what the trainer says of itself."""

    def __init__(self, model: ModelConfig, state: Mapping[str, Any]) -> None:
        self._model, self._num_devices = model, int(state["num_ranks"])
        self._peak_flops = device_peak_flops(state["device_name"], state["compute_dtype"])

    def of(self, lengths: Sequence[int], tokens_per_s: float | None) -> float | None:
        """Return it for samples of these lengths; None where the peak of the devices is not known."""
        if self._peak_flops is None:
            return None
        return model_flops_utilization(
            tokens_per_s,
            flops_per_token=flops_per_token(self._model, mean_context(lengths)),
            peak_flops=self._peak_flops,
            num_devices=self._num_devices,
        )
