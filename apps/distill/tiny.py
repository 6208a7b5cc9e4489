"""Distillation of a tiny teacher into a tiny student, on-policy and off-policy, on a CPU in a few minutes.

1. The teacher is fine-tuned on right answers; the student on demonstrations of the format, which are right in one of
   four cases (apps/quickstart/digits.py).
2. On-policy: the student answers, the teacher scores its tokens, and no reward is learned from (tiny_onpolicy.yaml).
3. Off-policy: the teacher's top-k logprobs of the demonstrations are stored, and a student of the same start learns
   from them (tiny_offline.yaml).

python apps/distill/tiny.py [--seed N] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

APPS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(APPS / "quickstart"))

from digits import write_task  # noqa: E402

from forge.config import DistillConfig, EvalConfig, GRPOConfig, SFTConfig, load  # noqa: E402
from forge.log_levels import parse_with_log_flags  # noqa: E402
from forge.loops.evals import evaluate  # noqa: E402
from forge.loops.grpo import run_grpo  # noqa: E402
from forge.loops.sft import run_sft  # noqa: E402
from forge.loops.storing import store_logprobs  # noqa: E402
from forge.loops.supervised import run_supervised  # noqa: E402
from forge.observe import start_logging  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description="Distill a tiny teacher into a tiny student, on a CPU.")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    parser.add_argument("--output", type=Path, default=Path("runs/distill"), help="folder to write to")
    arguments = parse_with_log_flags(parser)
    start_logging("warning")
    began = time.perf_counter()
    found = distill(arguments.output, seed=arguments.seed)
    print(", ".join(f"{name} {value:.1%}" for name, value in found.items()))
    print(f"{time.perf_counter() - began:.0f} s in all")


def distill(folder: Path, *, seed: int) -> dict[str, float]:
    """Make both models, distill in both ways, and return the held-out accuracy of each model."""
    task = write_task(folder / "task", seed=seed)
    print("1. Fine-tuning: the teacher on right answers, the student on the format.", flush=True)
    asyncio.run(
        run_sft(_load(SFTConfig, "distill/teacher.yaml", folder, seed, f"data.sources.0.path={task}/right.jsonl"))
    )
    shown = (f"data.sources.0.path={task}/demonstrations.jsonl", "run.name=student")
    asyncio.run(run_sft(_load(SFTConfig, "quickstart/sft.yaml", folder, seed, *shown)))
    models = (f"model.path={folder}/student/checkpoints/hf", f"teacher.path={folder}/teacher/checkpoints/hf")
    print("2. On-policy: the teacher scores what the student samples.", flush=True)
    asked = (f"prompts.sources.0.path={task}/prompts.jsonl", f"evaluation.sources.0.path={task}/heldout.jsonl")
    result = asyncio.run(run_grpo(_load(GRPOConfig, "distill/tiny_onpolicy.yaml", folder, seed, *models, *asked)))
    assert result.first_evaluation is not None
    assert result.evaluation is not None
    print("3. Off-policy: the student learns from stored logprobs.", flush=True)
    offline = _load(DistillConfig, "distill/tiny_offline.yaml", folder, seed, *models, shown[0])
    asyncio.run(store_logprobs(offline))
    asyncio.run(run_supervised(offline))
    return {
        "teacher": _accuracy(folder, "teacher", seed),
        "student": result.first_evaluation.solved,
        "on-policy": result.evaluation.solved,
        "off-policy": _accuracy(folder, "offline", seed),
    }


def _load(schema: type, file: str, folder: Path, seed: int, *overrides: str) -> Any:
    return load(schema, files=[APPS / file], overrides=[f"run.output_dir={folder}", f"run.seed={seed}", *overrides])


def _accuracy(folder: Path, name: str, seed: int) -> float:
    """Return which part of the held-out questions a model answers right, greedily."""
    reward = {"kind": "regex", "name": "right", "args": {"pattern": r"The answer is (\d)\.", "whole": True, "group": 1}}
    config = EvalConfig.model_validate(
        {
            "run": {"name": f"eval_{name}", "output_dir": str(folder), "seed": seed},
            "model": {"path": str(folder / name / "checkpoints" / "hf")},
            "prompts": {"sources": [{"path": str(folder / "task" / "heldout.jsonl")}]},
            "rewards": {"functions": [reward]},
            "generator": {"max_seq_len": 64, "max_batch": 256, "sampling": {"max_tokens": 16, "temperature": 0.0}},
        }
    )
    return asyncio.run(evaluate(config, overwrite=True)).parts["right"]


if __name__ == "__main__":
    main()
