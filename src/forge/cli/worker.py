"""`forge worker`: make this machine a host for a controller elsewhere."""

from __future__ import annotations

import argparse

from forge.errors import LaunchError
from forge.log_levels import add_log_flags

_DEFAULT = "tcp://127.0.0.1:22222"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `worker`."""
    parser = subparsers.add_parser(
        "worker",
        help="make this machine a host that a controller attaches to",
        description="Listen for a controller and run its processes, one run after another, until stopped. Plain tcp:// "
        "has no authentication and executes what it is sent: it is refused off loopback. Use tls:// there (docs: "
        "guides/security).",
    )
    parser.add_argument(
        "--address", metavar="URL", default=_DEFAULT, help="tcp://HOST:PORT or tls://HOST:PORT; default: %(default)s"
    )
    parser.add_argument("--once", action="store_true", help="end after one run instead of waiting for the next")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow tcp:// off loopback: everyone who reaches the port can run code as this user",
    )
    parser.add_argument(
        "--name-timeout",
        metavar="S",
        type=float,
        default=0.0,
        help="seconds in which the name in the address must become known, as that of a pod does (0)",
    )
    add_log_flags(parser)
    parser.set_defaults(handler=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from forge.runtime.worker import serve

    if not 0 <= arguments.name_timeout < float("inf"):
        raise LaunchError(
            "nothing can be waited for so long",
            path="--name-timeout",
            value=arguments.name_timeout,
            rule="0 or more seconds",
            repair="leave it out, or write for example --name-timeout 60",
        )
    return serve(
        arguments.address,
        once=arguments.once,
        insecure=arguments.insecure,
        name_timeout_s=arguments.name_timeout,
    )
