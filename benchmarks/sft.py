"""How many tokens a second does supervised fine-tuning learn from, against TRL's `SFTTrainer`?

Both train the same model (Qwen3's shape, about 30 million weights, made here) from the same files on conversations of
30 to 512 tokens, lengths log-uniform, on a CPU in float32, with as many threads and the same AdamW. Loss is on answers
only, and a step has about as many tokens on all sides. Ours is what `apps/sft/main.py` runs: `run_sft`, with its
loader that reads, tokenises and packs while it trains, a rank in a process of its own, and its metrics. TRL is given
tokens, so that it pays for no tokenising. It runs in an environment of its own, packed, padded in a random order (its
default) and padded with samples of similar length together.

Each side is a process that trains for one window and waits for its next turn; the order of turns is reversed every
round. Tokens of padding do not count, nor do warming up and validation. The mean loss of the same held-out answers is
taken on all sides when so many tokens have been trained on, and given at equal numbers of tokens.

With `--lora RANK` all sides train an adapter of that rank on all linear layers instead of the weights, TRL's by PEFT.
The most memory of the training process is read from the kernel when the measuring ends.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.report import table, verdict
from harness.sft_ours import serve, settings_of
from harness.sft_plan import Plan, prepare
from harness.sides import Side, comparison_parser, parse_comparison, run_comparison, started, trl_program
from harness.throughput import quartiles

TRL_MODES = {
    "TRL, packed": ("packed", "random"),
    "TRL, padded, similar lengths together": ("padded", "group_by_length"),
    "TRL, padded": ("padded", "random"),
}
OURS, PADDED = "ours", "TRL, padded"
GOAL_BEST, GOAL_PADDED = 1.3, 2.5
PADDED_ROWS = 8
"""TRL's default of rows in a micro-batch, of which two make a step."""


SHAPE_30M = {
    "vocab_size": 32768,
    "hidden_size": 384,
    "num_layers": 10,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1152,
    "max_seq_len": 2048,
}
FULL = Plan(SHAPE_30M)
QUICK = Plan({"num_layers": 2}, longest=256, num_rounds=3, num_warm=1, num_marks=2, num_held_out=6)

# ---- TRL's side


def trl_command(environment: Path, plan: Plan, folder: Path, name: str) -> list[str]:
    mode, order = TRL_MODES[name]
    rows, accumulation = (1, plan.num_rows) if mode == "packed" else (PADDED_ROWS, 2)
    asked = {
        "model": folder / "model",
        "train": folder / "train.ids.jsonl",
        "validation": folder / "held_out.ids.jsonl",
        "mode": mode,
        "order": order,
        "max-length": plan.longest,
        "rows": rows,
        "accumulation": accumulation,
        "steps": plan.num_steps,
        "warmup-steps": 0,
        "window": plan.window,
        "validate-every-tokens": plan.validate_every_tokens,
        "threads": plan.threads,
    }
    if plan.lora_rank is not None:
        asked["lora-rank"] = plan.lora_rank
    return [*trl_program(environment, "trl_sft.py", asked), "--take-turns"]


def commands(plan: Plan, folder: Path, environment: Path | None) -> dict[str, list[str]]:
    """Return what starts each of the sides."""
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    found = {OURS: [sys.executable, str(Path(__file__).resolve()), "--serve", str(folder)]}
    if environment is not None:
        found |= {name: trl_command(environment, plan, folder, name) for name in TRL_MODES}
    return found


# ---- measuring


def measure(plan: Plan, environment: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="forge-sft-") as name:
        folder = Path(name)
        data = prepare(folder, plan)
        with started(commands(plan, folder, environment), folder, threads=plan.threads) as sides:
            for side in sides:
                side.windows.clear()  # the first window warms up
            for number in range(1, plan.num_warm + plan.num_rounds):
                shown = []
                for side in sides if number % 2 else sides[::-1]:
                    window = side.take_turn()
                    shown.append(f"{side.name} {window['tokens'] / window['seconds']:,.0f}")
                    if number >= plan.num_warm:
                        side.windows.append(window)
                progress = f"window {number + 1} of {plan.num_warm + plan.num_rounds}, tokens/s: {'; '.join(shown)}"
                print(progress, file=sys.stderr, flush=True)
            for side in sides:
                side.finish(with_turn=True)
    return {
        "plan": asdict(plan),
        "settings": [word for word in settings_of(plan, Path()) if "=." not in word and "path" not in word],
        "data": data,
        "sides": {side.name: summary(side) for side in sides},
        "rows": [compare(sides[0], side) for side in sides[1:]],
        "curves": curves(sides),
    }


