"""`forge history`: whether the files of a run show that each group counted once and no token was too old."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `history`."""
    parser = subparsers.add_parser(
        "history",
        help="check that a run lost no group, trained on none twice, and kept its staleness bound",
        description="Check the ledger, checkpoints, rollouts, journals and trace of a run of reinforcement learning. "
        "The check shares no code with what wrote the files. The run must not be running. The exit code is 1 if a "
        "guarantee was broken.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(handler=_check)


def _check(arguments: argparse.Namespace) -> int:
    from forge.observe.history import check_history, history_lines

    found = check_history(arguments.run_dir)
    print(json.dumps(found.plain(), indent=2) if arguments.json else "\n".join(history_lines(found)))
    return 0 if found.is_good else 1
