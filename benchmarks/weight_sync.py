"""How fast do weights get from a trainer to its readers?

Publishing, fetching in place and without a copy, resharding, many small tensors, memory, torn reads, the cost to a
training loop, and TCP. Every rate stands beside a plain copy of as many bytes (`dst.copy_(src)`, warm memory, one
thread) by as many processes, measured in turns with it in the same run; the ratio is the median over neighbouring
windows. Readers and publishers are actors in processes of their own. TorchStore's figures were measured in another run
on the same kind of machine and are there for orientation.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import contextlib
import json
import logging
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import forge
from forge.runtime.rendezvous import HOST
from forge.store import kernel
from forge.store.client import TRANSPORTS
from harness.memory import Watch, available
from harness.report import figures_table, machine, throughput_table
from harness.state_dicts import num_elements_of, small, transformer
from harness.store_cast import Cast, Plan, Publisher, next_version
from harness.store_ranks import StoreRank
from harness.throughput import Moved, alternate, at_once, figure, quartiles, row

GIB = 2**30
NUM_TRAINERS, NUM_READERS = 2, 4
SECTIONS = ("copy", "publish", "fetch", "view", "end_to_end", "reshard", "small", "memory", "torn", "overlap", "tcp")
LARGE_SECTIONS = ("publish", "fetch", "view", "end_to_end")
POLICY = "policy"
TORCHSTORE_COLD_S = 5.0
"""Seconds per GiB; its other figures stand beside the rows that they belong to."""


FULL = Plan(num_bytes=10**9, num_rounds=7, num_cold=3, num_small=10_000, num_reads=10_000)
LARGE = Plan(num_bytes=4 * 10**9, dtype=torch.bfloat16, num_rounds=5, num_cold=1, num_small=0, num_reads=0, keep=1)
QUICK = Plan(num_bytes=64 * 10**6, num_rounds=2, num_cold=1, num_small=500, num_reads=100)


Found = dict[str, list[dict[str, Any]]]

# ---- the questions


async def copy(cast: Cast) -> Found:
    """What the machine gives: the peer of the other rows, and the C library's memcpy against it."""
    rows = []
    for count in (1, 2, 4):
        taken = await alternate(
            lambda count=count: at_once(cast.readers.copy_libc, "whole", count),
            lambda count=count: at_once(cast.readers.copy, "whole", count),
            num_rounds=cast.plan.num_rounds,
        )
        rows.append(row(f"memcpy of the C library, {processes(count)}", *taken))
    return {"rows": rows}


async def publish(cast: Cast) -> Found:
    """Into new memory, into memory that is used again, and converting on the way."""
    plan = cast.plan
    cold, peer = [], []
    for number in range(plan.num_cold):
        fresh = await StoreRank.as_actor()  # its memory goes with it
        await fresh.hold.call("whole", plan.shapes, plan.dtype, 1)
        peer.append(await at_once(fresh.copy, "whole", 1))
        await fresh.hold.call("start", small(100), torch.float32, 1)
        await at_once(fresh.publish, "start", 1, f"start-{number}", 0, {})  # threads, imports, the native kernel
        cold.append(await at_once(fresh.publish, "whole", 1, f"cold-{number}", 0, {}))
        for key in (f"start-{number}", f"cold-{number}"):
            await fresh.retire.call(key, 0, 1)
        await fresh.stop()
    warm = Publisher(cast, POLICY, keep=2)  # with 1 every publication would be a cold one
    taken = await alternate(warm, warm.copy, num_rounds=plan.num_rounds, num_warm=3)
    rows = [
        row("publish, cold", cold, peer, torchstore=GIB / TORCHSTORE_COLD_S / 1e9),
        row("publish, warm", *taken, goal=0.8, torchstore=4.7),
    ]
    cold_s = statistics.median(moved.seconds / moved.num_bytes * GIB for moved in cold)
    figures = [
        figure("publish, cold", cold_s, "s/GiB", goal=TORCHSTORE_COLD_S / 4, sign="≤", torchstore="5.0 s/GiB"),
        figure("publish, warm: the weights must not change for", 1e3 * rows[1]["extra_s"], "ms"),
    ]
    if plan.dtype == torch.float32:
        narrow = Publisher(cast, "narrow", dtype=torch.bfloat16)
        taken = await alternate(narrow, narrow.copy, num_rounds=plan.num_rounds, num_warm=3)
        rows.append(row("publish, warm, float32 → bfloat16 (bytes read)", *taken))
        await narrow.retire()
    return {"rows": rows, "figures": figures}


