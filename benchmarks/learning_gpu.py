"""How soon does a small real model solve held-out tasks on one GPU, against TRL's `GRPOTrainer`?

SmolLM2-135M-Instruct learns tasks of reasoning-gym by GRPO: 32 prompts x 16 completions a step, a reward of 1 for the
right number, the clipped token-mean loss, AdamW with a constant rate, temperature 1, no reference model; computed in
bfloat16 with weights, gradients and optimizer states in float32. Ours is the loop of `apps/grpo/main.py` with the
native engine in the trainer's process. TRL generates with transformers, or with vLLM in its process (`--sides`).

All sides start from the same files, for each task and seed. Each trains for one window of steps, and waits while the
others do; held-out questions are asked after every window, with the likeliest tokens, off the clock. A side is done
when its clock reaches `--clock` seconds.

    python scripts/fetch_smollm2.py models/smollm2-135m
    python benchmarks/learning_gpu.py --model models/smollm2-135m --json learning_gpu.json
    python benchmarks/learning_gpu.py --model FOLDER --device cpu --clock 20 --seeds 1 --window 1   # to try it
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.grpo_ours import common_settings, train_in_turns
from harness.grpo_plan import Plan
from harness.grpo_report import Point, curve, reached
from harness.learning_plan import TASKS, write_tasks
from harness.report import machine, table
from harness.sides import Side, started, words_of

HERE = Path(__file__).resolve().parent
OURS = "ours, native engine"
TRL_SIDES: Mapping[str, Mapping[str, Any]] = {
    "TRL, transformers": {},
    "TRL, vLLM": {"vllm-memory": 0.2},
}
LEVELS = (0.5, 0.8, 0.9)
"""Held-out accuracies whose times are reported."""


def plan_of(chosen: argparse.Namespace, seed: int) -> Plan:
    """Return one comparison, as the sides read it."""
    return Plan(
        shape={},
        num_prompts=chosen.prompts,
        group_size=chosen.group_size,
        max_tokens=48,
        max_seq_len=256,
        learning_rate=chosen.learning_rate,
        window=chosen.window,
        goal=1.1,  # evaluated after every window; a run ends by its clock
        seed=seed,
    )


def our_settings(plan: Plan, folder: Path, *, device: str) -> list[str]:
    """Return the configuration of our side, as it would be written on the command line of `apps/grpo/main.py`."""
    is_cuda = device == "cuda"
    changed = {
        "generator.with_gpus": str(is_cuda).lower(),
        "distributed.with_gpus": str(is_cuda).lower(),
        "training.microbatch_tokens": 32768 if is_cuda else 4096,
    }
    kept = [word for word in common_settings(plan, folder) if word.partition("=")[0] not in changed]
    return [
        *kept,
        *(f"{key}={value}" for key, value in changed.items()),
        f"evaluation.sources=[{{path: {folder / 'task' / 'heldout.jsonl'}}}]",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "rewards.functions=[{kind: 'harness.learning_plan:reward', name: solved}]",
        "placement=shared",
        f"generator.max_seq_len={plan.max_seq_len}",
        f"distributed.precision={'bfloat16' if is_cuda else 'float32'}",
        "record.rollouts=some",
    ]


def serve(folder: Path, device: str) -> None:
    """Be our side until the measuring program has gone."""
    plan = Plan(**json.loads((folder / "plan.json").read_text()))
    train_in_turns(folder, plan, our_settings(plan, folder, device=device), place="ours")
    print(json.dumps({"event": "done"}), flush=True)


def commands(chosen: argparse.Namespace, plan: Plan, folder: Path) -> dict[str, list[str]]:
    """Return what starts each side."""
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    options = {
        "model": folder / "model",
        "prompts": folder / "task" / "prompts.jsonl",
        "heldout": folder / "task" / "heldout.jsonl",
        "prompts-per-step": plan.num_prompts,
        "group-size": plan.group_size,
        "max-tokens": plan.max_tokens,
        "max-seq-len": plan.max_seq_len,
        "rows": min(chosen.rows, plan.samples_per_step),
        "window": plan.window,
        "learning-rate": plan.learning_rate,
        "seed": plan.seed,
        "device": chosen.device,
        "answers": "number",
    }
    found = {}
    for name in chosen.sides:
        if name == OURS:
            found[name] = [sys.executable, str(Path(__file__).resolve()), "--serve", str(folder)]
            found[name] += ["--device", chosen.device]
        else:
            program = str(HERE / "harness" / "trl_grpo.py")
            found[name] = [str(chosen.trl_python), program, *words_of({**options, **TRL_SIDES[name]}), "--evaluate"]
    return found


def measure_run(chosen: argparse.Namespace, plan: Plan, folder: Path, *, until: float) -> dict[str, list[Point]]:
    """Train all sides in turns until their clocks are over; return the curve of each."""
    with started(commands(chosen, plan, folder), folder, threads=chosen.threads) as sides:
        left = list(sides)
        while left and time.monotonic() < until:
            for side in list(left):
                side.windows.append(side.take_turn())
                if _clock(side) >= chosen.clock or side.windows[-1]["accuracy"] >= chosen.enough:
                    left.remove(side)
            shown = "; ".join(
                f"{side.name} {side.windows[-1]['accuracy']:.1%} at {_clock(side):.0f} s" for side in sides
            )
            print(f"held-out: {shown}", file=sys.stderr, flush=True)
        for side in sides:
            side.finish()
    return {side.name: curve(side.windows) for side in sides}


def _clock(side: Side) -> float:
    return sum(float(window["seconds"]) for window in side.windows[1:])


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure every task and seed that there is time for."""
    write_tasks(chosen.tasks_folder, chosen.tasks)
    end = time.monotonic() + 60 * chosen.minutes
    runs: dict[str, list[dict[str, list[Point]]]] = {name: [] for name in chosen.tasks}
    found = {"machine": machine(), "plan": asdict(plan_of(chosen, 0)), "runs": runs}
    for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
        for task in chosen.tasks:
            if time.monotonic() > end - chosen.clock:
                print(f"{task}, seed {seed}: not measured, the time is over", file=sys.stderr, flush=True)
                continue
            with tempfile.TemporaryDirectory(prefix="forge-learning-") as name:
                folder = Path(name)
                (folder / "model").symlink_to(chosen.model.resolve())
                (folder / "task").symlink_to((chosen.tasks_folder / task).resolve())
                print(f"{task}, seed {seed}", file=sys.stderr, flush=True)
                runs[task].append(measure_run(chosen, plan_of(chosen, seed), folder, until=end))
            if chosen.json is not None:
                chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def rows_of(task: str, runs: Sequence[Mapping[str, Sequence[Point]]]) -> list[tuple[str, ...]]:
    """Return a row for each side: accuracies before and after, times to each level, and the rate; medians of seeds."""
    rows = []
    for side in runs[0] if runs else ():
        curves = [run[side] for run in runs]
        times = []
        for level in LEVELS:
            found = [reached(points, level) for points in curves]
            known = sorted(each[0] for each in found if each is not None)
            some = f" ({len(known)} of {len(found)})" if known and len(known) < len(found) else ""
            times.append(f"{statistics.median(known):.1f}{some}" if known else "not reached")
        rates = [points[-1][1] / points[-1][0] for points in curves if points[-1][0]]
        first = f"{statistics.mean(points[0][2] for points in curves):.1%}"
        last = f"{statistics.mean(points[-1][2] for points in curves):.1%}"
        rows.append((task, side, first, last, *times, f"{statistics.median(rates):.0f}" if rates else "-"))
    return rows


