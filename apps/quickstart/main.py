"""The quick start: a tiny model learns a task by reinforcement learning, on a CPU, in a few minutes.

1. A model of 0.4 million random weights is shown how answers are written, and that an answer is one of the digits of
   the question. Which digit is right is not in what it is shown (apps/quickstart/digits.py).
2. GRPO teaches it which: it answers, a reward says right or wrong, and it learns from that alone. The trainer, the
   generator and the rewards are processes of their own, and new weights go from one to the other after every step.
3. Held-out questions, which it has never seen, say how good it is.

Run it with `make quickstart`, `forge quickstart` or `python apps/quickstart/main.py [--seed N] [--output FOLDER]
[key=value …]`. As it is, it ends with exit code 1 if the model did not learn.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from digits import write_task

from forge.config import GRPOConfig, SFTConfig, load
from forge.errors import INPUT_ERRORS, ConfigError, ForgeError
from forge.log_levels import parse_with_log_flags
from forge.loops.grpo import GRPOResult, run_grpo
from forge.loops.sft import run_sft
from forge.observe import start_logging

APPS = Path(__file__).resolve().parents[1]
START_AT_MOST, END_AT_LEAST = 0.35, 0.85
MARK = ".quickstart"
Config = TypeVar("Config", SFTConfig, GRPOConfig)


def main() -> None:
    parser = argparse.ArgumentParser(description="A tiny model learns a task by reinforcement learning, on a CPU.")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="folder to write to")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to apps/grpo/tiny.yaml")
    arguments = parse_with_log_flags(parser)
    start_logging("warning")
    began = time.perf_counter()
    try:
        result = teach(arguments.output, seed=arguments.seed, overrides=arguments.overrides)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
    except ForgeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, INPUT_ERRORS) else 1)
    if result.is_stopped:
        sys.exit(result.exit_code)
    is_judged = not arguments.overrides  # the goal is that of the quick start as it is
    sys.exit(0 if report(result, seconds=time.perf_counter() - began, is_judged=is_judged) else 1)


def teach(folder: Path, *, seed: int, overrides: Sequence[str] = ()) -> GRPOResult:
    """Make the task, show the format, and let reinforcement learning find the answers."""
    sft = configured(SFTConfig, "quickstart/sft.yaml", folder, seed=seed)
    grpo = configured(GRPOConfig, "grpo/tiny.yaml", folder, seed=seed, overrides=overrides)
    prepare(folder)
    write_task(folder / "task", seed=seed)
    print("1. Supervised fine-tuning: how an answer is written.", flush=True)
    tuned = asyncio.run(run_sft(sft))
    if tuned.is_stopped:
        sys.exit(tuned.exit_code)
    print("2. GRPO: which answer is right. Held-out accuracy is `avg@1`.", flush=True)
    return asyncio.run(run_grpo(grpo))


def configured(schema: type[Config], file: str, folder: Path, *, seed: int, overrides: Sequence[str] = ()) -> Config:
    """A configuration file, with its paths moved into the folder of this run."""
    places = [f"run.output_dir={folder}", f"run.seed={seed}"]
    if schema is SFTConfig:
        places += [f"data.sources.0.path={folder}/task/demonstrations.jsonl"]
    else:
        places += [f"model.path={folder}/sft/checkpoints/hf", f"prompts.sources.0.path={folder}/task/prompts.jsonl"]
        places += [f"evaluation.sources.0.path={folder}/task/heldout.jsonl"]
    return load(schema, files=[APPS / file], overrides=[*places, *overrides])


def prepare(folder: Path) -> None:
    """An empty folder. What an earlier quick start wrote there is removed, anything else is left alone."""
    try:
        if folder.exists() and any(folder.iterdir()):
            if not (folder / MARK).exists():
                raise unusable(folder, "an empty folder, or one of an earlier quick start: this one is not empty")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
    except OSError as error:
        raise unusable(folder, f"a folder that can be written: {error.strerror}") from None


def unusable(folder: Path, rule: str) -> ConfigError:
    repair = "give another with --output"
    return ConfigError(
        "the quick start cannot write there", path="--output", value=str(folder), rule=rule, repair=repair
    )


def report(result: GRPOResult, *, seconds: float, is_judged: bool = True) -> bool:
    """Print how it went; whether the model learned, where that is judged."""
    first, last = result.first_evaluation, result.evaluation
    assert first is not None
    assert last is not None
    print()
    print(f"Held-out accuracy: {first.solved:.1%} -> {last.solved:.1%} on {last.num_prompts} questions never seen")
    print(f"{result.step} steps; {seconds:.0f} s in all")
    print(f"Report: {result.report}")
    print(f"Model:  {result.export}   (try: forge chat {shlex.quote(str(result.export))})")
    if not is_judged or (first.solved <= START_AT_MOST and last.solved >= END_AT_LEAST):
        return True
    goal = f"from at most {START_AT_MOST:.0%} to at least {END_AT_LEAST:.0%}"
    print(f"FAILED: the goal is {goal}; try another --seed, and report it: it should never happen", file=sys.stderr)
    return False


if __name__ == "__main__":
    main()
