"""Who takes part in the benchmark of the store, and with how much."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.state_dicts import Shapes, num_elements_of, transformer
from harness.throughput import Moved, at_once


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to measure."""

    num_bytes: int
    dtype: torch.dtype = torch.float32
    num_rounds: int
    num_cold: int
    num_small: int
    num_reads: int
    keep: int = 2

    @property
    def shapes(self) -> Shapes:
        return transformer(self.num_bytes // self.dtype.itemsize)

    @property
    def size(self) -> int:
        return num_elements_of(self.shapes) * self.dtype.itemsize

    @property
    def label(self) -> str:
        return f"{len(self.shapes)} tensors, {self.size / 1e9:.2f} GB {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Cast:
    """The processes: ranks of a trainer, of which mostly the first alone publishes, and readers."""

    plan: Plan
    trainers: Any
    readers: Any
    versions: Counter[str] = field(default_factory=Counter)
    """How many versions of each key were published."""

    async def hold(self, name: str, shapes: Shapes, dtype: torch.dtype, *, trainers: int, readers: int) -> None:
        await self.trainers.hold.call(name, shapes, dtype, trainers)
        await self.readers.hold.call(name, shapes, dtype, readers)

    async def forget(self, name: str) -> None:
        await asyncio.gather(self.trainers.forget.call(name), self.readers.forget.call(name))

    async def pids(self) -> list[int]:
        found = [*(await self.trainers.pid.call()).items(), *(await self.readers.pid.call()).items()]
        return [os.getpid(), *(pid for _, pid in found)]


class Publisher:
    """Publishes version after version of one key from the trainer's first rank."""

    def __init__(self, cast: Cast, key: str, *, name: str = "whole", active: int = 1, **options: Any) -> None:
        self.cast, self.key, self.name, self.active, self.options = cast, key, name, active, options

    async def __call__(self) -> Moved:
        version = next_version(self.cast, self.key)
        return await at_once(self.cast.trainers.publish, self.name, self.active, self.key, version, self.options)

    async def copy(self) -> Moved:
        return await at_once(self.cast.trainers.copy, self.name, self.active)

    async def retire(self) -> None:
        await self.cast.trainers.retire.call(self.key, 0, self.active)


def next_version(cast: Cast, key: str) -> int:
    cast.versions[key] += 1
    return cast.versions[key] - 1
