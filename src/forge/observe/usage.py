"""What this process uses of its machine, with the processes that it has started: CPU time, memory, GPUs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_MAX_CHILDREN: Final = 256
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_OWN: Final = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A GPU that a process computes with, and how busy it is.

    Attributes:
        name: `gpu0`, with the number that the driver gives it.
        used: bytes of its memory that are in use, by whatever process.
        busy: the part of the time since the last look in which it computed; None where the driver does not tell.
    """

    name: str
    used: int
    busy: float | None


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process uses, with its children that are not processes of the run themselves.

    Attributes:
        cpu_s: CPU time since its start.
        memory: bytes that are its own. Pages that a fork shares with others as long as nobody writes them are among
            these.
        shared: bytes of shared memory that it has mapped, such as the store's.
        gpu_memory: bytes of GPUs that PyTorch holds for it; None without a GPU.
        devices: its GPUs.
    """

    cpu_s: float
    memory: int
    shared: int
    gpu_memory: int | None = None
    devices: tuple[DeviceUse, ...] = ()


def measure_use(*, except_for: Collection[int] = ()) -> ProcessUse | None:
    """Return what this process uses. `except_for` are children that are counted elsewhere. None without /proc.

    It takes about a millisecond of CPU time in a process of 60 threads, and some 80 microseconds for each child.
    """
    own = _memory_of(_OWN)
    if own is None:
        return None
    times = os.times()
    cpu_s = time.process_time() + times.children_user + times.children_system
    memory, shared = own
    for pid in _descendants(except_for):
        child = Path(f"/proc/{pid}")
        found, spent_s = _memory_of(child), _cpu_of(child)
        if found is not None and spent_s is not None:
            memory, shared, cpu_s = memory + found[0], shared + found[1], cpu_s + spent_s
    gpu_memory, devices = _gpus()
    return ProcessUse(cpu_s, memory, shared, gpu_memory, devices)


def _memory_of(process: Path) -> tuple[int, int] | None:
    """Return bytes of memory of its own, and of shared memory."""
    text = _read(process / "status")
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        own, shared = (1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    except (KeyError, ValueError, IndexError):  # it has ended
        return None
    return own, shared


def _cpu_of(process: Path) -> float | None:
    """Return the CPU time of a process and of the children that it has waited for."""
    fields = _read(process / "stat").rpartition(")")[2].split()
    try:
        return sum(map(int, fields[11:15])) * _TICK_S
    except ValueError:
        return None


def _descendants(except_for: Collection[int]) -> Iterator[int]:
    waiting, num_found = [os.getpid()], 0
    while waiting and num_found < _MAX_CHILDREN:
        for child in _children(waiting.pop()):
            if child not in except_for:
                num_found += 1
                waiting.append(child)
                yield child


def _children(pid: int) -> list[int]:
    folder = f"/proc/{pid}/task"
    try:
        threads = os.listdir(folder)
    except OSError:
        return []
    return [int(child) for thread in threads for child in _read(Path(f"{folder}/{thread}/children")).split()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # it has ended, or belongs to another user
        return ""


# ---- GPUs ------------------------------------------------------------------------------------------------------------


_look: Callable[[str], tuple[int, int, float | None] | None] | None = None


def _gpus() -> tuple[int | None, tuple[DeviceUse, ...]]:
    """Return what PyTorch holds of this process's GPUs, and these GPUs; nothing where it has not started CUDA."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None, ()
    places = range(cuda.device_count())
    held = [cuda.memory_reserved(place) for place in places]
    mine = [place for place in places if held[place]] or [cuda.current_device()]
    return sum(held), tuple(_device(cuda, place) for place in mine)


def _device(cuda: Any, place: int) -> DeviceUse:
    global _look
    if _look is None:
        from forge.observe.nvml import open_look

        _look = open_look()
    found = _look(str(cuda.get_device_properties(place).uuid))
    if found is None:
        free, total = cuda.mem_get_info(place)
        return DeviceUse(f"gpu{place}", total - free, None)
    number, used, busy = found
    return DeviceUse(f"gpu{number}", used, busy)
