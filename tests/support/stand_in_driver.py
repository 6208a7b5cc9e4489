"""A GPU driver for machines without a GPU: `stand_in_libcuda.c`, compiled, with this machine's memory behind it."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from forge.runtime.device_memory import CudaDriver, DeviceMemory, Purpose, open_driver

STEP = 2 << 20
PURPOSE = Purpose("a test", "test.size", "ask for less")


@functools.cache
def _compiled() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="forge-stand-in-driver-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source = Path(__file__).with_name("stand_in_libcuda.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", folder / "driver.so", source], check=True, timeout=600)
    return folder / "driver.so"


class StandIn:
    """One "GPU" of its own: each has a copy of the library, and so a state of its own."""

    def __init__(self, folder: Path, *, capacity: int = 32 * STEP) -> None:
        self.path = str(shutil.copy(_compiled(), folder / "libcuda.so"))
        self._library = ctypes.CDLL(self.path)
        self._library.stand_in_used.restype = ctypes.c_size_t
        self._library.stand_in_set_capacity.argtypes = (ctypes.c_size_t,)
        self._library.stand_in_fail.argtypes = (ctypes.c_char_p, ctypes.c_int)
        self._library.stand_in_set_capacity(capacity)

    def driver(self) -> CudaDriver:
        found = open_driver(0, library=self.path)
        assert found is not None
        return found

    @property
    def used(self) -> int:
        return int(self._library.stand_in_used())

    @property
    def num_waits(self) -> int:
        """How often somebody waited for the device."""
        return int(self._library.stand_in_waits())

    @property
    def depth(self) -> int:
        """Contexts that were made current and not put away again."""
        return int(self._library.stand_in_depth())

    def resize(self, capacity: int) -> None:
        self._library.stand_in_set_capacity(capacity)

    def fail(self, name: str, code: int) -> None:
        """Have a function answer with a code; 0 to work again."""
        self._library.stand_in_fail(name.encode(), code)

    def map_nothing(self) -> None:
        """Be a GPU that cannot map memory."""
        self._library.stand_in_set_maps(0)


class HostMemory(DeviceMemory):
    """The same on a stand-in, whose memory torch takes for a CPU's."""

    def tensor(self) -> Tensor:
        assert self.is_held
        numbers = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        numbers.owner = self  # type: ignore[attr-defined]
        return torch.frombuffer(numbers, dtype=torch.uint8)


def is_there(address: int) -> bool:
    """Whether there is memory at an address: the system refuses to read from where there is none."""
    libc = ctypes.CDLL(None, use_errno=True)
    reading, writing = os.pipe()
    try:
        return int(libc.write(writing, ctypes.c_void_p(address), ctypes.c_size_t(1))) == 1
    finally:
        os.close(reading)
        os.close(writing)
