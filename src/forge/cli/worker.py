"""`forge worker`: make this machine a host for a controller elsewhere."""

from __future__ import annotations

import argparse

_DEFAULT = "tcp://127.0.0.1:22222"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `worker`."""
    parser = subparsers.add_parser(
        "worker",
        help="make this machine a host that a controller attaches to",
        description="Listen for a controller and run its processes, one run after another, until stopped. Plain tcp:// "
        "has no authentication and executes what it is sent: bind it to loopback or a trusted network only, or use "
        "tls:// (docs: guides/security).",
    )
    parser.add_argument(
        "--address", metavar="URL", default=_DEFAULT, help="tcp://HOST:PORT or tls://HOST:PORT; default: %(default)s"
    )
    parser.add_argument("--once", action="store_true", help="end after one run instead of waiting for the next")
    parser.set_defaults(handler=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from forge.runtime.worker import serve

    return serve(arguments.address, once=arguments.once)
