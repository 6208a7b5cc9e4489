"""All figures of one GPU in one call: the tables of `docs/performance.md`, within a budget of time.

Each stage is one of the other benchmarks, run with the time that is left for it; what does not fit is left out, and the
table says so. A JSON file keeps everything, and a Markdown file is what goes into the documentation, commands included.
Where one call may not take long enough for all, `--stages` chooses some, and `--json` of an earlier call is added to.

    python benchmarks/gpu_table.py --minutes 20 --json gpu.json --markdown gpu.md
    python benchmarks/gpu_table.py --minutes 9 --stages grpo --json gpu.json --markdown gpu.md
    python benchmarks/gpu_table.py --quick --device cpu --minutes 3 --stages sync       # to try the program out
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.gpu_children import Budget, end_session, measured, start, tell
from harness.gpu_plan import ROOT

NUM_LAST = 30
GRACE_S = 30.0
"""What a stage may take beyond its own budget, to end its sides and print."""


@dataclass(frozen=True)
class Stage:
    """One benchmark of the table.

    Attributes:
        title: of its section.
        script: its file in `benchmarks/`.
        words: its arguments on a GPU; `quick` those of a trial on a CPU.
        minutes: what it is given, if there is as much; `least` what it needs to be worth beginning.
        takes: which options of this program it knows.
    """

    title: str
    script: str
    words: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick", "--device", "cpu")
    minutes: float = 3.0
    least: float = 1.0
    takes: frozenset[str] = frozenset()


OWN = frozenset({"minutes", "folder", "shape"})
STAGES: Mapping[str, Stage] = {
    "grpo": Stage(
        "A GRPO step, against TRL",
        "grpo_gpu.py",
        quick=("--quick", "--device", "cpu", "--sides", "native-shared"),
        minutes=9.0,
        least=2.5,
        takes=OWN | {"trl_python", "vllm_python"},
    ),
    "sync": Stage(
        "New weights, to the generator that serves them",
        "sync_gpu.py",
        quick=("--quick", "--device", "cpu", "--sides", "shared"),
        minutes=3.5,
        least=1.0,
        takes=OWN | {"vllm_python"},
    ),
    "context": Stage(
        "The longest context that trains",
        "context_gpu.py",
        quick=("--quick", "--device", "cpu", "--sides", "ours, full checkpointing"),
        minutes=5.0,
        least=1.5,
        takes=OWN | {"trl_python"},
    ),
    "memory": Stage("Memory, planned and measured", "memory_plan.py", quick=("--quick",), takes=frozenset({"minutes"})),
    "trainer": Stage(
        "A training step",
        "trainer.py",
        quick=("--preset", "tiny", "--device", "cpu", "--tokens", "512", "--longest", "64"),
    ),
    "generation": Stage(
        "Generation",
        "generation_cuda.py",
        words=("--shapes", "qwen3_1_7b"),
        quick=("--quick", "--device", "cpu", "--contenders", "native"),
        minutes=4.0,
        least=2.0,
    ),
    "store": Stage("Weights between two plain processes", "weight_sync_cuda.py", minutes=2.0, least=0.75),
}
USUAL = ("grpo", "sync", "context", "memory")


def shares(names: Sequence[str], minutes: float | None) -> dict[str, float]:
    """The minutes that each stage may take: its own, and more where there is more time than all ask for.

    They may add up to more than there is. Stages come in the order of their importance: one that does not use its time
    leaves it to those after it, and one for which less is left than it needs is not begun.
    """
    wanted = sum(STAGES[name].minutes for name in names)
    scale = 1.0 if minutes is None else max(1.0, minutes / wanted)
    return {name: STAGES[name].minutes * scale for name in names}


def command_of(name: str, chosen: argparse.Namespace, *, answer: Path, minutes: float | None) -> list[str]:
    """The command line of a stage."""
    stage = STAGES[name]
    words = list(stage.quick if chosen.quick else stage.words)
    given: dict[str, Any] = {
        "minutes": None if minutes is None else f"{minutes:.2f}",
        "folder": chosen.folder,
        "shape": None if chosen.quick else chosen.shape,
        "trl_python": chosen.trl_python,
        "vllm_python": chosen.vllm_python,
    }
    for key, value in given.items():
        if key in stage.takes and value is not None:
            words += [f"--{key.replace('_', '-')}", str(value)]
    more = [word for pair in chosen.give for word in shlex.split(pair.partition(":")[2]) if pair.startswith(f"{name}:")]
    script = ROOT / "benchmarks" / stage.script
    return [sys.executable, str(script), *words, *more, "--json", str(answer)]


def shown_command(command: Sequence[str]) -> str:
    """A command as it is written down: without this machine's paths."""
    words, skips = (
        ["python", f"benchmarks/{Path(command[1]).name}"],
        {"--folder", "--json", "--trl-python", "--vllm-python"},
    )
    rest = iter(command[2:])
    for word in rest:
        if word in skips:
            next(rest)
        else:
            words.append(shlex.quote(word))
    return " ".join(words)


