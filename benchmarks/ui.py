"""How soon does `forge ui` show a run with 100,000 steps and 1,000,000 rollouts, and what does it hold in memory?

The run is written by the library's own writers into a temporary folder, or one that is kept (`--folder`). `forge ui`
runs as a process, chromium looks at its pages, and a client with its token asks what the page asks. The peer is
TensorBoard, as it comes, on the same scalars in its own files: it shows no rollouts, so only the metrics are compared.
Files are in the page cache. Each side is started anew in every round; medians are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from aiohttp import ClientError, ClientSession

from harness.report import machine, table
from harness.ui_data import NEEDLE, Size, make_data

from devtools import Page, open_browser  # isort: skip  - of the tests, whose folder harness.ui_data adds

FIRST_PAINT_GOAL_S = 1.0
MEMORY_GOAL_MB = 700
LIMIT_S = 900
RUN = "large"
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
ADDRESS = re.compile(r"at (http://127\.0\.0\.1:\d+)/\S*token=(\S+)")
Figures = dict[str, float]


class Server:
    """A server that runs as a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, token: str) -> None:
        self.process, self.url = process, url
        self.headers = {"Authorization": f"Bearer {token}"}
        self.token = token

    def memory_mb(self) -> float:
        """What it and its children occupy."""
        own = psutil.Process(self.process.pid)
        return sum(each.memory_info().rss for each in (own, *own.children(recursive=True))) / 1e6

    def cpu_s(self) -> float:
        """CPU time of it and its children so far."""
        own = psutil.Process(self.process.pid)
        return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))

    def peak_mb(self) -> float:
        """The most that it has occupied."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1e3  # type: ignore[index]


@asynccontextmanager
async def started(*command: str, address: Callable[[str], tuple[str, str] | None]) -> AsyncIterator[Server]:
    """Run a server until the block ends, from when it has printed its address."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    drain: asyncio.Task[bytes] | None = None
    try:
        async for line in process.stdout:
            found = address(line.decode())
            if found is not None:
                break
        else:
            raise RuntimeError(f"{command[:4]} ended without an address")
        drain = asyncio.create_task(process.stdout.read())
        yield Server(process, *found)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        if drain is not None:
            await drain


def our_address(line: str) -> tuple[str, str] | None:
    found = ADDRESS.search(line)
    return None if found is None else (found[1], found[2])


def their_address(line: str) -> tuple[str, str] | None:
    found = re.search(r"at (http://\S+?)/? \(Press", line)
    return None if found is None else (found[1], "")


async def get(http: ClientSession, server: Server, path: str, **parameters: object) -> Any:
    query = {name: str(value) for name, value in parameters.items()}
    async with http.get(f"{server.url}{path}", params=query, headers=server.headers) as answer:
        answer.raise_for_status()
        return await answer.json(content_type=None)


async def painted(page: Page) -> float:
    """Return after how many seconds the browser painted something of its page first."""
    return float(await page.until(PAINT)) / 1e3


