"""RLHF from beginning to end: preferences, a reward model, and GRPO against it with a reference model.

    preferences ──▶ reward model ──▶ GRPO: trainer, generator, reward model, reference model

python apps/rlhf/main.py [--seed N] [--output FOLDER] [key=value of tiny_grpo.yaml …]
python apps/rlhf/main.py --size qwen3_1_7b [--output FOLDER] [key=value of qwen3_1_7b_grpo.yaml …]

`--size tiny` makes its own data and its own model of 0.4 million weights, and runs on a CPU. A larger size starts from
the model and the preferences that its files name. A stage that has finished in the same folder is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from forge.config import GRPOConfig, RewardTrainingConfig, SFTConfig, load
from forge.errors import INPUT_ERRORS, ForgeError
from forge.log_levels import parse_with_log_flags
from forge.loops.grpo import GRPOResult, run_grpo
from forge.loops.reward_model import RewardModelResult, run_reward_model
from forge.loops.sft import run_sft
from forge.observe import start_logging

HERE = Path(__file__).resolve().parent
METRICS = "reward_model.json"


def main() -> None:
    parser = argparse.ArgumentParser(description="Preferences, a reward model, and GRPO against it.")
    parser.add_argument("--size", default="tiny", help="which files of apps/rlhf: tiny, or qwen3_1_7b for three GPUs")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    parser.add_argument("--output", type=Path, help="folder to write to; by default runs/rlhf-SIZE-SEED")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to SIZE_grpo.yaml")
    arguments = parse_with_log_flags(parser)
    folder = arguments.output or Path("runs") / f"rlhf-{arguments.size}-{arguments.seed}"
    start_logging("warning")
    began = time.perf_counter()
    try:
        found, result = teach(arguments.size, folder, seed=arguments.seed, overrides=arguments.overrides)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
    except ForgeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, INPUT_ERRORS) else 1)
    if result.is_stopped:
        sys.exit(result.exit_code)
    print(summary(found, result, seconds=time.perf_counter() - began))


def teach(size: str, folder: Path, *, seed: int, overrides: Sequence[str] = ()) -> tuple[dict[str, float], GRPOResult]:
    """Run the stages, and return the reward model's metrics on held-out pairs and how GRPO ended."""
    common = [f"run.output_dir={folder}", f"run.seed={seed}"]
    places = prepare_tiny(folder, seed=seed) if size == "tiny" else {"reward_model": [], "grpo": []}
    print("2. The reward model: which of two answers people prefer.", flush=True)
    training = load(
        RewardTrainingConfig,
        files=[HERE / f"{size}_reward_model.yaml"],
        overrides=[*common, *places["reward_model"]],
    )
    export, metrics = train_reward_model(training, folder / METRICS)
    print("3. GRPO: the reward is the reward model's score, and a reference model holds the policy back.", flush=True)
    model = [f"rewards.reward_model.path={export}"]
    config = load(
        GRPOConfig, files=[HERE / f"{size}_grpo.yaml"], overrides=[*common, *places["grpo"], *model, *overrides]
    )
    return metrics, asyncio.run(run_grpo(config))


def prepare_tiny(folder: Path, *, seed: int) -> dict[str, list[str]]:
    """Make the data and the first policy of the tiny run, and return where the other stages find them."""
    from preferences import write_files

    files = write_files(folder / "task", seed=seed)
    sft = load(
        SFTConfig,
        files=[HERE / "tiny_sft.yaml"],
        overrides=[
            *(f"run.output_dir={folder}", f"run.seed={seed}"),
            f"data.sources.0.path={files}/demonstrations.jsonl",
        ],
    )
    policy = folder / sft.run.name / "checkpoints" / "hf"
    if not policy.exists():
        print("1. Supervised fine-tuning: how an answer is written.", flush=True)
        tuned = asyncio.run(run_sft(sft))
        if tuned.is_stopped:
            sys.exit(tuned.exit_code)
    pairs = [
        f"data.sources.0.path={files}/preferences.jsonl",
        f"validation.sources.0.path={files}/heldout_preferences.jsonl",
    ]
    prompts = [f"prompts.sources.0.path={files}/prompts.jsonl", f"evaluation.sources.0.path={files}/heldout.jsonl"]
    return {"reward_model": [f"model.path={policy}", *pairs], "grpo": [f"model.path={policy}", *prompts]}


def train_reward_model(config: RewardTrainingConfig, record: Path) -> tuple[Path, dict[str, float]]:
    """Train the reward model unless that was done, and return its folder and its metrics on held-out pairs."""
    export = Path(config.run.output_dir) / config.run.name / "checkpoints" / "hf"
    if not (export.exists() and record.exists()):
        result: RewardModelResult = asyncio.run(run_reward_model(config))
        if result.is_stopped:
            sys.exit(result.exit_code)
        record.write_text(json.dumps(dict(result.validation_metrics), indent=2), encoding="utf-8")
    return export, json.loads(record.read_text(encoding="utf-8"))


def summary(found: dict[str, float], result: GRPOResult, *, seconds: float) -> str:
    """Return how it went, in a few lines."""
    lines = [""]
    if "accuracy" in found:
        lines.append(f"Reward model: {found['accuracy']:.1%} of held-out pairs, calibration error {found['ece']:.3f}")
    if result.first_evaluation is not None and result.evaluation is not None:
        first, last = result.first_evaluation, result.evaluation
        lines.append(f"Held-out prompts: reward {first.reward:+.2f} -> {last.reward:+.2f}")
        lines.append(f"Held-out prompts: solved {first.solved:.1%} -> {last.solved:.1%} of {last.num_prompts}")
    lines += [f"{result.step} steps; {seconds:.0f} s in all", f"Report: {result.report}", f"Model:  {result.export}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
