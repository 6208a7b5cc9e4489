"""How long do new weights take from the trainer to a generator that serves them, on one GPU?

The shape of Qwen3-1.7B, trained in bfloat16 with float32 weights, which are published in bfloat16. First the hardware:
one copy of as many bytes within the device, and between pinned host memory and the device. Then the whole way, with
the actors of a run: the trainer publishes a version, the generator takes it between two steps and answers with it. The
ways are one process that shares the weights, memory of the device that two processes have open (CUDA IPC), and shared
host memory; the generators are the embedded engine and vLLM. Rates count the bytes that are published.

`benchmarks/weight_sync_cuda.py` has the same without actors and engines, between two plain processes.

    python benchmarks/sync_gpu.py --minutes 5 --json sync_gpu.json
    python benchmarks/sync_gpu.py --quick --device cpu --sides shared ipc          # to try the program out
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.gpu_children import Budget, Outcome, measured, run_side, tell
from harness.gpu_plan import QUICK, ROOT, SHAPES, Plan, prepare, resized
from harness.gpu_report import GOAL_SYNC_MS, first_line, goals_table, text
from harness.report import table

HOST = {"FORGE_STORE_WAYS": "shm"}
"""Lets the store behave as if readers could be on other hosts: weights then wait in shared host memory."""
SIDES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "shared": ("native-shared", {}),
    "ipc": ("native-beside-sync", {}),
    "host": ("native-beside-sync", HOST),
    "vllm-ipc": ("vllm-beside-sync", {}),
    "vllm-host": ("vllm-beside-sync", HOST),
    "vllm-turns": ("vllm-turns", {}),
}
USUAL = ("shared", "ipc", "host", "vllm-ipc", "vllm-host")
GOAL_SIDE = "ipc"
LEAST_S = {"cuda": 45.0, "cpu": 15.0}
COPIES = """
import sys, time, torch
num_bytes, device = int(sys.argv[1]), sys.argv[2]
is_cuda = device == "cuda"
here, there = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
pinned = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
def best(target, source):
    taken = []
    for _ in range(8):
        if is_cuda: torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if is_cuda: torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken)
from harness.gpu_plan import say
say("copies", on_device_s=best(there, here), to_host_s=best(pinned, here), from_host_s=best(there, pinned))
"""


def figures(outcome: Mapping[str, Any], *, num_bytes: int) -> dict[str, Any]:
    """A side's medians, with and without the proof of the weights.

    `num_bytes` is what is counted where nothing is published, because both compute with the same weights.
    """
    num_bytes = max(
        (event["num_bytes"] for event in outcome["events"] if event["event"] == "published"), default=num_bytes
    )
    found: dict[str, Any] = {"status": outcome["status"], "why": outcome["why"], "num_bytes": num_bytes}
    rounds = [event for event in outcome["events"] if event["event"] == "round"]
    for name, with_proof in (("plain", False), ("proven", True)):
        chosen = [each for each in rounds if each["with_proof"] is with_proof]
        if chosen:
            parts = ("publish_s", "take_s", "way_s", "token_s", "stall_s", "update_s")
            found[name] = {part: statistics.median(each[part] for each in chosen) for part in parts}
            found[name]["gbps"] = num_bytes / found[name]["way_s"] / 1e9
    return found


def goal_row(sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Whether weights through device memory are served soon enough."""
    side = sides.get(GOAL_SIDE, {}).get("plain")
    if side is None:
        return None
    value = 1e3 * side["way_s"]
    return {
        "what": "whole way through CUDA IPC, ms",
        "ratio": value,
        "goal": GOAL_SYNC_MS,
        "sign": "<",
        "met": value < GOAL_SYNC_MS,
    }


def report(found: Mapping[str, Any]) -> str:
    num_bytes, copies = found["num_bytes"], found["copies"]
    parts = [f"{found['plan']['shape']}, {num_bytes / 1e9:.2f} GB of weights as they are published"]
    if copies:
        names = {"on_device_s": "one copy on the device", "to_host_s": "to pinned memory", "from_host_s": "from it"}
        rows = [
            (label, text(1e3 * copies[key], ".2f"), text(num_bytes / copies[key] / 1e9, ",.0f"))
            for key, label in names.items()
        ]
        parts.append(table(("the hardware, best of 8", "ms", "GB/s"), rows))
    rows = []
    for name, side in found["sides"].items():
        for label in ("plain", "proven"):
            each = side.get(label)
            if each is None:
                continue
            keys = ("publish_s", "take_s", "way_s", "stall_s", "token_s")
            cells = [text(1e3 * each[key], ".2f") for key in keys]
            rows.append((name, "yes" if label == "proven" else "no", *cells, text(each["gbps"], ",.1f"), ""))
        if side["status"] != "ok":
            rows.append((name, *[""] * 7, f"{side['status']}: {first_line(side['why'])}"))
    head = ("way", "proof", "publish, ms", "take, ms", "whole way, ms", "no tokens for, ms", "a token, ms", "GB/s", "")
    parts.append(table(head, rows))
    row = found["goal"]
    if row is not None:
        parts.append(goals_table([row]))
    return "\n\n".join(parts)


