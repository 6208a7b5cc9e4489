"""How many tokens a second does preference optimisation learn from, against TRL's `DPOTrainer`?

Both train the same model (Qwen3's shape, about 30 million weights, made here) with DPO from the same pairs, in the same
order, on a CPU in float32, with as many threads and the same AdamW. Ours is what `apps/dpo/main.py` runs:
`run_preference`, with its loader, a rank in a process of its own, and its metrics. TRL is given tokens, so that it pays
for no tokenising. It runs in an environment of its own, with the reference's logprobs computed before training, as ours
are, and with a reference model beside the policy, its default.

Each side is a process that trains for one window and waits for its next turn; the order of turns is reversed every
round. All tokens of a prompt with its chosen answer and of the same prompt with its rejected one count, on all sides;
padding does not, nor do warming up and the pass of the reference. The losses of the same steps are compared.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.dpo_ours import serve, settings_of
from harness.dpo_plan import DPOPlan, prepare
from harness.report import table, verdict
from harness.sides import Side, comparison_parser, parse_comparison, run_comparison, started, trl_program
from harness.throughput import quartiles
from sft import SHAPE_30M, rates, summary

OURS = "ours"
TRL_MODES = {"TRL, reference precomputed": True, "TRL, reference beside the policy": False}
GOAL = 1.3
FULL = DPOPlan(SHAPE_30M)
QUICK = DPOPlan({"num_layers": 2}, longest=192, num_pairs=4, num_rounds=2, num_warm=1)


def trl_command(environment: Path, plan: DPOPlan, folder: Path, *, precompute: bool) -> list[str]:
    asked = {
        "model": folder / "model",
        "train": folder / "pairs.ids.jsonl",
        "max-length": plan.longest,
        "pairs": plan.num_pairs,
        "steps": plan.num_steps,
        "window": plan.window,
        "beta": plan.beta,
        "learning-rate": plan.learning_rate,
        "threads": plan.threads,
    }
    return [*trl_program(environment, "trl_dpo.py", asked), *(["--precompute"] if precompute else [])]


def commands(plan: DPOPlan, folder: Path, environment: Path | None) -> dict[str, list[str]]:
    """Return what starts each of the sides."""
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    found = {OURS: [sys.executable, str(Path(__file__).resolve()), "--serve", str(folder)]}
    if environment is not None:
        for name, precompute in TRL_MODES.items():
            found[name] = trl_command(environment, plan, folder, precompute=precompute)
    return found


def measure(plan: DPOPlan, environment: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="forge-dpo-") as name:
        folder = Path(name)
        data = prepare(folder, plan)
        with started(commands(plan, folder, environment), folder, threads=plan.threads) as sides:
            for number in range(1, plan.num_warm + plan.num_rounds):
                for side in sides if number % 2 else sides[::-1]:
                    side.windows.append(side.take_turn())
                shown = "; ".join(f"{side.name} {rates(side)[-1]:,.0f}" for side in sides)
                print(f"window {number + 1}, tokens/s: {shown}", file=sys.stderr, flush=True)
            for side in sides:
                side.finish(with_turn=True)
    losses = {side.name: losses_of(side) for side in sides}
    for side in sides:
        del side.windows[: plan.num_warm]
    return {
        "plan": asdict(plan),
        "settings": [word for word in settings_of(plan, Path()) if "=." not in word and "path" not in word],
        "data": data,
        "sides": {side.name: summary(side) for side in sides},
        "losses": losses,
        "rows": [compare(sides[0], side, losses) for side in sides[1:]],
    }


def losses_of(side: Side) -> list[float]:
    """The loss of each step: of our side in its windows, of TRL's in lines of their own."""
    own = [loss for window in side.windows for loss in window.get("losses", ())]
    return own or [log["loss"] for log in side.logs]


def compare(ours: Side, peer: Side, losses: dict[str, list[float]]) -> dict[str, Any]:
    low, median, high = quartiles(sorted(a / b for a, b in zip(rates(ours), rates(peer), strict=True)))
    pairs = list(zip(losses[ours.name], losses[peer.name], strict=False))
    return {
        "what": peer.name,
        "ratio": median,
        "ratio_quartiles": [low, high],
        "goal": GOAL,
        "met": median >= GOAL,
        "largest_difference": max(abs(mine - theirs) for mine, theirs in pairs),
        "compared_steps": len(pairs),
    }


def report(found: dict[str, Any]) -> str:
    plan, data, rows = found["plan"], found["data"], {row["what"]: row for row in found["rows"]}
    head = ("", "tokens/s (best)", "tokens per CPU second", "ours is faster by (quartiles)", "goal", "losses differ by")
    lines: list[Sequence[str]] = []
    for name, side in found["sides"].items():
        row = rows.get(name)
        lines.append(
            (
                name,
                f"{side['tokens_per_s']:,.0f} ({side['tokens_per_s_best']:,.0f})",
                f"{side['tokens_per_cpu_s']:,.0f}",
                "{:.2f} ({:.2f}–{:.2f})".format(row["ratio"], *row["ratio_quartiles"]) if row else "",
                verdict(row, "≥") if row else "",
                f"{row['largest_difference']:.1g} at most, {row['compared_steps']} steps" if row else "",
            )
        )
    described = (
        f"{data['parameters'] / 1e6:.1f} M weights, float32, {plan['threads']} thread(s), steps of {plan['num_pairs']} "
        f"pairs, {plan['num_rounds']} windows of each side; a prompt with an answer has {data['mean_length']:.0f} "
        f"tokens on average, of which {data['prompts']:.0%} are the prompt's"
    )
    return f"{described}\n\n{table(head, lines)}"


def parse_arguments() -> argparse.Namespace:
    parser = comparison_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="of each side; default: %(default)s")
    parser.add_argument("settings", nargs="*", help="of our side, such as training.share_prefixes=false")
    return parse_comparison(parser)


def plan_of(chosen: argparse.Namespace) -> DPOPlan:
    """Return the plan that the command line asks for."""
    plan = replace(QUICK if chosen.quick else FULL, threads=chosen.threads, settings=tuple(chosen.settings))
    return replace(plan, num_rounds=chosen.rounds) if chosen.rounds else plan


def main() -> int:
    chosen = parse_arguments()
    return run_comparison(
        chosen,
        serve=lambda folder, plan: serve(folder, DPOPlan(**plan)),
        measure=lambda environment: measure(plan_of(chosen), environment),
        report=report,
    )


if __name__ == "__main__":
    sys.exit(main())
