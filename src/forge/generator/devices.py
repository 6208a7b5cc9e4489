"""The GPUs of a generator's processes."""

from __future__ import annotations

import os


def all_devices(rank: int, world_size: int) -> tuple[str, ...]:
    """Return the GPUs of all ranks, in order: rank 0's engine uses them all."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if world_size == 1:
        return tuple(own.split(",")) if own else ()
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, world_size, is_master=rank == 0)
    store.set(f"devices/{rank}", own or "-")
    found = [store.get(f"devices/{each}").decode() for each in range(world_size)]
    store.set(f"read/{rank}", "yes")
    if rank == 0:  # the others' answers come from here
        store.wait([f"read/{each}" for each in range(world_size)])
    named = (device for devices in found if devices != "-" for device in devices.split(","))
    return tuple(dict.fromkeys(named))  # beside a trainer every rank sees all of them