def rates(side: Side) -> list[float]:
    return [window["tokens"] / window["seconds"] for window in side.windows]


def summary(side: Side) -> dict[str, Any]:
    tokens = sum(window["tokens"] for window in side.windows)
    return {
        "tokens_per_s": statistics.median(rates(side)),
        "tokens_per_s_best": max(rates(side)),
        "tokens_per_cpu_s": tokens / sum(window["cpu_seconds"] for window in side.windows),
        "windows": side.windows,
        "curve": side.curve,
        "last": side.last,
    }


def compare(ours: Side, peer: Side) -> dict[str, Any]:
    low, median, high = quartiles(sorted(a / b for a, b in zip(rates(ours), rates(peer), strict=True)))
    goal = GOAL_PADDED if peer.name == PADDED else GOAL_BEST
    return {"what": peer.name, "ratio": median, "ratio_quartiles": [low, high], "goal": goal, "met": median >= goal}


def curves(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Everyone's loss where all are known: at the tokens where we validated, read off the others' straight lines."""
    end = min(side.curve[-1][0] for side in sides)
    marks = sorted({min(tokens, end) for tokens, _ in sides[0].curve})
    return [{"tokens": mark, "losses": {side.name: _read_off(side.curve, mark) for side in sides}} for mark in marks]


def _read_off(curve: Sequence[tuple[int, float]], mark: int) -> float:
    for (left, before), (right, after) in pairwise(curve):
        if left <= mark <= right:
            return before + (after - before) * (mark - left) / max(1, right - left)
    raise ValueError(f"{mark} tokens lie outside the curve")


# ---- what is printed


def report(found: dict[str, Any]) -> str:
    sides, rows = found["sides"], {row["what"]: row for row in found["rows"]}
    head = ("", "tokens/s (best)", "tokens per CPU second", "peak memory, MB", "ours is faster by (quartiles)", "goal")
    lines = []
    for name, side in sides.items():
        row = rows.get(name)
        low, high = row["ratio_quartiles"] if row else (0, 0)
        lines.append(
            (
                name,
                f"{side['tokens_per_s']:,.0f} ({side['tokens_per_s_best']:,.0f})",
                f"{side['tokens_per_cpu_s']:,.0f}",
                f"{side['last']['peak_bytes'] / 1e6:,.0f}",
                f"{row['ratio']:.2f} ({low:.2f}–{high:.2f})" if row else "",
                verdict(row, "≥") if row else "",
            )
        )
    losses = table(
        ("tokens trained on", *sides),
        ((f"{mark['tokens']:,}", *(f"{mark['losses'][name]:.4f}" for name in sides)) for mark in found["curves"]),
    )
    return f"{_described(found)}\n\n{table(head, lines)}\n\nLoss per held-out answer token:\n\n{losses}"


def _described(found: dict[str, Any]) -> str:
    plan, data = found["plan"], found["data"]
    train = data["train"]
    adapter = "" if plan["lora_rank"] is None else f" with an adapter of rank {plan['lora_rank']}"
    return (
        f"{data['parameters'] / 1e6:.1f} M weights{adapter}, float32, {plan['threads']} thread(s), "
        f"windows of {plan['window']} step(s) of about {plan['num_rows'] * plan['longest']:,} tokens, "
        f"{plan['num_rounds']} of each side; "
        f"conversations of {train['mean_length']:.0f} tokens on average, of which {train['answers']:.0%} count"
    )


def parse_arguments() -> argparse.Namespace:
    parser = comparison_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="of each side; default: %(default)s")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter of this rank instead of the weights")
    parser.add_argument("settings", nargs="*", help="of our side, such as training.compile=true")
    return parse_comparison(parser)


def plan_of(chosen: argparse.Namespace) -> Plan:
    """Return the plan that the command line asks for."""
    plan = QUICK if chosen.quick else FULL
    plan = replace(plan, threads=chosen.threads, lora_rank=chosen.lora, settings=tuple(chosen.settings))
    return replace(plan, num_rounds=chosen.rounds) if chosen.rounds else plan


def main() -> int:
    chosen = parse_arguments()
    return run_comparison(
        chosen,
        serve=lambda folder, plan: serve(folder, Plan(**plan)),
        measure=lambda environment: measure(plan_of(chosen), environment),
        report=report,
    )


if __name__ == "__main__":
    sys.exit(main())
