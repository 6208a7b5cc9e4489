"""The ranks of one trainer: their process groups, their device, and small messages between them."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from forge.errors import LayoutError

_TIMEOUT = timedelta(minutes=30)


class Ranks:
    """This process's place among the ranks, from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Two groups are made: the default one for tensors (NCCL on GPUs, gloo on CPUs), and `control`, always gloo, for
    metrics, objects and checkpoints, which must not wait in a GPU's queue. Engines of one rank share the default group
    of their process; it ends with the last of them.
    """

    _num_sharing: ClassVar[int] = 0

    def __init__(self, *, use_gpu: bool | None = None) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = _choose_device(use_gpu)
        was_collecting = gc.isenabled()
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        is_made = dist.is_initialized()
        is_shared = is_made and Ranks._num_sharing > 0 and self.size == 1 and dist.get_backend() == backend
        if is_made and not is_shared:
            raise LayoutError(
                "this process already belongs to a torch.distributed group",
                path="torch.distributed",
                value=f"rank {dist.get_rank()} of {dist.get_world_size()}",
                rule="one engine in a process, or several of one rank each on the same device",
                repair="close the existing engine, or run this one in its own actor",
            )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            # Gradients are summed as the same tensors in the same order, so that a run repeats itself bit for bit.
            torch.autograd.set_multithreading_enabled(False)
        place: dict[str, Any] = {"rank": self.rank, "world_size": self.size, "timeout": _TIMEOUT}
        if self.size == 1:
            place["store"] = dist.HashStore()  # no other process connects
        if not is_shared:
            dist.init_process_group(backend, **place)
        Ranks._num_sharing += self.size == 1
        self._is_open = True
        self.control = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        if was_collecting:
            gc.enable()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def any(self, value: bool) -> bool:
        """Whether some rank's value is true, on every rank."""
        if self.size == 1:
            return value
        found = torch.tensor([int(value)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.control)
        return bool(found.item())

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    def close(self) -> None:
        """Leave the groups. The next engine in this process can make new ones."""
        if not self._is_open:
            return
        self._is_open = False
        Ranks._num_sharing -= self.size == 1
        if Ranks._num_sharing == 0 and dist.is_initialized():
            dist.destroy_process_group()


def _choose_device(use_gpu: bool | None) -> torch.device:
    if use_gpu is None:
        use_gpu = torch.cuda.is_available()
    if not use_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LayoutError(
            "a GPU is required, and torch sees none",
            path="distributed.with_gpus",
            value=True,
            rule="a machine with a GPU and torch's CUDA build",
            repair="set distributed.with_gpus=false, or run `forge doctor` to see what is missing",
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local if local < torch.cuda.device_count() else 0)