async def fetch(cast: Cast) -> Found:
    """Into the readers' memory, by 1, 2 and 4 of them at once, and with other ways to verify."""
    rows, figures = [], []
    await Publisher(cast, POLICY, keep=cast.plan.keep)()
    peers = {1: (0.95, 6.5), 2: (1.0, 4.3), 4: (None, None)}
    wishes = [(count, "cheap") for count in (1, 2, 4)] + [(1, "off"), (1, "full")]
    for count, verify in wishes:
        if available() < (needed := count * cast.plan.size + 2 * GIB):
            figures.append(figure(f"fetch in place, {readers(count)}: left out, GiB needed", needed / GIB, "GiB"))
            continue
        await cast.readers.hold.call("whole", cast.plan.shapes, cast.plan.dtype, count)
        taken = await alternate(
            lambda count=count, verify=verify: at_once(cast.readers.fetch, "whole", count, POLICY, verify),
            lambda count=count: at_once(cast.readers.copy, "whole", count),
            num_rounds=cast.plan.num_rounds,
        )
        goal, torchstore = peers[count] if verify == "cheap" else (None, None)
        what = f"fetch in place, {readers(count)}, verify={verify}"
        rows.append(row(what, *taken, goal=goal, torchstore=torchstore))
    return {"rows": rows, "figures": figures}


async def view(cast: Cast) -> Found:
    """Without a copy."""
    await Publisher(cast, POLICY, keep=cast.plan.keep)()
    figures = []
    await cast.readers.hold.call("whole", cast.plan.shapes, cast.plan.dtype, 1)
    for verify in ("cheap", "off"):
        moved = [await at_once(cast.readers.view, "whole", 1, POLICY, verify) for _ in range(cast.plan.num_rounds + 2)]
        took_ms = statistics.median(1e3 * entry.seconds / entry.num_bytes * GIB for entry in moved[2:])
        what = f"zero-copy fetch, verify={verify}"
        figures.append(figure(what, took_ms, "ms/GiB", goal=10, torchstore="275 ms/GiB (3.9 GB/s)"))
    return {"figures": figures}


async def end_to_end(cast: Cast) -> Found:
    """Publish, then fetch in place: from the first byte to the last. Two copies, so that 0.5 would be perfect."""
    rows = []
    publisher = Publisher(cast, POLICY, keep=2)
    for count in (1, 2):
        if available() < count * cast.plan.size + 2 * GIB:
            continue
        await cast.readers.hold.call("whole", cast.plan.shapes, cast.plan.dtype, count)

        async def ours(count: int = count) -> Moved:
            first = await publisher()
            second = await at_once(cast.readers.fetch, "whole", count, publisher.key)
            return Moved(first.num_bytes, first.seconds + second.seconds, first.cpu_s + second.cpu_s)

        taken = await alternate(ours, publisher.copy, num_rounds=cast.plan.num_rounds, num_warm=3)
        rows.append(row(f"publish + fetch in place, {readers(count)}", *taken))
    return {"rows": rows}


async def reshard(cast: Cast) -> Found:
    """Two ranks with rows each, read by 2 and 4 with columns each. All readers at once, all bytes counted."""
    plan, rows = cast.plan, []
    await cast.forget("whole")
    await cast.trainers.hold_shards.call("rows", plan.shapes, plan.dtype, 0, NUM_TRAINERS)
    publisher = Publisher(cast, "sharded", name="rows", active=NUM_TRAINERS)
    taken = await alternate(publisher, publisher.copy, num_rounds=plan.num_rounds, num_warm=3)
    rows.append(row("publish by 2 ranks, Shard(0)", *taken))
    for count in (2, 4):
        await cast.readers.hold_shards.call("columns", plan.shapes, plan.dtype, 1, count)
        taken = await alternate(
            lambda count=count: at_once(cast.readers.fetch, "columns", count, publisher.key),
            lambda count=count: at_once(cast.readers.copy, "columns", count),
            num_rounds=plan.num_rounds,
        )
        what = f"2 ranks Shard(0) → {count} readers Shard(1)"
        rows.append(row(what, *taken, goal=0.6, torchstore=2.6 if count == 2 else None))
        await cast.readers.forget.call("columns")
    await publisher.retire()
    await cast.trainers.forget.call("rows")
    return {"rows": rows}


async def small_tensors(cast: Cast) -> Found:
    """What a tensor costs beside its bytes: the first time, when everything is looked at, and then."""
    plan, figures = cast.plan, []
    await cast.hold("small", small(plan.num_small), torch.float32, trainers=1, readers=1)
    publisher = Publisher(cast, "small", name="small")

    async def reading() -> Moved:
        return await at_once(cast.readers.fetch, "small", 1, publisher.key)

    for what, verb in (("publish", publisher), ("fetch in place", reading)):
        moved = [await verb() for _ in range(plan.num_rounds + 3)]
        each = [1e6 * entry.seconds / plan.num_small for entry in moved]
        label = f"{what}, {plan.num_small:,} tensors of 1 KB"
        figures.append(figure(f"{label}, the first time", each[0], "µs a tensor", goal=50))
        figures.append(figure(f"{label}, from then on", statistics.median(each[3:]), "µs a tensor", goal=50))
    await cast.forget("small")
    return {"figures": figures}


