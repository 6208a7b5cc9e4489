"""How many samples a second does reinforcement learning on multi-turn episodes with a tool learn from, against the tool
loop of TRL's `GRPOTrainer`?

Both train the same model (Qwen3's shape, 4.5 million weights, made here) on the same questions with the same tool,
reward and chat template, on a CPU in float32, with the same AdamW, clipped token-mean loss, temperature 0.5 and no
reference model. An episode is four turns: three calls of the tool, then an answer. Ours is a program that calls
`agent.run_tools`, named by `episode.kind`, with default records and metrics. TRL runs `GRPOTrainer(tools=[...])` in an
environment of its own and generates with transformers. Both sides are measured at 1 and at 2 threads, ours also with
the generator a step ahead on a core of its own.

A model with random weights calls no tool. So all sides start from one that was trained here on demonstrations of such
episodes, before anything is measured, and then learn at a rate of 1e-6, which changes nothing that could be seen: both
sides sample the same turns. Tokens and turns of a sample are printed for each side and have to agree within 2%.

Each side is a process that trains for one window of steps and waits for its next turn, in which no other side runs; the
order of turns is reversed every round.
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

from harness.grpo_plan import SHAPE_5M, SHAPE_QUICK
from harness.grpo_report import best_of, compare, rates, side_summary
from harness.report import table, verdict
from harness.sides import (
    add_start_options,
    comparison_parser,
    parse_comparison,
    run_comparison,
    started,
    trl_program,
)
from harness.tools_ours import SIDES, serve, settings_of
from harness.tools_plan import MAX_TURNS, ToolsPlan, prepare

GOAL, TOLERANCE = 3.0, 0.02
TRL_SIDES: Mapping[str, int] = {"TRL, 1 thread": 1, "TRL, 2 threads": 2}
FULL = ToolsPlan(SHAPE_5M)
QUICK = ToolsPlan(SHAPE_QUICK, num_rounds=2, window=1, num_prompts=2, group_size=2, sft_steps=2, max_tokens=16)

Windows = Mapping[str, Sequence[Mapping[str, Any]]]

# ---- the sides


def trl_command(environment: Path, plan: ToolsPlan, folder: Path, name: str) -> list[str]:
    """Return what starts a side of TRL's."""
    asked = {
        "model": folder / "model",
        "prompts": folder / "task" / "prompts.jsonl",
        "prompts-per-step": plan.num_prompts,
        "group-size": plan.group_size,
        "max-tokens": plan.max_tokens,
        "max-completion-tokens": plan.max_completion_tokens,
        "window": plan.window,
        "learning-rate": plan.learning_rate,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "threads": TRL_SIDES[name],
    }
    return trl_program(environment, "trl_tools.py", asked)


def commands(names: Sequence[str], plan: ToolsPlan, folder: Path, environment: Path | None) -> dict[str, list[str]]:
    """Return what starts each of the sides."""
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    ours = [sys.executable, str(Path(__file__).resolve()), "--serve", str(folder), "--side"]
    found = {name: [*ours, name] for name in names if name in SIDES}
    if environment is not None:
        found |= {name: trl_command(environment, plan, folder, name) for name in names if name in TRL_SIDES}
    return found


# ---- measuring


def measure(plan: ToolsPlan, chosen: argparse.Namespace, environment: Path | None) -> dict[str, Any]:
    """Take windows of all sides by turns, and return what was found."""
    found: dict[str, Any] = {"plan": asdict(plan), "settings": settings_of(plan, Path("."))}
    with tempfile.TemporaryDirectory(prefix="forge-grpo-tools-") as name:
        folder = Path(name)
        found["data"] = prepare(folder, plan, start=chosen.start)
        if chosen.keep_start is not None:
            shutil.copytree(folder / "model", chosen.keep_start)
        wanted = commands(chosen.sides or [*SIDES, *TRL_SIDES], plan, folder, environment)
        with started(wanted, folder) as sides:
            for number in range(plan.num_warm + plan.num_rounds):
                for side in sides if number % 2 else sides[::-1]:
                    side.windows.append(side.take_turn())
                shown = "; ".join(f"{side.name} {rates(side.windows[-1:])[0]:.2f}" for side in sides)
                line = f"round {number + 1} of {plan.num_warm + plan.num_rounds}, samples/s: {shown}"
                print(line, file=sys.stderr, flush=True)
            lasts = {side.name: side.finish() for side in sides}
    windows = {side.name: side.windows[1 + plan.num_warm :] for side in sides}
    found["sides"] = {name: side_summary(taken, lasts[name]) for name, taken in windows.items()}
    found["rows"] = [*ratio_rows(windows), *agreement_rows(found["sides"])]
    return found


