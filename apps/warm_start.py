"""What the agents' applications share: show a tiny model how a task is spoken, then let it learn by reinforcement.

1. The application writes its files: demonstrations, tasks to train on, held-out tasks.
2. Supervised fine-tuning on the demonstrations (`sft.yaml`): they show the format, and nothing about what succeeds.
3. Reinforcement learning on the tasks (`grpo.yaml`), with the application's episode.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forge.config import GRPOConfig, SFTConfig, load
from forge.errors import INPUT_ERRORS, ForgeError
from forge.log_levels import parse_with_log_flags
from forge.loops.grpo import GRPOResult, run_grpo
from forge.loops.run_paths import run_dir
from forge.loops.sft import run_sft
from forge.observe import start_logging

ReportFunction = Callable[[Path, Path], str]
"""Returns what an application measures itself, from the folders of the fine-tuned model and of the finished run."""


def main(app: Path, write_files: Callable[..., Path], *, report: ReportFunction | None = None) -> None:
    """Run an application from the command line: [--seed N] [--output FOLDER] [key=value of grpo.yaml …]."""
    parser = argparse.ArgumentParser(description="A tiny model learns to act over several turns, on a CPU.")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    parser.add_argument("--output", type=Path, help="folder to write to; by default runs/NAME-SEED")
    parser.add_argument("--config", type=Path, default=app / "grpo.yaml", help="the reinforcement learning")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration")
    arguments = parse_with_log_flags(parser)
    folder = arguments.output or Path("runs") / f"{app.name}-{arguments.seed}"
    start_logging("warning")
    began = time.perf_counter()
    try:
        grpo = show(
            app, write_files, folder, seed=arguments.seed, config=arguments.config, overrides=arguments.overrides
        )
        result = asyncio.run(run_grpo(grpo))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
    except ForgeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, INPUT_ERRORS) else 1)
    if result.is_stopped:
        sys.exit(result.exit_code)
    print(summary(result, seconds=time.perf_counter() - began))
    if report is not None:
        print(report(Path(str(grpo.model.path)), run_dir(grpo)))


def show(
    app: Path, write_files: Callable[..., Path], folder: Path, *, seed: int, config: Path, overrides: Sequence[str] = ()
) -> GRPOConfig:
    """Write the files, fine-tune on the demonstrations unless that was done, and return how to go on with the tasks."""
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
    places = [f"model.path={model}", f"prompts.sources.0.path={files}/prompts.jsonl"]
    if (files / "heldout.jsonl").exists():
        places += [f"evaluation.sources.0.path={files}/heldout.jsonl"]
    grpo = load(GRPOConfig, files=[config], overrides=[*common, *places, *overrides])
    hint = " Held-out success is `avg@k`." if grpo.evaluation.sources else ""
    print(f"2. Reinforcement learning: what succeeds.{hint}", flush=True)
    return grpo


def summary(result: GRPOResult, *, seconds: float) -> str:
    """Return how it went, in a few lines."""
    first, last = result.first_evaluation, result.evaluation
    lines = [""]
    if first is not None and last is not None:
        lines += [f"Held-out success: {first.solved:.1%} -> {last.solved:.1%} of {last.num_prompts} tasks never seen"]
    lines += [f"{result.step} steps; {seconds:.0f} s in all", f"Report: {result.report}", f"Model:  {result.export}"]
    return "\n".join(lines)
