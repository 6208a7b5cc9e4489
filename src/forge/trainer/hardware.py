"""What the bits of a training step depend on besides its inputs: the device, and the software that drives it."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from forge.runtime.machine import cpu_model


def hardware_of(device: torch.device) -> dict[str, str]:
    """Return the device, the release of torch, the threads and the instruction sets that this process computes with.

    A step that is computed again where all of these are the same has the same bits.
    """
    found = {
        "torch": str(torch.__version__),
        "num_threads": str(torch.get_num_threads()),
        "cpu": _cpu(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "onednn": os.environ.get("ONEDNN_MAX_CPU_ISA", "default"),
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return found


@lru_cache(maxsize=1)
def _cpu() -> str:
    return cpu_model()