async def memory(cast: Cast) -> Found:
    """Segments and the processes' own memory, at the peak of republishing while a reader fetches each version."""
    plan, figures = cast.plan, []
    shapes = transformer(plan.num_bytes // plan.dtype.itemsize // 4)
    size = num_elements_of(shapes) * plan.dtype.itemsize
    await cast.hold("quarter", shapes, plan.dtype, trainers=1, readers=1)
    pids = await cast.pids()
    own_before, segments_before = Watch(pids).start
    for keep in (2, 3, 1):
        publisher = Publisher(cast, f"kept-{keep}", name="quarter", keep=keep)
        async with watching(pids) as watch:
            for _ in range(keep + 3):
                await publisher()
                await at_once(cast.readers.fetch, "quarter", 1, publisher.key)
        segments = (watch.peak_segments - segments_before) / size
        own = (watch.peak_own - own_before) / size
        what = f"peak extra memory for each kept version, keep={keep}"
        goal = 1.1 if keep > 1 else None
        figures.append(figure(what, (segments + own) / keep, "× the state dict", goal=goal, sign="≤"))
        figures.append(figure(f"of that, segments, keep={keep}", segments / keep, "× the state dict"))
        await publisher.retire()
    await cast.forget("quarter")
    return {"figures": figures}


@contextlib.asynccontextmanager
async def watching(pids: Sequence[int]) -> AsyncIterator[Watch]:
    watch = Watch(pids)

    async def look() -> None:
        while True:
            watch.look()
            await asyncio.sleep(0.005)

    looking = asyncio.create_task(look())
    try:
        yield watch
        watch.look()
    finally:
        looking.cancel()


async def torn(cast: Cast) -> Found:
    """Two readers read a megabyte again and again while it is published again and again; nothing is verified."""
    shapes = {f"tensor.{number}": (64, 256) for number in range(16)}
    await cast.hold("torn", shapes, torch.float32, trainers=1, readers=2)
    await cast.trainers.republish.call("torn", "torn", 1)
    answers = await cast.readers.read_often.call("torn", 2, "torn", cast.plan.num_reads // 2)
    versions = max(count for _, count in (await cast.trainers.settle.call(1)).items())
    found = [answer for _, answer in answers.items()]
    total = {name: sum(answer[name] for answer in found) for name in found[0]}
    figures = [
        figure(f"torn reads of {total['reads']:,}", total["torn"], "", goal=0, sign="≤", torchstore="8 of 36"),
        figure("reads that were refused", total["refused"], "", goal=0, sign="≤"),
        figure("versions published meanwhile", versions, ""),
        figure("versions that the readers saw (sum over both)", total["versions"], ""),
    ]
    await cast.forget("torn")
    return {"figures": figures}


async def overlap(cast: Cast) -> Found:
    """A step that computes for about three times the copy, then changes the weights; with and without publishing."""
    plan = cast.plan
    await cast.trainers.hold.call("whole", plan.shapes, plan.dtype, 1)
    copied_s = (await at_once(cast.trainers.copy, "whole", 1)).seconds
    steps = await train(cast, [None, None], 20)
    num_products = max(20, round(20 * 3 * copied_s / steps[1][0]))
    numbers: list[int | None] = [next_version(cast, POLICY), None, next_version(cast, POLICY)]
    await train(cast, numbers, num_products)  # memory for two versions
    numbers = []
    for number in range(plan.num_rounds):
        version = next_version(cast, POLICY)
        numbers += [None, version] if number % 2 else [version, None]
    steps = await train(cast, numbers, num_products)
    pairs = []
    for index in range(0, len(steps), 2):
        with_it = index if numbers[index] is not None else index + 1
        alone = index + 1 if with_it == index else index
        pairs.append((steps[with_it], steps[alone]))
    slower = [100 * (with_it[0] / alone[0] - 1) for with_it, alone in pairs]
    low, median, high = quartiles(sorted(slower))
    figures = [
        figure("a step alone", 1e3 * statistics.median(alone[0] for _, alone in pairs), "ms"),
        figure("a step during which the weights are published is slower by", median, "%"),
        figure("… lower quartile", low, "%"),
        figure("… upper quartile", high, "%"),
        figure("of that, waiting for the snapshot", 1e3 * statistics.median(w[1] for w, _ in pairs), "ms"),
    ]
    return {"figures": figures}


async def train(cast: Cast, versions: list[int | None], num_products: int) -> list[tuple[float, float]]:
    answers = await cast.trainers.train.call("whole", POLICY, versions, num_products, 1)
    return next(steps for _, steps in answers.items() if steps)


async def tcp(cast: Cast) -> Found:
    """Two processes that may not share memory, against a plain socket between the same two."""
    plan, rows = cast.plan, []
    here = await StoreRank.options(env={TRANSPORTS: "tcp"}).as_actor()
    there = await StoreRank.options(env={TRANSPORTS: "tcp", HOST: "another-host"}).as_actor()
    for rank in (here, there):
        await rank.hold.call("whole", plan.shapes, plan.dtype, 1)
    port = await here.listen.call_one()
    await asyncio.gather(here.accept.call_one(), there.dial.call_one(port))
    await at_once(here.publish, "whole", 1, "far", 0, {})

    async def raw() -> Moved:
        began, span = await asyncio.gather(here.send_raw.call_one("whole"), there.receive_raw.call_one("whole"))
        return Moved(span.num_bytes, span.ended - began, span.cpu_s)

    for verify, goal in (("cheap", 0.8), ("off", None)):
        taken = await alternate(
            lambda verify=verify: at_once(there.fetch, "whole", 1, "far", verify), raw, num_rounds=plan.num_rounds
        )
        rows.append(row(f"fetch over TCP, verify={verify}", *taken, goal=goal))
    for rank in (here, there):
        await rank.hang_up.call_one()
        await rank.stop()
    return {"rows": rows}


def readers(count: int) -> str:
    return f"{count} reader{'s' if count > 1 else ''}"


def processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


# ---- the report


QUESTIONS: dict[str, Callable[[Cast], Awaitable[Found]]] = {
    "copy": copy,
    "publish": publish,
    "fetch": fetch,
    "view": view,
    "end_to_end": end_to_end,
    "reshard": reshard,
    "small": small_tensors,
    "memory": memory,
    "torn": torn,
    "overlap": overlap,
    "tcp": tcp,
}


def report(found: dict[str, Any]) -> str:
    parts = []
    for part in found["parts"]:
        sections = part["sections"]
        rates = [entry for name, section in sections.items() if name != "tcp" for entry in section.get("rows", ())]
        figures = [entry for section in sections.values() for entry in section.get("figures", ())]
        parts.append(f"## {part['label']}")
        if rates:
            parts.append(throughput_table(rates))
        if "tcp" in sections:
            parts.append(throughput_table(sections["tcp"]["rows"], peer="raw socket"))
        if figures:
            parts.append(figures_table(figures))
    return "\n\n".join(parts)


def goals_missed(found: dict[str, Any]) -> list[str]:
    return [
        entry["what"]
        for part in found["parts"]
        for section in part["sections"].values()
        for entry in (*section.get("rows", ()), *section.get("figures", ()))
        if entry["met"] is False
    ]


async def measure(plan: Plan, sections: Sequence[str]) -> dict[str, Any]:
    async with forge.run():
        trainers = await StoreRank.options(procs=NUM_TRAINERS).as_actor()
        cast = Cast(plan, trainers, await StoreRank.options(procs=NUM_READERS).as_actor())
        taken = {}
        for name in sections:
            print(f"measuring: {name}", file=sys.stderr, flush=True)
            await cast.trainers.hold.call("whole", plan.shapes, plan.dtype, 1)
            if name == "copy":
                await cast.readers.hold.call("whole", plan.shapes, plan.dtype, NUM_READERS)
            taken[name] = await QUESTIONS[name](cast)
            await cast.forget("whole")
    return {"label": plan.label, "num_bytes": plan.size, "sections": taken}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run with 64 MB; figures mean little")
    parser.add_argument("--large", action="store_true", help="4 GB in bfloat16 too (needs 20 GB of memory)")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="answer this question only (repeatable)")
    parser.add_argument("--rounds", type=int, help="windows of each side of a comparison")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal was missed")
    chosen = parser.parse_args()
    logging.getLogger("forge").setLevel(logging.ERROR)
    plans = [(QUICK if chosen.quick else FULL, chosen.only or SECTIONS)]
    if chosen.large:
        plans.append((LARGE, [name for name in chosen.only or SECTIONS if name in LARGE_SECTIONS]))
    found: dict[str, Any] = {"machine": machine(), "native": kernel.native(), "parts": []}
    for plan, sections in plans:
        scaled = replace(plan, num_rounds=chosen.rounds) if chosen.rounds else plan
        found["parts"].append(asyncio.run(measure(scaled, sections)))
    found["machine"]["load_after"] = os.getloadavg()[0]
    facts = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    print(f"{facts}, native kernel: {'yes' if found['native'] else kernel.why_not()}\n\n{report(found)}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    missed = goals_missed(found)
    print("\n" + ("goals missed: " + "; ".join(missed) if missed else "every goal measured was met"))
    return 1 if chosen.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