class Bench:
    """Runs ways one after the other."""

    def __init__(self, plan: Plan, folder: Path, *, budget: Budget, chosen: argparse.Namespace) -> None:
        self.plan, self.folder, self.budget, self.chosen = plan, folder, budget, chosen

    def child(self, name: str, command: Sequence[str], more: Mapping[str, str]) -> Outcome:
        least = LEAST_S[self.plan.device]
        if not self.budget.has(least):
            return Outcome("skipped", why=f"{self.budget.left_s:.0f} s are left, and a way needs {least:.0f}")
        limit_s = self.budget.cut(self.chosen.side_limit)
        device = self.plan.device
        return run_side(name, command, folder=self.folder, device=device, limit_s=limit_s, more=more)

    def way(self, name: str) -> Outcome:
        side, more = SIDES[name]
        path = self.plan.write(self.folder / f"sync-{name}.plan.json")
        program = ROOT / "benchmarks" / "harness" / "gpu_sync.py"
        python = self.chosen.vllm_python if name.startswith("vllm") else sys.executable
        words = [str(program), side, str(path), str(self.folder), str(self.chosen.rounds)]
        return self.child(f"sync-{name}", [str(python), *words], more)

    def copies(self, num_bytes: int) -> dict[str, Any]:
        """What the hardware does with as many bytes, in a process that ends."""
        outcome = self.child("copies", [sys.executable, "-c", COPIES, str(num_bytes), self.plan.device], {})
        event = outcome.last("copies")
        if event is None:
            tell(f"copies: {outcome.status}: {outcome.why[-400:]}")
            return {}
        return {name: value for name, value in event.items() if name != "event"}


def published_bytes(plan: Plan, num_parameters: int) -> int:
    """Weights are published in what generators compute in: bfloat16 on a GPU."""
    return num_parameters * (4 if plan.precision == "float32" else 2)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--shape", choices=SHAPES, help="default: qwen3_1_7b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few rounds; figures mean nothing")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=USUAL, help="default: %(default)s")
    parser.add_argument("--precision", choices=("mixed", "pure", "float32"), help="of the trainer; default: mixed")
    parser.add_argument("--rounds", type=int, help="of each kind; default: 10")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    parser.add_argument("--vllm-python", type=Path, default=Path(sys.executable), help="interpreter that has vLLM")
    parser.add_argument("--minutes", type=float, help="for all together; default: no end")
    parser.add_argument("--side-limit", type=float, default=200.0, help="seconds for a way; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="for models and logs; default: one that is deleted afterwards")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the goal was missed")
    chosen = parser.parse_args(words)
    chosen.rounds = chosen.rounds or (2 if chosen.quick else 10)
    return chosen


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    plan = replace(QUICK if chosen.quick else Plan(num_prompts=8), device=chosen.device, settings=tuple(chosen.set))
    plan = resized(plan, shape=chosen.shape, precision=chosen.precision)
    folder.mkdir(parents=True, exist_ok=True)
    num_bytes = published_bytes(plan, prepare(folder, plan)["parameters"])
    bench = Bench(plan, folder, budget=Budget(chosen.minutes), chosen=chosen)
    found: dict[str, Any] = {"plan": asdict(plan), "num_bytes": num_bytes, "sides": {}}
    found["copies"] = bench.copies(num_bytes)
    for name in chosen.sides:
        found["sides"][name] = figures(bench.way(name).summary(), num_bytes=num_bytes)
        found["goal"] = goal_row(found["sides"])
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> int:
    chosen = parse_arguments()
    found = measured(measure, chosen)
    if found is None:
        return 0
    print(report(found))
    is_missed = found["goal"] is not None and not found["goal"]["met"]
    return 1 if chosen.check and is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
