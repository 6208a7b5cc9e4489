"""`forge hosts RUN [--add ADDRESS] [--remove ADDRESS]`: the hosts of a run that is running."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `hosts`."""
    parser = subparsers.add_parser(
        "hosts",
        help="show, add or remove the hosts of a run that is running",
        description="Show the hosts of a run of reinforcement learning while it runs, let hosts join it on which "
        "`forge worker` listens, or let hosts leave: their replicas get replacements on other hosts first. A resume "
        "continues with the last hosts.",
        epilog="example: forge hosts runs/first --add tcp://10.0.0.8:22222",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument(
        "--add", metavar="ADDRESS", action="append", default=[], help="a worker to use from now on; may be repeated"
    )
    parser.add_argument(
        "--remove", metavar="ADDRESS", action="append", default=[], help="a host to let go; may be repeated"
    )
    parser.add_argument(
        "--drain-timeout",
        metavar="S",
        type=float,
        default=None,
        help="seconds after which replicas that leave end with the requests that they still have (default: no limit)",
    )
    parser.add_argument("--timeout", metavar="S", type=float, default=None, help="seconds to wait for the answer")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(handler=_hosts)


def _hosts(arguments: argparse.Namespace) -> int:
    from forge.loops.run_control import RunRefused, ask_run

    request: dict[str, Any] = {"command": "hosts", "add": arguments.add, "remove": arguments.remove}
    if arguments.drain_timeout is not None:
        request["drain_timeout_s"] = arguments.drain_timeout
    try:
        reply = ask_run(arguments.run_dir, request, timeout_s=arguments.timeout)
    except RunRefused as error:
        print(f"forge hosts: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"step": reply["step"], "hosts": reply["hosts"]}))
        return 0
    print(f"after step {reply['step']}:")
    for host in reply["hosts"]:
        print(f"  {_line(host)}")
    return 0


def _line(host: Mapping[str, Any]) -> str:
    free = f", {host['num_free_gpus']} free GPU(s)" if host["num_free_gpus"] else ""
    return f"{host['name']}  {host['state']}{free}: {', '.join(host['groups']) or 'nothing runs there'}"
