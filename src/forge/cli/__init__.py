"""The `forge` command. Each subcommand is a module here, which loads what it needs only when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from forge.errors import ForgeError


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    from forge._version import __version__
    from forge.cli import chat, config, doctor, download, plan, report, rewards, run, serve, worker

    parser = argparse.ArgumentParser(
        prog="forge", description="TorchForge: post-training of language models as one plain Python program."
    )
    parser.add_argument("--version", action="version", version=f"forge {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (run, plan, report, chat, serve, config, rewards, download, doctor, worker):
        module.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    parsed = make_parser().parse_args(arguments)
    try:
        return int(parsed.handler(parsed))
    except ForgeError as error:
        print(f"forge {parsed.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
