"""Real ranks with real DTensors for the layout tests: four gloo processes that serve one case after the other.

Run as a program it is one rank; `Ranks` in the test process starts four of them, once, and hands each case to all.
"""

from __future__ import annotations

import os
import pickle
import selectors
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
import torch.distributed as dist

from forge.store.sharding import TensorShards
from forge.store.tensors import dtype_of, local, shards_of

WORLD = 4
LIMIT_S = 600
PlacementCode = tuple[str, int, int]
"""("R", 0, 0), ("S", dim, 0) or ("SS", dim, split factor)."""
MeshRanks = tuple[Any, ...]
"""The ranks of a mesh, nested as its shape is."""

_NOT_IN_GLOO = frozenset(map(dtype_of, ("float8_e4m3fn", "float8_e5m2", "uint16")))


@dataclass(frozen=True)
class Part:
    """What one rank says about one of its tensors."""

    held: TensorShards
    shape: tuple[int, ...]
    data: bytes
    """The local tensor, row-major."""
    full: bytes | None = None
    """`full_tensor()`; None outside of the mesh."""


class Ranks:
    """The test process's end of the four ranks."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._logs = [folder / f"rank{rank}.log" for rank in range(WORLD)]
        self._ended = ""
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(WORLD):
            with self._logs[rank].open("wb") as log:
                command = [sys.executable, __file__, str(rank), str(folder / "meeting")]
                self._processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
                    )
                )

    def call(self, name: str, *args: object) -> list[Any]:
        """Run one case on all ranks and return what each of them answered.

        A rank that raises may leave the others waiting for it in a collective, so then all of them end.
        """
        assert not self._ended, f"the ranks have ended: {self._ended}"
        for process in self._processes:
            assert process.stdin is not None
            pickle.dump((name, args), process.stdin)
            process.stdin.flush()
        answers: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < WORLD:
                ready = selector.select(timeout=LIMIT_S)
                if not ready:
                    self._end(f"no answer to {name}{args} within {LIMIT_S} s from all but {sorted(answers)}")
                for key, _ in ready:
                    answers[key.data] = self._answer(key.data)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(WORLD)]

    def _answer(self, rank: int) -> Any:
        stream = self._processes[rank].stdout
        assert stream is not None
        try:
            ok, value = pickle.load(stream)
        except EOFError:
            ok, value = False, f"it ended early:\n{self._logs[rank].read_text()[-2000:]}"
        if not ok:
            self._end(f"rank {rank} raised:\n{value}")
        return value

    def _end(self, why: str) -> NoReturn:
        self._ended = why
        for process in self._processes:
            process.kill()
        raise AssertionError(why)

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=600)
            finally:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


def full_value(shape: Sequence[int], dtype: str) -> torch.Tensor:
    """The same tensor in every process, with bytes of every kind and few that are equal in neighbours."""
    kind = dtype_of(dtype)
    count = torch.Size(shape).numel() * kind.itemsize
    data = (torch.arange(count) * 167 + torch.arange(count) // 251) % (2 if kind is torch.bool else 251)
    return data.to(torch.uint8).view(kind).reshape(tuple(shape)) if count else torch.empty(tuple(shape), dtype=kind)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def placements_of(codes: Sequence[PlacementCode]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    make = {"R": lambda dim, factor: Replicate(), "S": lambda dim, factor: Shard(dim)}
    make["SS"] = lambda dim, factor: _StridedShard(dim, split_factor=factor)
    return [make[kind](dim, factor) for kind, dim, factor in codes]


class _Rank:
    """What a rank can be asked to do. Every rank is asked the same, in the same order."""

    def __init__(self) -> None:
        self._meshes: dict[MeshRanks, Any] = {}

    def distribute(
        self, shape: Sequence[int], dtype: str, mesh_ranks: MeshRanks, codes: Sequence[PlacementCode]
    ) -> Part:
        """Distribute the known tensor. Strided shards are made by redistribution, whose reading is torch's own."""
        from torch.distributed.tensor import Replicate, distribute_tensor

        mesh = self._mesh(mesh_ranks)
        placements = placements_of(codes)
        direct = [Replicate()] * mesh.ndim if any(kind == "SS" for kind, _, _ in codes) else placements
        tensor = distribute_tensor(full_value(shape, dtype), mesh, direct, src_data_rank=None)
        if direct is not placements and mesh.get_coordinate() is not None:
            tensor = tensor.redistribute(placements=placements)
        return self._part(tensor)

    def flatten(self, shape: Sequence[int], dim: int) -> Part:
        """A view of a sharded tensor, which torch expresses with a strided shard that is no order of splitting."""
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = self._mesh(tuple(range(WORLD)))
        return self._part(distribute_tensor(full_value(shape, "float32"), mesh, [Shard(dim)]).flatten())

    def ordered(self, shape: Sequence[int], order: tuple[int, int]) -> Part:
        """Rows split by both mesh dimensions in a given order, which the DTensor carries beside its placements."""
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
        from torch.distributed.tensor._redistribute import redistribute_local_tensor

        whole = distribute_tensor(full_value(shape, "float32"), self._mesh(((0, 1), (2, 3))), [Replicate()] * 2)
        spec = DTensorSpec(
            whole.device_mesh,
            (Shard(0), Shard(0)),
            tensor_meta=whole._spec.tensor_meta,
            shard_order=(ShardOrderEntry(0, order),),
        )
        mine = redistribute_local_tensor(whole.to_local(), whole._spec, spec)
        return self._part(DTensor(mine, spec, requires_grad=False))

    def fsdp_over_tp(self, mesh_ranks: MeshRanks, width: int, dtype: str, shard_dim: int) -> dict[str, Part]:
        """Two linear layers, column- and row-parallel, under FSDP2; parameters in the order of their names."""
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 4)).to(dtype_of(dtype))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(full_value(parameter.shape, dtype))
        mesh = self._mesh(mesh_ranks)
        names = mesh.mesh_dim_names
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(
            model,
            mesh=mesh["dp"] if len(names) == 2 else mesh["rep", "dp"],
            shard_placement_fn=lambda parameter: Shard(shard_dim) if parameter.ndim > shard_dim else Shard(0),
        )
        return {name: self._part(parameter) for name, parameter in model.named_parameters()}

    def _mesh(self, ranks: MeshRanks) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        if ranks not in self._meshes:
            table = torch.tensor(ranks)
            self._meshes[ranks] = DeviceMesh("cpu", table, mesh_dim_names=("rep", "dp", "tp")[3 - table.ndim :])
        return self._meshes[ranks]

    def _part(self, tensor: Any) -> Part:
        mine = local(tensor)
        inside = tensor.device_mesh.get_coordinate() is not None
        return Part(shards_of(tensor), tuple(mine.shape), raw(mine), raw(self._full(tensor)) if inside else None)

    def _full(self, tensor: Any) -> torch.Tensor:
        """`full_tensor()`; what gloo cannot carry travels as another type of the same size, placed alike."""
        from torch.distributed.tensor import DTensor

        if tensor.dtype not in _NOT_IN_GLOO:
            return tensor.full_tensor()
        twin = DTensor.from_local(
            local(tensor).view({1: torch.uint8, 2: torch.float16}[tensor.itemsize]),
            tensor.device_mesh,
            tensor.placements,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        return twin.full_tensor()


def _serve(rank: int, meeting: str, requests: BinaryIO, answers: BinaryIO) -> None:
    import traceback

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    me = _Rank()
    while True:
        try:
            name, args = pickle.load(requests)
        except EOFError:
            break
        try:
            answer = (True, getattr(me, name)(*args))
        except Exception:  # noqa: BLE001  (whatever it was, the test shows it)
            answer = (False, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Records are pickled under this module's own name, for the test process to find them.
    import dtensor_ranks

    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    dtensor_ranks._serve(int(sys.argv[1]), sys.argv[2], sys.stdin.buffer, output)
