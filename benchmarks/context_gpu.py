"""What is the longest context that trains at a shape on one GPU, against TRL's `GRPOTrainer`?

One sample a step, a third of it prompt, through the loss of reinforcement learning, backward, clipped, and through
AdamW, whose states are there before. Lengths are sought between one that went well and one that did not, each in a
process of its own with a limit of time: what does not train within it counts as too long, and the table says so. Ours
is measured with several settings. TRL's is its own loss with gradient checkpointing, without generation and without
vLLM, so that all memory is its own; with Liger's layers as well where that package is installed.

    python benchmarks/context_gpu.py --minutes 6 --json context_gpu.json
    python benchmarks/context_gpu.py --quick --device cpu          # to try the program out
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.gpu_children import Budget, Outcome, measured, run_side, tell
from harness.gpu_context import Try, end_of, longest_of, next_length
from harness.gpu_memory import GpuMemory
from harness.gpu_plan import QUICK, ROOT, SHAPES, Plan, prepare, resized
from harness.gpu_report import first_line, text
from harness.report import table

FULL = "training.activation_checkpointing=full"
OFFLOAD = "training.activation_offload=true"
OURS: Mapping[str, tuple[str, ...]] = {
    "ours, full checkpointing": (FULL,),
    "ours, full checkpointing, offload": (FULL, OFFLOAD),
    "ours, full checkpointing, optimizer bfloat16": (FULL, "training.optimizer_dtype=bfloat16"),
    "ours, full checkpointing, offload, all bfloat16": (FULL, OFFLOAD, "distributed.precision=bfloat16_pure"),
}
TRL: Mapping[str, Mapping[str, Any]] = {
    "TRL, gradient checkpointing": {},
    "TRL, gradient checkpointing, Liger's layers": {"liger": True},
    "TRL, gradient checkpointing, all bfloat16": {"precision": "pure"},
}
USUAL = ("ours, full checkpointing", "TRL, gradient checkpointing", "ours, full checkpointing, offload")
LEAST_S = {"cuda": 30.0, "cpu": 15.0}
FIRST = {"cuda": 16384, "cpu": 512}
QUICK_LONGEST, QUICK_BYTES = 1500, 1e12
"""Of the quick run on a CPU: longer samples count as not fitting, however much memory there is."""


class Seeker:
    """Seeks the longest sample that one side trains."""

    def __init__(self, plan: Plan, folder: Path, *, budget: Budget, chosen: argparse.Namespace) -> None:
        self.plan, self.folder, self.budget, self.chosen = plan, folder, budget, chosen
        self.total_bytes = float(GpuMemory().total) if plan.device == "cuda" else QUICK_BYTES

    def seek(self, name: str, *, num_sides: int) -> dict[str, Any]:
        """All tries of a side, until its longest is known or its part of the time is over: `num_sides` are to come."""
        tries: list[Try] = []
        failure = ""
        until = Budget(min(self.chosen.side_limit, self.budget.left_s / num_sides) / 60)
        while (length := self._next(tries)) is not None:
            if not until.has(LEAST_S[self.plan.device]):
                failure = "time was over before the end was found"
                break
            outcome = self._run(name, length, limit_s=until.cut(self.chosen.try_limit))
            tried = judged(length, outcome)
            if tried is None:
                failure = outcome.why
                break
            tries.append(tried)
            tell(f"{name}: {length:,} tokens: {tried.outcome}, {tried.peak_bytes / 1e9:.1f} GB")
        return {"tries": [asdict(each) for each in tries], "why": failure}

    def _next(self, tries: Sequence[Try]) -> int | None:
        """Return the length to try next: the next of `--lengths`, or where the end may be."""
        if not self.chosen.lengths:
            return next_length(tries, total_bytes=self.total_bytes, least=self.chosen.first)
        left = [length for length in self.chosen.lengths if length not in {each.length for each in tries}]
        return left[0] if left and all(each.outcome == "trained" for each in tries) else None

    def _run(self, name: str, length: int, *, limit_s: float) -> Outcome:
        plan = replace(self.plan, **TRL[name]) if name in TRL else self.plan
        path = plan.write(self.folder / "context.plan.json")
        harness = ROOT / "benchmarks" / "harness"
        if name in TRL:
            command = [str(self.chosen.trl_python), str(harness / "gpu_trl.py"), "context", str(length)]
            command += [str(path), str(self.folder)]
        else:
            command = [sys.executable, str(harness / "gpu_context.py"), str(length), str(path), str(self.folder)]
            command += [*OURS[name], *self.chosen.set]
        if self.plan.device == "cpu" and length > QUICK_LONGEST:
            return Outcome("ok", [{"event": "full", "length": length}])
        return run_side("context", command, folder=self.folder, device=plan.device, limit_s=limit_s)


def judged(length: int, outcome: Outcome) -> Try | None:
    """How a try ended; None if it failed for another reason than memory or time."""
    trained = outcome.last("trained")
    if trained is not None:
        return Try(length, "trained", float(outcome.peak_bytes - outcome.start_bytes), trained["seconds"])
    if outcome.last("full") is not None or "OutOfMemoryError" in outcome.why or "out of memory" in outcome.why:
        return Try(length, "full")
    return Try(length, "time", seconds=outcome.seconds) if outcome.status == "time" else None


def report(found: Mapping[str, Any]) -> str:
    plan, rows = found["plan"], []
    for name, side in found["sides"].items():
        tries = [Try(**each) for each in side["tries"]]
        best, end = longest_of(tries), end_of(tries)
        why = {"full": "memory", "time": "time"}[end.outcome] if end is not None else "not found"
        rows.append(
            (
                name,
                "" if best is None else f"{best.length:,}",
                text(None if best is None else best.peak_bytes / 1e9, ".1f"),
                text(None if best is None else best.seconds, ".1f"),
                text(None if best is None or not best.seconds else best.length / best.seconds, ",.0f"),
                "" if end is None else f"{end.length:,}",
                why,
                first_line(side["why"]),
            )
        )
    head = ("side", "longest, tokens", "peak GB", "s a step", "tokens/s", "too long", "ended by", "")
    return f"{plan['shape']}, one sample, {plan['precision']} precision\n\n{table(head, rows)}"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--shape", choices=SHAPES, help="default: qwen3_1_7b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model; figures mean nothing")
    parser.add_argument("--sides", nargs="+", choices=[*OURS, *TRL], default=USUAL, help="default: %(default)s")
    parser.add_argument("--precision", choices=("mixed", "pure", "float32"), help="default: mixed")
    parser.add_argument("--first", type=int, help="length to begin with; default: 16384")
    parser.add_argument("--lengths", type=int, nargs="+", help="try these alone, until one does not fit")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="training.… or distributed.…")
    parser.add_argument("--trl-python", type=Path, default=Path(sys.executable), help="interpreter that has TRL")
    parser.add_argument("--minutes", type=float, help="for all sides together; default: no end")
    parser.add_argument("--side-limit", type=float, default=240.0, help="seconds for a side; default: %(default)s")
    parser.add_argument("--try-limit", type=float, default=120.0, help="seconds for a length; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="for models and logs; default: one that is deleted afterwards")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    chosen = parser.parse_args(words)
    chosen.first = chosen.first or FIRST[chosen.device]
    return chosen


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    plan = replace(QUICK if chosen.quick else Plan(), device=chosen.device, gradient_checkpointing=True)
    plan = resized(plan, shape=chosen.shape, precision=chosen.precision)
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder, plan)
    seeker = Seeker(plan, folder, budget=Budget(chosen.minutes), chosen=chosen)
    found: dict[str, Any] = {"plan": asdict(plan), "sides": {}}
    for number, name in enumerate(chosen.sides):
        found["sides"][name] = seeker.seek(name, num_sides=len(chosen.sides) - number)
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> int:
    chosen = parse_arguments()
    found = measured(measure, chosen)
    if found is None:
        return 0
    print(report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
