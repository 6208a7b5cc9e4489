"""What the agents' applications share: show a tiny model how a task is spoken, then let it learn by reinforcement.

1. The application writes its files: demonstrations, tasks to train on, held-out tasks.
2. Supervised fine-tuning on the demonstrations (`sft.yaml`): they show the format, and nothing about what succeeds.
3. Reinforcement learning on the tasks (`grpo.yaml`), with the application's episode.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forge.config import GRPOConfig, SFTConfig, load
from forge.errors import INPUT_ERRORS, ForgeError
from forge.loops.grpo import GRPOResult, run_grpo
from forge.loops.sft import run_sft


def main(app: Path, write_files: Callable[..., Path]) -> None:
    """Run an application from the command line: [--seed N] [--output FOLDER] [key=value of grpo.yaml …]."""
    parser = argparse.ArgumentParser(description="A tiny model learns to act over several turns, on a CPU.")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    parser.add_argument("--output", type=Path, help="folder to write to; by default runs/NAME-SEED")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to grpo.yaml")
    arguments = parser.parse_args()
    folder = arguments.output or Path("runs") / f"{app.name}-{arguments.seed}"
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    began = time.perf_counter()
    try:
        result = teach(app, write_files, folder, seed=arguments.seed, overrides=arguments.overrides)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
    except ForgeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, INPUT_ERRORS) else 1)
    if result.is_stopped:
        sys.exit(result.exit_code)
    print(summary(result, seconds=time.perf_counter() - began))


def teach(
    app: Path, write_files: Callable[..., Path], folder: Path, *, seed: int, overrides: Sequence[str] = ()
) -> GRPOResult:
    """Write the files, fine-tune on the demonstrations unless that was done, and learn from the tasks."""
    files = write_files(folder / "task", seed=seed)
    common = [f"run.output_dir={folder}", f"run.seed={seed}"]
    shown = [f"data.sources.0.path={files}/demonstrations.jsonl"]
    sft = load(SFTConfig, files=[app / "sft.yaml"], overrides=[*common, *shown])
    model = folder / sft.run.name / "checkpoints" / "hf"
    if not model.exists():
        print("1. Supervised fine-tuning on demonstrations: the format.", flush=True)
        tuned = asyncio.run(run_sft(sft))
        if tuned.is_stopped:
            sys.exit(tuned.exit_code)
    print("2. Reinforcement learning: what succeeds. Held-out success is `avg@k`.", flush=True)
    places = [f"model.path={model}", f"prompts.sources.0.path={files}/prompts.jsonl"]
    places += [f"evaluation.sources.0.path={files}/heldout.jsonl"]
    grpo = load(GRPOConfig, files=[app / "grpo.yaml"], overrides=[*common, *places, *overrides])
    return asyncio.run(run_grpo(grpo))


def summary(result: GRPOResult, *, seconds: float) -> str:
    """Return how it went, in a few lines."""
    first, last = result.first_evaluation, result.evaluation
    assert first is not None
    assert last is not None
    return "\n".join(
        [
            "",
            f"Held-out success: {first.solved:.1%} -> {last.solved:.1%} of {last.num_prompts} tasks never seen",
            f"{result.step} steps; {seconds:.0f} s in all",
            f"Report: {result.report}",
            f"Model:  {result.export}",
        ]
    )
