"""Processes of a run on the hosts of a test network, without actors: one publishes, the others read.

    with Nodes(folder) as nodes:
        root = nodes.start(network.hosts[0], bind=network.hosts[0].address)
        reader = nodes.start(network.hosts[1], env=root.finish())
        root.run("publish", 1, 1 << 20)
        reader.run("fetch", 1 << 20)

A node answers a line of its input, a name and arguments as JSON, with one line: a value as JSON. The first node of a
run, the root, is started with the address at which it listens, and answers with the variables that make others members.

All nodes are forks of one process, which has imported what they need and enters the namespaces of a host for each: so
they start at once, and share the memory that the imports take. They end with their hosts.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from networks import SUPPORT, NetworkHost

TENSORS = 8
WIDTH = 1024
_NAMESPACES = ("net", "uts", "ipc", "mnt", "pid")


class Nodes:
    """Starts nodes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._num_started = folder, 0
        paths = os.pathsep.join(dict.fromkeys([str(SUPPORT), *filter(None, sys.path)]))
        env = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=env | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, host: NetworkHost, *, bind: str = "", env: Mapping[str, str] | None = None) -> Node:
        """Start a node on a host."""
        self._num_started += 1
        base = self._folder / f"{host.name}-{self._num_started}"
        os.mkfifo(base.with_suffix(".in"))
        os.mkfifo(base.with_suffix(".out"))
        request = {"host": host.namespaces.pid, "base": str(base), "bind": bind, "env": dict(env or {})}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Node(host, base, int(self._process.stdout.readline()))

    def logs(self) -> str:
        """Return what all nodes have logged lately."""
        return "\n".join(f"== {log.name}\n{log.read_text()[-4000:]}" for log in sorted(self._folder.glob("*.log")))

    def close(self) -> None:
        """End the process that starts them."""
        self._process.communicate(timeout=600)


