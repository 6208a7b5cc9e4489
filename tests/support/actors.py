"""Actors that the tests spawn. Kept apart and light: every rank process imports this module."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from forge import ForgeActor, endpoint
from forge.service import Batch


class TaskFailed(Exception):
    """A user's own exception, with a constructor that takes one argument."""

    def __init__(self, code: int) -> None:
        super().__init__(f"failed with {code}")
        self.code = code


class NotPicklable(Exception):
    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


FAILURE = TaskFailed(99)


class Worker(ForgeActor):
    """Does what a test tells it to."""

    def __init__(self, tag: str = "") -> None:
        self.tag = tag
        self.is_ready = False
        self.log: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

    @endpoint
    async def setup(self) -> None:
        self.is_ready = True

    @endpoint(retry=True)
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def describe(self) -> dict[str, Any]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "MARK")
        names += ("FORGE_AMX", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
        return {
            "tag": self.tag,
            "is_ready": self.is_ready,
            "replica": os.environ.get("FORGE_REPLICA"),
            "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
            **{name: os.environ.get(name) for name in names},
        }

    @endpoint
    def add(self, left: int, *, right: int = 1) -> int:
        return left + right

    @endpoint(retry=True, concurrent=True)
    async def nap(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return os.getpid()

    @endpoint(concurrent=True)
    async def nap_once(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return os.getpid()

    @endpoint(concurrent=True)
    async def hold(self, key: str) -> int:
        """Answer when somebody opens the gate `key`."""
        self.log.append(f"hold {key}")
        try:
            await self.gates.setdefault(key, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.log.append(f"cancelled {key}")
            raise
        return os.getpid()

    @endpoint
    async def hold_serial(self, key: str) -> int:
        return await type(self).hold.spec.method(self, key)  # type: ignore[no-any-return, attr-defined]

    @endpoint(concurrent=True)
    async def open(self, key: str) -> None:
        self.gates.setdefault(key, asyncio.Event()).set()

    @endpoint(concurrent=True)
    async def read_log(self) -> list[str]:
        return self.log

    @endpoint
    async def fail(self, code: int) -> None:
        raise TaskFailed(code)

    @endpoint
    async def fail_oddly(self, how: str) -> Any:
        if how == "not picklable":
            raise NotPicklable(reason="no way home")
        if how == "exit":
            raise SystemExit(3)
        if how == "stop iteration":
            raise StopIteration("done")
        return lambda: asyncio.get_running_loop()  # an answer that can travel only by value

    @endpoint
    def fail_in_thread(self) -> None:
        next(iter(()))  # StopIteration, which no future can hold

    @endpoint
    async def fail_again(self) -> None:
        """Raise the same object each time."""
        raise FAILURE

    @endpoint
    async def call_own(self, left: int) -> int:
        """An endpoint may call another one of its actor as a method."""
        return self.add(left) + 1

    @endpoint
    async def start_children(self, pipe: str) -> None:
        """Start a process of its own, as engines and sandboxes do; it says its pid through the pipe."""
        import subprocess

        for _ in range(2):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            with open(pipe, "w") as words:
                words.write(f"{child.pid}\n")

    @endpoint
    async def cancel_everything(self) -> None:
        """Break the actor, not its process."""
        for task in asyncio.all_tasks():
            task.cancel()

    @endpoint
    async def change_rank(self, value: str | None) -> None:
        """What some libraries do."""
        if value is None:
            os.environ.pop("RANK", None)
        else:
            os.environ["RANK"] = value

    @endpoint
    async def fail_on(self, pid: int) -> int:
        """Fail in one process only."""
        if os.getpid() == pid:
            raise TaskFailed(1)
        return os.getpid()

    @endpoint
    async def block_loop(self, seconds: float) -> None:
        time.sleep(seconds)  # that is the fault

    @endpoint
    def block_thread(self, path: str) -> int:
        """Compute until a file appears; the event loop stays free."""
        while not Path(path).exists():
            time.sleep(0.005)
        return os.getpid()

    @endpoint
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint(retry=True)
    async def die_in(self, folder: str) -> int:
        """Die in the first process that is asked, answer in the next."""
        try:
            Path(folder, "dead").touch(exist_ok=False)
        except FileExistsError:
            return os.getpid()
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    @endpoint
    def all_reduce(self) -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        try:
            total = torch.tensor([float(dist.get_rank() + 1)])
            dist.all_reduce(total)
            return total.item()
        finally:
            dist.destroy_process_group()


class Scorer(ForgeActor):
    """A batched endpoint, as reward models have."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @endpoint(batch=Batch(size=4, wait_s=0.02))
    async def double(self, items: list[int]) -> list[Any]:
        self.sizes.append(len(items))
        return [TaskFailed(item) if item < 0 else 2 * item for item in items]

    @endpoint(batch=2)
    async def short(self, items: list[int]) -> list[int]:
        return items[:1]

    @endpoint
    async def read_sizes(self) -> list[int]:
        return self.sizes


class Caller(ForgeActor):
    """Calls a service from a process of its own."""

    def __init__(self, service: Any) -> None:
        self.service = service

    @endpoint
    async def call(self, times: int) -> list[int]:
        return [await self.service.pid.route() for _ in range(times)]

    @endpoint(concurrent=True)
    async def nap(self, seconds: float) -> int:
        return await self.service.nap.route(seconds)  # type: ignore[no-any-return]

    @endpoint(concurrent=True)
    async def hold(self, key: str) -> int:
        return await self.service.hold.route(key)  # type: ignore[no-any-return]

    @endpoint
    async def same_service(self, other: Any) -> bool:
        return other is self.service


class Patient(ForgeActor):
    """Answers when something is written into a named pipe. As a replica that joins later, its index decides whether it
    starts: `refused` cannot."""

    def __init__(self, refused: int | None = None) -> None:
        self.refused = refused

    @endpoint
    async def setup(self) -> None:
        if os.environ["FORGE_REPLICA_JOINED"] == "1" and os.environ["FORGE_REPLICA"] == str(self.refused):
            raise TaskFailed(7)

    @endpoint(retry=True, concurrent=True)
    async def pid(self) -> int:
        return os.getpid()

    @endpoint(concurrent=True)
    async def hold(self, pipe: str) -> int:
        await asyncio.to_thread(Path(f"{pipe}-reached").write_text, "reached")
        await asyncio.to_thread(Path(pipe).read_text)
        return os.getpid()


class Holder(ForgeActor):
    """Three of them on one machine each start a service of their own."""

    @endpoint
    async def setup(self) -> None:
        self.service = await Worker.options(num_replicas=2).as_service()

    @endpoint
    async def believed_and_real(self) -> tuple[list[int], list[int]]:
        metrics = await self.service.get_metrics()
        return [replica.pids[0] for replica in metrics.replicas], await self.service.pid.fanout()


class Owner(ForgeActor):
    """Starts a service inside an actor."""

    def __init__(self, heartbeat_timeout_s: float = 15) -> None:
        self.heartbeats = {"heartbeat_s": 0.2, "heartbeat_timeout_s": heartbeat_timeout_s}

    @endpoint
    async def setup(self) -> None:
        self.service = await Worker.options(num_replicas=2, **self.heartbeats).as_service()

    @endpoint
    async def call(self) -> list[int]:
        return await self.service.pid.fanout()  # type: ignore[no-any-return]

    @endpoint
    async def handle(self) -> Any:
        return self.service

    @endpoint
    async def close(self) -> None:
        await self.service.shutdown()


class FailsInInit(ForgeActor):
    def __init__(self) -> None:
        raise TaskFailed(7)


class FailsInSetup(ForgeActor):
    @endpoint
    async def setup(self) -> None:
        raise TaskFailed(8)


class DiesInSetup(ForgeActor):
    @endpoint
    async def setup(self) -> None:
        os._exit(9)


class HangsInInit(ForgeActor):
    def __init__(self) -> None:
        time.sleep(1000)


class DiesWhenRestarted(ForgeActor):
    """The first generation works; every later one dies in its setup."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @endpoint
    async def setup(self) -> None:
        mark = Path(self.folder, f"started-{os.environ['FORGE_REPLICA']}")
        if mark.exists():
            raise TaskFailed(5)
        mark.touch()

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


class DiesSoon(ForgeActor):
    """Comes up every time, dies a moment later, never serves."""

    @endpoint
    async def setup(self) -> None:
        self.end = asyncio.create_task(self._end())

    async def _end(self) -> None:
        await asyncio.sleep(2.0)  # its start must be known to others before
        os.kill(os.getpid(), signal.SIGKILL)


class SlowToStart(ForgeActor):
    """Says that its setup has begun, then takes its time."""

    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    async def setup(self) -> None:
        with open(self.path, "w") as pipe:
            pipe.write(f"{os.getpid()}\n")
        await asyncio.sleep(1000)


class Extended(Worker):
    """Extends an endpoint of its base."""

    @endpoint
    async def setup(self) -> None:
        await super().setup()
        self.tag += "+"


class Cleaner(ForgeActor):
    """Leaves a mark when it is stopped in order."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def __cleanup__(self, error: Exception | None) -> None:
        Path(self.path).write_text("clean")

    @endpoint
    async def ping(self) -> None: ...


class GpuWorker(ForgeActor):
    """Computes on the GPU that it was given."""

    @endpoint
    def count(self) -> int:
        import torch

        return torch.cuda.device_count()

    @endpoint(retry=True)
    def multiply(self, size: int) -> float:
        """The sum of a product of two matrices of ones: size cubed."""
        import torch

        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        ones = torch.ones(size, size, device=device, dtype=torch.float64)
        return float((ones @ ones).sum())
