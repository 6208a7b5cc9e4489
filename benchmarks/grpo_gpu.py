"""How many samples a second does reinforcement learning learn from on one GPU, against TRL's `GRPOTrainer` with vLLM?

One GRPO step on a model of Qwen3's shape with random weights: 64 prompts of 512 tokens, 8 completions of exactly 1,024
tokens each, a reward that costs nothing, the clipped token-mean loss, AdamW, temperature 1, no reference model;
computed in bfloat16 with weights, gradients and optimizer states in float32, on every side. Ours is what
`apps/grpo/main.py` runs, its records and weight proofs included. TRL shares the GPU with vLLM in one process, which
sleeps while it trains; before it is measured, the number of rows and whether gradients are checkpointed are chosen by
timing its own training step (`--no-probe` leaves that out).

Each side is a process that has the GPU to itself, one after the other. The first step is not counted. A time is that
from the end of one training step to the end of the next. The GPU's memory is read from outside every 50 ms.

    python benchmarks/grpo_gpu.py --minutes 9 --json grpo_gpu.json
    python benchmarks/grpo_gpu.py --prompts 32 --tail 1 --max-tokens 8192 --sides native-shared native-shared-ahead2
    python benchmarks/grpo_gpu.py --quick --device cpu --sides native-shared        # to try the program out
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness import gpu_ours, gpu_trl
from harness.gpu_children import Budget, Outcome, measured, run_side, tell
from harness.gpu_memory import GpuMemory
from harness.gpu_plan import QUICK, ROOT, SHAPES, Plan, facts_of, prepare, resized
from harness.gpu_report import best_probe, goal_rows, goals_table, side_figures, speed_table, text, use_table
from harness.report import table

SIDES = (*gpu_ours.SIDES, *gpu_trl.SIDES)
USUAL = ("native-shared", "trl-vllm", "vllm-turns", "native-beside", "native-beside-sync", "trl-vllm-uncorrected")
LEAST_S = {"cuda": 90.0, "cpu": 20.0}
"""What a side needs at least, to start and take its steps: with less time left it is not begun."""
SIDE_S = 300.0
TRAINER_SHARE = 0.8
"""The part of the GPU that TRL's training step may take when its settings are chosen: vLLM keeps some while asleep."""


def device_peak(device: str) -> float | None:
    """The GPU's peak in operations a second, where it is known. Asked in a process that ends: it takes memory."""
    if device != "cuda":
        return None
    import subprocess

    from forge.observe import device_peak_flops

    word = "import torch; print(torch.cuda.get_device_name())"
    name = subprocess.run([sys.executable, "-c", word], capture_output=True, text=True, check=True).stdout.strip()
    return device_peak_flops(name)


