"""Device memory that other processes on the host can open: CUDA IPC.

The memory is allocated with CUDA itself and not with torch's allocator: a handle then stands for exactly one segment,
and nothing is left in /dev/shm. A handle is opened once for each process and segment, and stays open while the segment
is recycled from version to version.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import re
import threading
import weakref
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from forge.errors import StoreError
from forge.store.records import HEADER, Holder, SegmentRecord
from forge.store.segments import STAMP_SIZE, Segment, pack_stamp, unpack_stamp, when_unmapped

_log = logging.getLogger("forge.store")
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_numbers = itertools.count(1)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


@cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded."""
    torch.cuda.init()
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.search(r"(/\S*libcudart[^/\s]*\.so[^/\s]*)$", line)
        if found:
            library = ctypes.CDLL(found[1])
            library.cudaGetErrorString.restype = ctypes.c_char_p
            library.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]
            return library
    raise StoreError("torch has loaded no CUDA runtime", rule="a CUDA build of torch", repair='Weights(on="host")')


def _check(code: int, what: str) -> None:
    if code:
        text = _runtime().cudaGetErrorString(code).decode()
        _runtime().cudaGetLastError()
        raise StoreError(f"CUDA could not {what}: {text}", value=code)


class _Array:
    """Device memory at an address, as torch takes it. Every tensor that looks at it keeps this object, and with it
    `base`, alive."""

    def __init__(self, address: int, size: int, *, base: Tensor | None = None) -> None:
        self.base = base
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor(address: int, size: int, device: int, end: str) -> Tensor:
    """Return the memory as a tensor. When nothing uses it any more, the runtime's function `end` frees it."""
    owner = _Array(address, size)
    weakref.finalize(owner, _give_back, end, address, device).atexit = False
    with torch.cuda.device(device):
        tensor: Tensor = torch.as_tensor(owner, device=f"cuda:{device}")
    return tensor


def _give_back(end: str, address: int, device: int) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        getattr(_runtime(), end)(ctypes.c_void_p(address))


def alias(memory: Tensor) -> tuple[Tensor, object]:
    """Return the same memory as a separate tensor, and an object that lives for as long as anything uses that."""
    owner = _Array(memory.data_ptr(), memory.numel(), base=memory)
    with torch.cuda.device(memory.device):
        return torch.as_tensor(owner, device=memory.device), owner


def uuid_of(device: int) -> str:
    """Return a GPU's UUID: the same in every process, however that process numbers its GPUs."""
    return str(torch.cuda.get_device_properties(device).uuid)


class DeviceSegment:
    """A segment in the memory of a GPU of this process."""

    def __init__(self, run: str, key: str, size: int, *, device: int) -> None:
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", key)[-60:]
        self.name = f"forge-{run}-{plain}-{os.getpid()}-cuda-{next(_numbers)}"
        self.size, self.device = size, device
        address = ctypes.c_void_p()
        library = _runtime()
        with torch.cuda.device(device):
            code = library.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size))
            if code == 2:  # out of memory: torch may hold some that it does not use
                library.cudaGetLastError()
                torch.cuda.empty_cache()
                code = library.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size))
            if code == 2:
                library.cudaGetLastError()
                free, total = torch.cuda.mem_get_info(device)
                raise StoreError(
                    f"GPU {device} has no room for a segment of {size / 2**30:.2f} GiB",
                    path=key,
                    value=size,
                    rule=f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB are free",
                    repair='keep fewer versions (keep=1), or keep them in shared memory: Weights(on="host")',
                )
            _check(code, "allocate device memory")
            self.memory = _tensor(int(address.value or 0), size, device, "cudaFree")
            handle = _Handle()
            _check(library.cudaIpcGetMemHandle(ctypes.byref(handle), address), "share device memory")
        self.handle = ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES)
        header = torch.frombuffer(bytearray(pack_stamp(0)), dtype=torch.uint8)
        self.memory[:STAMP_SIZE].copy_(header)
        self._stamp = self.memory[STAMP_SIZE - 8 : STAMP_SIZE].view(torch.int64)

    def set_stamp(self, stamp: int) -> None:
        self._stamp.fill_(stamp)  # a kernel of its own, and so in order with the copies around it, without waiting
        if stamp:
            torch.cuda.current_stream(self.device).synchronize()  # before anybody is told of it

    @property
    def stamp(self) -> int:
        return read_stamp(self.memory)

    @property
    def token(self) -> bytes:
        """The IPC handle and the GPU's UUID, by which other processes open the memory."""
        return self.handle + uuid_of(self.device).encode()

    def close(self) -> None:
        """Let go of the memory. It is freed when nothing in this process looks at it any more."""
        self.memory = self._stamp = torch.empty(0, dtype=torch.int64)


