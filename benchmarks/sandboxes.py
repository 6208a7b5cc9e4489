"""What does a command cost in a long-lived sandbox, and how many sandboxes does one process hold?

Peers, measured in the same run: a plain shell without isolation (`bash -c`), and a new sandbox for every program
(`Sandbox.run`). Memory is the proportional set size of every process that belongs to the sandboxes, shells included.

    python benchmarks/sandboxes.py                     # 300 sandboxes at once
    python benchmarks/sandboxes.py --num 20 --rounds 5 # a smoke run
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil

from forge.runtime.sandbox import Box, open_sandbox
from harness.report import machine, table


def median_ms(run: Callable[[], Any], rounds: int) -> float:
    """Return the median time of a blocking call."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def memory_mb(processes: list[psutil.Process]) -> float:
    """Return what processes hold, with shared pages divided among those that share them."""
    found = 0
    for process in processes:
        with open(f"/proc/{process.pid}/smaps_rollup", encoding="ascii") as file:
            found += next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return found / 1024


async def measure(isolation: str, *, num: int, rounds: int) -> dict[str, float]:
    """Return milliseconds of calls, and what many sandboxes at once cost."""
    backend: Any = open_sandbox(isolation)
    loop = asyncio.get_running_loop()
    found: dict[str, float] = {
        "plain_ms": median_ms(lambda: subprocess.run(["bash", "-c", "true"], check=True), rounds),
        "one_shot_ms": median_ms(lambda: backend.run("pass"), rounds),
    }
    async with Box(backend) as box:

        async def median(call: Callable[[], Any]) -> float:
            times = []
            for _ in range(rounds):
                began = loop.time()
                await call()
                times.append(loop.time() - began)
            return statistics.median(times) * 1e3

        async def open_and_close() -> None:
            async with Box(backend):
                pass

        await box.python("1")
        found |= {"bash_ms": await median(lambda: box.bash("true")), "python_ms": await median(lambda: box.python("1"))}
        found["open_close_ms"] = await median(open_and_close)
    boxes = [Box(backend) for _ in range(num)]
    used, began, descriptors = time.process_time(), loop.time(), len(os.listdir("/proc/self/fd"))
    await asyncio.gather(*(box.__aenter__() for box in boxes))
    found["open_all_s"], found["owner_cpu_ms"] = loop.time() - began, (time.process_time() - used) / num * 1e3
    await asyncio.gather(*(box.bash("true") for box in boxes))
    began = loop.time()
    await asyncio.gather(*(box.bash("true") for box in boxes))
    found["bash_all_s"] = loop.time() - began
    below = psutil.Process().children(recursive=True)
    found["memory_mb"] = memory_mb(below) / num
    found["descriptors"] = (len(os.listdir("/proc/self/fd")) - descriptors) / num
    began = loop.time()
    await asyncio.gather(*(box.close() for box in boxes))
    found["close_all_s"] = loop.time() - began
    assert psutil.wait_procs(below, timeout=60)[1] == []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isolation", default="auto")
    parser.add_argument("--num", type=int, default=300, help="sandboxes at once")
    parser.add_argument("--rounds", type=int, default=30, help="calls of which the median counts")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    found = asyncio.run(measure(args.isolation, num=args.num, rounds=args.rounds))
    one_shot = found["one_shot_ms"]
    rows = [
        ["`box.python`", f"{found['python_ms']:.2f}", f"{one_shot / found['python_ms']:.0f}×"],
        ["`box.bash`", f"{found['bash_ms']:.2f}", f"{one_shot / found['bash_ms']:.0f}×"],
        ["plain `bash -c`, no isolation", f"{found['plain_ms']:.2f}", f"{one_shot / found['plain_ms']:.0f}×"],
        ["open and close a sandbox", f"{found['open_close_ms']:.1f}", f"{one_shot / found['open_close_ms']:.1f}×"],
        ["a new sandbox for a program", f"{one_shot:.1f}", "1×"],
    ]
    print(table(["one at a time", "median ms", "faster than a new sandbox"], rows), end="\n\n")
    many = [
        ["open all, s", f"{found['open_all_s']:.2f}"],
        ["one command in each, s", f"{found['bash_all_s']:.2f}"],
        ["close all, s", f"{found['close_all_s']:.2f}"],
        ["CPU of the owner to open one, ms", f"{found['owner_cpu_ms']:.2f}"],
        ["memory of each with its shell, MB", f"{found['memory_mb']:.1f}"],
        ["file descriptors of each in the owner", f"{found['descriptors']:.1f}"],
    ]
    print(table([f"{args.num} sandboxes at once", ""], many))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine(), "options": vars(args), **found}, file, indent=1)


if __name__ == "__main__":
    main()