class Bench:
    """Runs sides one after the other, and keeps what they told."""

    def __init__(self, plan: Plan, folder: Path, *, budget: Budget, chosen: argparse.Namespace) -> None:
        self.plan, self.folder, self.budget, self.chosen = plan, folder, budget, chosen
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.probes: list[dict[str, Any]] = []
        self.most_gib = TRAINER_SHARE * GpuMemory().total / 2**30 if plan.device == "cuda" else None

    def run(self, name: str) -> None:
        outcome = self._skipped() or self._measured(name)
        self.outcomes[name] = outcome.summary()
        tell(f"{name}: {outcome.status} after {outcome.seconds:.0f} s {outcome.why[-600:] if outcome.why else ''}")

    def _skipped(self) -> Outcome | None:
        least = LEAST_S[self.plan.device]
        if self.budget.has(least):
            return None
        return Outcome("skipped", why=f"{self.budget.left_s:.0f} s are left, and a side needs {least:.0f}")

    def _measured(self, name: str) -> Outcome:
        plan = self._for_trl() if name in gpu_trl.SIDES else self.plan
        if (skipped := self._skipped()) is not None:  # the search for settings has taken what was left
            return skipped
        path = plan.write(self.folder / f"{name}.plan.json")
        program = ROOT / "benchmarks" / "harness" / ("gpu_trl.py" if name in gpu_trl.SIDES else "gpu_ours.py")
        words = ["train", name] if name in gpu_trl.SIDES else [name]
        return self._child(name, [self._python(name), str(program), *words, str(path), str(self.folder)])

    def _child(self, name: str, command: Sequence[str]) -> Outcome:
        limit_s = self.budget.cut(self.chosen.side_limit)
        return run_side(name, command, folder=self.folder, device=self.plan.device, limit_s=limit_s)

    def _python(self, name: str) -> str:
        if name in gpu_trl.SIDES:
            return str(self.chosen.trl_python)
        return str(self.chosen.vllm_python if "vllm" in name else sys.executable)

    def _for_trl(self) -> Plan:
        """The plan with the settings that make TRL's training step fastest, found once."""
        if not self.chosen.probe:
            return replace(self.plan, liger=self.chosen.liger != "no")
        if not self.probes:
            self._probe(self.plan)
        best = best_probe(self.probes, most_gib=self.most_gib)
        if best is None:
            return self.plan
        wanted = {name: best[name] for name in ("rows", "gradient_checkpointing", "liger", "attention")}
        tell(f"TRL's fastest training step: {wanted}")
        return replace(self.plan, **wanted)

    def _probe(self, plan: Plan) -> None:
        name = "trl-probe"
        path = plan.write(self.folder / f"{name}.plan.json")
        program = ROOT / "benchmarks" / "harness" / "gpu_trl.py"
        words = [str(program), "probe", self.chosen.liger, str(path), str(self.folder)]
        outcome = self._child(name, [str(self.chosen.trl_python), *words])
        self.probes += [dict(event) for event in outcome.all("tried")]
        if outcome.status != "ok":
            tell(f"{name}: {outcome.status}: {outcome.why[-600:]}")

    def found(self, peak_flops: float | None) -> dict[str, Any]:
        facts = facts_of(self.plan.shape)
        sides = {
            name: side_figures(outcome, self.plan, facts=facts, peak_flops=peak_flops)
            for name, outcome in self.outcomes.items()
        }
        return {
            "plan": asdict(self.plan),
            "sides": sides,
            "rows": goal_rows(sides),
            "probes": self.probes,
            "probe_taken": best_probe(self.probes, most_gib=self.most_gib),
            "outcomes": self.outcomes,
        }


def length_words(plan: Mapping[str, Any]) -> str:
    if not plan["tail"]:
        return str(plan["max_tokens"])
    return f"log-normal (median {plan['tail_median']}, sigma {plan['tail']:g}) up to {plan['max_tokens']}"


def report(found: Mapping[str, Any]) -> str:
    plan = found["plan"]
    what = (
        f"{plan['shape']}, {plan['num_prompts']} prompts x {plan['group_size']} samples, {plan['prompt_tokens']} + "
        f"{length_words(plan)} tokens, {plan['precision']} precision, {plan['num_steps']} steps after "
        f"{plan['num_warm']} that did not count"
    )
    parts = [what, speed_table(found["sides"]), use_table(found["sides"])]
    if found["rows"]:
        parts.append(goals_table(found["rows"]))
    if found["probes"]:
        parts.append(f"TRL's training step by its settings, before it was measured:\n\n{probe_table(found)}")
    return "\n\n".join(parts)


def probe_table(found: Mapping[str, Any]) -> str:
    rows = [
        (
            str(probe["rows"]),
            "yes" if probe["gradient_checkpointing"] else "no",
            "yes" if probe["liger"] else "no",
            probe["attention"],
            text(probe.get("seconds_a_sample"), ".4f"),
            text(probe.get("allocated_gib"), ".1f") if probe["fits"] else "does not fit",
            "taken" if probe == found["probe_taken"] else "",
        )
        for probe in found["probes"]
    ]
    head = ("rows", "gradient checkpointing", "Liger's layers", "attention", "s a sample", "torch's peak, GiB", "")
    return table(head, rows)


