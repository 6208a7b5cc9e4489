"""Two plain processes of one run, without Monarch: each obeys the benchmark over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from harness.throughput import Moved

ANSWER_S = 300.0


class Peer:
    """A process of the run. `ask` calls a method of the `Worker` there."""

    def __init__(self, environment: dict[str, str], device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_obey, args=(theirs, environment, device), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"{method} was not answered within {ANSWER_S:.0f} s")
        is_good, answer = self._pipe.recv()
        if not is_good:
            raise RuntimeError(f"{method} failed in process {self._process.pid}:\n{answer}")
        return answer

    def stop(self) -> None:
        self._pipe.close()  # which it sees
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _obey(pipe: Connection, environment: dict[str, str], device: str) -> None:
    os.environ.update(environment)
    worker = Worker(device)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(worker, method)(*args))
        except Exception:  # noqa: BLE001 - the benchmark's to hear
            answer = (False, traceback.format_exc())
        pipe.send(answer)


class Worker:
    """Holds weights on a device, publishes and fetches them, and makes plain copies for comparison."""

    def __init__(self, device: str) -> None:
        import torch

        torch.set_num_threads(1)
        self.device, self.weights = device, {}
        self._torch = torch

    def hold(self, shapes: dict[str, tuple[int, ...]]) -> int:
        """The weights, as many bytes beside them, and as many in pinned memory."""
        from harness.state_dicts import Block

        torch = self._torch
        self.block = Block(shapes, torch.bfloat16, device=self.device)
        self.other = Block(shapes, torch.bfloat16, device=self.device)
        is_cuda = self.device != "cpu"
        self.pinned = torch.ones(self.block.flat.numel(), dtype=torch.bfloat16, pin_memory=is_cuda)
        return self.block.num_bytes

    def _timed(self, work: Any) -> Moved:
        self._wait()
        cpu, began = time.process_time(), time.perf_counter()
        answer = work()
        self._wait()
        took_s = time.perf_counter() - began
        return Moved(
            self.block.num_bytes, took_s, time.process_time() - cpu, answer if isinstance(answer, float) else 0.0
        )

    def _wait(self) -> None:
        if self.device != "cpu":
            self._torch.cuda.synchronize()

    # the peers

    def copy_whole(self) -> Moved:
        return self._timed(lambda: self.other.flat.copy_(self.block.flat))

    def copy_each(self) -> Moved:
        def work() -> None:
            for name, tensor in self.block.tensors.items():
                self.other.tensors[name].copy_(tensor)

        return self._timed(work)

    def to_host(self) -> Moved:
        return self._timed(lambda: self.pinned.copy_(self.block.flat, non_blocking=True))

    def from_host(self) -> Moved:
        return self._timed(lambda: self.other.flat.copy_(self.pinned, non_blocking=True))

    # the store

    def _weights(self, key: str, on: str) -> Any:
        import forge.store as ts

        if key not in self.weights:
            self.weights[key] = ts.Weights(key, rank=0, world_size=1, on=on)  # type: ignore[arg-type]
        return self.weights[key]

    def publish(self, key: str, on: str, version: int) -> Moved:
        """Publish a version whose every element is its number; `extra` is the time of the snapshot."""
        self.block.flat.fill_(float(version % 256))
        weights = self._weights(key, on)
        return self._timed(lambda: weights.publish(self.block.tensors, version=version).result(ANSWER_S).snapshot_s)

    def fetch(self, key: str, on: str, verify: str) -> Moved:
        weights = self._weights(key, on)
        versions = []
        moved = self._timed(lambda: versions.append(weights.fetch_blocking(self.block.tensors, verify=verify).version))
        self._check(self.block.tensors, versions[0])
        return moved

    def view(self, key: str, on: str) -> Moved:
        weights = self._weights(key, on)
        fetched = []
        moved = self._timed(lambda: fetched.append(weights.fetch_blocking()))
        self._check(fetched[0].tensors, fetched[0].version)
        return moved

    def _check(self, tensors: dict[str, Any], version: int) -> None:
        for name, tensor in tensors.items():
            ends = (float(tensor.view(-1)[0]), float(tensor.view(-1)[-1]))
            if ends != (float(version % 256),) * 2:
                raise AssertionError(f"{name} of version {version} has {ends}")

    def facts(self) -> dict[str, Any]:
        torch = self._torch
        if self.device == "cpu":
            return {"torch": torch.__version__, "device": "cpu"}
        properties = torch.cuda.get_device_properties(0)
        found = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": properties.name}
        return found | {"gpu_memory_gb": round(properties.total_memory / 1e9)}
