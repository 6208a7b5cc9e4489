"""How many samples a second does reinforcement learning learn from, and how soon is it good, against TRL's
`GRPOTrainer`?

Both train the same model (Qwen3's shape, 4.5 million weights, made here) from the same files with the same reward, on a
CPU in float32, with the same AdamW, clipped token-mean loss, temperature 1 and no reference model. Ours is what
`apps/grpo/main.py` runs, its records and metrics included: in one process, with trainer and generator apart in turns,
and with the generator 1 or 2 steps ahead on a core of its own. TRL runs in an environment of its own and generates with
transformers, at 1 and at 2 threads; the better one is what counts. Continuous batching, its other way to generate on a
CPU, is measured when it is asked for.

Speed: 8 prompts x 8 completions a step, each of exactly 32 tokens. Each side is a process that trains for one window of
steps and waits for its next turn, in which nobody else works; the order of turns is reversed every round.

Time to an accuracy: completions end by themselves, after about 7 tokens here. All sides begin with the same model,
which was shown how answers are written, and not which are right. Held-out questions are asked after every window, with
the likeliest tokens, and nobody's clock runs meanwhile.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.grpo_ours import SIDES, serve, settings_of
from harness.grpo_plan import SHAPE_5M, SHAPE_30M, SHAPE_QUICK, Plan, prepare
from harness.grpo_report import (
    Point,
    best_of,
    curve,
    only_the_best,
    report,
    side_summary,
    speed_rows,
    sync_row,
    time_row,
)
from harness.plot import bars, curves
from harness.sides import (
    add_start_options,
    comparison_parser,
    parse_comparison,
    run_comparison,
    started,
    trl_program,
)

TRL_SIDES: Mapping[str, tuple[str, ...]] = {
    "TRL, 1 thread": (),
    "TRL, 2 threads": ("--threads", "2"),
    "TRL, continuous batching": ("--continuous-batching",),
}
USUAL = [*SIDES, "TRL, 1 thread", "TRL, 2 threads"]
"""Continuous batching took 1.7 times the CPU time of plain generation, and is left out unless it is asked for."""
TWO, AHEAD = "ours, synchronous, one process, 2 threads", "ours, asynchronous, staleness 1"

FULL = Plan(SHAPE_5M)
QUICK = Plan(SHAPE_QUICK, num_rounds=2, window=2, max_tokens=8, num_prompts=2, group_size=4, sft_steps=0)
TIMED: Mapping[str, Any] = {"max_tokens": 16, "learning_rate": 1e-4}
"""What is different where time to an accuracy is measured: a rate at which so small a step learns steadily."""
MOST_WINDOWS = 60
TRL_ROWS = 64
"""Samples that go through TRL's model at once, at most."""

# ---- the sides


def trl_command(environment: Path, plan: Plan, folder: Path, name: str) -> list[str]:
    task = folder / "task"
    asked = {
        "model": folder / "model",
        "prompts": task / "prompts.jsonl",
        "heldout": task / "heldout.jsonl",
        "prompts-per-step": plan.num_prompts,
        "group-size": plan.group_size,
        "max-tokens": plan.max_tokens,
        "rows": min(TRL_ROWS, plan.samples_per_step),
        "window": plan.window,
        "learning-rate": plan.learning_rate,
        "seed": plan.seed,
    }
    kind = "--fixed-length" if plan.is_fixed_length else "--evaluate"
    return [*trl_program(environment, "trl_grpo.py", asked), kind, *TRL_SIDES[name]]


def commands(names: Sequence[str], plan: Plan, folder: Path, environment: Path | None) -> dict[str, list[str]]:
    """What starts each of the sides."""
    plan_file = folder / "plan.json"
    plan_file.write_text(json.dumps(asdict(plan)))
    ours = [sys.executable, str(Path(__file__).resolve()), "--serve", str(folder), "--side"]
    found = {}
    for name in names:
        if name in SIDES:
            found[name] = [*ours, name]
        elif environment is not None:
            found[name] = trl_command(environment, plan, folder, name)
    return found


# ---- measuring


