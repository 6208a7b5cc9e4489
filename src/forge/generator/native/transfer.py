"""Copies between host and device that wait for nothing but themselves.

With ordinary memory the host waits in a copy until the device has done all that was launched before it. With pinned
memory it does not: the copy takes its turn on the stream. torch reuses pinned memory only when the
copies from and to it are done. So it can be dropped as soon as a copy has been launched, and is never overwritten too
early.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def put(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device. On a CPU it shares memory; on a GPU the array may be changed at once."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class HostCopy:
    """A copy of a tensor to the host, launched when this is created.

    Waiting for it does not wait for what is launched afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._on_host, self._event = tensor, None
        if tensor.is_cuda:
            self._on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._on_host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> NDArray[Any]:
        """Wait for the copy and return it."""
        if self._event is not None:
            self._event.synchronize()
        found: NDArray[Any] = self._on_host.numpy()
        return found
