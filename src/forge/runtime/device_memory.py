"""Memory of a GPU that comes and goes behind addresses that stay.

A recorded CUDA graph has the addresses of its tensors in it, so memory that torch frees and takes again makes it
worthless. Here a range of addresses is reserved once, and physical memory is put behind it and taken away again: what
was recorded keeps working, and between the two the memory belongs to what asks the driver for it, torch's
allocator and other processes included. These are calls of the driver's own library, made through ctypes.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from forge.errors import ForgeError

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY: Final = "libcuda.so.1"

_GIB: Final = 1 << 30
_OUT_OF_MEMORY: Final = 2
_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0
_MAPS_MEMORY: Final = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Kind(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_SIZE, _ADDRESS, _FLAGS, _HANDLE = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_ulonglong, ctypes.c_ulonglong
_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (ctypes.POINTER(_SIZE), ctypes.POINTER(_SIZE)),
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_SIZE), ctypes.POINTER(_Kind), ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_ADDRESS), _SIZE, _SIZE, _ADDRESS, _FLAGS),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemCreate": (ctypes.POINTER(_HANDLE), _SIZE, ctypes.POINTER(_Kind), _FLAGS),
    "cuMemRelease": (_HANDLE,),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, _HANDLE, _FLAGS),
    "cuMemSetAccess": (_ADDRESS, _SIZE, ctypes.POINTER(_Access), _SIZE),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class DeviceMemoryError(ForgeError, RuntimeError):
    """The driver refused a call, or memory was used that is not there. `code` is the driver's answer, or 0."""

    def __init__(self, message: str, *, code: int = 0, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.code = code


class OutOfDeviceMemory(DeviceMemoryError, MemoryError):
    """A GPU has less memory free than was asked for."""


class CudaDriver:
    """The driver's calls for one GPU, in the context that torch uses there. Every answer is checked and named.

    Args:
        library: the driver's library, or one with the same functions.
        device: the GPU's number, as torch counts.
    """

    def __init__(self, library: ctypes.CDLL, device: int) -> None:
        self.device = device
        self._functions = {name: getattr(library, name) for name in _CALLS}
        for name, arguments in _CALLS.items():
            self._functions[name].argtypes, self._functions[name].restype = arguments, ctypes.c_int
        self._call("cuInit", 0)
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        maps = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(maps), _MAPS_MEMORY, number)
        self.maps_memory = bool(maps.value)
        self._kind = _Kind(type=_PINNED, location=_Location(_ON_DEVICE, number.value))
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code:
            known = ctypes.c_char_p()
            self._functions["cuGetErrorName"](code, ctypes.byref(known))
            error = known.value.decode() if known.value else "an error without a name"
            raise DeviceMemoryError(
                f"the GPU's driver refused {name}: {error}",
                code=code,
                path=f"GPU {self.device}",
                value=f"{name} = {code} ({error})",
                rule="the driver maps memory for a working GPU",
                repair="look for an earlier error of the GPU in the log, or in `nvidia-smi -q`",
            )

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Enter the context on this thread: one that has not called torch yet has none."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def granularity(self) -> int:
        """Return what sizes are multiples of."""
        found = _SIZE()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(self._kind), _MINIMUM)
        return found.value

    def memory(self) -> tuple[int, int]:
        """Return what is free, and what there is, in bytes."""
        free, total = _SIZE(), _SIZE()
        with self._current():
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def synchronize(self) -> None:
        """Wait until the GPU has done all that it was given."""
        with self._current():
            self._call("cuCtxSynchronize")

    def reserve(self, num_bytes: int) -> int:
        """Return a range of addresses with nothing behind it."""
        address = _ADDRESS()
        with self._current():
            self._call("cuMemAddressReserve", ctypes.byref(address), num_bytes, 0, 0, 0)
        return address.value

    def free(self, address: int, num_bytes: int) -> None:
        """Let a range of addresses go."""
        with self._current():
            self._call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int) -> int:
        """Put memory behind a range. Returns its handle; if anything fails, all is as before."""
        handle, access = _HANDLE(), _Access(self._kind.location, _READ_WRITE)
        with self._current():
            self._call("cuMemCreate", ctypes.byref(handle), num_bytes, ctypes.byref(self._kind), 0)
            with contextlib.ExitStack() as undo:
                undo.callback(self._call, "cuMemRelease", handle)
                self._call("cuMemMap", address, num_bytes, 0, handle, 0)
                undo.callback(self._call, "cuMemUnmap", address, num_bytes)
                self._call("cuMemSetAccess", address, num_bytes, ctypes.byref(access), 1)
                undo.pop_all()
        return handle.value

    def unmap(self, address: int, num_bytes: int) -> None:
        """Take the memory behind a range away, when nothing that runs uses it any more; `release` frees it."""
        with self._current():
            self._call("cuCtxSynchronize")
            self._call("cuMemUnmap", address, num_bytes)

    def release(self, handle: int) -> None:
        """Free memory that is behind no range."""
        with self._current():
            self._call("cuMemRelease", handle)