async def timed(work: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = await work()
    return time.perf_counter() - began, found


# ---- The metrics, on both sides --------------------------------------------------------------------------------------


async def metrics_of_ours(folder: Path, size: Size, browser: Path) -> Figures:
    """Start `forge ui` and wait until all steps are in the curves; start it again and look at them at once."""
    command = (sys.executable, "-m", "forge.cli", "ui", str(folder / "runs"), "--no-open")
    began = time.perf_counter()
    async with started(*command, address=our_address) as server, ClientSession() as http:
        found = {"listening_s": time.perf_counter() - began}
        page_of = http.get(f"{server.url}/api/events", params={"run": RUN}, headers=server.headers)
        async with page_of:  # what an open page does
            await _until_read(http, server, size)
        found |= {"all_steps_s": time.perf_counter() - began, "memory_mb": server.memory_mb(), "cpu_s": server.cpu_s()}
    async with started(*command, address=our_address) as server, open_browser(browser) as page:
        await page.open(f"{server.url}/?token={server.token}")
        await page.until("document.querySelector('[data-run]')")
        found["list_paint_s"] = await painted(page)
        await page.open(f"{server.url}/run/{RUN}", width=1400)
        await page.until("document.querySelectorAll('.chart .line').length > 3")
        found["curves_s"] = await page.ask("performance.now()") / 1e3
        found["paint_s"] = await painted(page)
    return found


async def _until_read(http: ClientSession, server: Server, size: Size) -> None:
    while True:
        rows = await get(http, server, "/api/metrics", run=RUN, points=2)
        if not rows["isPartial"] and rows["numRows"] == size.num_steps and rows["steps"][-1] == size.num_steps:
            return
        await asyncio.sleep(0.05)


async def metrics_of_tensorboard(folder: Path, size: Size, browser: Path) -> Figures:
    """Start TensorBoard and wait until it serves the last step; start it again and look at its page at once."""
    module = "from tensorboard.main import run_main; run_main()"
    options = ("--logdir", str(folder / "events"), "--port", "0", "--host", "127.0.0.1")
    command = (sys.executable, "-c", module, *options)
    began = time.perf_counter()
    async with started(*command, address=their_address) as server, ClientSession() as http:
        found = {"listening_s": time.perf_counter() - began}
        await _until_served(http, server, size)
        found |= {"all_steps_s": time.perf_counter() - began, "memory_mb": server.memory_mb(), "cpu_s": server.cpu_s()}
    async with started(*command, address=their_address) as server, open_browser(browser) as page:
        await page.open(f"{server.url}/#timeseries", width=1400)
        found["paint_s"] = await painted(page)
    return found


async def _until_served(http: ClientSession, server: Server, size: Size) -> None:
    path, query = "/data/plugin/scalars/scalars", {"run": ".", "tag": "train/grad_norm"}
    while True:
        try:
            steps = [step for _, step, _ in await get(http, server, path, **query)]
        except ClientError:
            steps = []
        if steps and steps[-1] == size.num_steps:
            return
        await asyncio.sleep(0.05)


# ---- The rollouts ----------------------------------------------------------------------------------------------------


async def rollouts_of_ours(folder: Path, size: Size, browser: Path) -> Figures:
    """Start `forge ui` and do with its rollouts what a reader does."""
    command = (sys.executable, "-m", "forge.cli", "ui", str(folder / "runs"), "--no-open")
    async with started(*command, address=our_address) as server, open_browser(browser) as page:
        await page.open(f"{server.url}/?token={server.token}")
        await page.until("document.querySelector('[data-run]')")
        found = {"memory_before_mb": server.memory_mb()}
        began, cpu = time.perf_counter(), server.cpu_s()
        found |= {f"first_{name}": value for name, value in (await _open_rollouts(page, server)).items()}
        async with ClientSession() as http:
            await _until_indexed(http, server)
            found["indexed_s"], found["indexed_cpu_s"] = time.perf_counter() - began, server.cpu_s() - cpu
            found["indexed_mb"], found["indexed_peak_mb"] = server.memory_mb(), server.peak_mb()
            found |= {f"again_{name}": value for name, value in (await _open_rollouts(page, server)).items()}
            found |= await _queries(http, server, size)
            found |= await _searches(http, server, size)
        found["memory_mb"], found["peak_mb"] = server.memory_mb(), server.peak_mb()
    return found


async def _until_indexed(http: ClientSession, server: Server) -> None:
    """Wait for the index, which the open page keeps going."""
    while True:
        if (await get(http, server, "/api/rollouts", run=RUN, limit=1))["progress"] >= 1:
            return
        await asyncio.sleep(0.5)


async def _open_rollouts(page: Page, server: Server) -> Figures:
    await page.open(f"{server.url}/run/{RUN}?view=rollouts", width=1400)
    await page.until("document.querySelector('[data-sample]') && document.querySelector('.detail .token')")
    seconds = await page.ask("performance.now()") / 1e3
    return {"rollout_s": seconds, "paint_s": await painted(page)}


async def _queries(http: ClientSession, server: Server, size: Size) -> Figures:
    """Ask for lists that the server has not made yet, and for samples all over the run."""

    async def median(requests: list[dict[str, object]], path: str = "/api/rollouts") -> float:
        times = [(await timed(lambda given=given: get(http, server, path, run=RUN, **given)))[0] for given in requests]  # type: ignore[misc]
        return statistics.median(times)

    middle = size.num_steps // 2
    steps = [max(1, round(size.num_steps * part)) for part in (0.1, 0.3, 0.5, 0.7, 0.9)]
    names = [f"step.{step}.{(step - 1) * size.num_groups}.1" for step in steps]
    return {
        "filtered_s": await median(
            [{"reward": f"{0.1 * number}~", "step": f"{number}~{middle}"} for number in range(5)]
        ),
        "sorted_s": await median([{"sort": sort} for sort in ("best", "worst", "gap", "long", "advantage")]),
        "page_s": await median([{"offset": part * size.num_rollouts // 10, "limit": 50} for part in range(1, 6)]),
        "linked_s": await median([{"at": name} for name in names]),
        "sample_s": await median([{"name": name} for name in names], "/api/rollouts/sample"),
        "group_s": await median([{"name": name} for name in names], "/api/rollouts/group"),
    }


async def _searches(http: ClientSession, server: Server, size: Size) -> Figures:
    """Search as the page does, which asks again until all is searched."""

    async def search(text: str, enough: int | None, **filters: object) -> tuple[float, int]:
        began = time.perf_counter()
        while True:
            found = await get(http, server, "/api/rollouts", run=RUN, q=text, limit=50, **filters)
            if found["searched"] >= 1 or (enough is not None and found["numFound"] >= enough):
                return time.perf_counter() - began, found["numFound"]

    step, cpu = size.num_steps // 2, server.cpu_s()
    rare_s, num_rare = await search(NEEDLE.format(step=step), None)
    cpu = server.cpu_s() - cpu
    assert num_rare == 1, num_rare
    first_s, _ = await search("carry one", 50)
    part_s, _ = await search("largest part", None, step=f"{size.num_steps - size.num_steps // 10}~")
    return {"search_s": rare_s, "search_cpu_s": cpu, "search_page_s": first_s, "search_part_s": part_s}


# ---- The report ------------------------------------------------------------------------------------------------------


async def measure(folder: Path, size: Size, num_rounds: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Run all rounds, and return what each found."""
    sides = {"ours": metrics_of_ours, "tensorboard": metrics_of_tensorboard, "rollouts": rollouts_of_ours}
    rounds: dict[str, list[Figures]] = {side: [] for side in sides}
    for number in range(num_rounds):
        for side, run in sides.items():
            with tempfile.TemporaryDirectory(prefix="ui-bench-browser-") as browser:
                async with asyncio.timeout(LIMIT_S):
                    rounds[side].append(await run(folder, size, Path(browser)))
            log(f"round {number + 1}, {side}: {json.dumps({k: round(v, 3) for k, v in rounds[side][-1].items()})}")
    medians = {
        side: {name: statistics.median(each[name] for each in found) for name in found[0]}
        for side, found in rounds.items()
    }
    return {"size": asdict(size), "bytes": _bytes(folder), "rounds": rounds, "medians": medians}


def _bytes(folder: Path) -> dict[str, int]:
    run = folder / "runs" / RUN
    return {
        "metrics": (run / "metrics.jsonl").stat().st_size,
        "rollouts": sum(path.stat().st_size for path in (run / "rollouts").iterdir()),
        "events": sum(path.stat().st_size for path in (folder / "events").iterdir()),
    }


METRICS_ROWS = (
    ("from the command to an address", "listening_s", "s"),
    ("from the command until all steps are served", "all_steps_s", "s"),
    ("CPU time until then", "cpu_s", "s"),
    ("memory then", "memory_mb", "MB"),
    ("first paint of the run's page, by a new server", "paint_s", "s"),
    ("curves drawn, by a new server", "curves_s", "s"),
)
ROLLOUT_ROWS = (
    ("first paint, nothing read yet", "first_paint_s", "s"),
    ("first rollouts and the tokens of one, nothing read yet", "first_rollout_s", "s"),
    ("everything indexed", "indexed_s", "s"),
    ("CPU time until then", "indexed_cpu_s", "s"),
    ("first paint, everything indexed", "again_paint_s", "s"),
    ("rollouts and the tokens of one, everything indexed", "again_rollout_s", "s"),
    ("another filter", "filtered_s", "s"),
    ("another order", "sorted_s", "s"),
    ("a page in the middle", "page_s", "s"),
    ("the page with a given sample", "linked_s", "s"),
    ("a sample with its gradient", "sample_s", "s"),
    ("a group side by side", "group_s", "s"),
    ("search for what is there once, in all texts", "search_s", "s"),
    ("CPU time of that search", "search_cpu_s", "s"),
    ("search for a frequent text, until 50 are found", "search_page_s", "s"),
    ("search in a tenth of the steps", "search_part_s", "s"),
    ("memory before rollouts are asked for", "memory_before_mb", "MB"),
    ("memory with the index", "indexed_mb", "MB"),
    ("most memory at any time", "peak_mb", "MB"),
)


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.0f} MB" if unit == "MB" else f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="a smoke run of 300 steps; figures mean little")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side")
    parser.add_argument("--folder", type=Path, help="where the run is, or is made and kept; 4 GB")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a goal is missed")
    arguments = parser.parse_args()
    size = Size(num_steps=300) if arguments.quick else Size()

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="ui-bench-") as scratch:
        folder = arguments.folder or Path(scratch)
        make_data(folder, size, log=log)
        about = machine()
        found = asyncio.run(measure(folder, size, 1 if arguments.quick else arguments.rounds, log))
    ours, theirs, rollouts = (found["medians"][side] for side in ("ours", "tensorboard", "rollouts"))
    print(json.dumps(about), end="\n\n")
    head = [f"{size.num_steps:,} steps of metrics", "forge ui", "TensorBoard"]
    print(
        table(
            head, [[name, *(shown(side.get(key), unit) for side in (ours, theirs))] for name, key, unit in METRICS_ROWS]
        )
    )
    head = [f"{size.num_rollouts:,} rollouts, {found['bytes']['rollouts'] / 1e9:.1f} GB", "forge ui"]
    print("\n" + table(head, [[name, shown(rollouts[key], unit)] for name, key, unit in ROLLOUT_ROWS]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, **found}, indent=1) + "\n")
    paint = max(ours["list_paint_s"], ours["paint_s"], rollouts["first_paint_s"], rollouts["again_paint_s"])
    is_met = paint < FIRST_PAINT_GOAL_S and rollouts["peak_mb"] < MEMORY_GOAL_MB
    print(
        f"\nGoal: first paint of every page in less than {FIRST_PAINT_GOAL_S:g} s ({paint:.2f} s), at most "
        f"{MEMORY_GOAL_MB} MB at any time ({rollouts['peak_mb']:.0f} MB): {'met' if is_met else 'missed'}."
    )
    return 0 if is_met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
