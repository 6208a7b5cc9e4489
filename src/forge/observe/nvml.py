"""How busy an NVIDIA GPU is: a few calls of the driver's own library, which every driver comes with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

LIBRARY: Final = "libnvidia-ml.so.1"
_GPU_SAMPLES: Final = 1
_NOT_FOUND: Final = 6
_MAX_SAMPLES: Final = 4096

Look = Callable[[str], tuple[int, int, float | None] | None]
"""From a GPU's UUID to its number, the bytes in use, and the part of the time since the last look that it was busy."""


class _Sample(ctypes.Structure):
    _fields_ = (("time_us", ctypes.c_ulonglong), ("value", ctypes.c_ulonglong))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def open_look(library: str = LIBRARY) -> Look:
    """Return what looks at a GPU; without the library, or where it does not start, something that returns None."""
    try:
        found = ctypes.CDLL(library)
        if found.nvmlInit_v2() != 0:
            return _blind
    except (OSError, AttributeError):
        return _blind
    return _Looks(found)


def _blind(uuid: str) -> None:
    return None


class _Looks:
    def __init__(self, library: Any) -> None:
        self._library = library
        self._devices: dict[str, tuple[Any, int] | None] = {}
        self._seen_us: dict[str, int] = {}

    def __call__(self, uuid: str) -> tuple[int, int, float | None] | None:
        if uuid not in self._devices:
            self._devices[uuid] = self._find(uuid)
        device = self._devices[uuid]
        if device is None:
            return None
        memory = _Memory()
        if self._library.nvmlDeviceGetMemoryInfo(device[0], ctypes.byref(memory)) != 0:
            return None
        return device[1], int(memory.used), self._busy(uuid, device[0])

    def _find(self, uuid: str) -> tuple[Any, int] | None:
        device, number = ctypes.c_void_p(), ctypes.c_uint()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if self._library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)) != 0:
            return None
        if self._library.nvmlDeviceGetIndex(device, ctypes.byref(number)) != 0:
            return None
        return device, int(number.value)

    def _busy(self, uuid: str, device: Any) -> float | None:
        """Return the mean of what the driver has noted since the last look: it does so several times a second."""
        kind, count = ctypes.c_int(), ctypes.c_uint(_MAX_SAMPLES)
        samples = (_Sample * _MAX_SAMPLES)()
        since = ctypes.c_ulonglong(self._seen_us.get(uuid, 0))
        status = self._library.nvmlDeviceGetSamples(
            device, _GPU_SAMPLES, since, ctypes.byref(kind), ctypes.byref(count), samples
        )
        if status not in (0, _NOT_FOUND) or not count.value or status == _NOT_FOUND:
            return None
        found = samples[: count.value]
        self._seen_us[uuid] = max(int(each.time_us) for each in found)
        return sum(int(each.value) & 0xFFFFFFFF for each in found) / len(found) / 100