def ratio_rows(windows: Windows) -> list[dict[str, Any]]:
    """Return our best side against TRL's best, which has the goal, and both with the same number of threads."""
    ours = [name for name in windows if name in SIDES]
    peers = [name for name in windows if name in TRL_SIDES]
    if not ours or not peers:
        return []
    best = (best_of(windows, ours), best_of(windows, peers))
    rows = [compare(windows, fast=best[0], slow=best[1], goal=GOAL)]
    same = [(mine, its) for mine in ours for its in peers if mine.partition(", ")[2] == its.partition(", ")[2]]
    rows += [compare(windows, fast=mine, slow=its, goal=None) for mine, its in same if (mine, its) != best]
    return rows + [cpu_row(windows, fast=mine, slow=its) for mine, its in dict.fromkeys((best, *same))]


def cpu_row(windows: Windows, *, fast: str, slow: str) -> dict[str, Any]:
    """Return the ratio of samples per CPU second: what else the machine does changes it less than samples/s."""

    def mean(name: str) -> float:
        samples = sum(window["samples"] for window in windows[name])
        return float(samples / sum(window["cpu_seconds"] for window in windows[name]))

    row: dict[str, Any] = {"what": f"{fast} / {slow}, per CPU second", "ratio": mean(fast) / mean(slow), "sign": "≥"}
    return {**row, "ratio_quartiles": None, "goal": None, "met": None}


def agreement_rows(sides: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return how far apart the sides are in the tokens and turns of a sample: they must do the same work."""
    if len(sides) < 2:
        return []
    rows = []
    for what in ("num_sampled", "num_observed", "num_turns"):
        values = [side["last"]["episodes"][what] for side in sides.values()]
        apart = max(values) / min(values) - 1
        row = {"what": f"{what} of a sample: largest / smallest of all sides - 1", "ratio": apart, "sign": "≤"}
        rows.append({**row, "ratio_quartiles": None, "goal": TOLERANCE, "met": apart <= TOLERANCE})
    return rows


# ---- the report


def report(found: Mapping[str, Any]) -> str:
    """Return everything as Markdown."""
    plan, data = found["plan"], found["data"]
    described = (
        f"{data['parameters'] / 1e6:.1f} M weights, float32, {plan['num_prompts']} prompts x {plan['group_size']} "
        f"episodes a step, at most {MAX_TURNS} turns of {plan['max_tokens']} tokens; {plan['num_rounds']} windows of "
        f"{plan['window']} steps; {plan['sft_steps']} steps on demonstrations before"
    )
    head = ("", "samples/s (best)", "samples per CPU second", "turns", "tokens sampled", "tokens read", "trained on")
    lines = []
    for name, side in found["sides"].items():
        had = side["last"]["episodes"]
        lines.append(
            (
                name,
                f"{side['samples_per_s']:.2f} ({side['samples_per_s_best']:.2f})",
                f"{side['samples_per_cpu_s']:.2f}",
                f"{had['num_turns']:.2f}",
                f"{had['num_sampled']:.1f}",
                f"{had['num_observed']:.1f}",
                f"{side['tokens_per_sample']:.1f}",
            )
        )
    cells = []
    for row in found["rows"]:
        spread = row["ratio_quartiles"]
        shown = f"{row['ratio']:.3g}" + ("" if spread is None else f" ({spread[0]:.2f}–{spread[1]:.2f})")
        cells.append((row["what"], shown, verdict(row, row["sign"])))
    parts = [described, table(head, lines), table(("", "ratio (quartiles)", "goal"), cells)]
    return "\n\n".join(parts if cells else parts[:2])


# ---- the command line


def parse_arguments() -> argparse.Namespace:
    parser = comparison_parser(__doc__)
    add_start_options(parser, sides=[*SIDES, *TRL_SIDES], which="default: all")
    parser.add_argument("--prompts", type=int, help="prompts of a step")
    return parse_comparison(parser)


def plan_of(chosen: argparse.Namespace) -> ToolsPlan:
    """Return the plan that the command line asks for."""
    wanted = {"num_rounds": chosen.rounds, "window": chosen.window, "num_prompts": chosen.prompts}
    plan = replace(QUICK if chosen.quick else FULL, settings=tuple(chosen.set))
    return replace(plan, **{name: value for name, value in wanted.items() if value})


def main() -> int:
    chosen = parse_arguments()
    return run_comparison(
        chosen,
        serve=lambda folder, plan: serve(folder, ToolsPlan(**plan), chosen.side),
        measure=lambda environment: measure(plan_of(chosen), chosen, environment),
        report=report,
    )


if __name__ == "__main__":
    sys.exit(main())