# ---- The command line


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--shape", choices=SHAPES, help="default: qwen3_1_7b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens; figures mean nothing")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=USUAL, help="in this order; default: %(default)s")
    parser.add_argument("--prompts", type=int, help="of a step; default: 64")
    parser.add_argument("--group-size", type=int, help="completions of each; default: 8")
    parser.add_argument("--prompt-tokens", type=int, help="default: 512")
    parser.add_argument("--max-tokens", type=int, help="of a completion, exactly; default: 1024")
    parser.add_argument("--tail", type=float, help="spread of log-normal lengths, cut at --max-tokens; default: 0")
    parser.add_argument("--tail-median", type=int, help="their median; default: 600")
    parser.add_argument("--steps", type=int, help="that are measured; default: 2")
    parser.add_argument("--warm", type=int, help="steps before them; default: 1")
    parser.add_argument("--precision", choices=("mixed", "pure", "float32"), help="of all sides; default: mixed")
    parser.add_argument("--microbatch-tokens", type=int, help="ours; default: 17408")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), help="ours; default: none")
    parser.add_argument("--vllm-memory", type=float, help="the part of the GPU that vLLM may take; default: 0.5")
    parser.add_argument("--rows", type=int, help="TRL's, at once; default: by probing")
    parser.add_argument("--no-probe", dest="probe", action="store_false", help="take TRL's settings as they are given")
    parser.add_argument("--liger", choices=("no", "yes", "both"), default="no", help="Liger's layers for TRL: try them")
    parser.add_argument("--attention", help="TRL's, by transformers' name; default: sdpa, or by probing")
    parser.add_argument(
        "--warm-tokens", type=int, help="TRL's: most tokens of a completion in steps before; default: all"
    )
    parser.add_argument("--only-start", action="store_true", help="end each side when it has started")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of our sides")
    parser.add_argument("--trl", action="append", default=[], metavar="KEY=JSON", help="a setting of GRPOConfig")
    parser.add_argument("--trl-python", type=Path, default=Path(sys.executable), help="interpreter that has TRL")
    parser.add_argument("--vllm-python", type=Path, default=Path(sys.executable), help="interpreter that has vLLM")
    parser.add_argument("--minutes", type=float, help="for all sides together; default: no end")
    parser.add_argument("--side-limit", type=float, default=SIDE_S, help="seconds for a side; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="for models and logs; default: one that is deleted afterwards")
    parser.add_argument("--json", type=Path, help="write everything measured to this file, side by side as it comes")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal was missed or a side failed")
    return parser.parse_args(words)


def plan_of(chosen: argparse.Namespace) -> Plan:
    plan = QUICK if chosen.quick else Plan()
    return resized(
        replace(
            plan,
            device=chosen.device,
            settings=tuple(chosen.set),
            trl=tuple(chosen.trl),
            only_start=chosen.only_start,
        ),
        shape=chosen.shape,
        num_prompts=chosen.prompts,
        group_size=chosen.group_size,
        prompt_tokens=chosen.prompt_tokens,
        max_tokens=chosen.max_tokens,
        tail=chosen.tail,
        tail_median=chosen.tail_median,
        num_steps=chosen.steps,
        num_warm=chosen.warm,
        precision=chosen.precision,
        microbatch_tokens=chosen.microbatch_tokens,
        checkpointing=chosen.checkpointing,
        vllm_memory=chosen.vllm_memory,
        rows=chosen.rows,
        attention=chosen.attention,
        warm_tokens=chosen.warm_tokens,
    )


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    budget, plan = Budget(chosen.minutes), plan_of(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    data = prepare(folder, plan)
    tell(f"the model and the prompts are there: {data['parameters'] / 1e6:,.1f} million weights")
    peak_flops = device_peak(plan.device)
    bench = Bench(plan, folder, budget=budget, chosen=chosen)
    found: dict[str, Any] = {}
    for name in chosen.sides:
        bench.run(name)
        found = {**bench.found(peak_flops), "data": data}
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> int:
    chosen = parse_arguments()
    found = measured(measure, chosen)
    if found is None:
        return 0
    print(report(found))
    missed = [row["what"] for row in found["rows"] if row["met"] is False]
    missed += [f"{name}: {side['status']}" for name, side in found["sides"].items() if side["status"] != "ok"]
    print("\n" + ("not met or not measured: " + "; ".join(missed) if missed else "every goal measured was met"))
    return 1 if chosen.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