class Node:
    """A process on a host, as a test drives it."""

    def __init__(self, host: NetworkHost, base: Path, pid: int) -> None:
        self.host, self.pid = host, pid
        self._process, self._log = psutil.Process(pid), base.with_suffix(".log")
        self._input = open(base.with_suffix(".in"), "w", encoding="utf-8")  # noqa: SIM115
        self._output = open(base.with_suffix(".out"), encoding="utf-8")  # noqa: SIM115

    def start(self, name: str, *args: Any, **options: Any) -> None:
        """Have it do something; `finish` waits for the answer."""
        self._input.write(json.dumps([name, args, options]) + "\n")
        self._input.flush()

    def finish(self) -> Any:
        line = self._output.readline()
        answer = json.loads(line) if line else {"error": f"it ended\n{self.log()}"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def run(self, name: str, *args: Any, **options: Any) -> Any:
        self.start(name, *args, **options)
        return self.finish()

    @property
    def own_pid(self) -> int:
        """Its process id as its own host sees it."""
        return int(self.run("pid"))

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def is_running(self) -> bool:
        return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        assert self._output.read() == ""  # the kernel closes it with the process


def serve_starts() -> None:
    """Start a node for each line of standard input, and print its process id."""
    import forge.store.weights  # noqa: F401 - before the forks

    gc.freeze()  # what is not looked at stays shared
    for line in sys.stdin:
        request = json.loads(line)
        between = os.fork()
        if between == 0:
            _fork_into(request)
        if os.waitpid(between, 0)[1] != 0:
            raise RuntimeError(f"no node was started: {request}")


def _fork_into(request: Mapping[str, Any]) -> None:
    """Enter a host's namespaces, and be a node there: in a child, since a process keeps its PID namespace."""
    log = os.open(f"{request['base']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    namespaces = [os.open(f"/proc/{request['host']}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    for namespace in namespaces:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter a namespace of process {request['host']}")
        os.close(namespace)
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        os._exit(0)
    for number, path, flags in ((0, f"{request['base']}.in", os.O_RDONLY), (1, f"{request['base']}.out", os.O_WRONLY)):
        os.dup2(os.open(path, flags), number)
    os.dup2(log, 2)
    os.environ.update(request["env"])
    serve(request["bind"])
    os._exit(0)


def open_run(address: str) -> dict[str, str]:
    """Be the root of a run that listens here; return what makes others members of it."""
    from forge.runtime.control import control
    from forge.runtime.rendezvous import open_environment, open_server, secret_environment

    control().start(open_server(address, insecure=True)).result()
    return {**open_environment(is_remote=True), **secret_environment()}


class Commands:
    """What a node does."""

    def __init__(self) -> None:
        self._weights: dict[str, Any] = {}
        self._into: dict[str, Any] = {}
        self._kept: list[Any] = []

    def weights(self, name: str = "policy", **options: Any) -> Any:
        import forge.store as ts

        return self._weights.setdefault(name, ts.Weights(name, **options))

    def distribute(self, distribution: str) -> None:
        """Do what `ts.setup(distribution=)` does, without the imports that volumes need."""
        from forge.store.client import client

        client().line.call("distribution", distribution)

    def publish(self, version: int, num_bytes: int, *, keep: int = 2, seed: int | None = None) -> str:
        """Publish the contents that belong to a version, or to another number; return the digest."""

        async def publish() -> str:
            published = await self.weights(rank=0, world_size=1, keep=keep).publish(tensors, version=version)
            return str(published.digest)

        tensors = contents(version if seed is None else seed, num_bytes)
        return asyncio.run(publish())

    def rewind(self, to: int) -> list[int]:
        retired: list[int] = asyncio.run(self.weights().rewind(to=to))
        return retired

    def fetch(
        self,
        num_bytes: int,
        *,
        part: tuple[str, int, int] | None = None,
        views: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Fetch the newest version, or a part of it, and compare it with what was published."""
        import torch

        into = None if views else self._places(num_bytes, part)
        fetched = self.weights().fetch_blocking(into, **options)
        found = fetched.tensors if into is None else self._memory
        wanted = contents(fetched.version if seed is None else seed, num_bytes)
        self._kept = [fetched.tensors] if views else []
        return {
            "version": fetched.version,
            "digest": fetched.digest,
            "is_right": all(torch.equal(found[name], cut(tensor, part)) for name, tensor in wanted.items()),
            "num_received": fetched.num_received,
            "relay": None if fetched.relay is None else fetched.relay.pid,
        }

    def time_fetch(self, num_bytes: int, digest: str) -> dict[str, float]:
        """Fetch the newest version into memory that was used before; return when that began and ended. The clock is
        the machine's."""
        into = self._places(num_bytes, None)
        began = time.monotonic()
        fetched = self.weights().fetch_blocking(into)
        ended = time.monotonic()
        assert fetched.digest == digest
        return {"began": began, "ended": ended, "num_received": fetched.num_received}

    def _places(self, num_bytes: int, part: tuple[str, int, int] | None) -> dict[str, Any]:
        import torch

        import forge.store as ts

        key = f"{num_bytes} {part}"
        if key not in self._into:
            rows = num_bytes // (TENSORS * WIDTH * 4)
            self._into[key] = {f"t{n}": cut(torch.zeros(rows, WIDTH), part).clone() for n in range(TENSORS)}
        self._memory = self._into[key]
        if part is None:
            return self._memory
        kind, index, count = part
        where = ts.Chunk(dim=int(kind == "columns"), index=index, count=count)
        return {name: ts.At(tensor, where) for name, tensor in self._memory.items()}

    def pid(self) -> int:
        return os.getpid()

    def let_go(self) -> None:
        self._kept.clear()

    def retire(self, keep: int) -> list[int]:
        self._kept.clear()
        retired: list[int] = asyncio.run(self.weights().retire(keep=keep))
        return retired

    def spoil(self) -> int:
        """Flip a bit of every tensor in what this process relays; return how many copies there are."""
        from forge.store.client import client

        copies = list(client().data_plane.relayed._copies.values())
        for copy in copies:
            for at in range(4096, copy.segment.size, copy.segment.size // TENSORS // 2):
                copy.segment.map[at] ^= 1
        return len(copies)

    def throttle(self, pause_s: float) -> None:
        """Pause before each chunk that this process gets from another host."""
        from forge.store.relay_copies import RelayCopy

        read: Any = RelayCopy.read

        def paused(copy: Any, *args: Any) -> Any:
            time.sleep(pause_s)
            return read(copy, *args)

        RelayCopy.read = paused  # type: ignore[method-assign]

    def held(self) -> dict[str, int]:
        """What this process holds: segments that it has open, mappings of them, connections, and threads that relay."""
        import threading

        gc.collect()
        files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_open(fd)]
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        return {
            "segments": len({file for file in files if "memfd:forge-" in file}),
            "mapped": maps.count("memfd:forge-"),
            "sockets": sum(file.startswith("socket:") for file in files),
            "relaying": sum(thread.name == "forge-relay" for thread in threading.enumerate()),
        }

    def is_serving(self) -> bool:
        """Return whether other processes can connect to this one."""
        from forge.store.client import client

        return client().data_plane._server is not None

    def cpu(self) -> float:
        """CPU seconds that this process has used."""
        return cpu_s()


def fd_is_open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def contents(version: int, num_bytes: int) -> dict[str, Any]:
    """Return the tensors of a version: the same in every process."""
    import torch

    rows = num_bytes // (TENSORS * WIDTH * 4)
    made = {}
    for number in range(TENSORS):
        base = torch.arange(rows * WIDTH, dtype=torch.int32).mul_(2654435 + 2 * (version * TENSORS + number))
        made[f"t{number}"] = base.bitwise_and_(0x3FFFFFFF).view(torch.float32).view(rows, WIDTH)
    return made


def cut(tensor: Any, part: tuple[str, int, int] | None) -> Any:
    if part is None:
        return tensor
    kind, index, count = part
    return tensor.chunk(count, dim=int(kind == "columns"))[index]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(bind: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    commands = Commands()
    if bind:
        answer({"value": open_run(bind)})
    for line in os.fdopen(0, encoding="utf-8"):
        name, args, options = json.loads(line)
        try:
            call: Callable[..., Any] = getattr(commands, name)
            answer({"value": call(*args, **options)})
        except Exception:  # noqa: BLE001 - raised in the test
            answer({"error": traceback.format_exc()})


def answer(value: Mapping[str, Any]) -> None:
    os.write(1, (json.dumps(value) + "\n").encode())


if __name__ == "__main__":
    serve_starts()
