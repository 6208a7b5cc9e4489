"""Ray as a peer for `benchmarks/service.py`: both ends of a pipe between two environments.

`RayPeer` is our end: it starts this file with the interpreter of Ray's own environment and asks it, line by line, to
start actors and to measure one short window at a time, so that Ray's windows alternate with ours. The far end, started
with `--serve`, is the only code that imports Ray. Ray's daemons are started by its `ray.init` and ended by its
`ray.shutdown`, also when the pipe breaks because the asking process died.

Run without `--serve`, this file does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from harness.windows import count_calls

RAY_VERSION = "2.60.0"
STOP_S = 60.0
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": Ray binds to loopback, as it does on those systems


def make_environment(folder: Path) -> None:
    """An environment with Ray alone, made once; `RAY_VERSION` is pinned and brings no torch."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    probe = subprocess.run([str(python), "-c", "import ray; print(ray.__version__)"], capture_output=True, text=True)
    if probe.stdout.strip() != RAY_VERSION:
        print(f"installing ray {RAY_VERSION} into {folder.name}", file=sys.stderr, flush=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", f"ray=={RAY_VERSION}"], check=True)


class RayPeer:
    """A Ray driver in a process of its own. Each method is one request and waits for its answer."""

    def __init__(self, environment: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        env |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", _LOOPBACK_ONLY: "0"}
        command = [str(environment / "bin" / "python"), "-m", "harness.ray_peer", "--serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        hello = self._read()
        self.pid, self.version = self._process.pid, str(hello["version"])
        self.start_s = float(hello["seconds"])

    def start(self, num_replicas: int, kind: str) -> float:
        """Replace the actors by `num_replicas` of one kind, `def` or `async`; how long that took."""
        return float(self._ask(f"start {num_replicas} {kind}")["seconds"])

    async def measure(self, num_callers: int, seconds: float) -> tuple[int, float]:
        """One window: how many calls were answered, and in what time. Our event loop stays free meanwhile."""
        answer = await asyncio.to_thread(self._ask, f"measure {num_callers} {seconds}")
        return int(answer["calls"]), float(answer["seconds"])

    def stop(self) -> None:
        """End Ray's processes and the peer itself. By force only if it does not go by itself."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the Ray peer ended with code {self._process.wait()}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


class _Driver:
    """The far end: a Ray driver that obeys the lines it reads."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._actors: list[Any] = []
        self._call: Callable[[int], Awaitable[Any]] | None = None

    def _kinds(self) -> dict[str, Any]:
        class Plain:
            def f(self, x: int) -> int:
                return x

        class Async:
            async def f(self, x: int) -> int:
                return x

        return {"def": self._ray.remote(num_cpus=0)(Plain), "async": self._ray.remote(num_cpus=0)(Async)}

    def start(self, num_replicas: int, kind: str) -> dict[str, Any]:
        began = time.perf_counter()
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = [self._kinds()[kind].remote() for _ in range(num_replicas)]
        self._ray.get([actor.f.remote(0) for actor in self._actors])
        turns = itertools.cycle([actor.f.remote for actor in self._actors])

        async def call(x: int) -> Any:
            return await next(turns)(x)

        self._call = call
        return {"seconds": time.perf_counter() - began}

    async def measure(self, num_callers: int, seconds: float) -> dict[str, Any]:
        assert self._call is not None
        calls, took_s = await count_calls(self._call, num_callers=num_callers, seconds=seconds)
        return {"calls": calls, "seconds": took_s}


async def _obey(driver: _Driver, answers: Any) -> None:
    """Answer each line until the pipe ends. One event loop for all windows, as a program would have."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        match line.split():
            case ["start", num_replicas, kind]:
                answer = driver.start(int(num_replicas), kind)
            case ["measure", num_callers, seconds]:
                answer = await driver.measure(int(num_callers), float(seconds))
            case _:
                raise ValueError(f"no such request: {line!r}")
        print(json.dumps(answer), file=answers, flush=True)


def serve() -> None:
    """Start Ray, obey, and end Ray's processes whatever happens. Answers go to stdout, all else to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ray = importlib.import_module("ray")
    folder = tempfile.mkdtemp(prefix="bench-ray-")
    began = time.perf_counter()
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=100_000_000,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        hello = {"version": ray.__version__, "seconds": time.perf_counter() - began}
        print(json.dumps(hello), file=answers, flush=True)
        asyncio.run(_obey(_Driver(ray), answers))
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="be the far end of the pipe (needs Ray)")
    chosen, _ = parser.parse_known_args()
    if chosen.serve:
        serve()
    else:
        print("part of benchmarks/service.py: python benchmarks/service.py --with-ray")


if __name__ == "__main__":
    main()
