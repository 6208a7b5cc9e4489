"""Which GPUs and how many threads a process gets. Plain bookkeeping: no processes, no Monarch."""

from __future__ import annotations

import functools
import glob
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from forge.errors import PlacementError

_log = logging.getLogger("forge.runtime")
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
RENDEZVOUS_VARIABLES = ("FORGE_RENDEZVOUS", "FORGE_SECRET", "FORGE_RUN", "FORGE_INSECURE")
RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *RENDEZVOUS_VARIABLES,
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def visible_gpus(environ: Mapping[str, str], num_present: int) -> tuple[str, ...]:
    """Return the devices that this process may use, as `CUDA_VISIBLE_DEVICES` would name them.

    As CUDA does: unset means all; empty means none; the list ends at the first entry that is no device. A device that
    is listed twice counts once. UUIDs and MIG names pass through as they are.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(str(index) for index in range(num_present))
    found: list[str] = []
    for word in (part.strip() for part in chosen.split(",")):
        if word.isascii() and word.isdecimal():
            if int(word) >= num_present:
                break
            word = str(int(word))
        elif not word.startswith(("GPU-", "MIG-")):
            break
        if word not in found:
            found.append(word)
    return tuple(found)


def count_gpus() -> int:
    """Return how many NVIDIA GPUs this machine shows, without loading CUDA."""
    query = shutil.which("nvidia-smi")
    if query is not None:
        answer = subprocess.run([query, "-L"], capture_output=True, text=True, timeout=60, check=False)
        if answer.returncode == 0:
            return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    return len(glob.glob("/dev/nvidia[0-9]*"))


def num_usable_gpus() -> int:
    """Return how many GPUs this process may use: none where torch, which is not loaded here, was built without CUDA."""
    return 0 if _is_torch_for_cpus() else len(visible_gpus(os.environ, count_gpus()))


@functools.cache
def _is_torch_for_cpus() -> bool:
    return "+cpu" in metadata.version("torch")


def wants_gpus(chosen: bool | None) -> bool:
    """Return whether to use GPUs: as the configuration says, or where there are any."""
    return num_usable_gpus() > 0 if chosen is None else chosen


def count_cpus() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class GpuLease:
    """GPUs of one host that are one holder's until they are given back."""

    holder: str
    devices: tuple[str, ...]


class GpuPool:
    """The GPUs of one host. Each is held by at most one holder; safe to use from any thread."""

    def __init__(self, host: str, devices: Sequence[str]) -> None:
        self.host = host
        self.devices = tuple(dict.fromkeys(devices))
        self._leases: dict[str, GpuLease] = {}
        self._guard = threading.Lock()

    @property
    def free(self) -> tuple[str, ...]:
        with self._guard:
            return tuple(device for device in self.devices if device not in self._leases)

    def take(self, count: int, *, holder: str) -> GpuLease:
        """Lease `count` GPUs, lowest first, or raise with who holds the rest."""
        with self._guard:
            free = [device for device in self.devices if device not in self._leases]
            if count > len(free):
                raise PlacementError(
                    f"{holder} asked for {count} GPU(s) on host {self.host}, where {len(free)} of "
                    f"{len(self.devices)} are free",
                    path="options(procs=, with_gpus=True)",
                    value=count,
                    rule=f"at most {len(free)} GPU(s): free {free or 'none'}; {self._held()}",
                    repair="ask for fewer procs, stop a holder, or make more GPUs visible (CUDA_VISIBLE_DEVICES)",
                )
            lease = GpuLease(holder, tuple(free[:count]))
            self._leases.update(dict.fromkeys(lease.devices, lease))
            return lease

    def release(self, lease: GpuLease) -> None:
        """Return a lease; giving it back twice does nothing."""
        with self._guard:
            for device in lease.devices:
                if self._leases.get(device) is lease:
                    del self._leases[device]

    def _held(self) -> str:
        if not self._leases:
            return "none is held"
        held: dict[str, list[str]] = {}
        for device, lease in self._leases.items():
            held.setdefault(lease.holder, []).append(device)
        return "; ".join(f"{holder} holds {', '.join(devices)}" for holder, devices in sorted(held.items()))


class ThreadLedger:
    """Counts the CPU threads that were handed out on one host, to warn once when they exceed its cores."""

    def __init__(self, host: str, num_cpus: int) -> None:
        self.host, self.num_cpus, self.num_claimed = host, num_cpus, 0
        self._warned = False

    def claim(self, num_procs: int, num_threads: int | None) -> int:
        """Return the number of threads for each of `num_procs` processes: what was asked for, or one."""
        chosen = 1 if num_threads is None else num_threads
        self.num_claimed += num_procs * chosen
        if num_threads is not None and self.num_claimed > self.num_cpus and not self._warned:
            self._warned = True
            _log.warning(
                "host %s: %d threads were asked for on %d cores; over-subscription can cost 10x to 20x",
                self.host,
                self.num_claimed,
                self.num_cpus,
            )
        return chosen

    def release(self, num_procs: int, num_threads: int) -> None:
        self.num_claimed -= num_procs * num_threads


def rank_environment(*, rank: int, local_rank: int, world_size: int, local_world_size: int) -> dict[str, str]:
    """Return the variables that `torch.distributed` reads, less the rendezvous server."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
    }
