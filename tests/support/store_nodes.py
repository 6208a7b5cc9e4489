"""Processes of a run on the hosts of a test network, without actors: one publishes, the others read.

Each is this program. It answers a line of its input, a name and arguments as JSON, with one line: a value as JSON. The
first process of a run, the root, is started with the address at which it listens; the others with the variables that
it gives out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from networks import SUPPORT, HostProcess, NetworkHost

TENSORS = 8
WIDTH = 1024


class Node:
    """A process on a host, as a test drives it."""

    def __init__(self, host: NetworkHost, log: Path, *, bind: str = "", env: Mapping[str, str] | None = None) -> None:
        paths = os.pathsep.join(dict.fromkeys([str(SUPPORT), *filter(None, sys.path)]))
        variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(env or {})}
        self.host, self._log = host, log
        self.process: HostProcess = host.start([sys.executable, __file__, bind], env=variables, stderr=log)

    @property
    def process_id(self) -> int:
        """Return its process id as its own host sees it."""
        return int(self.run("pid"))

    def start(self, name: str, *args: Any, **options: Any) -> None:
        """Have it do something; `finish` waits for the answer."""
        self.process.write_line(json.dumps([name, args, options]))

    def finish(self) -> Any:
        while (line := self.process.read_line()) and not line.startswith("{"):
            pass
        answer = json.loads(line) if line else {"error": f"it ended\n{self.log()}"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def run(self, name: str, *args: Any, **options: Any) -> Any:
        self.start(name, *args, **options)
        return self.finish()

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")


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

    def setup(self, **options: Any) -> None:
        import forge.store as ts

        asyncio.run(ts.setup(**options))

    def publish(self, version: int, num_bytes: int, keep: int = 2) -> str:
        async def publish() -> str:
            published = await self.weights(rank=0, world_size=1, keep=keep).publish(tensors, version=version)
            return str(published.digest)

        tensors = contents(version, num_bytes)
        return asyncio.run(publish())

    def fetch(
        self, num_bytes: int, *, part: tuple[str, int, int] | None = None, views: bool = False, **options: Any
    ) -> dict[str, Any]:
        """Fetch the newest version, or a part of it, and compare it with what was published."""
        import torch

        into = None if views else self._places(num_bytes, part)
        began_cpu_s = cpu_s()
        fetched = self.weights().fetch_blocking(into, **options)
        spent_s = cpu_s() - began_cpu_s
        wanted = contents(fetched.version, num_bytes) if options.get("verify") != "off" else {}
        found = fetched.tensors if into is None else self._memory
        is_right = all(torch.equal(found[name], cut(tensor, part)) for name, tensor in wanted.items())
        self._kept = [fetched.tensors] if views else []
        return {
            "version": fetched.version,
            "digest": fetched.digest,
            "is_right": is_right,
            "num_received": fetched.num_received,
            "relay": None if fetched.relay is None else fetched.relay.pid,
            "seconds": fetched.seconds,
            "cpu_s": spent_s,
        }

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

    def held(self) -> dict[str, int]:
        """What this process holds: segments that it has open, mappings of them, connections, and threads that relay."""
        import gc
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
        print(json.dumps({"value": open_run(bind)}), flush=True)
    for line in sys.stdin:
        name, args, options = json.loads(line)
        try:
            call: Callable[..., Any] = getattr(commands, name)
            print(json.dumps({"value": call(*args, **options)}), flush=True)
        except Exception:  # noqa: BLE001 - raised in the test
            print(json.dumps({"error": traceback.format_exc()}), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
