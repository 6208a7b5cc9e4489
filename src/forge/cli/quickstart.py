"""`forge quickstart`: a tiny model learns a task by reinforcement learning, on a CPU, in a few minutes."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge.log_levels import add_log_flags


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `quickstart`."""
    parser = subparsers.add_parser(
        "quickstart",
        help="teach a tiny model a task by reinforcement learning, on a CPU",
        description="Teach a tiny model a task by reinforcement learning, on a CPU, in a few minutes. Nothing is "
        "downloaded. What an earlier quick start wrote into the folder is replaced.",
        epilog="example: forge quickstart --seed 1 --output runs/second",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of everything random (default: 0)")
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        default=Path("runs/quickstart"),
        help="folder to write to (runs/quickstart)",
    )
    parser.add_argument("overrides", metavar="a.b=c", nargs="*", help="changes to the reinforcement learning")
    add_log_flags(parser)
    parser.set_defaults(handler=_quickstart)


def _quickstart(arguments: argparse.Namespace) -> int:
    from forge.cli.run import run_here
    from forge.recipes import programs

    own = ["--seed", str(arguments.seed), "--output", str(arguments.output)]
    return run_here(programs()["quickstart"], [*own, "--", *arguments.overrides])
