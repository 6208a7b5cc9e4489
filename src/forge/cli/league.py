"""`forge league show`: the table of a run's self-play league."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `league`."""
    parser = subparsers.add_parser(
        "league",
        help="show the ratings and results of a self-play league",
        description="Show the self-play league of a run: see episode.league in the configuration.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="print the table of a run's league",
        description="Print the Elo rating of every member of a run's league and of the live policy, with the games of "
        "the live policy against each. The run may still be running.",
    )
    show.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run")
    show.add_argument("--json", action="store_true", help="print JSON instead of text")
    show.set_defaults(handler=_show)


def _show(arguments: argparse.Namespace) -> int:
    from forge.observe.league_table import league_lines, read_league

    table = read_league(arguments.run_dir)
    print(json.dumps(table, indent=2) if arguments.json else "\n".join(league_lines(table)))
    return 0
