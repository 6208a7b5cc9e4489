"""How fast do weights get from one process to another on one GPU?

The state dict of Qwen3-1.7B in bfloat16 goes from a publisher to a reader, two plain processes without Monarch: through
device memory that both have open (CUDA IPC), against a copy of the same bytes on the device; and through shared host
memory, against a copy between pinned memory and the device. Both sides of a comparison take turns in the same run.
`--device cpu` runs the same program without a GPU, through host memory alone, to try it out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forge.runtime.control import control
from forge.runtime.rendezvous import close_server, environment
from harness.pair import Peer
from harness.report import figures_table, throughput_table
from harness.state_dicts import Shapes, num_elements_of, qwen3
from harness.throughput import Moved, Window, alternate, figure, row

GOAL = 0.7
QUICK_MODEL: Shapes = qwen3(num_layers=2, width=256, inner=768, num_heads=4, num_kv_heads=2, head_dim=64, vocab=2048)


@dataclass
class Pair:
    """A publisher and a reader, and where versions are kept between them."""

    publisher: Peer
    reader: Peer
    on: str
    num_rounds: int
    version: int = -1

    @property
    def key(self) -> str:
        return f"policy-{self.on}"

    def publish(self) -> Moved:
        self.version += 1
        moved: Moved = self.publisher.ask("publish", self.key, self.on, self.version)
        return moved

    def fetch(self, verify: str) -> Moved:
        moved: Moved = self.reader.ask("fetch", self.key, self.on, verify)
        return moved

    def both(self) -> Moved:
        first, second = self.publish(), self.fetch("cheap")
        return Moved(first.num_bytes, first.seconds + second.seconds, first.cpu_s + second.cpu_s)

    def compare(
        self, what: str, ours: Callable[[], Moved], peer: tuple[Peer, str], *, goal: float | None = None
    ) -> dict[str, Any]:
        process, method = peer
        taken = alternate(window(ours), window(lambda: process.ask(method)), num_rounds=self.num_rounds, num_warm=3)
        return row(what, *asyncio.run(taken), goal=goal)


def window(measure: Callable[[], Moved]) -> Window:
    async def moved() -> Moved:
        return measure()

    return moved


def on_device(pair: Pair) -> tuple[str, list[dict[str, Any]]]:
    """Against one copy of all bytes within the device."""
    mine, its = (pair.publisher, "copy_whole"), (pair.reader, "copy_whole")
    rows = [pair.compare("copies of each tensor", lambda: pair.reader.ask("copy_each"), its)]
    rows.append(pair.compare(f"publish, on={pair.on}", pair.publish, mine, goal=GOAL))
    for verify in ("cheap", "off", "full"):
        goal = GOAL if verify == "cheap" else None
        what = f"fetch in place, on={pair.on}, verify={verify}"
        rows.append(pair.compare(what, lambda verify=verify: pair.fetch(verify), its, goal=goal))
    rows.append(pair.compare(f"publish + fetch, on={pair.on}", pair.both, its))
    return "one copy on the device", rows


def through_host(pair: Pair) -> tuple[str, list[dict[str, Any]]]:
    """Against one copy between the device and pinned memory, in the direction of the row."""
    down, up = (pair.publisher, "to_host"), (pair.reader, "from_host")
    rows = [pair.compare(f"publish, on={pair.on}", pair.publish, down)]
    for verify in ("cheap", "off", "full"):
        what = f"fetch in place, on={pair.on}, verify={verify}"
        rows.append(pair.compare(what, lambda verify=verify: pair.fetch(verify), up))
    rows.append(pair.compare(f"publish + fetch, on={pair.on}", pair.both, up))
    return "pinned copy", rows


def milliseconds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [figure(entry["what"], 1e3 * statistics.median(entry["ours"]["seconds"]), "ms") for entry in rows]


def views(pair: Pair) -> dict[str, Any]:
    taken = [pair.reader.ask("view", pair.key, pair.on).seconds for _ in range(pair.num_rounds + 2)]
    return figure(f"fetch without a copy, on={pair.on}", 1e3 * statistics.median(taken[2:]), "ms")


def measure(device: str, shapes: Shapes, num_rounds: int) -> dict[str, Any]:
    peers: list[Peer] = []
    try:
        peers += [Peer(environment(), device) for _ in range(2)]
        for peer in peers:
            peer.ask("hold", shapes)
        found: dict[str, Any] = {"facts": peers[0].ask("facts"), "num_tensors": len(shapes), "tables": []}
        found["num_bytes"] = 2 * num_elements_of(shapes)
        wishes = [("cuda", on_device), ("host", through_host)] if device != "cpu" else [("host", on_device)]
        for on, question in wishes:
            print(f"measuring: on={on}", file=sys.stderr, flush=True)
            pair = Pair(*peers, on, num_rounds)
            against, rows = question(pair)
            found["tables"].append({"peer": against, "rows": rows, "figures": [*milliseconds(rows), views(pair)]})
        return found
    finally:
        for peer in peers:
            peer.stop()
        control().start(close_server()).result(20)


def report(found: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in found["facts"].items())
    parts = [facts, f"## {found['num_tensors']} tensors, {found['num_bytes'] / 1e9:.2f} GB bfloat16"]
    for entry in found["tables"]:
        parts += [throughput_table(entry["rows"], peer=entry["peer"]), figures_table(entry["figures"])]
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds; figures mean little")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the program without a GPU")
    parser.add_argument("--rounds", type=int, help="windows of each side of a comparison")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal was missed")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no NVIDIA GPU is visible here: nothing was measured. `--device cpu` tries the program itself.")
        return 0
    num_rounds = chosen.rounds or (2 if chosen.quick else 15)
    found = measure(chosen.device, QUICK_MODEL if chosen.quick else qwen3(), num_rounds)
    print(report(found))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    missed = [entry["what"] for part in found["tables"] for entry in part["rows"] if entry["met"] is False]
    print("\n" + ("goals missed: " + "; ".join(missed) if missed else "every goal measured was met"))
    return 1 if chosen.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
