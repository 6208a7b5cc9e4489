"""`forge scale RUN [KIND=N …]`: change the number of workers of a run that is running."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from forge.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `scale`."""
    parser = subparsers.add_parser(
        "scale",
        help="change the number of workers of a run that is running",
        description="Start or end workers of a run of reinforcement learning while it runs, or show how many it has. "
        "New workers join when they are ready; those that leave finish their requests first. A resume continues with "
        "the last numbers.",
        epilog="example: forge scale runs/first generators=4",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument(
        "counts",
        metavar="KIND=N",
        nargs="*",
        help="generators, rewards, reference or episodes; none to show the numbers",
    )
    parser.add_argument("--timeout", metavar="S", type=float, default=None, help="seconds to wait for the answer")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(handler=_scale)


def _scale(arguments: argparse.Namespace) -> int:
    from forge.loops.run_control import RunRefused, ask_run

    wanted = dict(_read(word) for word in arguments.counts)
    try:
        request = {"command": "scale", "workers": wanted}
        reply = ask_run(arguments.run_dir, request, timeout_s=arguments.timeout)
    except RunRefused as error:
        print(f"forge scale: {error}", file=sys.stderr)
        return 2 if error.type_name == "OptionError" else 1
    workers = reply["workers"]
    if arguments.json:
        print(json.dumps({"step": reply["step"], "workers": workers}))
    else:
        print(f"after step {reply['step']}: " + ", ".join(f"{kind}={count}" for kind, count in workers.items()))
    return 0


def _read(word: str) -> tuple[str, int]:
    kind, is_given, count = word.partition("=")
    if not is_given or not count.isascii() or not count.isdecimal() or not 1 <= int(count) <= 100_000:
        raise ConfigError(
            "this does not say how many workers of which kind",
            path="KIND=N",
            value=word,
            rule="a kind, `=`, and a whole number from 1 to 100000",
            repair="write it like generators=4",
        )
    return kind, int(count)