def measure_speed(plan: Plan, folder: Path, wanted: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Windows of all sides by turns, and their ratios."""
    with started(wanted, folder) as sides:
        for number in range(plan.num_warm + plan.num_rounds):
            for side in sides if number % 2 else sides[::-1]:
                side.windows.append(side.take_turn())
            shown = "; ".join(f"{side.name} {_rate(side.windows[-1]):.1f}" for side in sides)
            _tell(f"round {number + 1} of {plan.num_warm + plan.num_rounds}, samples/s: {shown}")
        lasts = {side.name: side.finish() for side in sides}
    windows = {side.name: side.windows[1 + plan.num_warm :] for side in sides}
    ours = [name for name in windows if name in SIDES]
    peers = [name for name in windows if name in TRL_SIDES]
    rows = speed_rows(windows, ours=ours, peers=peers)
    rows += [sync_row(name, lasts[name]["times"]) for name in ours if lasts[name].get("times")]
    return {
        "sides": {name: side_summary(taken, lasts[name]) for name, taken in windows.items()},
        "rows": rows,
        "best_peer": best_of(windows, peers) if peers else None,
    }


def measure_time(plan: Plan, folder: Path, wanted: Mapping[str, Sequence[str]]) -> dict[str, list[Point]]:
    """Windows of all sides by turns, each until it meets the goal; the curve of each."""
    assert plan.goal is not None
    with started(wanted, folder) as sides:
        left = list(sides)
        for _ in range(MOST_WINDOWS):
            for side in list(left):
                side.windows.append(side.take_turn())
                if side.windows[-1]["accuracy"] >= plan.goal:
                    left.remove(side)
            _tell("held-out: " + "; ".join(f"{side.name} {side.windows[-1]['accuracy']:.1%}" for side in sides))
            if not left:
                break
        for side in sides:
            side.finish()
    return {side.name: curve(side.windows) for side in sides}


def measure_times(plan: Plan, folder: Path, environment: Path | None, names: Sequence[str]) -> dict[str, Any]:
    """Time to the goal for each of the seeds, and what it is of the peer's."""
    assert plan.goal is not None
    runs = []
    for seed in range(plan.num_seeds):
        shutil.rmtree(folder / "runs", ignore_errors=True)
        seeded = replace(plan, seed=seed)
        runs.append(measure_time(seeded, folder, commands(names, seeded, folder, environment)))
    curves = {name: [run[name] for run in runs] for name in runs[0]}
    peer = next((name for name in curves if name in TRL_SIDES), None)
    ours = [name for name in curves if name in SIDES and peer is not None]
    rows = [time_row(curves, ours=name, peer=str(peer), goal=plan.goal) for name in ours]
    return {"curves": curves, "rows": only_the_best(rows)}


def _rate(window: Mapping[str, Any]) -> float:
    return float(window["samples"] / window["seconds"])


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure(plan: Plan, chosen: argparse.Namespace, environment: Path | None) -> dict[str, Any]:
    """Both questions, or the one that was asked."""
    peers = [name for name in chosen.sides or USUAL if name in TRL_SIDES] if environment is not None else []
    found: dict[str, Any] = {"plan": asdict(plan), "settings": settings_of(plan, Path(".")), "rows": []}
    with tempfile.TemporaryDirectory(prefix="forge-grpo-") as name:
        folder = Path(name)
        found["data"] = prepare(folder, plan, start=chosen.start)
        if chosen.keep_start is not None:
            shutil.copytree(folder / "model", chosen.keep_start)
        if chosen.only != "time":
            speed = measure_speed(plan, folder, commands(chosen.sides or USUAL, plan, folder, environment))
            peers = [speed["best_peer"]] if speed["best_peer"] else []
            found |= {"sides": speed["sides"], "rows": speed["rows"]}
        if chosen.only != "speed" and plan.sft_steps:
            wanted: dict[str, Any] = {"goal": chosen.goal, "window": chosen.time_window, "num_seeds": chosen.seeds}
            timed = replace(plan, **TIMED, **wanted)
            later = measure_times(timed, folder, environment, [TWO, AHEAD, *peers[:1]])
            found |= {"time_plan": asdict(timed), "curves": later["curves"], "rows": [*found["rows"], *later["rows"]]}
    return found


def draw(found: Mapping[str, Any], folder: Path) -> None:
    """Pictures of the rates, and of the curves where they were measured."""
    folder.mkdir(parents=True, exist_ok=True)
    if found.get("sides"):
        rates = {name: side["samples_per_s"] for name, side in found["sides"].items()}
        title = "GRPO on two cores: samples learned from in a second"
        (folder / "grpo_samples.svg").write_text(bars(title, rates, unit="/s"))
    if found.get("curves"):
        lines = {
            name: [[(seconds, accuracy) for seconds, _, accuracy in run] for run in runs]
            for name, runs in found["curves"].items()
        }
        drawn = curves("Held-out accuracy", lines, across="seconds", goal=found["time_plan"]["goal"])
        (folder / "grpo_accuracy.svg").write_text(drawn)


# ---- the command line


def parse_arguments() -> argparse.Namespace:
    parser = comparison_parser(__doc__)
    which = "of the speed, and which TRL the time is compared with; default: all but the last"
    add_start_options(parser, sides=[*SIDES, *TRL_SIDES], which=which)
    parser.add_argument("--model", choices=("5m", "30m"), default="5m", help="weights; default: %(default)s")
    parser.add_argument("--only", choices=("speed", "time"), help="one of the two questions")
    parser.add_argument("--goal", type=float, default=0.7, help="held-out accuracy; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side to it; default: %(default)s")
    parser.add_argument("--time-window", type=int, default=5, help="steps between evaluations; default: %(default)s")
    parser.add_argument("--plots", type=Path, help="draw what was measured into this folder, as SVG")
    return parse_comparison(parser)


def plan_of(chosen: argparse.Namespace) -> Plan:
    plan = QUICK if chosen.quick else FULL
    if chosen.model == "30m" and not chosen.quick:
        plan = replace(plan, shape=SHAPE_30M)
    wanted = {"num_rounds": chosen.rounds, "window": chosen.window, "settings": tuple(chosen.set)}
    return replace(plan, **{name: value for name, value in wanted.items() if value})


def main() -> int:
    chosen = parse_arguments()
    return run_comparison(
        chosen,
        serve=lambda folder, plan: serve(folder, Plan(**plan), chosen.side),
        measure=lambda environment: measure(plan_of(chosen), chosen, environment),
        report=report,
        draw=None if chosen.plots is None else lambda found: draw(found, chosen.plots),
    )


if __name__ == "__main__":
    sys.exit(main())
