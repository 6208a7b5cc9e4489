"""`forge diagnose`: why a run does not learn."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `diagnose`."""
    parser = subparsers.add_parser(
        "diagnose",
        help="look for known reasons why a run of reinforcement learning does not learn",
        description="Look at the metrics and completions of a run of reinforcement learning for known problems: reward "
        "hacking, memorised prompts, entropy collapse, stale data, a learning rate that is too high, groups that teach "
        "nothing, completions that are cut off, failing rewards, a sampler that differs from the trainer, numbers that "
        "are not finite. Each finding names its evidence, the likely cause and what to change. It speaks only where "
        "the evidence is strong. The run may be running. The exit code is 0 whether or not something was found.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run, with its metrics.jsonl")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command and return its exit code."""
    from forge.observe.diagnosis import diagnose, diagnosis_lines

    found = diagnose(arguments.run_dir)
    print(json.dumps(found.plain(), indent=2) if arguments.json else "\n".join(diagnosis_lines(found)))
    return 0
