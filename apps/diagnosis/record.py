"""Makes the runs of docs/tutorials/diagnosing.md: one that learns, and some that do not, each for another reason.

python apps/diagnosis/record.py [NAME …] [--output FOLDER]

Everything happens in `runs/diagnosis` below the working directory: the task, a model that is fine-tuned on it, and the
runs. What is worth keeping of a run goes to FOLDER/NAME: its configuration, its metrics, and the rollouts of a few
steps. All of them take about two minutes of CPU time. The same seed gives the same numbers on the same kind of CPU,
except for `stale_data`, whose generation and training run at the same time.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = Path("runs/diagnosis")
HEALTHY = "healthy"
NAMES = (
    HEALTHY,
    "reward_hacking",
    "memorised",
    "entropy_collapse",
    "learning_rate",
    "stale_data",
    "cut_off",
)
MAY_END_EARLY = ("cut_off", "entropy_collapse", "learning_rate", "stale_data")
"""Runs that end with an error when they find nothing more to learn from."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the runs of the tutorial about diagnosing.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"among {', '.join(NAMES)}; default: all")
    parser.add_argument(
        "--output", type=Path, default=HERE / "recorded", help="folder to copy to; default: %(default)s"
    )
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in NAMES]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    make_model()
    for name in arguments.names or NAMES:
        make_run(name)
        keep(WORK / name, arguments.output / name)
        print(f"{name}: {arguments.output / name}", flush=True)


def make_model() -> None:
    """Write the task and fine-tune the model that all runs start from, unless that was done."""
    if not (WORK / "task" / "few.jsonl").exists():
        run([str(HERE / "task.py"), str(WORK / "task")])
    if not (WORK / "sft" / "checkpoints" / "hf").exists():
        forge("run", str(HERE.parent / "sft" / "main.py"), "--config", str(HERE / "sft.yaml"))


def make_run(name: str, *overrides: str) -> None:
    """Make a run, anew if there is one of that name."""
    shutil.rmtree(WORK / name, ignore_errors=True)
    files = [HERE / f"{each}.yaml" for each in dict.fromkeys((HEALTHY, name))]
    options = [word for file in files for word in ("--config", str(file))]
    program = str(HERE.parent / "grpo" / "main.py")
    forge("run", program, *options, *overrides, allowed=(0, 1) if name in MAY_END_EARLY else (0,))


def forge(*words: str, allowed: Sequence[int] = (0,)) -> None:
    run(["-m", "forge.cli", *words], allowed=allowed)


def run(words: Sequence[str], *, allowed: Sequence[int] = (0,)) -> None:
    """Run a Python command, and end with what it printed if its exit code is not an allowed one."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode not in allowed:
        sys.exit(f"{done.stdout}{done.stderr}\nexit code {done.returncode}: python {' '.join(words)}")


def keep(source: Path, target: Path) -> None:
    """Copy what shows how a run went: configuration, metrics, and some rollouts. Of a run that took no step, the
    ledger."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "rollouts").mkdir(parents=True)
    steps = sorted((source / "rollouts").glob("step_*.jsonl"))
    names = ["config.yaml", "metrics.jsonl", *([] if steps else ["ledger.jsonl"])]
    shown = [steps[0], steps[len(steps) // 2], steps[-1]] if steps else []
    for kind in ("fruitless", "evaluation"):
        files = sorted((source / "rollouts").glob(f"{kind}_*.jsonl"))
        shown += files[-1:]
    for path in [*(source / name for name in names), *shown]:
        shutil.copy(path, target / path.relative_to(source))


if __name__ == "__main__":
    main()