def read_stamp(memory: Tensor) -> int:
    return unpack_stamp(memory[:STAMP_SIZE].cpu().numpy().tobytes())


class OpenedSegments:
    """The device segments of other processes that this one has open. Those that are let go of are closed when nothing
    looks at them any more."""

    def __init__(self) -> None:
        self._opened: dict[str, Tensor] = {}
        self._guard = threading.Lock()

    def open(self, holder: Holder, record: SegmentRecord) -> Tensor:
        """Return the memory of a segment. StoreError where its GPU cannot be reached from here."""
        with self._guard:
            known = self._opened.get(holder.segment)
            if known is None:
                known = self._opened[holder.segment] = _open(holder, record.size)
            return known

    def drop(self, segment: str) -> None:
        with self._guard:
            self._opened.pop(segment, None)

    def close(self) -> None:
        with self._guard:
            self._opened.clear()


def _open(holder: Holder, size: int) -> Tensor:
    if not torch.cuda.is_available():
        raise StoreError("this process sees no GPU", rule="a GPU to open device memory with")
    handle, uuid = holder.token[:_HANDLE_BYTES], holder.token[_HANDLE_BYTES:].decode()
    devices = [index for index in range(torch.cuda.device_count()) if uuid_of(index) == uuid]
    if not devices:
        raise StoreError(f"GPU {uuid} is not visible to this process", rule="CUDA_VISIBLE_DEVICES shows it")
    address = ctypes.c_void_p()
    value = _Handle.from_buffer_copy(handle)
    with torch.cuda.device(devices[0]):
        code = _runtime().cudaIpcOpenMemHandle(ctypes.byref(address), value, _LAZY_PEER_ACCESS)
        _check(code, f"open the device memory of process {holder.pid}")
    return _tensor(int(address.value or 0), max(size, HEADER), devices[0], "cudaIpcCloseMemHandle")


_pinned: set[int] = set()
_pinning = threading.Lock()


def pin(segment: Segment) -> None:
    """Let the GPU read and write a mapped segment by itself, which is several times as fast. Where that is refused,
    copies go on as before."""
    address = segment.flat().data_ptr()
    with _pinning:
        if address in _pinned:
            return
        flag = 0 if segment.is_writable else 8  # cudaHostRegisterReadOnly
        if int(torch.cuda.cudart().cudaHostRegister(address, segment.size, flag)):
            _runtime().cudaGetLastError()
            _log.info("segment %s could not be pinned; copies between it and the GPU are slower", segment.name)
            return
        _pinned.add(address)
    when_unmapped(segment, partial(_unpin, address))


def _unpin(address: int) -> None:
    with _pinning:
        _pinned.discard(address)
    torch.cuda.cudart().cudaHostUnregister(address)


def to_host(memory: Tensor, segment: Segment, start: int) -> None:
    """Copy device memory to a segment, from `start` on, beside whatever else the GPU does."""
    pin(segment)
    side = torch.cuda.Stream(memory.device)
    with torch.cuda.stream(side):
        segment.flat()[start : start + memory.numel()].copy_(memory, non_blocking=True)
    side.synchronize()
