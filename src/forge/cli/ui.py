"""`forge ui [RUNS_DIR]`: every run of a folder in a browser, live."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from forge.log_levels import add_log_flags

if TYPE_CHECKING:
    import asyncio

    from forge.ui.server import UiOptions


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `ui`."""
    parser = subparsers.add_parser(
        "ui",
        help="show the runs of a folder in a browser, live",
        description="Serve every run in RUNS_DIR, and in the folders below it, to a browser: which are running, their "
        "curves as they grow, their configuration. It reads the runs' own files and writes none, so it also shows "
        "runs of other machines over a shared folder, and runs that were killed. With --control, the page also sends "
        "commands to runs of this machine and user. Ctrl-C ends it.",
        epilog="example: forge ui runs",
    )
    parser.add_argument(
        "runs_dir", metavar="RUNS_DIR", nargs="?", type=Path, default=Path("runs"), help="folder of runs; default: runs"
    )
    parser.add_argument("--run", metavar="NAME", help="open this run, by its path in RUNS_DIR, instead of the list")
    parser.add_argument("--no-open", action="store_true", help="print the address and open no browser")
    parser.add_argument("--port", metavar="N", type=int, default=0, help="port to listen on; default: one that is free")
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen on; default: %(default)s"
    )
    parser.add_argument("--tls-cert", metavar="FILE", type=Path, help="certificate for HTTPS, PEM")
    parser.add_argument("--tls-key", metavar="FILE", type=Path, help="its private key, PEM")
    parser.add_argument("--insecure", action="store_true", help="allow plain HTTP on an address other than loopback")
    parser.add_argument(
        "--control",
        action="store_true",
        help="let the page stop, save, evaluate, profile and change runs of this machine and user",
    )
    parser.add_argument("--until", metavar="PID", type=int, help="end when this process ends")
    parser.add_argument("--stays", action="store_true", help=argparse.SUPPRESS)  # of `forge run --keep-ui`
    add_log_flags(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command and return its exit code."""
    import asyncio

    from forge.observe.logs import start_logging
    from forge.ui.server import UiOptions, check_runs_dir

    check_runs_dir(arguments.runs_dir)
    start_logging("warning")
    options = UiOptions(
        runs_dir=arguments.runs_dir,
        host=arguments.host,
        port=arguments.port,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        insecure=arguments.insecure,
        control=arguments.control,
    )
    return asyncio.run(serve_until_stopped(options, arguments))


async def serve_until_stopped(options: UiOptions, arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, or until the process of `--until` has ended, and return 0."""
    import asyncio
    import signal

    from forge.ui.server import serve_ui

    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
            stack.callback(loop.remove_signal_handler, number)
        if arguments.until is not None:
            stack.enter_context(_ended(arguments.until, stopped))
        async with serve_ui(options) as ui:
            print(f"Runs of {options.runs_dir} at {ui.url(arguments.run)}", flush=True)
            if arguments.stays:
                print(f"The UI stays when the run has ended: kill {os.getpid()} ends it.", flush=True)
            _say_how_to_reach(ui.port)
            if not arguments.no_open:
                _open(ui.ticket_url(arguments.run))
            failing, stopping = asyncio.create_task(ui.hub.failed()), asyncio.create_task(stopped.wait())
            try:
                await asyncio.wait((failing, stopping), return_when=asyncio.FIRST_COMPLETED)
                if failing.done():
                    failing.result()
            finally:
                failing.cancel()
                stopping.cancel()
    return 0


@contextlib.contextmanager
def _ended(pid: int, event: asyncio.Event) -> Iterator[None]:
    """Inside the block, set an event when a process has ended."""
    import asyncio

    try:
        handle = os.pidfd_open(pid)
    except OSError:
        event.set()
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(handle, event.set)
    try:
        yield
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _has_screen() -> bool:
    return any(os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))


def _say_how_to_reach(port: int) -> None:
    """Over SSH, print how a browser on the other side gets here."""
    if os.environ.get("SSH_CONNECTION") and not _has_screen():
        words = f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}"
        print(f"From your own machine: {words}, then open the address there.", flush=True)


def _open(url: str) -> None:
    """Start a browser, if there is a screen. A browser in the terminal would take the terminal."""
    import webbrowser

    def start() -> None:
        if not webbrowser.open(url):
            print("No browser could be started here: open the address yourself.", file=sys.stderr, flush=True)

    if _has_screen():
        threading.Thread(target=start, daemon=True).start()