def report(found: Mapping[str, Any]) -> str:
    """Return the table, and the ratio of rates for each task."""
    head = ("task", "side", "at first", "at the end", *(f"s to {level:.0%}" for level in LEVELS), "samples/s")
    rows = [row for task, runs in found["runs"].items() for row in rows_of(task, runs)]
    ratios = []
    for task in found["runs"]:
        rates = {row[1]: float(row[-1]) for row in rows if row[0] == task and row[-1] != "-"}
        peers = {name: rate for name, rate in rates.items() if name != OURS}
        if OURS in rates and peers:
            best = max(peers, key=lambda name: peers[name])
            ratios.append(f"{task}: ours / {best}: {rates[OURS] / peers[best]:.2f} in samples/s")
    return "\n\n".join([table(head, rows), *ratios])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument(
        "--model", type=Path, help="folder of SmolLM2-135M-Instruct, as scripts/fetch_smollm2.py writes it"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument(
        "--tasks-folder", type=Path, default=Path("outputs/learning_tasks"), help="where questions are kept"
    )
    parser.add_argument("--sides", nargs="+", choices=[OURS, *TRL_SIDES], default=[OURS, "TRL, transformers"])
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clock", type=float, default=45.0, help="seconds that a side trains; default: %(default)s")
    parser.add_argument("--enough", type=float, default=0.99, help="held-out accuracy at which a side is done")
    parser.add_argument("--minutes", type=float, default=60.0, help="for everything")
    parser.add_argument("--window", type=int, default=5, help="steps between evaluations; default: %(default)s")
    parser.add_argument("--prompts", type=int, default=32, help="of a step; default: %(default)s")
    parser.add_argument("--group-size", type=int, default=16, help="completions of each; default: %(default)s")
    parser.add_argument("--rows", type=int, default=512, help="TRL's, at once; default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--threads", type=int, default=4, help="CPU threads of a side; default: %(default)s")
    parser.add_argument("--trl-python", type=Path, default=Path(sys.executable), help="interpreter that has TRL")
    parser.add_argument("--json", type=Path, help="write all curves to this file")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve is None and (chosen.model is None or not (chosen.model / "config.json").exists()):
        parser.error(f"--model {chosen.model}: no model there; scripts/fetch_smollm2.py makes one")
    return chosen


def main() -> int:
    chosen = parse_arguments()
    if chosen.serve is not None:
        serve(chosen.serve, chosen.device)
        return 0
    found = measure(chosen)
    print(report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