def run_stage(name: str, chosen: argparse.Namespace, *, minutes: float | None, folder: Path) -> dict[str, Any]:
    """Run a stage to its end, and return what it wrote and printed."""
    answer, log = folder / f"stage-{name}.json", folder / f"stage-{name}.txt"
    answer.unlink(missing_ok=True)
    command = command_of(name, chosen, answer=answer, minutes=minutes)
    tell(f"== {name}: {shown_command(command)}")
    began = time.monotonic()
    paths = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    limit_s = None if minutes is None else 60 * minutes + GRACE_S
    with log.open("w") as output:
        process = start(command, output=output, variables=variables)
        try:
            is_late = _wait(process, log, limit_s)
        finally:
            end_session(process)
    status = "time" if is_late else "ok" if process.returncode == 0 else "failed"
    return {
        "status": status,
        "seconds": time.monotonic() - began,
        "command": shown_command(command),
        "printed": markdown_of(log.read_text(errors="replace")),
        "log": log.read_text(errors="replace")[-4000:] if status != "ok" else "",
        "found": json.loads(answer.read_text()) if answer.exists() else None,
    }


def _wait(process: Any, log: Path, limit_s: float | None) -> bool:
    """Show what a stage prints until it ends; True if its time was over before."""
    until = None if limit_s is None else time.monotonic() + limit_s
    with log.open(errors="replace") as file:
        while True:
            is_over = process.poll() is not None
            sys.stderr.write(file.read())
            sys.stderr.flush()
            if is_over:
                return False
            if until is not None and time.monotonic() > until:
                return True
            time.sleep(0.2)


def markdown_of(printed: str) -> str:
    """The tables of what a stage printed, each with the sentence before it; without a table, its last lines."""
    found: list[str] = []
    lines = [line.rstrip() for line in printed.splitlines()]
    before = ""
    for number, line in enumerate(lines):
        is_row = line.startswith("|")
        if is_row and not (number and lines[number - 1].startswith("|")):
            found += ["", before, ""] if before and not before.startswith(("[", "{")) else [""]
        if is_row:
            found.append(line)
        before = "" if is_row else line or before
    if not found:
        return "```text\n" + "\n".join(lines[-NUM_LAST:]) + "\n```"
    return "\n".join(found).strip()


def page(stages: Mapping[str, Mapping[str, Any]], machine: str) -> str:
    """The Markdown of all stages."""
    parts = [f"Machine: {machine}."]
    for name, stage in stages.items():
        parts.append(f"### {STAGES[name].title}")
        if stage.get("command"):
            parts.append(f"```bash\n{stage['command']}\n```")
        if stage["status"] == "skipped":
            parts.append(f"Not measured: {stage['why']}.")
            continue
        if stage["printed"]:
            parts.append(stage["printed"])
        if stage["status"] != "ok":
            parts.append(f"This ended as `{stage['status']}` after {stage['seconds']:.0f} s.")
    return "\n\n".join(parts) + "\n"


def machine_of(device: str) -> str:
    """The GPU and the programs, in words. torch is asked in a process that ends."""
    import subprocess

    word = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name() if {} else 'CPU')"
    command = [sys.executable, "-c", word.format(device == "cuda")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    version, cuda, name = done.stdout.strip().split(" ", 2)
    parts = [name, f"{len(os.sched_getaffinity(0))} cores", f"Python {sys.version.split()[0]}", f"torch {version}"]
    return ", ".join([*parts, *([f"CUDA {cuda}"] if device == "cuda" else [])])


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--minutes", type=float, help="for all stages together; default: each its own")
    parser.add_argument(
        "--stages", nargs="+", choices=STAGES, default=USUAL, help="in this order; default: %(default)s"
    )
    parser.add_argument("--shape", default="qwen3_1_7b", help="default: %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models; figures mean nothing")
    parser.add_argument("--trl-python", type=Path, help="interpreter that has TRL; default: this one")
    parser.add_argument("--vllm-python", type=Path, help="interpreter that has vLLM; default: this one")
    parser.add_argument(
        "--give", action="append", default=[], metavar="STAGE:WORDS", help="more arguments, as in 'grpo:--steps 2'"
    )
    parser.add_argument("--folder", type=Path, help="for models and logs; default: one that is deleted afterwards")
    parser.add_argument("--json", type=Path, help="write everything to this file; one that is there is added to")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    chosen = parser.parse_args(words)
    for pair in chosen.give:
        if pair.partition(":")[0] not in STAGES:
            parser.error(f"--give {pair!r}: begins with the name of a stage and a colon")
    return chosen


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    budget = Budget(chosen.minutes)
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"stages": {}}
    if chosen.json is not None and chosen.json.exists():
        found = json.loads(chosen.json.read_text())
    found["machine"] = machine_of(chosen.device)
    for name, minutes in shares(chosen.stages, chosen.minutes).items():
        left = budget.left_minutes
        least = 0.2 if chosen.quick else STAGES[name].least
        given = minutes if left is None else min(minutes, left - GRACE_S / 60)
        if not (ROOT / "benchmarks" / STAGES[name].script).exists():
            found["stages"][name] = {"status": "skipped", "why": f"there is no benchmarks/{STAGES[name].script}"}
        elif given < least:
            why = f"{max(given, 0.0):.1f} minutes were left, and it needs {least:g}"
            found["stages"][name] = {"status": "skipped", "why": why}
        else:
            found["stages"][name] = run_stage(name, chosen, minutes=given, folder=folder)
        tell(f"== {name}: {found['stages'][name]['status']} {found['stages'][name].get('why', '')}")
        write(found, chosen)
    return found


def write(found: Mapping[str, Any], chosen: argparse.Namespace) -> None:
    """After every stage, so that a call that is cut short has told what it found."""
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    if chosen.markdown is not None:
        chosen.markdown.write_text(page(found["stages"], found["machine"]))


def main() -> int:
    chosen = parse_arguments()
    found = measured(measure, chosen)
    if found is None:
        return 0
    print(page(found["stages"], found["machine"]))
    return 0 if all(stage["status"] in ("ok", "skipped") for stage in found["stages"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