def open_driver(device: int, *, library: str = LIBRARY) -> CudaDriver | None:
    """Return the driver's calls for a GPU; None where its library lacks them, or the GPU cannot: do without."""
    try:
        driver = CudaDriver(ctypes.CDLL(library), device)
    except (OSError, AttributeError):
        return None
    return driver if driver.maps_memory else None


@dataclass(frozen=True, slots=True)
class Purpose:
    """What memory is for, told when there is too little.

    Attributes:
        what: in words, such as "the cache for keys and values".
        path: the key of a configuration that decides how much it is; `repair` what to do.
    """

    what: str
    path: str
    repair: str


@dataclass(slots=True)
class _Range:
    driver: CudaDriver
    num_bytes: int
    address: int
    handle: int | None = None
    is_closed: bool = field(default=False)

    def empty(self) -> None:
        if self.handle is not None:
            self.driver.unmap(self.address, self.num_bytes)  # if that is refused, the memory is still there
            handle, self.handle = self.handle, None
            self.driver.release(handle)

    def close(self) -> None:
        if not self.is_closed:
            self.empty()
            self.is_closed = True
            self.driver.free(self.address, self.num_bytes)


_dropped: Final[deque[_Range]] = deque()


def release_dropped() -> None:
    """Free the ranges that are no longer in use.

    Python may find them at any moment, also while a graph is recorded, when the driver must not be asked to wait.
    """
    while True:
        try:
            dropped = _dropped.pop()
        except IndexError:  # there is none left, or another thread was faster
            return
        dropped.close()


class DeviceMemory:
    """A range of addresses on a GPU, with memory behind it between `restore` and `release`. For one thread at a time.

    A tensor of it keeps it alive. When neither is in use any more, the range is freed as soon as any other is made,
    taken or given back, or by `release_dropped`; `close` does it at once. Nothing may be computed with such a tensor
    while there is no memory: the GPU would report an error from which no process recovers. What memory holds is lost
    with `release`, and what `restore` brings holds anything.

    Args:
        driver: the GPU.
        num_bytes: how much; rounded up to what the driver maps at once.
        purpose: what for.
        spare: frees what this process could do without, and is called when there is too little; for torch, that is
            `torch.cuda.empty_cache`.
    """

    def __init__(
        self, driver: CudaDriver, num_bytes: int, *, purpose: Purpose, spare: Callable[[], object] | None = None
    ) -> None:
        release_dropped()
        step = driver.granularity()
        self.num_bytes = max(step, -(-num_bytes // step) * step)
        self.purpose, self._spare = purpose, spare
        self._range = _Range(driver, self.num_bytes, driver.reserve(self.num_bytes))
        self._end = weakref.finalize(self, _dropped.append, self._range)
        self._end.atexit = False  # a process that ends frees all by itself, and its driver may be gone by then

    @property
    def address(self) -> int:
        return self._range.address

    @property
    def is_held(self) -> bool:
        """Whether there is memory behind the addresses."""
        return self._range.handle is not None

    def restore(self) -> None:
        """Put memory behind the addresses, if there is none. `OutOfDeviceMemory` leaves all as it was."""
        if self.is_held:
            return
        if self._range.is_closed:
            raise self._unusable("the range was closed")
        release_dropped()
        driver = self._range.driver
        if self._spare is not None and driver.memory()[0] < self.num_bytes:
            self._spare()
        try:
            self._range.handle = driver.map(self.address, self.num_bytes)
        except DeviceMemoryError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            free, total = driver.memory()
            raise OutOfDeviceMemory(
                f"GPU {driver.device} has no room for {self.purpose.what}",
                code=error.code,
                path=self.purpose.path,
                value=f"{self.num_bytes / _GIB:.4g} GiB",
                rule=f"at most what is free: {free / _GIB:.4g} GiB of {total / _GIB:.4g} now",
                repair=self.purpose.repair,
            ) from error

    def release(self) -> None:
        """Free the physical memory once the GPU has finished its queued work. The addresses stay reserved."""
        self._range.empty()
        release_dropped()

    def close(self) -> None:
        """Let memory and addresses go. Nothing may use a tensor of it afterwards."""
        self._end.detach()
        self._range.close()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": data, "version": 3, "strides": None}

    def tensor(self) -> Tensor:
        """Return all of it as uint8 [num_bytes], always at the same address. Made while there is memory."""
        import torch

        if not self.is_held:
            raise self._unusable("there is no memory behind the addresses")
        return torch.as_tensor(self, device=torch.device("cuda", self._range.driver.device))

    def _unusable(self, why: str) -> DeviceMemoryError:
        return DeviceMemoryError(
            f"memory for {self.purpose.what} is not available: {why}",
            path=self.purpose.path,
            value=f"{self.num_bytes / _GIB:.4g} GiB at {self.address:#x}",
            rule="memory is used between `restore` and `release`",
            repair="call `take` before, and nothing after `close`",
        )
